# SPDX-License-Identifier: Apache-2.0
"""Values to codes and to rounding errors: ``cpp/src/kernels/encode.inl.hpp`` over whole arrays."""

from __future__ import annotations

from typing import Any

from breccia.kernels.whole_array.namespace import ABS_MASK, INFINITY_BITS, Namespace
from breccia.kernels.whole_array.spec import Element

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
        magic = xp.constant(MAGIC, "float32", x)
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
    low = xp.constant(element.lowest, "float32", x)
    high = xp.constant(element.max, "float32", x)
    if zero_point is not None:
        low, high = low - zero_point, high - zero_point
    return xp.minimum(xp.maximum(x, low), high)


def _integer(xp: Namespace, x: Any, element: Element, zero_point: Any, uniform: Any) -> Any:
    clamped = _clamped(xp, x, element, zero_point)
    if uniform is None:
        code = xp.bits(clamped + xp.constant(MAGIC, "float32", x)) - MAGIC_BITS
    else:
        below = xp.floor(clamped)
        code = xp.astype(below, "int32") + xp.astype(uniform < clamped - below, "int32")
    if zero_point is not None:
        code = code + xp.astype(zero_point, "int32")
    return code & ((1 << element.bits) - 1)
