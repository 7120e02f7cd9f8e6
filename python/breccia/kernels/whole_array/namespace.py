# SPDX-License-Identifier: Apache-2.0
"""What the whole-array kernels need of an array library: its operators, and these functions.

Arrays are float32, int32, uint8 or bool unless a function says otherwise.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

FLOAT32_MAX = 3.4028234663852886e38
INFINITY_BITS = 0x7F80_0000
ABS_MASK = 0x7FFF_FFFF


class Namespace(Protocol):
    """An array library."""

    def astype(self, x: Any, dtype: str) -> Any: ...

    def bits(self, x: Any) -> Any:
        """float32 as int32, bit for bit."""

    def floats(self, bits: Any) -> Any:
        """int32 as float32, bit for bit."""

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        """A 0-d array, or the array that a NumPy array holds, on the device of ``like``."""

    def where(self, condition: Any, a: Any, b: Any) -> Any: ...

    def minimum(self, a: Any, b: Any) -> Any: ...

    def maximum(self, a: Any, b: Any) -> Any: ...

    def floor(self, x: Any) -> Any: ...

    def divide(self, a: Any, b: Any) -> Any:
        """The correctly rounded quotient."""

    def max(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Largest along axes, which stay with extent 1."""

    def any(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Whether any is true along axes, which stay with extent 1."""

    def sum(self, x: Any) -> Any:
        """Sum of all, in float64 where there is such a type."""

    def take(self, table: Any, index: Any) -> Any:
        """``table[index]`` for a 1-D table and int32 indices of any shape."""

    def index(self, x: Any, axis: int, index: Any) -> Any:
        """Rows or columns of ``x`` by a NumPy array of positions along one axis."""

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        """Zeros after the last two axes."""

    def concatenate(self, parts: list[Any], axis: int) -> Any: ...

    def arange(self, n: int, like: Any) -> Any:
        """int32 0 … n - 1, wrapping around."""

    def integer(self, seed: Any, like: Any) -> Any:
        """An integer, or an array of one, as a 0-d int32 array, wrapping around."""


class NumPy:
    """NumPy arrays. Callers silence floating-point warnings: infinities are part of the arithmetic."""

    def astype(self, x: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            import ml_dtypes

            return x.astype(ml_dtypes.bfloat16)
        return x.astype(dtype, copy=False)

    def bits(self, x: Any) -> Any:
        return x.view(np.int32)

    def floats(self, bits: Any) -> Any:
        if bits.dtype.itemsize != 4:  # NumPy 1 widens one number in arithmetic with Python's
            bits = bits.astype(np.int32)
        return bits.view(np.float32)

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        return np.asarray(value, dtype)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return np.where(condition, a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return np.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def floor(self, x: Any) -> Any:
        return np.floor(x)

    def divide(self, a: Any, b: Any) -> Any:
        return a / b

    def max(self, x: Any, axes: tuple[int, ...]) -> Any:
        return np.max(x, axes, keepdims=True)

    def any(self, x: Any, axes: tuple[int, ...]) -> Any:
        return np.any(x, axes, keepdims=True)

    def sum(self, x: Any) -> Any:
        return np.sum(x, dtype=np.float64)

    def take(self, table: Any, index: Any) -> Any:
        return np.take(table, index)

    def index(self, x: Any, axis: int, index: Any) -> Any:
        return np.take(x, index, axis)

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, cols)])

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return np.concatenate(parts, axis)

    def arange(self, n: int, like: Any) -> Any:
        return np.arange(n).astype(np.int32)

    def integer(self, seed: Any, like: Any) -> Any:
        return np.asarray(seed).astype(np.int64).astype(np.int32)


def wrapped(value: int) -> int:
    """An integer's low 32 bits as a signed one."""
    return (value + 2**31) % 2**32 - 2**31
