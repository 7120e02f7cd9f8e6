# SPDX-License-Identifier: Apache-2.0
"""Scales under which a block keeps every value: ``cpp/src/quantize/exact_scale.cpp`` over whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia.kernels.whole_array.encode import MAGIC, encode
from breccia.kernels.whole_array.namespace import ABS_MASK, Namespace
from breccia.kernels.whole_array.rules import Scale, Stats, decode_table, stored_scale
from breccia.kernels.whole_array.spec import Element, Spec

_AXES = (2, 4)  # of a block, in a Grid's five axes
_TOLERANCE = 1.0 / 512  # of fractions whose denominators are at most 255
_SIGNIFICANDS = {  # in the order of their odd parts
    1: (2, 3),
    2: (4, 6, 5, 7),
    3: (8, 12, 10, 14, 9, 11, 13, 15),
    4: (16, 24, 20, 28, 18, 22, 26, 30, 17, 19, 21, 23, 25, 27, 29, 31),
}


def stored_exactly(xp: Namespace, scale: Any, spec: Spec) -> tuple[Scale, Any]:
    """The scale as the recipe stores it, and whether that is the scale itself."""
    if spec.scale == "e8m0":
        bits = xp.bits(scale)
        code = (bits >> 23) & 0xFF
        fits = ((bits & ~0x7F80_0000) == 0) & (code > 0) & (code < 255)
        tiny = bits == 0x0040_0000
        code = xp.where(tiny, code * 0, code)
        return Scale(code, scale, scale), fits | tiny
    if spec.scale == "e4m3":
        code = encode(xp, scale, Element.of("float8_e4m3fn"))
        decoded = xp.take(decode_table(xp, "float8_e4m3fn", scale), code & 0xFF)
        return Scale(code, scale, scale), (decoded == scale) & (scale > 0)
    stored = stored_scale(xp, scale, spec)
    return Scale(stored.stored, scale, scale), (stored.decoded == scale) & (scale != 0)


def kept(xp: Namespace, blocks: Any, stats: Stats, scale: Any, spec: Spec) -> tuple[Scale, Any]:
    """A scale, with the zero point that goes with it, and whether each block keeps its values under it."""
    made, fits = stored_exactly(xp, scale, spec)
    if spec.rule == "asymmetric":
        made.zero_point, reaches = _zero_point(xp, stats, scale, spec.element)
        fits = fits & reaches
    finite = ~(stats.has_nan | stats.has_infinity)
    return made, fits & finite & loses_nothing(xp, blocks, made, spec.element)


def loses_nothing(xp: Namespace, blocks: Any, scale: Scale, element: Element) -> Any:
    codes = encode(xp, xp.divide(blocks, scale.factor), element, scale.zero_point)
    values = xp.take(decode_table(xp, element.name, blocks), codes & 0xFF)
    if scale.zero_point is not None:
        values = values - scale.zero_point
    values = values * scale.decoded
    different = blocks != values if element.has_one_zero else xp.bits(blocks) != xp.bits(values)
    return ~xp.any(different, _AXES)


def common_scales(xp: Namespace, blocks: Any, stats: Stats, spec: Spec) -> list[Any]:
    """The scale amax / p of each block for the p that its other values leave, 0 where they leave none; for float32
    scales, whose products are rounded, also the neighbours."""
    ratio = xp.divide(xp.floats(xp.bits(blocks) & ABS_MASK), stats.amax)
    find = _integer_scale if spec.element.is_integer else _float_scale
    scale = find(xp, blocks, ratio, stats, spec)
    scale = xp.where(stats.amax == 0, stats.amax, scale)
    if spec.scale != "float32":
        return [scale]
    neighbours = (xp.where(scale == 0, scale, xp.floats(xp.bits(scale) + step)) for step in (-1, 1))
    return [scale, *neighbours]


def _zero_point(xp: Namespace, stats: Stats, scale: Any, element: Element) -> tuple[Any, Any]:
    magic = xp.constant(MAGIC, "float32", scale)
    ends = xp.divide(stats.low, scale), xp.divide(stats.high, scale)
    low = (xp.minimum(*ends) + magic) - magic
    high = (xp.maximum(*ends) + magic) - magic
    lowest = xp.constant(element.lowest, "float32", scale)
    return lowest - low, high - low <= xp.constant(element.max - element.lowest, "float32", scale)


def _float_scale(xp: Namespace, blocks: Any, ratio: Any, stats: Stats, spec: Spec) -> Any:
    element = spec.element
    rest = 0x007F_FFFF >> element.mantissa_bits
    result = stats.amax * 0
    found = stats.has_nan & False
    for significand in _SIGNIFICANDS[element.mantissa_bits]:
        bits = xp.bits(ratio * xp.constant(float(significand), "float32", ratio)) + 16
        possible = ~xp.any(((bits & rest) >= 32) & (ratio != 0), _AXES)
        for p in _magnitudes(significand, spec):
            scale = xp.divide(stats.amax, xp.constant(p, "float32", ratio))
            good = possible & ~found & _is_product(xp, scale, p, stats, spec)
            result = xp.where(good, scale, result)
            found = found | good
    return result


def _magnitudes(significand: int, spec: Spec) -> list[float]:
    """The largest number of a format with that significand; where scales are E4M3, which end early, the smaller ones
    as well."""
    element = spec.element
    p = significand * 2.0 ** (element.max_exponent - element.mantissa_bits)
    p = p / 2 if p > element.max else p
    smallest = 2.0**-1
    if spec.scale != "e4m3":
        return [p]
    found = []
    while p >= smallest and (p / smallest).is_integer():
        found.append(p)
        p /= 2
    return found


def _is_product(xp: Namespace, scale: Any, p: Any, stats: Stats, spec: Spec) -> Any:
    if spec.scale == "float32":
        return scale == scale  # noqa: PLR0124 (whatever it is)
    _, fits = stored_exactly(xp, scale, spec)
    factor = p if not isinstance(p, float) else xp.constant(p, "float32", scale)
    return fits & (scale * factor == stats.amax)


def _integer_scale(xp: Namespace, blocks: Any, ratio: Any, stats: Stats, spec: Spec) -> Any:
    element = spec.element
    asymmetric = spec.rule == "asymmetric"
    largest = -element.lowest if element.lowest < 0 else element.max
    limit = int(element.max - element.lowest if asymmetric else largest)

    def value(x: float) -> Any:
        return xp.constant(x, "float32", ratio)

    magic, most = value(MAGIC), value(float(limit))
    denominator = stats.amax * 0 + value(1.0)
    for _ in range(limit.bit_length()):
        multiple = ratio * denominator
        distance = multiple - ((multiple + magic) - magic)
        fraction = xp.max(xp.floats(xp.bits(distance) & ABS_MASK), _AXES)
        more = (fraction >= value(_TOLERANCE)) & (denominator <= most)
        denominator = xp.where(more, denominator * _denominator(xp, fraction), denominator)
    n = denominator
    if spec.scale != "float32":  # the first multiple whose scale has few enough bits
        n = denominator * xp.constant(np.arange(1, limit + 1, dtype=np.float32), "float32", ratio)
        good = (n <= most) & _is_product(xp, xp.divide(stats.amax, n), n, stats, spec)
        n = -xp.max(xp.where(good, -n, n * 0 - value(1e6)), (4,))
    scale = xp.divide(stats.amax, n)
    if not asymmetric:
        turned = xp.any(blocks == -stats.amax, _AXES)
        if element.lowest < 0:
            turned = (n > value(element.max)) & xp.any(blocks == stats.amax, _AXES)
        scale = xp.where(turned, -scale, scale)
    return xp.where(n <= most, scale, scale * 0)


def _denominator(xp: Namespace, fraction: Any) -> Any:
    """Of a fraction between 0 and 1/2, by Euclid's algorithm with nearest quotients."""
    one, magic, tolerance = (xp.constant(x, "float32", fraction) for x in (1.0, MAGIC, _TOLERANCE))
    a, b = fraction * 0 + one, fraction
    for _ in range(8):
        quotient = (xp.divide(a, b) + magic) - magic
        rest = xp.floats(xp.bits(a - quotient * b) & ABS_MASK)
        goes_on = b >= tolerance
        a, b = xp.where(goes_on, b, a), xp.where(goes_on, rest, b)
    return (xp.divide(one, a) + magic) - magic
