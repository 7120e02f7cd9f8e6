# SPDX-License-Identifier: Apache-2.0
"""What a bridge says of itself, in one value.

A bridge is one file: it builds a `FileFormat` and names it ``BRIDGE``. Everything else asks that value, and no code
outside of this package compares the name of a format. A format of another package is added by `register`.

Functions that read a format of files take ``parts``, the stored arrays by role; functions that take another library's
live tensors take the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from breccia.bridges.common import Array
from breccia.bridges.file_kinds import SAFETENSORS, Container
from breccia.bridges.fp8 import of_a_vendor
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part
from breccia.bridges.readers import Readers
from breccia.bridges.written import InputScale, Written
from breccia.recipes import ScalingRecipe, has_exponents
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.value import UNSAID, Activations, Unsaid

__all__ = ["LIKELY", "NAMED", "NO", "PLAIN", "FileFormat", "Kind", "Place", "Sample", "stored_name"]

# What a bridge claims of a checkpoint; of two that look alike, the one that tells them apart says a larger number.
NO, LIKELY, NAMED = 0, 10, 100

Made: TypeAlias = "ScaledTensor | OutsideTensor | Array"


@dataclass(frozen=True)
class Place:
    """Where in a checkpoint a tensor is stored.

    Attributes:
        inputs: whether the layer has a scale of its activations beside.
        model: the source's config.json.
        spell: turns the model's own name of a tensor into the file's.
        activations: how the layer's inputs are quantized; None where they are not.
    """

    inputs: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    spell: Callable[[str], str] = str
    activations: Activations | None = None


@dataclass(frozen=True)
class Kind:
    """A type of stored values that no recipe makes.

    Attributes:
        name: as a part's dtype and a `Found`'s ``kind`` have it; a float dtype, if there is no ``encode``.
        block: how many values of a row it takes at a time.
        encode: bytes of float32 rows, along the last axis.
        otherwise: what rows that are no whole blocks are quantized to.
        decode: float32 rows of what ``encode`` gives; None where what was lost is not measured.
    """

    name: str
    block: int = 1
    encode: Callable[[Array], Array] | None = None
    otherwise: ScalingRecipe | None = None
    decode: Callable[[Array], Array] | None = None


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


def stored_name(name: str, role: str) -> str:
    """``X.weight`` and ``weight_scale`` give ``X.weight_scale``; so does ``X``.

    Args:
        name: of the logical tensor.
        role: of the stored one.

    Returns:
        The name in the file.
    """
    return (name.removesuffix("weight") if name.endswith("weight") else name + ".") + role


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class FileFormat:
    """A bridge by its functions, each of which may be left out: see `Bridge`, where all are described.

    Attributes:
        methods: by default its name alone.
        read: makes the logical tensor: called with ``parts`` and the `Found`.
        lay_out: role → `Part` of a tensor, called with the tensor and its `Place`; None where nothing is written.
        store: takes the place of ``lay_out`` where full names and metadata do not follow from roles alone: called with
            name, tensor and `Place`.
        role_name: the stored name of a role of a logical tensor.
        vendors_elements: whether ``carries`` decides about FP8 elements of vendors, too, such as float8_e4m3fnuz; they
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
    readers: Readers = field(default_factory=Readers)
    row_axis: int | None = None
    shape_role: str = ""
    reshaped: Callable[[Found, tuple[int, ...]], Found] = lambda found, shape: replace(found, shape=shape)
    sample: Sample = field(default_factory=Sample)
    beside: str = ""
    said_beside: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    claims: Callable[[Mapping[str, Any]], int] | None = None
    find: Callable[[str, Mapping[str, Any], Mapping[str, Any]], Found | None] = lambda name, entries, context: None
    find_all: Callable[[Mapping[str, Any], Mapping[str, str]], list[Found]] | None = None
    refine: Callable[[Found, Callable[[str], Array]], Found] = lambda found, array: found
    read: Callable[[Mapping[str, Array], Found], Made] | None = None
    keeps: Callable[[Found], bool] = lambda found: False
    carries: Callable[[ScalingRecipe], bool] = lambda recipe: False
    takes: Callable[[str, tuple[int, ...]], bool] = lambda name, shape: True
    why_not: Callable[[str], str] = lambda name: ""
    model_knows: Callable[[ScalingRecipe, Mapping[str, Any]], bool] = lambda recipe, model: True
    lay_out: Callable[[Any, Place], dict[str, Part]] | None = None
    store: Callable[[str, Any, Place], tuple[dict[str, Part], dict[str, str]]] | None = None
    role_name: Callable[[str, str], str] = stored_name
    plain_metadata: Callable[[str], dict[str, str]] = _nothing
    header: Callable[[Sequence[str], Mapping[str, ScalingRecipe], frozenset[str]], dict[str, str]] = _nothing
    config: Callable[[Written], dict[str, Any]] = _nothing
    vendors_elements: bool = False
    exponents: bool = False

    def __post_init__(self) -> None:
        if not self.methods:
            object.__setattr__(self, "methods", (self.name,))
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

    def open(self, parts: Mapping[str, Array], found: Found) -> Made:
        """See `Bridge.open`."""
        if self.read is None:
            raise ValueError(f"{self.name}: the format must be one of files, this one is of live objects")
        return self.read(parts, found)

    def stored(
        self, name: str, scaled: ScaledTensor | OutsideTensor, place: Place
    ) -> tuple[dict[str, Part], dict[str, str]]:
        """See `Bridge.stored`."""
        if self.store is not None:
            return self.store(name, scaled, place)
        if self.lay_out is None:
            raise ValueError(f"{self.name or 'plain'}: the format must be one that is written here, it is not")
        return {self.role_name(name, role): part for role, part in self.lay_out(scaled, place).items()}, {}


PLAIN = FileFormat("", opens_in=("transformers", "vLLM", "SGLang"))  # checkpoints without codes
