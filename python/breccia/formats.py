# SPDX-License-Identifier: Apache-2.0
"""Element formats without scales: codes to numbers and back.

Names are those of ml_dtypes. Codes are ``uint8``, one per byte; ``pack`` puts two 4-bit codes into a
byte, the element of even index in the low nibble.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breccia import _core
from breccia.value.inputs import refuse_mask

__all__ = ["FormatInfo", "decode", "encode", "finfo", "names", "pack", "unpack"]


@dataclass(frozen=True)
class FormatInfo:
    """Limits of a format.

    Attributes:
        name: ml_dtypes name.
        bits: bits of a code.
        max: largest finite value.
        min: most negative finite value (smallest value where there is no sign).
        smallest: smallest positive value.
        has_nan: whether a code is NaN.
        mantissa_bits: explicit significand bits (0 for integers and ``float8_e8m0fnu``).
        max_exponent: exponent of ``max``; the OCP MX specification's emax.
    """

    name: str
    bits: int
    max: float
    min: float
    smallest: float
    has_nan: bool
    mantissa_bits: int
    max_exponent: int


def names() -> list[str]:
    """Names of all formats."""
    return _core.format_names()


def finfo(fmt: str) -> FormatInfo:
    """Limits of a format.

    Args:
        fmt: a name of `names`, such as "float8_e4m3fn".

    Returns:
        A `FormatInfo`.

    Raises:
        ValueError: there is no such format.

    Examples:
        >>> from breccia import formats
        >>> fp4 = formats.finfo("float4_e2m1fn")
        >>> fp4.bits, fp4.max, fp4.has_nan
        (4, 6.0, False)
    """
    return _finfo(fmt)


@functools.cache
def _finfo(fmt: str) -> FormatInfo:
    return FormatInfo(**_core.format_info(fmt))


finfo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile cannot trace the core's functions


def encode(x: Any, fmt: str) -> NDArray[np.uint8]:
    """Codes of the values nearest to ``x``, ties to even, in the shape of ``x``.

    Values are rounded from float32 directly (float64 input is rounded to float32 first). Finite
    overflow and infinities saturate to the largest finite value. A NaN becomes the format's NaN with
    its sign; in the formats without one it becomes the zero of the opposite sign, as in ml_dtypes,
    and integer 0.

    Args:
        x: real numbers of any shape.
        fmt: a name of `names`, such as "float8_e4m3fn".

    Returns:
        uint8 of the same shape, one code per byte.

    Raises:
        TypeError: ``x`` is not an array of real numbers.
        ValueError: there is no such format.

    Examples:
        >>> from breccia import formats
        >>> formats.encode([0.5, 1.0, 1000.0], "float4_e2m1fn")  # 1000 saturates to 6
        array([1, 2, 7], dtype=uint8)
    """
    refuse_mask(x, "x")
    array = np.asarray(x)
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise TypeError(f"x must be an array of real numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # float64 beyond float32 saturates as infinity does
        return _core.encode(array.astype(np.float32), fmt)


def decode(codes: Any, fmt: str) -> NDArray[np.float32]:
    """Values of codes, exact in float32, in the shape of ``codes``. Bits above the format's are ignored.

    Args:
        codes: uint8 of any shape, one code per byte.
        fmt: a name of `names`, such as "float8_e4m3fn".

    Returns:
        float32 of the same shape.

    Raises:
        TypeError: ``codes`` is not an array of bytes.
        ValueError: there is no such format.

    Examples:
        >>> from breccia import formats
        >>> formats.decode(np.arange(8, dtype=np.uint8), "float4_e2m1fn").tolist()
        [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    return _core.decode(_bytes(codes, "codes"), fmt)


def pack(codes: Any) -> NDArray[np.uint8]:
    """Two 4-bit codes per byte along the last axis, element 2i in the low nibble: shape ``(..., n)`` becomes
    ``(..., n / 2)``.

    Args:
        codes: uint8 ``(..., n)``, one code per byte, n even.

    Returns:
        uint8 ``(..., n / 2)``.

    Raises:
        TypeError: ``codes`` is not an array of bytes.
        ValueError: ``n`` is odd: add a column of zeros, and give `unpack` the number of codes.

    Examples:
        >>> from breccia import formats
        >>> [hex(byte) for byte in formats.pack(np.array([1, 2, 3, 4], np.uint8))]
        ['0x21', '0x43']
    """
    array = _bytes(codes, "codes")
    if array.ndim == 0:
        raise ValueError("codes must be at least 1-D, got 0-D")
    n = array.shape[-1]
    if n % 2:
        raise ValueError(f"codes must have an even number of columns, got {n}: add one of zeros")
    return _core.pack(array).reshape(*array.shape[:-1], n // 2)


def unpack(packed: Any, n_values: int | None = None) -> NDArray[np.uint8]:
    """The inverse of `pack`: ``n_values`` codes per row of packed bytes, two per byte or one fewer (default: two
    per byte).

    Args:
        packed: uint8 ``(..., bytes)``.
        n_values: codes per row.

    Returns:
        uint8 ``(..., n_values)``, one code per byte.

    Raises:
        TypeError: ``packed`` is not an array of bytes, or ``n_values`` no integer.
        ValueError: ``n_values`` does not fit the number of bytes.
    """
    array = _bytes(packed, "packed")
    if array.ndim == 0:
        raise ValueError("packed must be at least 1-D, got 0-D")
    stored = array.shape[-1]
    n = 2 * stored if n_values is None else n_values
    if not isinstance(n, (int, np.integer)):
        raise TypeError(f"n_values must be an integer, got {n!r}")
    if (n + 1) // 2 != stored or n < 0:
        raise ValueError(
            f"n_values must be {2 * stored} or {max(2 * stored - 1, 0)}, the capacity of {stored} bytes a row, got {n}"
        )
    return _core.unpack(array, 2 * array.size).reshape(*array.shape[:-1], 2 * stored)[..., :n]


def _bytes(x: Any, argument: str) -> NDArray[np.uint8]:
    refuse_mask(x, argument)
    array = np.asarray(x)
    if array.dtype.itemsize != 1 or array.dtype.kind not in "uifV":
        raise TypeError(f"{argument} must be a uint8 array, got dtype {array.dtype}")
    return np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)
