# SPDX-License-Identifier: Apache-2.0
"""The scale rules, block by block, and values to codes: ``cpp/src/kernels/scale_rules.inl.hpp`` and
``encode.inl.hpp`` over whole arrays.

Every operation is one float32 or int32 operation of the core's, in the core's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia import formats
from breccia.kernels.whole_array.namespace import ABS_MASK, FLOAT32_MAX, INFINITY_BITS, Namespace
from breccia.kernels.whole_array.spec import Element, Spec

MAGIC = 12582912.0  # 1.5 * 2^23: adding it to a float rounds it to the nearest integer
MAGIC_BITS = 0x4B40_0000


def encode(xp: Namespace, x: Any, element: Element, zero_point: Any = None, uniform: Any = None) -> Any:
    """int32 codes of scaled values: nearest, ties to even; or, with ``uniform`` numbers in [0, 1), up with the
    probability that makes the expected value exact."""
    if element.is_integer:
        return _integer(xp, x, element, zero_point, uniform)
    magnitude, magic, exponent = _prepare(xp, x, element)
    if uniform is None:
        significand = _rounded(xp, magnitude, magic) - magic
    else:
        step = xp.floats(exponent - (element.mantissa_bits << 23))
        units = xp.floats(magnitude) / step
        below = xp.floor(units)
        significand = xp.astype(below, "int32") + xp.astype(uniform < units - below, "int32")
    binade = (exponent - element.min_exponent_bits) >> (23 - element.mantissa_bits)
    bits = xp.bits(x)
    sign = (bits >> (32 - element.bits)) & element.sign_mask
    code = significand + binade
    code = xp.where(code == 0, code, code | sign) if element.has_one_zero else code | sign
    if not element.has_nan:
        return code
    return xp.where((bits & ABS_MASK) > INFINITY_BITS, sign | element.nan_code, code)


def squared_errors(xp: Namespace, x: Any, scaled: Any, element: Element, decoded: Any, zero_point: Any) -> Any:
    """Of each value, the squared distance to what it quantizes to."""
    if element.is_integer:
        magic = xp.number(MAGIC, x)
        rounded = _clamped(xp, scaled, element, zero_point) + magic
        error = (rounded - magic) * decoded - x
    else:
        magnitude, magic_bits, _ = _prepare(xp, scaled, element)
        rounded = xp.floats(_rounded(xp, magnitude, magic_bits))
        error = (rounded - xp.floats(magic_bits)) * decoded - xp.floats(xp.bits(x) & ABS_MASK)
    return error * error


def _prepare(xp: Namespace, x: Any, element: Element) -> tuple[Any, Any, Any]:
    """Bits of the saturated magnitude, of the constant that rounds it, and of its binade."""
    magnitude = xp.bits(x) & ABS_MASK
    magnitude = xp.minimum(magnitude, magnitude * 0 + element.max_bits)
    exponent = xp.maximum(magnitude & INFINITY_BITS, magnitude * 0 + element.min_exponent_bits)
    return magnitude, exponent + ((23 - element.mantissa_bits) << 23), exponent


def _rounded(xp: Namespace, magnitude: Any, magic: Any) -> Any:
    return xp.bits(xp.floats(magnitude) + xp.floats(magic))


def _clamped(xp: Namespace, x: Any, element: Element, zero_point: Any) -> Any:
    low = xp.number(element.lowest, x)
    high = xp.number(element.max, x)
    if zero_point is not None:
        low, high = low - zero_point, high - zero_point
    return xp.minimum(xp.maximum(x, low), high)


def _integer(xp: Namespace, x: Any, element: Element, zero_point: Any, uniform: Any) -> Any:
    clamped = _clamped(xp, x, element, zero_point)
    if uniform is None:
        code = xp.bits(clamped + xp.number(MAGIC, x)) - MAGIC_BITS
    else:
        below = xp.floor(clamped)
        code = xp.astype(below, "int32") + xp.astype(uniform < clamped - below, "int32")
    if zero_point is not None:
        code = code + xp.astype(zero_point, "int32")
    return code & ((1 << element.bits) - 1)


_NAN_STORED = {"e8m0": 0xFF, "e4m3": 0x7F}
_E4M3_OFFSETS = (0, 1, -1, 2, -2, 3, 4, 5, 6)
_E8M0_OFFSETS = (0, 1, -1)
# The largest and the smallest number of a scale.
_RANGES = {
    "float16": (65504.0, 2.0**-24),
    "bfloat16": (3.3895313892515355e38, 2.0**-133),
    "float32": (FLOAT32_MAX, 2.0**-149),
}


@dataclass
class Stats:
    """Of each block: the finite part, and what else is in it."""

    amax: Any
    has_nan: Any
    has_infinity: Any
    low: Any = None
    high: Any = None


@dataclass
class Scale:
    """Of each block: the stored scale, what it decodes to, and the factor its codes are made with."""

    stored: Any
    decoded: Any
    factor: Any
    zero_point: Any = None


@dataclass
class Global:
    """The second level of NVFP4: what is stored, and TransformerEngine's inverse of it."""

    scale: Any
    encode: Any


def stats_of(xp: Namespace, x: Any, axes: tuple[int, ...], limits: bool) -> Stats:
    magnitude = xp.bits(x) & ABS_MASK
    finite = magnitude < INFINITY_BITS
    stats = Stats(
        amax=xp.floats(xp.max(xp.where(finite, magnitude, magnitude * 0), axes)),
        has_nan=xp.any(magnitude > INFINITY_BITS, axes),
        has_infinity=xp.any(magnitude == INFINITY_BITS, axes),
    )
    if limits:
        zero = xp.number(0.0, x)
        kept = xp.where(finite, x, zero)
        stats.high = xp.maximum(xp.max(kept, axes), zero)
        stats.low = -xp.maximum(xp.max(-kept, axes), zero)
    return stats


def global_scale(xp: Namespace, amax: Any) -> Global:
    """TransformerEngine's compute_global_encode_scaling_factor_FP4, and torchao's per_tensor_amax_to_scale for the
    number that is stored."""
    reach = xp.number(448.0 * 6.0, amax)
    one = xp.number(1.0, amax)
    largest = xp.number(FLOAT32_MAX, amax)
    ratio = xp.divide(reach, amax)
    subnormal = ratio > largest
    scale = xp.where(subnormal, xp.divide(one, largest), xp.divide(amax, reach))
    return Global(xp.where(amax == 0, one, scale), xp.where(amax == 0, one, xp.minimum(ratio, largest)))


def candidates(spec: Spec) -> int:
    if not spec.search:
        return 1
    if spec.scale == "e4m3":
        return len(_E4M3_OFFSETS)
    if spec.scale == "e8m0":
        return len(_E8M0_OFFSETS)
    return 32 if spec.element.is_integer and spec.element.lowest < 0 and spec.rule != "asymmetric" else 16


def scale_of(xp: Namespace, stats: Stats, spec: Spec, level: Global | None, candidate: int = 0) -> Scale:
    """The rule's scale, poisoned where a block holds a NaN that its format cannot."""
    if spec.scale == "e8m0":
        result = _mx_scale(xp, stats.amax, spec, candidate)
    elif spec.scale == "e4m3":
        result = _nvfp4_scale(xp, stats.amax, spec, level, candidate)
    else:
        result = _float_scale(xp, stats, spec, candidate)
    if not spec.element.has_nan:
        nan = xp.number(float("nan"), stats.amax)
        # Selected, not computed: arithmetic may give a NaN any bits.
        stored = result.stored * 0 + _NAN_STORED[spec.scale] if spec.scale in _NAN_STORED else nan
        result.stored = xp.where(stats.has_nan, stored, result.stored)
    return result


def stored_scale(xp: Namespace, s: Any, spec: Spec) -> Scale:
    """A scale rounded to its storage type, kept finite and non-zero."""
    largest, smallest = _RANGES[spec.scale]
    magnitude = xp.minimum(xp.floats(xp.bits(s) & ABS_MASK), xp.number(largest, s))
    if spec.scale != "float32":
        magnitude = xp.astype(xp.astype(magnitude, spec.scale), "float32")
    magnitude = xp.where(magnitude == 0, xp.number(smallest, s), magnitude)
    decoded = xp.floats(xp.bits(magnitude) | (xp.bits(s) & ~ABS_MASK))
    return Scale(decoded, decoded, decoded)


def exponent_scale(xp: Namespace, code: Any, rounds_up: bool) -> Scale:
    """E8M0 codes as int32, and the power of two that undoes them."""
    # 2^(code - 127): code 0 is a subnormal, whose bits are half of the smallest normal's.
    decoded = xp.floats(xp.where(code == 0, code * 0 + 0x0040_0000, code << 23))
    # At code 0 the oracles part from 2^127: see mx_scale in the core.
    at_zero = xp.number(1.0 if rounds_up else 2.0**126, decoded)
    return Scale(code, decoded, xp.where(code == 0, at_zero, xp.floats((254 - code) << 23)))


def e4m3_scale(xp: Namespace, code: Any, spec: Spec, level: Global | None) -> Scale:
    """E4M3 codes of NVFP4 as int32, and what values of their blocks are multiplied by."""
    decoded = xp.take(decode_table(xp, "float8_e4m3fn", code), code)
    one, largest = (xp.number(number, decoded) for number in (1.0, FLOAT32_MAX))
    if level is None:
        return Scale(code, decoded, xp.minimum(xp.divide(one, decoded), largest))
    if spec.rule == "torchao":
        factor = xp.divide(xp.divide(one, level.scale), decoded)
    else:
        factor = xp.divide(one, decoded * xp.divide(one, level.encode))
    return Scale(code, decoded * level.scale, xp.minimum(factor, largest))


def round_up_to_e8m0(xp: Namespace, x: Any) -> Any:
    bits = xp.bits(x)
    code = (bits + 0x007F_FFFF) >> 23
    return xp.where(bits <= 0x0040_0000, code * 0, xp.minimum(code, code * 0 + 254))


def decode_table(xp: Namespace, fmt: str, like: Any) -> Any:
    return xp.constant(formats.decode(np.arange(256, dtype=np.uint8), fmt), "float32", like)


def _mx_scale(xp: Namespace, amax: Any, spec: Spec, candidate: int) -> Scale:
    element: Element = spec.element
    if spec.rule == "rceil":
        code = round_up_to_e8m0(xp, xp.divide(amax, xp.number(element.max, amax)))
    else:
        bits = xp.bits(amax)
        if spec.rule == "even":
            bits = bits + (1 << (22 - element.mantissa_bits))
        code = bits >> 23
        if spec.rule == "ceil":
            code = xp.where((bits & 0x007F_FFFF) != 0, code + 1, code)
        code = xp.maximum(code - element.max_exponent, code * 0)
    moved = code + _E8M0_OFFSETS[candidate]
    code = xp.where((moved < 1) | (moved > 254), code, moved)
    return exponent_scale(xp, code, spec.rule == "rceil")


def _nvfp4_scale(xp: Namespace, amax: Any, spec: Spec, level: Global | None, candidate: int) -> Scale:
    clamps = spec.rule == "torchao"
    if level is None:
        b = xp.divide(amax, xp.number(6.0, amax))
    elif clamps:
        b = xp.divide(xp.divide(amax, xp.number(6.0, amax)), level.scale)
    else:
        b = amax * (level.encode * xp.number(float(np.float32(1) / np.float32(6)), amax))
    b = xp.minimum(xp.maximum(b, xp.number(2.0**-6 if clamps else 0.0, amax)), xp.number(448.0, amax))
    code = encode(xp, b, Element.of("float8_e4m3fn"))
    moved = code + _E4M3_OFFSETS[candidate]
    code = xp.where((moved < (8 if clamps else 1)) | (moved > 0x7E), code, moved)
    return e4m3_scale(xp, code, spec, level)


def _float_scale(xp: Namespace, stats: Stats, spec: Spec, candidate: int) -> Scale:
    element = spec.element

    def value(x: Any) -> Any:
        return xp.constant(float(np.float32(x)), "float32", stats.amax)

    one = value(1.0)
    if spec.rule == "asymmetric":
        shrink = value(np.float32(1) - np.float32(0.02) * np.float32(candidate))
        low, high = stats.low * shrink, stats.high * shrink
        levels = element.max - element.lowest
        s = xp.divide(high * value(0.5) - low * value(0.5), value(levels)) * value(2.0)
        result = stored_scale(xp, xp.where(stats.amax == 0, one, s), spec)
        zero = xp.minimum(
            xp.maximum(value(element.lowest) - xp.divide(low, result.decoded), value(element.lowest)),
            value(element.max),
        )
        magic = value(MAGIC)
        result.zero_point = (zero + magic) - magic
        return result
    if spec.rule == "multiply":
        stretch = np.float32(spec.margin) * (np.float32(1) + np.float32(0.0625) * np.float32(candidate))
        largest = value(FLOAT32_MAX)
        ratio = xp.minimum(xp.divide(value(element.max), stats.amax), largest)
        factor = xp.minimum(xp.divide(ratio, value(stretch)), largest)
        factor = xp.where(stats.amax == 0, one, factor)
        result = stored_scale(xp, xp.divide(one, factor), spec)
        result.factor = factor
        return result
    s = xp.divide(stats.amax, value(element.max)) * value(spec.margin)
    if not element.is_integer:
        s = s * value(np.float32(1) + np.float32(0.0625) * np.float32(candidate))
    else:
        s = s * value(np.float32(1) - np.float32(0.02) * np.float32(candidate & 15))
        if candidate >= 16:
            s = -s
    return stored_scale(xp, xp.where(stats.amax == 0, one, s), spec)
