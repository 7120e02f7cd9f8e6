# SPDX-License-Identifier: Apache-2.0
"""What the verbs take of JAX: arrays that have their memory, of floats, and where they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from breccia.frameworks.jax.callbacks import is_concrete, is_staging
from breccia.kernels.whole_array.namespace import Namespace, wrapped
from breccia.scaled_tensor import ScaledTensor
from breccia.value.inputs import FLOATS, check_float32, float_name


def is_here(x: Any) -> bool:
    """Whether the core may read the array at once; one on several devices it would gather, and of one that traced code
    closes over its values belong to the compiled code."""
    if isinstance(x, jax.core.Tracer) or is_staging():
        return False
    devices = x.devices()
    return len(devices) == 1 and x.is_fully_addressable and next(iter(devices)).platform == "cpu"


def check_here(x: Any, argument: str) -> None:
    """Refuses what is no array, concrete or traced, such as the description of one, and an array whose memory was
    deleted or given to a compiled function."""
    if not isinstance(x, jax.Array):
        hint = ": jax.eval_shape calls a function with it" if isinstance(x, jax.ShapeDtypeStruct) else ""
        raise TypeError(f"{argument} must be a JAX array, got {type(x).__name__}{hint}")
    if is_concrete(x) and x.is_deleted():
        raise ValueError(
            f"{argument} must be an array that has its memory, got one of shape {x.shape} that was deleted or donated"
        )


def parts_here(scaled: ScaledTensor, argument: str) -> ScaledTensor:
    for part in scaled._form.parts:
        check_here(getattr(scaled, part), f"{argument}.{part}")
    return scaled


def floats(x: Any, argument: str) -> Any:
    """``x`` as floats; integers and booleans as float32."""
    check_here(x, argument)
    name = x.dtype.name
    if name in FLOATS:
        if name == "float64" and is_here(x):
            check_float32(np.asarray(x), argument)
        return x
    if getattr(x.dtype, "kind", "key") in "iub":
        return x.astype(jnp.float32)
    raise TypeError(f"{argument} must be a float32, float64, float16 or bfloat16 array (or integers), got dtype {name}")


def dtype_name(dtype: Any) -> str:
    name = float_name(dtype)
    if name == "float64" and not jax.config.jax_enable_x64:
        raise TypeError("out_dtype must not be float64 unless jax_enable_x64 is set")
    return name


@contextlib.contextmanager
def in_reverse(what: str) -> Iterator[None]:
    """Says of forward differentiation that there is none of what is computed here."""
    try:
        yield
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(
            f"{what} must be differentiated in reverse mode (grad, vjp, jacrev), not forward (jvp, jacfwd, hessian)"
        ) from None


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
