# SPDX-License-Identifier: Apache-2.0
"""Dynamic range expansion of groups: ``cpp/src/kernels/expansion.inl.hpp`` and ``powers.inl.hpp`` over whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import formats
from breccia.kernels.whole_array.namespace import ABS_MASK, FLOAT32_MAX, INFINITY_BITS, Namespace
from breccia.kernels.whole_array.rules import Stats
from breccia.kernels.whole_array.spec import Element

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
    span = _difference(*(_logarithm(xp, xp.constant(x, "float32", blocks)) for x in ends))
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
    largest = _logarithm(xp, xp.constant(element.max, "float32", codes))
    half = xp.divide(xp.constant(0.5, "float32", codes), exponent)
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
    magic = xp.constant(_MAGIC, "float32", x)  # no compiler takes the sum for x
    total = x + magic
    significand = _polynomial(xp, x - (total - magic), _EXP2) + 1.0
    return xp.floats(xp.bits(significand) + (xp.bits(total) << 23))
