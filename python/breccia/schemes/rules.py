# SPDX-License-Identifier: Apache-2.0
"""The parts of a scheme: rules, activations, KV caches, and scales as they are stored; and recipes, activations and
roles of layers in the few words of a table."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from breccia import recipes
from breccia.recipes import ScalingRecipe
from breccia.schemes.matching import Match

_ELEMENTS = {
    "float8_e4m3fn": "FP8",
    "float8_e4m3fnuz": "FP8 fnuz",
    "float8_e5m2": "FP8 E5M2",
    "float6_e2m3fn": "FP6",
    "float6_e3m2fn": "FP6 E3M2",
    "float4_e2m1fn": "FP4",
    "int8": "INT8",
    "uint8": "UINT8",
    "int4": "INT4",
}


def recipe_label(recipe: ScalingRecipe | str | None) -> str:
    """Such as "FP8 128 × 128", "NVFP4", "INT4 g128"."""
    match recipe:
        case None:
            return "high precision"
        case str():
            return recipe
        case recipes.Float8BlockScaling():
            return f"{_ELEMENTS[recipe.element]} {recipe.block_m} × {recipe.block_k}"
        case recipes.Float8CurrentScaling():
            return _ELEMENTS[recipe.element] + (" per row" if recipe.granularity == "row" else "")
        case recipes.DelayedScaling():
            return _ELEMENTS[recipe.element]
        case recipes.INT4Scaling():
            return f"INT4 g{recipe.group_size}" + ("" if recipe.symmetric else " with zero points")
        case recipes.INT8Scaling():
            size = "per row" if recipe.group_size is None else f"g{recipe.group_size}"
            return f"INT8 {size}" + ("" if recipe.symmetric else " with zero points")
    return recipe.name.upper()


def activations_label(said: Any) -> str:
    """An `Activations` or a `KVCache`, such as "FP8 static", "FP8 per token dynamic", "NVFP4 local", "FP8 g128 dynamic,
    powers of two"."""
    scale = getattr(said, "scale", "float8_e4m3fn" if said.size == 16 else "float32")
    name = _ELEMENTS.get(said.element, said.element)
    if said.element == "float4_e2m1fn" and scale == "float8_e4m3fn":
        return f"NVFP4 {said.when}" + (" in two levels" if getattr(said, "two_level", False) else "")
    if scale == "float8_e8m0fnu" and said.size == 32:
        return f"MX{name.split()[0]} {said.when}"
    per = {"tensor": "", "group": f" g{said.size}"}.get(said.per, f" per {said.per}")
    text = f"{name}{per} {said.when}"
    text += "" if said.symmetric else " with zero points"
    text += ", powers of two" if scale == "float8_e8m0fnu" else ""
    bound = getattr(said, "bound", None)
    return text if bound is None else f"{text} up to {bound:g}"


# Roles of layers by the parts of their names; the first that matches.
_ROLES = (
    ("experts", re.compile(r"(^|\.)experts(\.|$)")),
    ("router", re.compile(r"(^|\.)(gate|router)$")),
    ("attention", re.compile(r"(^|\.)(self_attn|attn|attention|self_attention|cross_attn)(\.|$)")),
    ("embeddings", re.compile(r"(^|\.)(embed_tokens|wte|wpe|tok_embeddings|\w*embeddings?)(\.|$)")),
    ("head", re.compile(r"(^|\.)(lm_head|output|embed_out)$")),
    ("norms", re.compile(r"norm\w*$")),
    ("mlp", re.compile(r"(^|\.)(mlp|feed_forward|ffn)(\.|$)")),
)


def role_of(name: str) -> str:
    """What a module does in its model, by its name: "experts", "router", "attention", "embeddings", "head", "norms",
    "mlp" or "others"."""
    return next((role for role, pattern in _ROLES if pattern.search(name)), "others")


_WHEN = ("static", "dynamic", "local")
_PER = ("tensor", "token", "group", "block", "channel", "head", "token-head")


class Unsaid(Enum):
    """What a format says nothing of, which is not the same as "high precision" (None)."""

    UNSAID = "unsaid"

    def __repr__(self) -> str:
        return "UNSAID"


UNSAID = Unsaid.UNSAID


def _check_fields(part: Activations | KVCache) -> None:
    """Refuses what JSON may have instead of words and numbers, and what no set holds."""
    for one in fields(part):
        value = getattr(part, one.name)
        if isinstance(value, (dict, list)):
            raise ValueError(f"{one.name} must be a word or a number, got {str(value)[:80]}")


@dataclass(frozen=True)
class Activations:
    """How the inputs or outputs of layers are quantized.

    Attributes:
        element: their format by its ml_dtypes name, such as "float8_e4m3fn" or "int8".
        per: what shares a scale: "tensor", "token" (a row), "group" (``size`` elements of a row), "head".
        when: "static" (the scale is in the file), "dynamic" (made of the data), or "local" (block scales are made of
            the data, the tensor's own scale is in the file).
        size: elements of a group; None where there are none.
        symmetric: without a zero point.
        scale: dtype of the scales by its ml_dtypes name: "float32", "float8_e8m0fnu" (powers of two, rounded up),
            "float8_e4m3fn" (NVFP4's blocks).
        bound: the largest magnitude that counts for a dynamic scale; None where there is none.
        two_level: of NVFP4 that is dynamic: whether a scale of the whole tensor is made of the data, too.
    """

    element: str
    per: str
    when: str
    size: int | None = None
    symmetric: bool = True
    scale: str = "float32"
    bound: float | None = None
    two_level: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.when not in _WHEN:
            raise ValueError(f"when must be one of {', '.join(_WHEN)}, got {self.when!r}")
        if self.per not in _PER:
            raise ValueError(f"per must be one of {', '.join(_PER)}, got {self.per!r}")
        if (self.per == "group") != (self.size is not None):
            raise ValueError(f"size must be given for groups and for nothing else, got per {self.per!r}, {self.size}")
        if self.two_level and (self.when != "dynamic" or self.scale != "float8_e4m3fn"):
            raise ValueError(f"two_level must be left out but for dynamic blocks with scales in FP8, got {self.when!r}")

    def __str__(self) -> str:
        return activations_label(self)


NVFP4_LOCAL = Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
NVFP4_DYNAMIC = Activations("float4_e2m1fn", "group", "dynamic", 16, scale="float8_e4m3fn")
MXFP4_DYNAMIC = Activations("float4_e2m1fn", "group", "dynamic", 32, scale="float8_e8m0fnu")
MXFP8_DYNAMIC = Activations("float8_e4m3fn", "group", "dynamic", 32, scale="float8_e8m0fnu")


@dataclass(frozen=True)
class KVCache:
    """How the keys and values of attention are kept.

    Attributes:
        element: their format by its ml_dtypes name.
        per: what shares a scale: "tensor", "head", "token", "group".
        when: "static", "dynamic" or "local", see `Activations`.
        size: elements of a group.
        symmetric: without a zero point.
        affine: whether biases are taken off the keys and values first.
    """

    element: str
    per: str = "tensor"
    when: str = "static"
    size: int | None = None
    symmetric: bool = True
    affine: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)

    def __str__(self) -> str:
        return activations_label(self) + (" affine" if self.affine else "")


@dataclass(frozen=True)
class Rule:
    """What the modules that a rule matches are.

    Attributes:
        match: any of these matches.
        weights: a recipe; the name of a format that no recipe makes, such as "Q4_K"; None for high precision;
            `UNSAID` where the rule leaves them as they are.
        inputs: of the layer: None for high precision; `UNSAID` where the format leaves it to its reader.
        outputs: likewise.
        input_factor: whether inputs are multiplied by a stored factor for each column first.
        low_rank: rank of a branch that is added; None where there is none.
    """

    match: tuple[Match, ...]
    weights: ScalingRecipe | str | Unsaid | None
    inputs: Activations | Unsaid | None = UNSAID
    outputs: Activations | Unsaid | None = None
    input_factor: bool = False
    low_rank: int | None = None

    def matches(self, name: str, kinds: Iterable[str]) -> bool:
        """Whether the rule is of a module.

        Args:
            name: of the module.
            kinds: names of its classes, such as "Linear".

        Returns:
            True where one of `match` matches.
        """
        kinds = tuple(kinds)
        return name in self.names or any(one.matches(name, kinds) for one in self.patterns)

    @property
    def has_activations(self) -> bool:
        """Whether inputs or outputs are quantized by it."""
        return isinstance(self.inputs, Activations) or isinstance(self.outputs, Activations)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Full names, of which mixed models have one for each layer."""
        return frozenset(one.pattern for one in self.match if one.kind == "name")

    @functools.cached_property
    def patterns(self) -> tuple[Match, ...]:
        """Those of `match` that are no full names."""
        return tuple(one for one in self.match if one.kind != "name")

    @property
    def meaning(self) -> tuple[Any, ...]:
        """All but whom it is for."""
        return self.weights, self.inputs, self.outputs, self.input_factor, self.low_rank

    def __str__(self) -> str:
        if self.weights is None and not isinstance(self.inputs, Activations):
            return "high precision"
        text = "kept" if isinstance(self.weights, Unsaid) else recipe_label(self.weights)
        if isinstance(self.inputs, Activations):
            text += f" × {self.inputs}"
        elif self.inputs is UNSAID:
            text += " × unsaid"
        text += " with factors of inputs" if self.input_factor else ""
        text += f" + rank {self.low_rank}" if self.low_rank else ""
        return text + (f" → {self.outputs}" if isinstance(self.outputs, Activations) else "")


def rules_of(meanings: Mapping[str, tuple[Any, ...]]) -> list[Rule]:
    """Rules by the names of modules, one for each meaning (weights, inputs and so on) that they have."""
    kinds: dict[tuple[Any, ...], list[Match]] = {}
    for module, meaning in meanings.items():
        kinds.setdefault(meaning, []).append(Match("name", module))
    return [Rule(tuple(matches), *meaning) for meaning, matches in kinds.items()]


@dataclass(frozen=True)
class StoredScale:
    """A scale of activations or of a KV cache, as a multiplier and as its file has it.

    Attributes:
        module: the layer, or the attention whose keys or values it is of.
        of: "input", "output", "k", "v", "kv" (both), "q" or "prob".
        multiplier: value = code · multiplier, float32 numbers in the order of the file.
        form: "multiplier", or "divisor" where the file has the inverse.
        name: of the stored tensor.
        dtype: its safetensors name.
        shape: as stored.
    """

    module: str
    of: str
    multiplier: tuple[float, ...]
    form: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def from_dict(said: Mapping[str, Any]) -> StoredScale:
        """A scale of its fields, as files have them.

        Args:
            said: the fields, with lists for tuples.

        Returns:
            The scale.

        Raises:
            KeyError, TypeError: one is missing, or of another type.
        """
        numbers = tuple(map(float, said["multiplier"]))
        return StoredScale(**{**said, "multiplier": numbers, "shape": tuple(said["shape"])})


def inputs_said(said: Any) -> Activations | None:
    """The inputs that JSON has as the fields of `Activations`; None for null."""
    if said is None:
        return None
    if not isinstance(said, dict):
        raise ValueError(f"inputs must be an object, got {str(said)[:80]}")
    try:
        return Activations(**said)
    except TypeError as error:
        raise ValueError(f"inputs must have the fields of Activations: {error}") from None
