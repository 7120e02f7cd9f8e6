# SPDX-License-Identifier: Apache-2.0
"""jax.numpy as the whole-array kernels see it: any device, traced or not."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from breccia.frameworks.jax.callbacks import is_concrete, is_staging
from breccia.kernels.whole_array.namespace import Namespace, wrapped


class Jax(Namespace):
    """`Namespace` for JAX."""

    def bits(self, x: Any) -> Any:
        return lax.bitcast_convert_type(x, jnp.int32)

    def floats(self, bits: Any) -> Any:
        return lax.bitcast_convert_type(bits, jnp.float32)

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        array = jnp.asarray(np.asarray(value, dtype))
        # Hidden from the compiler, which would turn a division by a constant into a multiplication with its
        # reciprocal, and the sum that rounds to an integer into nothing.
        return lax.optimization_barrier(array) if dtype == "float32" and array.ndim == 0 else array

    def divide(self, a: Any, b: Any) -> Any:
        # Neither may the compiler see a broadcast divisor, which it inverts, nor a quotient of quotients.
        # One of each quotient, of a batch's members too, which vmap broadcasts behind the barrier.
        a, b = lax.optimization_barrier((jnp.where(b < 0, a, a), jnp.where(a < 0, b, b)))
        return a / b

    def rounded(self, product: Any) -> Any:
        return jnp.where(product == 0, 0.0, product)  # barriers are gone where LLVM makes one instruction of two

    def index(self, x: Any, axis: int, index: Any) -> Any:
        return jnp.take(x, index, axis, mode="clip")

    def is_known(self, x: Any) -> bool:
        return is_concrete(x) and not is_staging()

    def arange(self, n: int, like: Any) -> Any:
        return lax.iota(jnp.int32, n)

    def integer(self, seed: Any, like: Any) -> Any:
        return jnp.asarray(wrapped(seed) if isinstance(seed, int) else seed).astype(jnp.int32).reshape(())


JAX = Jax(jnp)
