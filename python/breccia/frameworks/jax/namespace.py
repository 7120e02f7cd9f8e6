# SPDX-License-Identifier: Apache-2.0
"""jax.numpy as the whole-array kernels see it: any device, traced or not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from breccia.kernels.whole_array.namespace import wrapped


class Jax:
    """`breccia.kernels.whole_array.namespace.Namespace` for JAX."""

    def astype(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    def bits(self, x: Any) -> Any:
        return lax.bitcast_convert_type(x, jnp.int32)

    def floats(self, bits: Any) -> Any:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        array = jnp.asarray(np.asarray(value, dtype))
        # Hidden from the compiler, which would turn a division by a constant into a multiplication with its
        # reciprocal, and the sum that rounds to an integer into nothing.
        return lax.optimization_barrier(array) if dtype == "float32" and array.ndim == 0 else array

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return jnp.where(condition, a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return jnp.minimum(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return jnp.maximum(a, b)

    def floor(self, x: Any) -> Any:
        return jnp.floor(x)

    def divide(self, a: Any, b: Any) -> Any:
        # Neither may the compiler see a broadcast divisor, which it inverts, nor a quotient of quotients.
        a, b = lax.optimization_barrier(tuple(jnp.broadcast_arrays(a, b)))
        return a / b

    def max(self, x: Any, axes: tuple[int, ...]) -> Any:
        return jnp.max(x, axes, keepdims=True)

    def any(self, x: Any, axes: tuple[int, ...]) -> Any:
        return jnp.any(x, axes, keepdims=True)

    def sum(self, x: Any) -> Any:
        return jnp.sum(x)

    def take(self, table: Any, index: Any) -> Any:
        return jnp.take(table, index, mode="clip")

    def index(self, x: Any, axis: int, index: Any) -> Any:
        return jnp.take(x, index, axis, mode="clip")

    def pad(self, x: Any, rows: int, cols: int) -> Any:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, cols)])

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return jnp.concatenate(parts, axis)

    def arange(self, n: int, like: Any) -> Any:
        return lax.iota(jnp.int32, n)

    def integer(self, seed: Any, like: Any) -> Any:
        return jnp.asarray(wrapped(seed) if isinstance(seed, int) else seed).astype(jnp.int32).reshape(())


JAX = Jax()
