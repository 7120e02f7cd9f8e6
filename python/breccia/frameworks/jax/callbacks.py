# SPDX-License-Identifier: Apache-2.0
"""The core on JAX's arrays: at once, and as callbacks of compiled code, where the extension has no handlers for XLA
(`ffi`)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from breccia import _core, recipes
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import cast_form

# Formats with a JAX dtype for one code per byte. Two codes per byte are uint8.
_FLOAT8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3", "e3m4", "e4m3b11fnuz", "e8m0fnu")
NATIVE = {**{f"float8_{name}": getattr(ml_dtypes, f"float8_{name}") for name in _FLOAT8}, "int8": np.int8}
_ALIGNMENT = 64  # of memory that XLA takes over without a copy

# Before version 0.10 in jax.core.
_trace_state: Any = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
with jax.core.eval_context():  # the first call may be inside of jit
    _EAGER = _trace_state(convention="breccia")


def is_staging() -> bool:
    """Whether a transformation such as jit runs: operations on concrete arrays, too, may become part of its code."""
    return bool(_trace_state(convention="breccia") != _EAGER)


def is_concrete(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def on_cpu(x: Any) -> bool:
    return all(device.platform == "cpu" for device in x.devices()) and x.is_fully_addressable


def raw(x: Any) -> Any:
    """Codes as uint8."""
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.name in NATIVE else x


def empty(shape: Any, dtype: Any) -> Any:
    """NumPy memory aligned as XLA wants it."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT
    return buffer[offset : offset + size].view(dtype).reshape(shape)


def from_numpy(array: Any, *like: Any) -> Any:
    """The same memory as a JAX array, where it is contiguous and aligned; else a copy. On the device of the arrays that
    it was made of, which jax may move to another where it may move them."""
    if is_staging():
        with jax.core.eval_context():
            return from_numpy(array, *like)
    bound = next((x for x in like if getattr(x, "committed", True)), None)
    if like and bound is None:
        made = jax.device_put(array, may_alias=True)
        if made.devices() == like[0].devices():
            return made
        bound = like[0]
    device = jax.local_devices(backend="cpu")[0] if bound is None else next(iter(bound.devices()))
    return jax.device_put(array, device, may_alias=True)


def tensor_of(made: Any, recipe: ScalingRecipe, shape: Any, original_dtype: str, like: Any) -> ScaledTensor:
    """Of the parts of a cast, NumPy's beside the array that they were made of."""
    form = cast_form(recipe, shape, original_dtype)
    return ScaledTensor._of(
        form, *form.place(from_numpy(part, like) if isinstance(part, np.ndarray) else part for part in made)
    )


# --- at once, on NumPy arrays ---------------------------------------------------------------------------------------


def _dtypes(plan: Any, recipe: ScalingRecipe) -> list[tuple[Any, Any]]:
    """(shape, dtype) of the outputs of a cast that exist."""
    fmt, element = recipes.scale_format(recipe), _spec(recipe).element
    found = [
        (plan["data"][0], NATIVE.get(element, np.uint8)),
        (plan["scale"][0], getattr(ml_dtypes, fmt) if fmt else _dtype(plan["scale"][1])),
    ]
    optional = (plan[key] for key in ("zero_point", "global_scale"))
    return found + [(part[0], _dtype(part[1])) for part in optional if part is not None]


def _dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _outputs(plan: Any, recipe: ScalingRecipe) -> tuple[list[Any], list[Any]]:
    """Memory for a cast: what exists, and the four arguments of the core."""
    made = [empty(shape, dtype) for shape, dtype in _dtypes(plan, recipe)]
    rest = made[2:]
    zero_point = rest.pop(0) if plan["zero_point"] is not None else None
    global_scale = rest.pop(0) if plan["global_scale"] is not None else None
    return made, [made[0], made[1], zero_point, global_scale]


def cast_now(x: Any, recipe: ScalingRecipe, **options: Any) -> list[Any]:
    made, arguments = _outputs(_core.plan_cast(list(x.shape), _spec(recipe)), recipe)
    _core.cast_into(x, _spec(recipe), *arguments, **options)
    return made


def dequantize_now(scaled: ScaledTensor, name: str) -> Any:
    out = empty(scaled.shape, _dtype(name))
    _core.dequantize_into(scaled._core, out)
    return out


def requantize_now(scaled: ScaledTensor, recipe: ScalingRecipe) -> list[Any]:
    made, arguments = _outputs(_core.plan_cast(list(scaled.shape), _spec(recipe)), recipe)
    _core.requantize_into(scaled._core, _spec(recipe), *arguments)
    return made


def matmul_now(a: Any, b: Any, name: str, precision: str) -> Any:
    out = empty(_core.matmul_shape(list(a.shape), list(b.shape)), _dtype(name))
    left, right = (x._core if isinstance(x, ScaledTensor) else np.asarray(x) for x in (a, b))
    _core.matmul_into(left, right, out, precision)
    return out


# --- in compiled code -----------------------------------------------------------------------------------------------


def cast_results(shape: Any, recipe: ScalingRecipe) -> tuple[Any, ...]:
    """What a cast returns, as XLA wants to know it."""
    plan = _core.plan_cast(list(shape), _spec(recipe))
    return tuple(result(extents, dtype) for extents, dtype in _dtypes(plan, recipe))


def result(shape: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(shape), _dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype))


def call(name: str, results: Any, vmap_method: str, now: Any, operands: tuple[Any, ...], **attributes: Any) -> Any:
    """``now(*operands)`` of the operands' values, called back by compiled code; the arguments are those of
    `ffi.call`."""

    def back(*operands: Any) -> Any:
        made = now(*jax.tree.map(np.asarray, operands))
        return tuple(made) if isinstance(results, tuple) else made

    return jax.pure_callback(back, results, *operands, vmap_method=vmap_method)
