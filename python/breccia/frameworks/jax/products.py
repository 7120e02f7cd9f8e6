# SPDX-License-Identifier: Apache-2.0
"""Products of JAX arrays: on a CPU by the core, in compiled code as well as outside of it, elsewhere by jax.numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from breccia import _core
from breccia.frameworks.jax import callbacks, ffi, partition
from breccia.frameworks.jax.arguments import JAX, dtype_name, floats, in_reverse, is_here, parts_here
from breccia.frameworks.jax.callbacks import from_numpy, raw
from breccia.kernels import whole_array
from breccia.layouts import _spec as _layout_spec
from breccia.recipes import _spec
from breccia.scaled_tensor import ScaledTensor, data_of
from breccia.verbs.grouped import by_expert

_DIRECT = ("float32", "float16", "bfloat16")  # float64 is checked to lie within float32 first


def matmul(a: Any, b: Any, out_dtype: Any, precision: str) -> Any:
    a, b, name = _operand(a, "a"), _operand(b, "b"), dtype_name(out_dtype)
    _core.matmul_shape(list(a.shape), list(b.shape))
    arrays = [data_of(x) for x in (a, b)]
    if all(map(is_here, arrays)):
        return from_numpy(callbacks.matmul_now(a, b, name, precision), *arrays)
    with in_reverse("a product"):
        return _matmul(a, b, name, precision)


def direct_linear(x: Any, w: ScaledTensor, out_dtype: Any, precision: str, bias: Any = None) -> Any:
    """``x @ w.T + bias`` of arrays of floats where all lies on one CPU; None for what `matmul` has more to say of."""
    if not isinstance(x, jax.Array) or x.ndim < 2 or x.dtype.name not in _DIRECT or type(w) is not ScaledTensor:
        return None
    if bias is not None and not (isinstance(bias, jax.Array) and bias.dtype.name in _DIRECT):
        return None
    for array in (x, w.data, w.scale, w.zero_point, w.global_scale, bias):
        if array is None:
            continue
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or array.is_deleted():
            return None
        if array.devices() != x.devices():
            return None
    if not is_here(x):
        return None
    depth, count = x.shape[-1], w.data.shape[0]
    if w.shape != (count, depth) or w.scale is None or w.scale.ndim == 1 or w.layout.axis != -1:
        return None
    data, scale, zero_point = _swapped(w.data, w.scale, w.zero_point)
    # Of copies, as in compiled code: a view of the arrays as they lie may give other bytes.
    recipe, layout = _spec(w.recipe), _layout_spec(w.layout.T)
    core = _core.ScaledTensor(
        np.asarray(data),
        np.asarray(scale),
        recipe,
        layout,
        None if zero_point is None else np.asarray(zero_point),
        None if w.global_scale is None else np.asarray(w.global_scale),
        [depth, count],
        w.original_dtype,
    )
    out = callbacks.empty((*x.shape[:-1], count), np.dtype(dtype_name(out_dtype)))
    _core.linear_into(np.asarray(x), core.T, None if bias is None else np.asarray(bias), out, precision)
    return from_numpy(out, w.data, x)


@jax.jit  # type: ignore[untyped-decorator]
def _swapped(*arrays: Any) -> Any:
    """Matrices transposed, in one call of compiled code; what is no matrix stays."""
    return [jnp.swapaxes(array, -1, -2) if array is not None and array.ndim == 2 else array for array in arrays]


def grouped_matmul(x: Any, w_stack: ScaledTensor, offsets: Any, out_dtype: Any) -> Any:
    """Of arrays that explicit axes do not split: an expert's rows may be any. Offsets that are traced are not checked,
    and the values are multiplied."""
    if isinstance(offsets, jax.core.Tracer):
        name = dtype_name(out_dtype)
        return partition.gathered(lambda x, w: _ragged(x, w, offsets).astype(name), _operand(x, "x"), w_stack)
    return partition.gathered(lambda x, w: by_expert(x, w, offsets, out_dtype), x, w_stack)


def _ragged(x: Any, w_stack: ScaledTensor, offsets: Any) -> Any:
    weights = jnp.swapaxes(_values(jax.lax.stop_gradient(w_stack)), -1, -2)
    y = jax.lax.ragged_dot(_values(x), weights, jnp.diff(offsets).astype(jnp.int32), precision="highest")
    return jnp.where(jnp.arange(x.shape[0])[:, None] < offsets[-1], y, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(a: Any, b: Any, name: str, precision: str) -> Any:
    def plain(a: Any, b: Any) -> Any:
        return jnp.matmul(_values(a), _values(b), precision="highest").astype(name)

    return partition.matmul(*ffi.ways(functools.partial(ffi.matmul, name=name, precision=precision), plain), a, b)


def _matmul_forward(a: Any, b: Any, name: str, precision: str) -> Any:
    return _matmul(a, b, name, precision), (a, b)


def _matmul_backward(name: str, precision: str, operands: Any, grad: Any) -> Any:
    a, b = operands

    def towards(operand: Any, left: Any, right: Any) -> Any:
        if isinstance(operand, ScaledTensor):
            return None
        product = _matmul(left, right, operand.dtype.name, "exact")
        return partition.split_as(operand, _sum_to(product, operand.shape))

    return towards(a, grad, _turned(b)), towards(b, _turned(a), grad)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _operand(x: Any, argument: str) -> Any:
    return parts_here(x, argument) if isinstance(x, ScaledTensor) else floats(x, argument)


def _values(operand: Any) -> Any:
    if not isinstance(operand, ScaledTensor):
        return operand.astype(jnp.float32)
    return jnp.broadcast_to(whole_array.dequantize(JAX, operand, raw), operand.shape)


def _turned(operand: Any) -> Any:
    return operand.mT if isinstance(operand, ScaledTensor) else jnp.swapaxes(operand, -1, -2)


def _sum_to(grad: Any, shape: tuple[int, ...]) -> Any:
    """Undo the broadcasting of leading axes."""
    extra = len(grad.shape) - len(shape)
    axes = [*range(extra), *(extra + i for i, n in enumerate(shape) if n == 1 and grad.shape[extra + i] != 1)]
    return jnp.sum(grad, tuple(axes)).reshape(shape) if axes else grad
