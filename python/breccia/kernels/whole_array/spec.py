# SPDX-License-Identifier: Apache-2.0
"""A recipe as numbers: what the rules and encoders below branch on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from breccia import formats, recipes
from breccia.recipes import ScalingRecipe, _spec


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


@dataclass(frozen=True)
class Element:
    """Limits of an element format, as numbers and as float32 bits."""

    name: str
    bits: int
    max: float
    lowest: float
    has_nan: bool
    is_integer: bool
    mantissa_bits: int
    max_exponent: int
    min_exponent_bits: int
    max_bits: int
    nan_code: int
    sign_mask: int
    has_one_zero: bool  # whose sign no code has

    @classmethod
    @functools.cache
    def of(cls, name: str) -> Element:
        info = formats.finfo(name)
        codes = np.arange(1 << (info.bits - 1), dtype=np.uint8)
        values = formats.decode(codes, name)
        smallest_normal = float(values[min(1 << info.mantissa_bits, len(values) - 1)])
        return cls(
            name=name,
            bits=info.bits,
            max=info.max,
            lowest=info.min,
            has_nan=info.has_nan,
            is_integer=name.lstrip("u").startswith("int"),
            mantissa_bits=info.mantissa_bits,
            max_exponent=info.max_exponent,
            min_exponent_bits=_bits(smallest_normal),
            max_bits=_bits(info.max),
            nan_code=int(formats.encode(np.full(1, np.nan), name)[0]),
            sign_mask=1 << (info.bits - 1),
            has_one_zero=len(np.unique(formats.encode(np.array([0.0, -0.0]), name))) == 1,
        )


@dataclass(frozen=True)
class Spec:
    """All of a recipe that a cast depends on."""

    element: Element
    rule: str  # of `breccia.recipes.Choices`; "divide" where groups have exponents
    scale: str  # dtype name, or "e8m0" or "e4m3" for codes
    search: bool
    two_level: bool
    global_divides: bool
    margin: float
    expanded: bool  # groups have exponents
    multiply: bool  # whether codes are made by multiplying with the factor, or by dividing

    @staticmethod
    def of(recipe: ScalingRecipe) -> Spec:
        return _spec_of(recipe)


Spec.of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile cannot trace the core's functions


@functools.cache
def _spec_of(recipe: ScalingRecipe) -> Spec:
    core, chosen = _spec(recipe), recipes.choices(recipe)
    rule = "divide" if chosen.expanded else chosen.rule
    return Spec(
        element=Element.of(core.element),
        rule=rule,
        scale={"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "e4m3"}.get(chosen.scale, chosen.scale),
        search=chosen.searches,
        two_level=chosen.two_level,
        global_divides=core.global_divides,
        margin=2.0 ** max(-126, min(126, chosen.margin)),
        expanded=chosen.expanded,
        multiply=rule not in ("divide", "asymmetric"),
    )
