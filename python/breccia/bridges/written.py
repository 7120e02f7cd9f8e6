# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself beside its tensors: the words of a format (`Dialect`), and what is said in them
(`Written`)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from breccia.recipes import DelayedScaling, Float8CurrentScaling, ScalingRecipe
from breccia.schemes.matching import Match
from breccia.schemes.value import Activations, KVCache

if TYPE_CHECKING:
    from breccia.schemes.dialects.common import Said
    from breccia.schemes.value import ModelScheme

PLACES = ("quantization_config", "compression_config", "quantization")  # entries of config.json that formats share


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Dialect:
    """What a format says beside its tensors.

    Attributes:
        methods: further values of ``quant_method`` whose words are these, beside those of the format.
        read: (what a checkpoint says) → its scheme, ValueError where that is not of the format's form. None: the
            weights as they are stored, with nothing said of their inputs.
        write: (the checkpoint as it is written) → entries of config.json, and under the name of `file` what that file
            says; ValueError where it cannot say it.
        owns: entries of config.json that are the format's, beside those of `PLACES`: no output of another format keeps
            them.
        file: the file beside config.json that says of quantization what `of_file` reads, without ``.json``; "" where
            there is none.
        of_file: (that file's JSON object) → the object that config.json has under ``quantization_config``.
        words: the keys of ``quantization_config``, at any depth, whose meaning is known, with blanks between; those
            included that say how the model was made alone. What others say is named in the report. "": all are known.
        names: of these, those whose own keys are names or patterns of modules; "" where ``quantization_config`` itself
            has such.
        closed: of these, those inside of which nothing says what a tensor is.
    """

    methods: tuple[str, ...] = ()
    read: Callable[[Said], ModelScheme] | None = None
    write: Callable[[Written], dict[str, Any]] = _nothing
    owns: tuple[str, ...] = ()
    file: str = ""
    of_file: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    words: str = ""
    names: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()

    @functools.cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(self.words.split())

    def keys(self, said: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any, bool]]:
        """Each key of ``quantization_config``, those of objects with dots between them.

        Args:
            said: the object, or one inside of it.
            inside: the key that this one stands under.

        Yields:
            The key, its value, and whether its meaning is known. What is null or empty says nothing.
        """
        named = inside.rpartition(".")[2] in self.names
        for key, value in said.items():
            path = f"{inside}.{key}" if inside else str(key)
            known = not self.words or key in self._words or (named and (inside or isinstance(value, (dict, bool))))
            if isinstance(value, Mapping) and value and known and key not in self.closed:
                yield from self.keys(value, path)
            else:
                yield path, value, bool(known or not value)


_HOW_SCALES_ARE_FOUND = frozenset(
    {
        "scale_search",
        "scale_rule",
        "scale_rounding",
        "scale_dtype",
        "scale_format",
        "two_level",
        "global_scale_form",
        "margin",
        "amax_history_len",
    }
)


def same_grid(a: ScalingRecipe, b: ScalingRecipe) -> bool:
    """Whether two recipes store the same values, however their scales are found."""
    if a is b:
        return True
    if type(a) is not type(b):
        return {type(a), type(b)} <= {DelayedScaling, Float8CurrentScaling} and (
            getattr(a, "granularity", "tensor") == getattr(b, "granularity", "tensor") and a.element == b.element
        )
    return all(
        getattr(a, f.name) == getattr(b, f.name) for f in dataclasses.fields(a) if f.name not in _HOW_SCALES_ARE_FOUND
    )


@dataclass(frozen=True)
class InputScale:
    """How a format's files store the scale of a layer's inputs.

    Attributes:
        role: the stored tensor's, beside the weight.
        amax: the largest magnitude of the inputs where the stored number is 1.
        divides: whether the stored number is ``amax`` / magnitude and not magnitude / ``amax``.
        other_roles: what else files call it that are read.
        shape: of one stored number.
    """

    role: str
    amax: float
    divides: bool = False
    other_roles: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()


FP8_INPUTS = 448.0  # E4M3's largest number
INT8_INPUTS = 127.5  # half of the range of symmetric INT8, as compressed-tensors has it
NVFP4_INPUTS = 448.0 * 6  # the same for scales of blocks, and E2M1's largest number


@dataclass(frozen=True)
class Written:
    """A checkpoint as it is written.

    Attributes:
        recipes: of the quantized modules, by their names.
        ignored: modules whose weights stay in high precision, those that share another's weight included.
        inputs: quantized modules with a scale of their activations.
        original: the source's config.json.
        cache: the KV cache, by constant scales or by 1; None where it is in high precision.
        activations: how the source quantizes the inputs of a module, where that is known.
        patterns: of modules that the source left alone by other things than their names, and that match no module that
            is quantized here.
        outputs: how the outputs of modules are quantized, by a static scale that is written.
        rows: modules of INT4 whose group is a whole row.
        kept: other quantized modules, by their stored names, which are as the source has them and says of them.
    """

    recipes: dict[str, ScalingRecipe]
    ignored: list[str] = field(default_factory=list)
    inputs: frozenset[str] = frozenset()
    original: Mapping[str, Any] = field(default_factory=dict)
    cache: KVCache | None = None
    activations: Mapping[str, Activations] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    patterns: tuple[Match, ...] = ()
    outputs: Mapping[str, Activations] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()

    def dynamic(self, module: str) -> Activations | None:
        """How a module's inputs are quantized by scales made of them.

        Args:
            module: its name.

        Returns:
            The activations; None where inputs are not quantized so.
        """
        said = self.activations.get(module)
        return said if said is not None and said.when == "dynamic" else None

    def groups(self) -> list[tuple[ScalingRecipe, list[str]]]:
        """The modules of each value grid, those of most modules first."""
        groups: list[tuple[ScalingRecipe, list[str]]] = []
        for module, recipe in self.recipes.items():
            names = next((names for known, names in groups if same_grid(known, recipe)), None)
            if names is None:
                groups.append((recipe, [module]))
            else:
                names.append(module)
        return sorted(groups, key=lambda group: -len(group[1]))

    def only(self, bridge: str) -> ScalingRecipe:
        """The one recipe, for a format whose config.json has room for one.

        Args:
            bridge: the format's name, for the message.

        Returns:
            The recipe of all quantized modules.

        Raises:
            ValueError: there are several.
        """
        groups = self.groups()
        if len(groups) > 1:
            (first, _), (second, names) = groups[:2]
            raise ValueError(
                f"{bridge}: all modules must have one recipe, which is all its config.json can say: most have "
                f"{first}, {names[0]!r} has {second}; name a recipe in --to, or another format"
            )
        return groups[0][0]


def said_of_inputs(modules: Iterable[str], inputs: Mapping[str, Activations]) -> dict[str, Any]:
    """How inputs are quantized, in JSON that a format has beside its own words: ``inputs`` of most modules and
    ``module_inputs`` of others by their names; nothing where there are none."""
    modules = list(modules)
    if not inputs:
        return {}
    most = Counter(inputs.get(module) for module in modules).most_common(1)[0][0]
    said: dict[str, Any] = {} if most is None else {"inputs": dataclasses.asdict(most)}
    apart = {module: inputs.get(module) for module in modules if inputs.get(module) != most}
    if apart:
        said["module_inputs"] = {m: None if one is None else dataclasses.asdict(one) for m, one in apart.items()}
    return said


# The layers that vLLM and SGLang make of several, and of which.
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
_WHOLES = {part: whole for whole, parts in _FUSED for part in parts}
_PART = re.compile(rf"(.*\.)?({'|'.join(_WHOLES)})\.weight")


def fused_layer(weight: str) -> str | None:
    """The layer that servers make of that of a weight and others; None where they leave it by itself."""
    match = _PART.fullmatch(weight)
    return None if match is None else (match[1] or "") + _WHOLES[match[2]]


def fused_layers(layers: Collection[str]) -> list[str]:
    """The names of layers that servers make of some of these alone."""
    there, wholes = set(layers), []
    for whole, parts in _FUSED:
        prefixes = (layer.removesuffix(parts[0]) for layer in layers if f".{layer}".endswith(f".{parts[0]}"))
        wholes += [prefix + whole for prefix in prefixes if all(prefix + part in there for part in parts)]
    return wholes
