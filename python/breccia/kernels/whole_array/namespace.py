# SPDX-License-Identifier: Apache-2.0
"""What the whole-array kernels need of an array library: its operators, and these functions.

Arrays are float32, int32, uint8 or bool unless a function says otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT32_MAX = 3.4028234663852886e38
INFINITY_BITS = 0x7F80_0000
ABS_MASK = 0x7FFF_FFFF


class Namespace:
    """An array library. What NumPy's functions of the same names do is asked of it; a subclass does the rest."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.where, self.minimum, self.maximum = library.where, library.minimum, library.maximum
        self.floor = library.floor

    def astype(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    def bits(self, x: Any) -> Any:
        """float32 as int32, bit for bit."""
        raise NotImplementedError

    def floats(self, bits: Any) -> Any:
        """int32 as float32, bit for bit."""
        raise NotImplementedError

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        """A 0-d array, or the array that a NumPy array holds, on the device of ``like``."""
        raise NotImplementedError

    def number(self, value: float, like: Any) -> Any:
        """A 0-d float32 array, on the device of ``like``."""
        return self.constant(value, "float32", like)

    def divide(self, a: Any, b: Any) -> Any:
        """The correctly rounded quotient."""
        return a / b

    def rounded(self, product: Any) -> Any:
        """The same, which no compiler adds to before it is rounded; zero may lose its sign."""
        return product

    def max(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Largest along axes, which stay with extent 1."""
        return self.library.max(x, axes, keepdims=True)

    def any(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Whether any is true along axes, which stay with extent 1."""
        return self.library.any(x, axes, keepdims=True)

    def sum(self, x: Any) -> Any:
        """Sum of all, in float64 where there is such a type."""
        return self.library.sum(x)

    def take(self, table: Any, index: Any) -> Any:
        """``table[index]`` for a 1-D table and int32 indices of any shape."""
        return self.index(table, 0, index)

    def index(self, x: Any, axis: int, index: Any) -> Any:
        """Rows or columns of ``x`` by a NumPy array of positions along one axis."""
        return self.library.take(x, index, axis)

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        """Zeros after the last two axes."""
        return self.library.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, cols)])

    def is_known(self, x: Any) -> bool:
        """Whether an array has values that Python may look at; not while a compiler traces."""
        return True

    def is_zero(self, count: int) -> bool:
        """Whether a number is 0; not where compiled code is to be for all numbers."""
        return count == 0

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return self.library.concatenate(parts, axis)

    def arange(self, n: int, like: Any) -> Any:
        """int32 0 … n - 1, wrapping around."""
        raise NotImplementedError

    def integer(self, seed: Any, like: Any) -> Any:
        """An integer, or an array of one, as a 0-d int32 array, wrapping around."""
        raise NotImplementedError


class NumPy(Namespace):
    """NumPy arrays. Callers silence floating-point warnings: infinities are part of the arithmetic."""

    def __init__(self) -> None:
        super().__init__(np)

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

    def sum(self, x: Any) -> Any:
        return np.sum(x, dtype=np.float64)

    def arange(self, n: int, like: Any) -> Any:
        return np.arange(n).astype(np.int32)

    def integer(self, seed: Any, like: Any) -> Any:
        return np.asarray(seed).astype(np.int64).astype(np.int32)


def wrapped(value: int) -> int:
    """An integer's low 32 bits as a signed one."""
    return (value + 2**31) % 2**32 - 2**31
