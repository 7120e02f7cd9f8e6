# SPDX-License-Identifier: Apache-2.0
"""What a conversion can write, as the command line and schemes spell it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from breccia import bridges, recipe_names, recipes
from breccia.bridges.contract import FileFormat
from breccia.bridges.parts import Found, ghost
from breccia.calibration.error_feedback import Order
from breccia.checkpoint.arguments import patterns_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.files.dtypes import DTYPES, nbytes_of
from breccia.checkpoint.planning.asked import Asked, fitted
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.left_alone import NOTHING_KNOWN, LeftAlone
from breccia.gguf.container import block_bytes
from breccia.gguf.models import ModelMap
from breccia.recipes import ScalingRecipe
from breccia.schemes.value import UNSAID, Activations, KVCache, ModelScheme
from breccia.spelling import suggestion

AUTO = "auto"  # the size of groups that is looked for
NO_KIND = "none"  # stands for a float type where a rule asks for high precision


class Feedback(NamedTuple):
    """GPTQ: see `breccia.gptq`."""

    order: Order
    damp: float


@dataclass(frozen=True)
class Target:
    """What to write: a float dtype, or a bridge's format with a recipe.

    ``names`` are those of a model that the format spells in its own way. ``left_alone`` says that the source is
    quantized: what its maker left in high precision stays so. ``inputs`` are modules with a scale of their
    activations, ``outputs`` those with one of what they give, ``cache`` is what is said of the KV cache.
    ``model`` is the source's config.json. ``recipe`` is None where the format was named without one: what the
    source has is kept if the format can hold it, and the format's first recipe is used if not. ``kind`` is what the
    format has that no recipe makes. ``with_inputs`` takes its place for modules with a scale of their activations.
    ``group_size`` is the one that was asked for. ``importance`` is that of columns. ``asked`` is what a scheme asks
    of layers, see `of`; ``named`` says that it means a tensor by itself. ``source`` is the source's own scheme.
    ``together`` has a module for each of those that are written as one, by the name of this one. ``products`` says how
    the graph of the output multiplies by tensors, see `Place`. ``feedback`` is given where weights are rounded by GPTQ.
    ``bare`` says that the format was named without a recipe, ``options`` are for recipes of rules. ``alone`` is
    what is left alone of the model. ``device`` rounds weights. ``smooth`` says that inputs are smoothed.
    ``rest`` is the dtype of floats beside codes: `KEEP` for what they have, "" for that of the output's own.
    """

    spelled: str
    float_dtype: str = ""
    format: str = ""
    recipe: ScalingRecipe | None = None
    with_inputs: ScalingRecipe | None = None
    default: ScalingRecipe | None = None
    kind: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    names: ModelMap | None = None
    left_alone: bool = False
    inputs: frozenset[str] = frozenset()
    cache: KVCache | None = None
    outputs: frozenset[str] = frozenset()
    model: Mapping[str, Any] = field(default_factory=dict)
    group_size: int | str | None = None
    importance: Importance | None = None
    feedback: Feedback | None = None
    smooth: bool = False
    rest: str = ""
    asked: Asked | None = None
    named: bool = False
    bare: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    source: ModelScheme | None = field(default=None, repr=False)
    together: Mapping[str, str] = field(default_factory=dict, repr=False)
    products: Mapping[str, str] = field(default_factory=dict, repr=False)
    alone: LeftAlone = field(default=NOTHING_KNOWN, repr=False)
    device: Device = field(default=Device(), repr=False)

    def of(self, found: Found) -> Target:
        """What to write one tensor in, by the rule that matches it; without one, or where its rule keeps weights, the
        recipe of ``--to``, and without that what the source has."""
        if self.asked is None:
            return self
        rules = ((name, self.asked.rule(name)) for name in names_of(found))  # those of all experts in one, too
        name, rule = next(((name, rule) for name, rule in rules if rule is not None), (found.name, None))
        if rule is None or rule.weights is UNSAID:
            alone = bool(self.asked.scheme.rules) and self.bare and found.format == "plain"
            return dataclasses.replace(self, recipe=None, with_inputs=None, default=None) if alone else self
        own = dataclasses.replace(self, with_inputs=None, left_alone=False, named=self.asked.names(name))
        if isinstance(rule.weights, ScalingRecipe):
            recipe = _with(fitted(rule.weights, self.bridge), self.options, known_alone=True)
            size = self.group_size if getattr(recipe, "group_size", None) is not None else None
            return dataclasses.replace(own, kind="", recipe=recipe, group_size=size)
        if rule.weights is None:
            return dataclasses.replace(own, kind=NO_KIND)
        kind = str(rule.weights).lower()
        if kind in self.bridge.kinds:
            return dataclasses.replace(own, kind=kind, recipe=None)
        if kind in self.bridge.recipes:
            return dataclasses.replace(own, kind="", recipe=self.bridge.recipes[kind])
        if kind.partition(":")[0] in recipe_names.names():
            return dataclasses.replace(own, kind="", recipe=fitted(recipe_names.recipe_of(kind), self.bridge))
        known = suggestion(kind, [*recipe_names.names(), *self.bridge.kinds, *self.bridge.recipes])
        raise ValueError(
            f"weights of a rule must be a recipe or a type of {self.format}, got {rule.weights!r}: {known}"
        )

    def inputs_of(self, module: str, recipe: ScalingRecipe | str) -> Activations | None:
        """How the inputs of a layer whose weight is written in a recipe are to be quantized: as a scheme asks, else as
        the source does. None: they stay in high precision, or nothing says it."""
        module = self.together.get(module, module)
        said = UNSAID if self.asked is None else self.asked.inputs(module, recipe, strict=False)
        if said is UNSAID:
            rule = None if self.source is None else self.source.rule(module)
            said = None if rule is None else rule.inputs
        return said if isinstance(said, Activations) else None

    def spell(self, name: str) -> str:
        """The name a tensor is stored under."""
        return (self.names.inside(name) if self.names else None) or name

    @property
    def quantizes_nothing(self) -> bool:
        """Whether all that is written is floats."""
        rules = self.asked.scheme.rules if self.asked is not None and self.recipe is None else ()
        if rules and all(rule.weights is None for rule in rules):
            return True
        kind = self.bridge.kinds.get(self.kind)
        return bool(self.float_dtype) or (kind is not None and kind.encode is None)

    @cached_property
    def bridge(self) -> FileFormat:
        """What the format is; that of plain tensors where a float dtype is written."""
        return bridges.bridge(self.format)


def target_names() -> list[str]:
    """Everything `parse_target` understands, formats with their recipes."""
    names = [*FLOATS, *recipe_names.names()]
    for name, bridge in bridges.registry().items():
        if bridge.writes and name != bridges.OWN:  # whose recipes are spelled alone
            names += [name, *(f"{name}:{key}" for key in (*bridge.recipes, *bridge.kinds))]
    return names


def parse_target(
    spelled: str,
    *,
    scale_search: str | None = None,
    group_size: int | str | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    by_rules: bool = False,
    argument: str = "to",
) -> Target:
    """A target as the command line spells it: ``bf16``, ``nvfp4:mse``, ``modelopt`` or ``modelopt:fp8``. Where rules
    say what layers become, options are for their recipes, as far as these have them."""
    if not isinstance(spelled, str):
        raise TypeError(f"to must be the name of a recipe or a format, such as 'nvfp4', got {spelled!r}")
    patterns: dict[str, Any] = {
        "include": patterns_of(include, "include"),
        "exclude": patterns_of(exclude, "exclude"),
    }
    spelled = spelled.strip().lower()
    options = {"scale_search": scale_search, "group_size": group_size}
    if spelled in FLOATS:
        for name in (name for name, value in options.items() if value is not None):
            raise ValueError(f"{name} must be left out: {spelled} has no {name}")
        return Target(spelled, float_dtype=FLOATS[spelled], **patterns)
    name, *keys = recipe_names.words_of(spelled)
    size = next((int(key) for key in reversed(keys) if key.isdecimal()), None)
    patterns["group_size"] = size if group_size is None else group_size
    if name in recipe_names.names():
        base = recipe_names.recipe_of(spelled)
        return Target(spelled, format=bridges.OWN, recipe=_with(base, options), **patterns)
    bridge = bridges.registry().get(name)
    if bridge is None or not bridge.writes:
        if said := meant(spelled):
            raise ValueError(f"{argument} must be a recipe or a format, got {spelled!r}: {said}")
        names = suggestion(spelled, target_names())
        every = "" if names.endswith("?") else " ('breccia convert --to list' has all)"
        raise ValueError(f"{argument} must be a recipe or a format, got {spelled!r}: {names}{every}")
    if keys and keys[0] in bridge.kinds:
        return _of_kind(spelled, bridge, keys, options, patterns)
    if keys and keys[0] not in bridge.recipes:
        names = ", ".join((*bridge.recipes, *bridge.kinds)) or "nothing"
        close = suggestion(keys[0], (*bridge.recipes, *bridge.kinds))
        said = meant(spelled) or (close if close.endswith("?") else "")
        more = f": {said}" if said else ""
        raise ValueError(f"{argument} must have one of {names} behind '{name}:', got {keys[0]!r}{more}")
    default = next(iter(bridge.recipes.values()), None) or recipes.NVFP4BlockScaling()
    recipe = with_inputs = None
    if keys:
        recipe, with_inputs = bridge.recipes[keys[0]], bridge.recipes_with_inputs.get(keys[0])
    elif not by_rules and any(v is not None for v in options.values()):
        recipe = default
    recipe, with_inputs = _optional(recipe, keys, options, name), _optional(with_inputs, keys, options, name)
    patterns |= {"bare": not keys, "options": options if by_rules else {}}
    return Target(spelled, format=name, recipe=recipe, with_inputs=with_inputs, default=default, **patterns)


def _optional(
    recipe: ScalingRecipe | None, keys: list[str], options: Mapping[str, Any], name: str
) -> ScalingRecipe | None:
    """A recipe with the options behind its key and those of the command line."""
    if recipe is None:
        return None
    if keys[1:]:
        recipe = recipe_names.with_options(recipe, keys[1:], f"{name}:{keys[0]}")
    return _with(recipe, options)


def _of_kind(
    spelled: str, bridge: FileFormat, keys: list[str], options: Mapping[str, Any], patterns: dict[str, Any]
) -> Target:
    if keys[1:]:
        raise ValueError(f"the option after '{bridge.name}:{keys[0]}:' must be left out, got {keys[1]!r}")
    for name in (name for name, value in options.items() if value is not None):
        raise ValueError(f"{name} must be left out: {bridge.name}:{keys[0]} has no {name}")
    return Target(spelled, format=bridge.name, kind=keys[0], **patterns)


def _with(recipe: ScalingRecipe, options: Mapping[str, Any], known_alone: bool = False) -> ScalingRecipe:
    given = {k: v for k, v in options.items() if v is not None}
    if not given:
        return recipe
    if isinstance(size := given.get("group_size"), str) and size != AUTO:
        raise ValueError(f"group_size must be a number or '{AUTO}', got {size!r}")
    known = {f.name for f in dataclasses.fields(recipe)}
    if known_alone:
        given = {name: value for name, value in given.items() if name in known and getattr(recipe, name) is not None}
    for name in given:
        if name not in known:
            raise ValueError(f"{name} must be left out: {type(recipe).__name__} has no {name}")
    return dataclasses.replace(recipe, **{k: v for k, v in given.items() if v != AUTO})


def names_of(found: Found) -> list[str]:
    """What patterns may call a tensor: its name, those of what it is made of, and that of what it is a part of."""
    return [found.name, *(other.name for other in found.origin.sources)]


FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
KEEP = "keep"  # for a float type that stays

_SHAPE = (1024, 4096)  # of a matrix, whose bits a weight are told
_FLOAT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_OTHERS = {
    "nf4": "bitsandbytes' NF4 is read and not written: nvfp4, mxfp4 and int4 have as many bits",
    "fp4": "nvfp4 and mxfp4 are FP4 with scales of 16 and 32 weights",
}
_OTHERS |= dict.fromkeys(
    ("w8a8", "fp8-dynamic", "fp8_dynamic"),
    "fp8 and int8 are weights of 8 bits, and --activations dynamic is inputs of 8",
)
_OTHERS |= dict.fromkeys(
    ("exl2", "exl3"), "ExLlama's files are neither read nor written: gptq and nvfp4 have about 4 bits"
)
_OTHERS["hqq"] = "it is not written: int4, with --moments FILE --method gptq, loses less"
_OTHERS |= dict.fromkeys(("bitsandbytes", "bnb", "qlora"), _OTHERS["nf4"])
_OF_BITS = {4: "nvfp4, mxfp4 and int4", 6: "mxfp6 and gguf:q6_k", 8: "fp8, mxfp8 and int8", 16: "bf16 and fp16"}
_PROGRAMS = {
    "llamacpp": "llama.cpp",
    "ollama": "llama.cpp",
    "lmstudio": "llama.cpp",
    "mlx-lm": "mlx-lm",
    "hf": "transformers",
}


def targets() -> list[dict[str, Any]]:
    """Every target, of JSON types: ``name``, its ``format`` and ``key`` there, ``bits`` a weight of a matrix of 1024 ×
    4096 with its scales, the programs that it ``opens_in``, and what it ``needs``."""
    bits: dict[str, dict[str, float]] = {
        "": {name: 32.0 if name == "fp32" else 16.0 for name in FLOATS},
        bridges.OWN: {name: _bits(recipe_names.recipe_of(name)) for name in recipe_names.names()},
    }
    for name, bridge in bridges.registry().items():
        if bridge.writes and name != bridges.OWN:
            bits[name] = {key: _bits(recipe) for key, recipe in bridge.recipes.items()}
            bits[name] |= {key: _bits(kind.name) for key, kind in bridge.kinds.items()}
    return [
        {
            "name": key if name in ("", bridges.OWN) else f"{name}:{key}",
            "format": name,
            "key": key,
            "bits": each,
            "opens_in": bridges.bridge(name).programs(key),
            "needs": bridges.bridge(name).needs,
        }
        for name, of in bits.items()
        for key, each in of.items()
    ]


def _bits(kind: ScalingRecipe | str) -> float:
    """Of a weight in a recipe, or in a type of a format's own."""
    if isinstance(kind, ScalingRecipe):
        nbytes = ghost(_SHAPE, kind).nbytes
    else:
        nbytes = nbytes_of(kind, _SHAPE) if kind in DTYPES else block_bytes(kind, _SHAPE)
    return round(8 * nbytes / (_SHAPE[0] * _SHAPE[1]), 3)


def _programs(row: dict[str, Any]) -> set[str]:
    return {one.partition(" with ")[0].lower() for one in row["opens_in"]}


def meant(spelled: str) -> str:
    """What a name in lower case that is no target probably means, in words; "" where nobody knows."""
    known = [row["name"] for row in targets()]
    if spelled in known:
        return ""
    if spelled in _FLOAT_NAMES:
        return f"did you mean {_FLOAT_NAMES[spelled]}?"
    if spelled in _OTHERS:
        return _OTHERS[spelled]
    if found := [name for name in known if name.partition(":")[2] == spelled]:
        return f"did you mean {' or '.join(found[:4])}?"
    if re.fullmatch(r"(?:gguf:)?iq\d(?:_\w+)?", spelled):
        return (
            "GGUF's IQ types are read and not written, except iq4_nl: gguf:q2_k to gguf:q6_k, with --imatrix FILE, "
            "have 2.6 to 6.6 bits"
        )
    bits = re.fullmatch(r"(?:w|int|fp|q)?(\d{1,3})[-_ ]?(?:bit|bits|b)?(?:a16)?", spelled)
    if bits and int(bits[1]) in _OF_BITS:
        return f"{_OF_BITS[int(bits[1])]} have about {bits[1]} bits a weight"
    bare = re.sub(r"_[sml]$|^e4m3(fn)?$|^fp8_e4m3(fn)?$", lambda match: "" if match[0][0] == "_" else "fp8", spelled)
    if found := [name for name in known if name == bare or name.partition(":")[2] == bare]:
        return f"did you mean {' or '.join(found[:4])}?"
    program = _PROGRAMS.get(spelled, spelled)
    opened = {row["format"] or "bf16" for row in targets() if program in _programs(row)}
    if opened:
        order = list(dict.fromkeys(row["format"] or "bf16" for row in targets()))
        names = [name for name in order if name in opened and name != bridges.OWN]
        return f"it is a program, which opens {', '.join(names)}"
    return ""
