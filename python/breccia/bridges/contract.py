# SPDX-License-Identifier: Apache-2.0
"""What a bridge says of itself, in one value.

A bridge is one file: it builds a `FileFormat` and names it ``BRIDGE``. Everything else asks that value, and no code
outside of this package compares the name of a format. A format of another package is added by `register`.

Functions that read a format of files take ``parts``, the stored arrays by role; functions that take another library's
live tensors take the tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from breccia.bridges.common import Array
from breccia.bridges.file_kinds import SAFETENSORS, Container
from breccia.bridges.fp8 import of_a_vendor
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part
from breccia.bridges.written import PLACES, Dialect, InputScale, Written
from breccia.recipes import ScalingRecipe, has_exponents
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.value import UNSAID, Activations, KVCache, Unsaid

# What a bridge claims of a checkpoint; of two that look alike, the one that tells them apart says a larger number.
NO, LIKELY, NAMED = 0, 10, 100
# How products of a file's own graph take a weight: x·W, a sum over its rows, or x·Wᵀ.
BY_COLUMNS, BY_ROWS = "x @ w", "x @ w.T"

Made: TypeAlias = "ScaledTensor | OutsideTensor | Array"


@dataclass(frozen=True)
class Place:
    """Where in a checkpoint a tensor is stored.

    Attributes:
        inputs: whether the layer has a scale of its activations beside.
        model: the source's config.json.
        spell: turns the model's own name of a tensor into the file's.
        activations: how the layer's inputs are quantized; None where they are not.
        product: how the file's graph multiplies by the tensor, `BY_COLUMNS` or `BY_ROWS`; "" where nothing says it.
    """

    inputs: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    spell: Callable[[str], str] = str
    activations: Activations | None = None
    product: str = ""


@dataclass(frozen=True)
class Kind:
    """A type of stored values that no recipe makes, or a mix of such types.

    Attributes:
        name: as a part's dtype and a `Found`'s ``kind`` have it; a float dtype, if there is no ``encode``.
        block: how many values of a row it takes at a time.
        encode: bytes of float32 rows, along the last axis; of a matrix with what its columns count, and with a function
            that chooses codes where they are given, too.
        decode: float32 rows of what ``encode`` gives; None where what was lost is not measured.
        of: (how the model's names are spelled, name, columns) → the key, in `FileFormat.kinds` or `FileFormat.recipes`,
            of what a tensor is written as: another type where its rows are no whole blocks, or where a mix has it.
        whole: whether embeddings and output layers of a model whose names are known are quantized, too.
    """

    name: str
    block: int = 1
    encode: Callable[..., Array] | None = None
    decode: Callable[[Array], Array] | None = None
    of: Callable[[Any, str, int], str] | None = None
    whole: bool = False


@dataclass(frozen=True)
class Sample:
    """A tensor that a format has a place for, by which `breccia.testing` tries it.

    Attributes:
        name: of the tensor.
        shape: logical.
        model: config.json of a model whose program knows it in each of the format's recipes.
    """

    name: str = "layers.0.mlp.up_proj.weight"
    shape: tuple[int, ...] = (256, 384)
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Readers:
    """What the programs that load a format know, beside matrices of linear layers.

    Attributes:
        fused_experts: all experts of a layer in one tensor.
        turned_experts: (config.json) → whether they load all experts of a layer in one tensor with inputs before
            outputs, where the model's files have them so.
        single_experts: experts in tensors of their own.
        experts_together: whether they want all experts of a layer in one tensor.
        gates_apart: whether they want the gates of gpt-oss' experts apart from the others, which its makers keep in
            turn.
        embeddings: quantized embeddings.
        turned_weights: matrices with inputs before outputs, which are written transposed.
        bfloat16_scales: whether they round float scales to bfloat16.
        shared_global_scale: whether they keep one global scale for all parts of a layer that they fuse.
        pre_scales: factors of a layer's inputs (``pre_quant_scale``); other formats get them in the weights.
        static_inputs: what the programs of most users do with static scales of inputs, in words; "" where they
            quantize by them.
        one_level: why NVFP4 is written in one level, for a note; "" where they know the second scale.
        misread_experts: what a program of many users does wrong with experts in tensors of their own, by the recipe's
            name.
        misread: what a program of many users does wrong with a tensor, a sentence for the report; called with its
            logical shape and the recipe that it is written in; "" where all read it right.
    """

    fused_experts: bool = False
    turned_experts: Callable[[Mapping[str, object]], bool] = lambda model: False
    single_experts: bool = True
    experts_together: bool = False
    gates_apart: bool = False
    embeddings: bool = False
    turned_weights: bool = False
    bfloat16_scales: bool = False
    shared_global_scale: bool = False
    pre_scales: bool = False
    static_inputs: str = ""
    one_level: str = ""
    misread_experts: Mapping[str, str] = field(default_factory=dict)
    misread: Callable[[tuple[int, ...], ScalingRecipe], str] = lambda shape, recipe: ""


def stored_name(name: str, role: str) -> str:
    """``X.weight`` and ``weight_scale`` give ``X.weight_scale``; so does ``X``."""
    return (name.removesuffix("weight") if name.endswith("weight") else name + ".") + role


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class FileFormat:
    """A bridge: what the rest of the package asks a format. Each part but the name may be left out, and has the usual
    answer then. A field with arguments in parentheses is a function that is called with these.

    Attributes:
        name: the format's, on the command line.
        methods: the ``quant_method`` of config.json that names the format, or several; by default its name alone.
        peer: the module that the functions for live objects import; None where there is none.
        extra: the extra that installs the peer, "" where there is none.
        recipes: what ``--to NAME:KEY`` writes, by key; the first is what ``--to NAME`` quantizes to.
        recipes_with_inputs: the same of layers with a scale of their inputs, where it is not that of `recipes`.
        kinds: what else ``--to NAME:KEY`` writes, by key.
        anchors: ends of the stored names that `find` is asked about.
        marks: patterns of names of stored tensors that only say that a file is of this format, which conversions leave
            out.
        opens_in: programs that open what is written, the most usual first; "PROGRAM with LIBRARY" where it needs one.
        refused: which of them refuse a recipe or kind, by its key.
        needs: what else they need, in words; "" where nothing.
        calibrated: whether files of the format are mostly made by data, which rounding to the nearest is not.
        container: the kind of file that holds the format's tensors.
        input_scales: whether scales of activations (``input_scale``) are written beside the weights.
        output_scales: whether a source of the format that has static scales of a layer's outputs (``output_scale``)
            keeps them.
        input_scale: (recipe of the weight, the source's ``quantization_config``, empty for what is written) → how the
            scale of a layer's inputs is stored; None where there is none, or nothing says what it means.
        inputs_beside: (the layer's weight, names of all stored tensors) → how its inputs are quantized, where not
            config.json but what is stored beside the weight says it; None for high precision, `UNSAID` where
            config.json says it, or nothing does.
        inputs_written: (recipe of the weight, how its inputs are to be quantized) → what `inputs_beside` finds in what
            is written: the same where the format can say it.
        cache_scales: where the scales of a KV cache are written, of keys ("k") and of values ("v"): their names with
            ``{}`` for the layer's, and shapes; empty where there is no place for them.
        caches: the KV caches that config.json has words for, where there are `cache_scales`.
        readers: what the programs that load the format know.
        row_axis: the axis of stored tensors along which a matrix's rows lie: 0 or -1; None where there is none, or
            where what is stored for some rows is not what would be stored for these rows alone. With 0, a batch's
            matrices lie there, too.
        shape_role: the role whose numbers are the logical shape; "" where there is none.
        reshaped: (a tensor, the shape of some of its rows) → their description, which `read` is called with.
        sample: a tensor to try the format with.
        dialect: what its config.json says, see `Dialect`.
        claims: (the context of `find`) → how much of a checkpoint is this format's, which settles who is asked first to
            `find` a tensor: `NAMED` where config.json names the format, `NO` where it is not to be asked, else
            `LIKELY`, or more where it tells its own tensors from another's that look alike. Where two that claim as
            much find a tensor, none reads it. None: `NAMED` by one of `methods`, else `LIKELY`.
        find: (name of a stored tensor that ends with one of `anchors`, all by name with ``name``, ``dtype`` and
            ``shape`` as headers say them, context) → the logical tensor that it belongs to, with its shape and recipe,
            known from headers alone; None where it is of another format, ValueError where it is of this one and does
            not fit. The context is what config.json says: "quantization_config", of which "quant_method" is the method,
            "" where it names none, and "quantization"; the whole of it is "config".
        find_all: (all stored tensors by name, the header's strings) → the logical tensors that the strings describe;
            none where these are of other formats, ValueError where they are the format's but not of its form. None
            where metadata describes no tensor of the format.
        text: the end of names of small stored tensors whose bytes are text, which `find_all` gets among the strings
            under their names; "" where there are none.
        refine: (a tensor, what reads a stored one by its name) → the tensor with what only small stored ones tell;
            itself where there is nothing to add, ValueError where they say what does not fit.
        read: (stored arrays by role, typed by the header, views of a file that must not be written to; the tensor) →
            a ScaledTensor in NumPy where the values have that form, else an `OutsideTensor` or a float array;
            ValueError or TypeError where they do not fit. None: the format is one of live objects.
        keeps: (a tensor, refined) → whether its stored bytes are copied where nothing is asked for, because no recipe
            says all that it is.
        carries: (recipe of the tensor to write) → whether the format holds its bytes as they are.
        takes: (name, shape) → whether the format has a place for a quantized weight; others stay as they are.
        why_not: (name) → why a weight must not be quantized though the format could hold it, in words; "" where it may.
        model_knows: (recipe, config.json) → whether the program of a model reads a recipe in this format.
        lay_out: (tensor, place) → its `Part` by role, ValueError where the format has no place for it; None where
            nothing is written. In planning the tensor's memory is never touched.
        store: takes the place of `lay_out` where full names and metadata do not follow from roles alone: called as
            `stored`.
        role_name: (name of a logical tensor, role) → the stored name.
        plain_metadata: (name) → the header's entries for a tensor that stays plain.
        header: (names of a file's logical tensors, recipes of the quantized modules by their names, modules with a
            scale of their activations) → the file's entries; None where there are none.
        config: ``write`` of the dialect, for a format that has no more of it.
        vendors_elements: whether `carries` decides about FP8 elements of vendors, too, such as float8_e4m3fnuz; they
            are not carried otherwise.
        exponents: the same of recipes whose groups have exponents, such as `Float8ExpandedScaling`.
    """

    name: str
    methods: tuple[str, ...] = ()
    peer: str | None = None
    extra: str = ""
    recipes: Mapping[str, ScalingRecipe] = field(default_factory=dict)
    recipes_with_inputs: Mapping[str, ScalingRecipe] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    anchors: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    opens_in: tuple[str, ...] = ()
    refused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: str = ""
    calibrated: bool = False
    container: Container = SAFETENSORS
    input_scales: bool = False
    output_scales: bool = False
    input_scale: Callable[[ScalingRecipe, Mapping[str, Any]], InputScale | None] = lambda recipe, said: None
    inputs_beside: Callable[[Found, Collection[str]], Activations | Unsaid | None] = lambda found, names: UNSAID
    inputs_written: Callable[[ScalingRecipe, Activations | None], Activations | Unsaid | None] = lambda recipe, one: (
        UNSAID
    )
    cache_scales: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    caches: tuple[KVCache, ...] = (KVCache("float8_e4m3fn"),)
    readers: Readers = field(default_factory=Readers)
    row_axis: int | None = None
    shape_role: str = ""
    reshaped: Callable[[Found, tuple[int, ...]], Found] = lambda found, shape: replace(found, shape=shape)
    sample: Sample = field(default_factory=Sample)
    dialect: Dialect = field(default_factory=Dialect)
    claims: Callable[[Mapping[str, Any]], int] | None = None
    find: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Found | None] = lambda name, entries, context: None
    find_all: Callable[[Mapping[str, Any], Mapping[str, str]], list[Found]] | None = None
    text: str = ""
    refine: Callable[[Found, Callable[[str], Array]], Found] = lambda found, array: found
    read: Callable[[dict[str, Array], Found], Made] | None = None
    keeps: Callable[[Found], bool] = lambda found: False
    carries: Callable[[ScalingRecipe], bool] = lambda recipe: False
    takes: Callable[[str, tuple[int, ...]], bool] = lambda name, shape: True
    why_not: Callable[[str], str] = lambda name: ""
    model_knows: Callable[[ScalingRecipe, Mapping[str, Any]], bool] = lambda recipe, model: True
    lay_out: Callable[[Any, Place], dict[str, Part]] | None = None
    store: Callable[[str, Any, Place], tuple[dict[str, Part], dict[str, str]]] | None = None
    role_name: Callable[[str, str], str] = stored_name
    plain_metadata: Callable[[str], dict[str, str]] = _nothing
    header: Callable[[Sequence[str], Mapping[str, ScalingRecipe], frozenset[str]], dict[str, str]] | None = None
    config: Callable[[Written], dict[str, Any]] | None = None
    vendors_elements: bool = False
    exponents: bool = False

    def __post_init__(self) -> None:
        if not self.methods:
            object.__setattr__(self, "methods", (self.name,))
        if self.config is not None:
            object.__setattr__(self, "dialect", replace(self.dialect, write=self.config))
        if not self.vendors_elements:
            self._carry_less(of_a_vendor)
        if not self.exponents:
            self._carry_less(has_exponents)

    def _carry_less(self, left_out: Callable[[ScalingRecipe], bool]) -> None:
        carries = self.carries
        object.__setattr__(self, "carries", lambda recipe: carries(recipe) and not left_out(recipe))

    @property
    def writes(self) -> bool:
        """Whether `stored` can write the format."""
        return self.lay_out is not None or self.store is not None

    def programs(self, key: str) -> list[str]:
        """Programs that open what ``--to NAME:KEY`` writes.

        Args:
            key: of a recipe or kind; "" where the format is named without one.

        Returns:
            Those of `opens_in` that do not refuse it.
        """
        return [program for program in self.opens_in if program not in self.refused.get(key, ())]

    @property
    def owned(self) -> frozenset[str]:
        """Entries of config.json that are the format's: those that its dialect owns, and what it writes of its sample.

        Returns:
            Their names.
        """
        model, keys = self.sample.model, {*PLACES, *self.dialect.owns}
        for recipe in self.recipes.values():
            with contextlib.suppress(ValueError):
                module = self.sample.name.removesuffix(".weight")
                keys |= self.dialect.write(Written({module: recipe}, original=model)).keys() - model.keys()
        return frozenset(keys)

    def open(self, parts: dict[str, Array], found: Found) -> Made:
        """A logical tensor of its stored ones: see `read`.

        Args:
            parts: stored arrays by role.
            found: the tensor, as `find` or `find_all` gave it.

        Returns:
            What `read` gives.

        Raises:
            ValueError: the format is one of live objects, or they do not fit.
        """
        if self.read is None:
            raise ValueError(f"{self.name}: the format must be one of files, this one is of live objects")
        return self.read(parts, found)

    def stored(
        self, name: str, scaled: ScaledTensor | OutsideTensor, place: Place
    ) -> tuple[dict[str, Part], dict[str, str]]:
        """The stored tensors of a logical one by full name, and its entries in the header's metadata.

        Args:
            name: of the logical tensor.
            scaled: the tensor, or one of the same form whose memory is never touched (in planning).
            place: where it goes.

        Returns:
            Full name → `Part`, and key → text.

        Raises:
            ValueError: the format has no place for such a tensor.
        """
        if self.store is not None:
            return self.store(name, scaled, place)
        if self.lay_out is None:
            raise ValueError(f"{self.name or 'plain'}: the format must be one that is written here, it is not")
        return {self.role_name(name, role): part for role, part in self.lay_out(scaled, place).items()}, {}


Bridge = FileFormat  # another name of it

PLAIN = FileFormat("", opens_in=("transformers", "vLLM", "SGLang"))  # checkpoints without codes

registered: dict[str, FileFormat] = {}  # formats of others, by name: see `breccia.bridges.register`
