# SPDX-License-Identifier: Apache-2.0
"""What to quantize to: element format, scale format, block shape and scale rule, as plain data.

Every recipe is a frozen dataclass: hashable, comparable, picklable, and JSON-serializable through
`ScalingRecipe.to_dict` and `from_dict`. Fields are checked on construction: a wrong value raises
``ValueError`` and a wrong type ``TypeError``, with the field, its value and what it must be. The
arithmetic of every rule is in docs/design/0010-scale-rules.md. Words are taken in any case, formats and dtypes by the
names of ml_dtypes, too; ``block_size`` is another name of ``block_k`` and ``group_size``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from breccia import _core, formats, layouts
from breccia.spelling import suggestion
from breccia.value.inputs import SHORT_NAMES

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8ExpandedScaling",
    "INT4Scaling",
    "INT8ExpandedScaling",
    "INT8Scaling",
    "MXFP4BlockScaling",
    "MXFP6BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "ScalingRecipe",
    "all_recipes",
    "from_dict",
    "global_divides",
    "scale_format",
]

ScaleSearch: TypeAlias = Literal["amax", "mse"]
ScaleRounding: TypeAlias = Literal["rceil", "floor", "ceil", "even"]
ScaleRule: TypeAlias = Literal["torchao", "transformer_engine"]

_STORED = SHORT_NAMES | {
    "e8m0": "float8_e8m0fnu",
    "E4M3": "float8_e4m3fn",
}


# What options are called, in whatever case, and the words for them elsewhere: their values here. Formats of vendors
# have no shorter names than those of ml_dtypes.
_VALUES = {
    name.lower(): name
    for name in (
        *formats.names(),
        *("E4M3", "E5M2", "E2M3", "E3M2", "E2M1", "fp32", "fp16", "bf16", "e8m0", "amax", "mse", "tensor", "row"),
        *("rceil", "floor", "ceil", "even", "transformer_engine", "torchao", "multiplier", "divisor"),
    )
} | {
    "e4m3fn": "E4M3",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
    "float6_e2m3fn": "E2M3",
    "float6_e3m2fn": "E3M2",
    "float4_e2m1fn": "E2M1",
    "float8_e8m0fnu": "e8m0",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}


class Choices(NamedTuple):
    """What kernels ask of any recipe, whatever its fields are called."""

    scale: str  # dtype that scales are stored as, by its ml_dtypes name
    rule: str  # divide, multiply, asymmetric, expanded; rceil, floor, ceil, even; transformer_engine, torchao
    searches: bool  # for the scale of least squared error
    rows: int  # of a block, 0 for all
    margin: int  # powers of two above the largest magnitude
    has_zero_point: bool
    expanded: bool  # groups have exponents
    two_level: bool
    one_for_all: bool  # a scale follows from the whole tensor: its only one, or that over the scales of blocks


@dataclass(frozen=True)
class ScalingRecipe:
    """Base of all recipes."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if type(self) is ScalingRecipe:
            raise TypeError("ScalingRecipe is abstract: use one of breccia.recipes.all_recipes()")
        fields = _fields(self)
        for field, value in fields.items():
            if isinstance(value, np.integer):  # which JSON does not know
                fields[field] = int(value)
                object.__setattr__(self, field, fields[field])
            elif isinstance(value, str) and _VALUES.get(value.lower(), value) != value:
                fields[field] = _VALUES[value.lower()]
                object.__setattr__(self, field, fields[field])
        key, traits, twin = _describe(type(self), tuple(fields.items()))
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_traits", traits)
        object.__setattr__(self, "_twin", twin)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(_fields(self).values())

    @property
    def element(self) -> str:
        """Format of the data codes, by its ml_dtypes name."""
        return _spec(self).element

    @property
    def layout(self) -> layouts.Layout:
        """Layout of the scales `breccia.cast` makes."""
        layout: layouts.Layout = getattr(_twins, self._twin)._layout  # type: ignore[attr-defined]
        return layout

    def to_dict(self) -> dict[str, Any]:
        """``{"name": ..., field: value, ...}``, of JSON types only."""
        return {"name": self.name, **_fields(self)}


@dataclass(frozen=True)
class DelayedScaling(ScalingRecipe):
    """FP8 with one float32 scale per tensor, TransformerEngine's training recipe.

    ``amax_history_len`` and ``margin`` describe the training loop's amax history; a single
    `breccia.cast` has no history and uses the tensor's own amax, times 2^``margin``.
    ``scale_rule``: "torchao" divides by amax / 448, "transformer_engine" multiplies by 448 / amax and
    stores the reciprocal; they differ in rare last bits.
    """

    name: ClassVar[str] = "delayed"
    fp8_format: str = "E4M3"
    amax_history_len: int = 16
    margin: int = 0
    scale_rule: ScaleRule = "torchao"


@dataclass(frozen=True)
class Float8CurrentScaling(ScalingRecipe):
    """FP8 with a float32 scale amax / max: one per tensor (shape ``()``), or one per row
    (``granularity="row"``, shape ``(..., M, 1)``)."""

    name: ClassVar[str] = "current"
    fp8_format: str = "E4M3"
    granularity: Literal["tensor", "row"] = "tensor"
    scale_rule: ScaleRule = "torchao"
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class Float8BlockScaling(ScalingRecipe):
    """FP8 with a scale per ``block_k`` elements of a row (DeepSeek-V3 activations: 1 × 128), or per
    ``block_m`` × ``block_k`` tile (DeepSeek-V3 weights: 128 × 128; tiles at the edges may be short).

    ``scale_format``: "fp32", "bf16", or "e8m0" for powers of two rounded up (DeepSeek-V3.1's ue8m0).
    """

    name: ClassVar[str] = "block"
    fp8_format: str = "E4M3"
    block_k: int = 128
    block_m: int = 1
    scale_format: str = "fp32"
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class Float8ExpandedScaling(ScalingRecipe):
    """FP8 whose groups of ``group_size`` elements of a row are raised to a power, so that they fill the range of the
    format: dynamic range expansion of COAT, arXiv:2410.19313, section 4, for the moments of optimizers.

    Codes are of m · sign(x) · (|x| / m)^k under the scale m / max: m is the largest magnitude of the group, max the
    format's largest value. k = log(R) / log(r), with r the ratio of m to the least magnitude above zero and R the same
    ratio of the format, at most 256 and rounded to float16; `ScaledTensor.exponents` holds it. A group of zeros, or
    with an infinity or a NaN, has k = 1: its codes are those of `Float8BlockScaling`. Reading takes the k-th root.
    """

    name: ClassVar[str] = "expanded"
    fp8_format: str = "E4M3"
    group_size: int = 128


@dataclass(frozen=True)
class MXFP8BlockScaling(ScalingRecipe):
    """OCP MX v1.0 MXFP8: an E8M0 scale per 32 elements of a row.

    ``scale_rounding``: "rceil" rounds amax / max up (TransformerEngine, cuBLAS; nothing saturates),
    "floor" is the specification's section 6.3 (torchao's default), "ceil" and "even" are torchao's.
    """

    name: ClassVar[str] = "mxfp8"
    fp8_format: str = "E4M3"
    block_size: int = 32
    scale_rounding: ScaleRounding = "rceil"
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class MXFP6BlockScaling(ScalingRecipe):
    """OCP MX v1.0 MXFP6, one code per byte: an E8M0 scale per 32 elements of a row."""

    name: ClassVar[str] = "mxfp6"
    fp6_format: str = "E2M3"
    block_size: int = 32
    scale_rounding: ScaleRounding = "rceil"
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class MXFP4BlockScaling(ScalingRecipe):
    """OCP MX v1.0 MXFP4, two codes per byte: an E8M0 scale per 32 elements of a row."""

    name: ClassVar[str] = "mxfp4"
    fp4_format: str = "E2M1"
    block_size: int = 32
    scale_rounding: ScaleRounding = "rceil"
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class NVFP4BlockScaling(ScalingRecipe):
    """NVIDIA NVFP4, two codes per byte: an E4M3 scale per 16 elements of a row and, with
    ``two_level``, a float32 ``global_scale`` = amax / (448 · 6) over them.

    Without the second level, ordinary weights (σ ≈ 0.02) put the block scales among E4M3's subnormals.
    ``scale_search="mse"`` picks the block scale of least squared error among nine neighbours, which
    include "four over six". ``scale_rule``: "transformer_engine" keeps subnormal block scales,
    "torchao" clamps them to 2^-6. ``global_scale_form="divisor"`` stores the inverse, (448 · 6) / amax, with
    value = code · (scale / global_scale): compressed-tensors' way, whose last bits differ from a product's.
    """

    name: ClassVar[str] = "nvfp4"
    fp4_format: str = "E2M1"
    block_size: int = 16
    scale_format: str = "E4M3"
    two_level: bool = True
    scale_search: ScaleSearch = "amax"
    scale_rule: ScaleRule = "transformer_engine"
    global_scale_form: Literal["multiplier", "divisor"] = "multiplier"


@dataclass(frozen=True)
class INT4Scaling(ScalingRecipe):
    """INT4, two codes per byte, a scale per ``group_size`` elements of a row (GPTQ, AWQ).

    Signed codes are -8 … 7 with scale amax / 7. Unsigned codes are 0 … 15: with ``symmetric=False``
    each group has an integer zero point, value = (code - zero_point) · scale; with ``symmetric=True``
    the zero point is 0, for data that is not negative (negative values saturate to 0). Codes are made
    with the scale as stored in ``scale_dtype``. ``scale_search="mse"`` may store a negative scale,
    which gives the larger side of the data the code -8.
    """

    name: ClassVar[str] = "int4"
    group_size: int = 128
    signed: bool = True
    scale_dtype: str = "fp16"
    symmetric: bool = True
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class INT8Scaling(ScalingRecipe):
    """INT8 with a scale amax / 127 per row (``group_size=None``) or per ``group_size`` elements of a
    row; with ``symmetric=False`` also an int8 zero point."""

    name: ClassVar[str] = "int8"
    group_size: int | None = None
    scale_dtype: str = "fp32"
    symmetric: bool = True
    scale_search: ScaleSearch = "amax"


@dataclass(frozen=True)
class INT8ExpandedScaling(ScalingRecipe):
    """INT8 whose groups of ``group_size`` elements of a row are raised to a power: `Float8ExpandedScaling` over the
    codes -127 … 127."""

    name: ClassVar[str] = "int8_expanded"
    group_size: int = 128


def _check_names(kind: type[ScalingRecipe], size: str = "") -> None:
    """Let a recipe answer an argument that is none of its fields with the close ones, and let ``block_size``, which
    most recipes say, name the elements of a block of one whose field for them, ``size``, has another name."""
    init: Any = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]

    @functools.wraps(init)
    def checked(self: ScalingRecipe, *args: Any, **kwargs: Any) -> None:
        if size and kwargs.get("block_size") is not None:
            if size in kwargs or len(args) > names.index(size):
                raise TypeError(f"block_size must be left out beside {size}: they are two names of one number")
            kwargs[size] = kwargs["block_size"]
        if size:
            kwargs.pop("block_size", None)
        if unknown := next((name for name in kwargs if name not in names), None):
            raise TypeError(f"{kind.__name__} has no field {unknown!r}: {suggestion(unknown, names)}")
        init(self, *args, **kwargs)

    changed: Any = kind
    changed.__init__ = checked
    if size:
        changed.block_size = property(
            lambda self: getattr(self, size), doc=f"Elements of a row that share a scale: another name of ``{size}``."
        )


def all_recipes() -> list[type[ScalingRecipe]]:
    """Every recipe class of this module."""
    return [kind for kind in ScalingRecipe.__subclasses__() if kind.__module__ == __name__]


for _kind in all_recipes():
    _names = {field.name for field in dataclasses.fields(_kind)}
    _check_names(_kind, next((name for name in ("block_k", "group_size") if name in _names), ""))


def from_dict(fields: Mapping[str, Any]) -> ScalingRecipe:
    """The inverse of `ScalingRecipe.to_dict`. ``name`` may also be a class name.

    Args:
        fields: ``name`` and the fields that differ from the defaults.

    Returns:
        The recipe.

    Raises:
        ValueError: the name is not that of a recipe, or a field has a wrong value.
        TypeError: a field is unknown or of the wrong type.
    """
    if not isinstance(fields, Mapping):
        raise TypeError(f"fields must be a mapping, as recipe.to_dict() makes, got {fields!r}")
    rest = dict(fields)
    name = rest.pop("name", None)
    for recipe in all_recipes():
        if name in (recipe.name, recipe.__name__):
            names = {field.name for field in dataclasses.fields(recipe)}
            names |= {"block_size"} if hasattr(recipe, "block_size") else set()
            unknown = sorted(rest.keys() - names)
            if unknown:
                raise TypeError(f"fields must be those of {recipe.__name__}, which has no {', '.join(unknown)}")
            return recipe(**rest)
    known = ", ".join(repr(recipe.name) for recipe in all_recipes())
    raise ValueError(f"name must be one of {known}, got {name!r}")


def scale_format(recipe: ScalingRecipe) -> str | None:
    """ml_dtypes name of the codes a recipe's scales are stored as; None where they are numbers.

    Args:
        recipe: any recipe.

    Returns:
        Such as "float8_e8m0fnu".
    """
    stored = choices(recipe).scale
    return stored if stored.startswith("float8") else None


def global_divides(recipe: ScalingRecipe) -> bool:
    """Whether a recipe's global scale divides its block scales.

    Args:
        recipe: any recipe.

    Returns:
        True for NVFP4 with ``global_scale_form="divisor"``.
    """
    return _spec(recipe).global_divides


def _fields(recipe: ScalingRecipe) -> dict[str, Any]:
    return {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}


_twins = types.ModuleType("breccia.recipes._twins")


def known(recipe: ScalingRecipe) -> ScalingRecipe:
    """The recipe equal to this one that all share: the one that torch.compile can return from what it compiles."""
    twin: ScalingRecipe = getattr(_twins, recipe._twin)  # type: ignore[attr-defined]
    return twin


def choices(recipe: ScalingRecipe) -> Choices:
    """What kernels ask of a recipe."""
    chosen: Choices = getattr(_twins, recipe._twin)._choices  # type: ignore[attr-defined]
    return chosen


def has_exponents(recipe: Any) -> TypeGuard[ScalingRecipe]:
    """Whether groups have exponents beside their scales. What is no recipe of the package has none."""
    return isinstance(recipe, ScalingRecipe) and choices(recipe).expanded


def crosses(recipe: ScalingRecipe, axis: int) -> bool:
    """Whether a scale follows from both sides of a cut of an axis, counted from the end, between blocks."""
    return choices(recipe).one_for_all or (axis == -1 and recipe.layout.block == (1, 0))


def _spec(recipe: ScalingRecipe) -> _core.Recipe:
    spec: _core.Recipe = getattr(_twins, recipe._twin)._spec  # type: ignore[attr-defined]
    return spec


def _describe(
    kind: type[ScalingRecipe], fields: tuple[tuple[str, Any], ...]
) -> tuple[str, tuple[int, bool, bool], str]:
    """A recipe's JSON text; its bits, "has zero points" and "is of two levels"; and the name of its twin."""
    spec = _core.Recipe(kind.__name__, dict(fields))
    key = json.dumps({"name": kind.name, **dict(fields)})
    traits = _core.format_info(spec.element)["bits"], spec.has_zero_point or spec.is_expanded, spec.two_level
    name = "recipe_" + hashlib.sha256(key.encode()).hexdigest()[:16]
    if not hasattr(_twins, name):
        twin = object.__new__(kind)
        twin.__dict__.update(
            fields, _spec=spec, _layout=layouts.from_spec(spec.layout), _key=key, _traits=traits, _twin=name
        )
        given = dict(fields)
        scale = given.get("scale_format", given.get("scale_dtype")) or ("e8m0" if "scale_rounding" in given else "fp32")
        twin.__dict__["_choices"] = Choices(
            scale=_STORED[scale],
            rule=_rule(spec, given),
            searches=given.get("scale_search") == "mse",
            rows=spec.layout.block_m,
            margin=given.get("margin", 0),
            has_zero_point=spec.has_zero_point,
            expanded=spec.is_expanded,
            two_level=spec.two_level,
            one_for_all=spec.two_level or twin.__dict__["_layout"].one_scale,
        )
        setattr(_twins, name, twin)
    return key, traits, name


def _rule(spec: _core.Recipe, given: Mapping[str, Any]) -> str:
    """`Choices.rule`, of a recipe's fields."""
    match given:
        case _ if spec.is_expanded:
            return "expanded"
        case {"scale_rounding": str(rule)} | {"two_level": _, "scale_rule": str(rule)}:
            return rule
        case {"scale_rule": "transformer_engine"}:
            return "multiply"
        case {"scale_format": "e8m0"}:
            return "rceil"
        case {"symmetric": False}:
            return "asymmetric"
    return "divide"


# torch.compile, which cannot trace the core's objects, calls this where a recipe is made in what it compiles, and
# takes the result for a constant.
_describe._dynamo_marked_constant = True  # type: ignore[attr-defined]
