# SPDX-License-Identifier: Apache-2.0
"""Values of a ScaledTensor, (decode(data) - zero_point) · scale · global_scale, over whole arrays; and dynamic range
expansion of groups: ``cpp/src/kernels/expansion.inl.hpp`` and ``powers.inl.hpp``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from breccia import formats
from breccia.kernels.whole_array.namespace import ABS_MASK, FLOAT32_MAX, INFINITY_BITS, Namespace
from breccia.kernels.whole_array.rules import Stats, decode_table
from breccia.kernels.whole_array.spec import Element
from breccia.layouts import Layout
from breccia.layouts import _spec as _layout_spec
from breccia.recipes import choices, global_divides, scale_format
from breccia.scaled_tensor import ScaledTensor


def dequantize(xp: Namespace, scaled: ScaledTensor, raw: Any) -> Any:
    """float32 values in the logical shape. ``raw(array)`` is the array with codes as uint8."""
    scale, zero_point = scales(xp, scaled, raw), zero_points(xp, scaled)
    values = xp.take(decode_table(xp, scaled.recipe.element, scaled.data), codes(xp, scaled, raw))
    if zero_point is not None and choices(scaled.recipe).expanded:
        exponent, scale = spread(xp, zero_point, scaled), spread(xp, scale, scaled)
        return contract(xp, values, scale, exponent, Element.of(scaled.recipe.element))
    if zero_point is not None:
        values = values - spread(xp, zero_point, scaled)
    return values * spread(xp, scale, scaled)


def codes(xp: Namespace, scaled: ScaledTensor, raw: Any) -> Any:
    """int32 codes in the logical shape."""
    data = xp.astype(raw(scaled.data), "int32")
    if not scaled.is_packed:
        return data & 0xFF
    axis: int = scaled.layout.axis
    n, rank = scaled.shape[axis], len(scaled.shape)
    shape = list(data.shape)
    pairs = xp.concatenate([x.reshape(*_split(shape, axis)) for x in (data & 15, (data >> 4) & 15)], rank + axis + 1)
    shape[axis] *= 2
    both = pairs.reshape(shape)
    return both[..., :n] if axis == -1 else both[..., :n, :]


def _split(shape: list[int], axis: int) -> list[int]:
    at = len(shape) + axis + 1
    return [*shape[:at], 1, *shape[at:]]


def scales(xp: Namespace, scaled: ScaledTensor, raw: Any) -> Any:
    """float32 scales, the global one included, in the shape of ``scale``."""
    scale, fmt = scaled.scale, scale_format(scaled.recipe)
    name = str(scale.dtype).rpartition(".")[2]
    if name == "uint16":  # bfloat16 bit patterns, as NumPy has them
        values = xp.floats(xp.astype(scale, "int32") << 16)
    elif name in ("float32", "float64", "float16", "bfloat16"):
        values = xp.astype(scale, "float32")
    else:
        fmt = "float8_e8m0fnu" if "e8m0" in name else fmt
        values = xp.take(decode_table(xp, str(fmt), scale), xp.astype(raw(scale), "int32") & 0xFF)
    level = scaled.global_scale
    if level is None:
        return values
    level = level.reshape(()) if math.prod(level.shape) == 1 else level
    return xp.divide(values, level) if global_divides(scaled.recipe) else values * level


def zero_points(xp: Namespace, scaled: ScaledTensor) -> Any:
    return None if scaled.zero_point is None else xp.astype(scaled.zero_point, "float32")


def spread(xp: Namespace, values: Any, scaled: ScaledTensor) -> Any:
    """Per-block values as an array that broadcasts against the logical shape."""
    if math.prod(values.shape) == 1 and scaled.layout.one_scale:
        return values.reshape(())
    axis: int = scaled.layout.axis
    if len(values.shape) < len(scaled.shape):  # one per row, without the constant axis
        values = values[..., None] if axis == -1 else values[..., None, :]
    if values.shape[axis] == 1 and scaled.layout.name == "per_channel":
        return values
    for at, block in block_sizes(scaled.layout):
        n = scaled.shape[at] if len(scaled.shape) >= -at else 1
        if block > 1 and values.shape[at] != n:
            values = xp.index(values, len(values.shape) + at, np.arange(n) // block)
    return values


def block_sizes(layout: Layout) -> list[tuple[int, int]]:
    """(axis, elements of a block along it), of the last two axes."""
    core = _layout_spec(layout)
    if core.kind == "PerBlockK":
        return [(core.axis, core.block_n)]
    if core.kind == "PerBlockMN":
        return [(-1, core.block_n), (-2, core.block_m)]
    return []


def saturation(xp: Namespace, scaled: ScaledTensor, raw: Any) -> tuple[Any, Any]:
    """The least and greatest values that do not saturate, to broadcast against the logical shape: beyond them a
    value would round to a code the format does not have."""
    element = Element.of(scaled.recipe.element)
    # Half a unit in the last place past the largest code.
    half = 0.5 if element.is_integer else 2.0 ** (element.max_exponent - element.mantissa_bits - 1)
    low, high = element.lowest - half, element.max + half
    scale, zero_point = spread(xp, scales(xp, scaled, raw), scaled), zero_points(xp, scaled)
    if zero_point is not None and not choices(scaled.recipe).expanded:
        zero = spread(xp, zero_point, scaled)
        ends = (low - zero) * scale, (high - zero) * scale
    else:
        ends = low * scale, high * scale
    return xp.minimum(*ends), xp.maximum(*ends)  # a scale may be negative


_MOST = 256.0  # of an exponent
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to the nearest integer
_MAGIC_BITS, _ROOT_HALF = 0x4B40_0000, 0x3F35_04F3
_LOG2 = (
    "0x1.7154c4p+0", "-0x1.71582ep-1", "0x1.ebff06p-2", "-0x1.6f93b2p-2", "0x1.30659cp-2", "-0x1.173e24p-2",
    "0x1.5d75a4p-3",
)  # fmt: skip
_EXP2 = ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10")


def expand(xp: Namespace, blocks: Any, stats: Stats, element: Element) -> tuple[Any, Any]:
    """Exponents of groups as float16, and values as multiples of their scales; where the exponent is 1, other
    numbers."""
    bits = xp.bits(blocks) & ABS_MASK
    size = xp.floats(bits)
    least = xp.floats(INFINITY_BITS - xp.max(INFINITY_BITS - xp.where(bits > 0, bits, bits * 0 + INFINITY_BITS), (4,)))
    top, low = _logarithm(xp, stats.amax), _logarithm(xp, least)
    ends = element.max, formats.finfo(element.name).smallest
    span = _difference(*(_logarithm(xp, xp.number(x, blocks)) for x in ends))
    exponent = xp.divide(span, xp.maximum(_difference(top, low), span * (1 / _MOST)))
    finite = ~(stats.has_nan | stats.has_infinity) & (stats.amax != 0)
    exponent = xp.astype(xp.where(finite, exponent, stats.amax * 0 + 1), "float16")
    log = _difference(_logarithm(xp, size), top) * xp.astype(exponent, "float32")
    power = _power_of_two(xp, xp.maximum(log, log * 0 - 126.0)) * element.max
    return exponent, _signed(xp, xp.where(bits > 0, power, size), blocks)


def contract(xp: Namespace, codes: Any, scale: Any, exponent: Any, element: Element) -> Any:
    """Values that codes, as numbers, stand for under scales and exponents that broadcast against them."""
    bits = xp.bits(codes) & ABS_MASK
    size = xp.floats(bits)
    largest = _logarithm(xp, xp.number(element.max, codes))
    half = xp.divide(xp.number(0.5, codes), exponent)
    log = _difference(_logarithm(xp, size), largest) * half
    # a code beyond the largest value, which no cast makes, may ask for more
    root = _power_of_two(xp, xp.minimum(xp.maximum(log, log * 0 - 126.0), log * 0 + 127.0))
    value = (root * _value_of_largest(xp, scale, element)) * _signed(xp, root, codes)
    value = xp.where((bits > 0) & (bits < INFINITY_BITS), value, codes)
    known = (exponent > 0) & (exponent < float("inf"))
    return xp.where(exponent == 1, codes * scale, xp.where(known, value, value + float("nan")))


def _value_of_largest(xp: Namespace, scale: Any, element: Element) -> Any:
    """The scale of the largest float32 may have been rounded up, and the product be beyond float32."""
    value = scale * element.max
    most = np.float32(FLOAT32_MAX) / np.float32(element.max)
    finite = xp.minimum(xp.maximum(value, scale * 0 - FLOAT32_MAX), scale * 0 + FLOAT32_MAX)
    return xp.where((xp.bits(scale) & ABS_MASK) <= int(most.view(np.int32)), finite, value)


def _signed(xp: Namespace, size: Any, of: Any) -> Any:
    return xp.floats(xp.bits(size) | (xp.bits(of) & -0x8000_0000))


def _polynomial(xp: Namespace, x: Any, terms: tuple[str, ...]) -> Any:
    """x · terms[0] + x² · terms[1] + …, from the last term on."""
    numbers = [float(np.float32(float.fromhex(term))) for term in terms]
    total = x * 0 + numbers[-1]
    for term in numbers[-2::-1]:
        total = xp.rounded(total * x) + term
    return xp.rounded(total * x)


def _logarithm(xp: Namespace, x: Any) -> tuple[Any, Any]:
    """log2 of numbers above zero as whole numbers and parts from -1/2 to 1/2; some numbers for others."""
    small = x < 2.0**-126
    offset = xp.where(small, x * 0 + (_MAGIC + 151.0), x * 0 + (_MAGIC + 127.0))
    bits = xp.bits(xp.where(small, x * 2.0**24, x)) + (0x3F80_0000 - _ROOT_HALF)
    whole = xp.floats(((bits >> 23) & 0x1FF) + _MAGIC_BITS) - offset
    return whole, _polynomial(xp, xp.floats((bits & 0x007F_FFFF) + _ROOT_HALF) - 1.0, _LOG2)


def _difference(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    return (a[0] - b[0]) + (a[1] - b[1])


def _power_of_two(xp: Namespace, x: Any) -> Any:
    """2^x for x from -126 to 127."""
    magic = xp.number(_MAGIC, x)  # no compiler takes the sum for x
    total = x + magic
    significand = _polynomial(xp, x - (total - magic), _EXP2) + 1.0
    return xp.floats(xp.bits(significand) + (xp.bits(total) << 23))
