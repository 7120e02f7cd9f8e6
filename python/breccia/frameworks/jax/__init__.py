# SPDX-License-Identifier: Apache-2.0
"""JAX arrays: on a CPU the core reads them in place and what it writes becomes an array without a copy; compiled code
calls it through XLA's foreign function interface, or else calls back. On other devices the same verbs are jax.numpy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from breccia import _core, recipes
from breccia.frameworks.jax import callbacks, ffi, partition, trees
from breccia.frameworks.jax import sharding as cuts
from breccia.frameworks.jax.arguments import JAX, check_here, dtype_name, floats, in_reverse, is_here, parts_here
from breccia.frameworks.jax.callbacks import NATIVE, from_numpy, is_concrete, on_cpu, raw, tensor_of
from breccia.frameworks.jax.products import direct_linear as direct_linear
from breccia.frameworks.jax.products import grouped_matmul as grouped_matmul
from breccia.frameworks.jax.products import matmul as matmul
from breccia.kernels import whole_array
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import cast_form
from breccia.value.inputs import side_array
from breccia.verbs.cast_options import CastOptions, Hadamard

namespace = JAX
_NEAREST = CastOptions()


def to_core(array: Any, argument: str) -> Any:
    if not isinstance(array, jax.Array):
        raise TypeError(f"{argument} must be a JAX array like data, got {type(array).__name__}")
    if is_here(array):
        return np.asarray(array)
    item, strides = array.dtype.itemsize, list[int]()
    for extent in reversed(array.shape):
        strides.insert(0, item)
        item *= max(extent, 1)
    return _core.Array(0, list(array.shape), strides, array.dtype.name)


def _devices(array: Any) -> tuple[Any, ...]:
    return tuple(sorted(array.devices(), key=lambda device: device.id))


def place(array: Any) -> Any:
    check_here(array, "operands")
    return _devices(array) if is_concrete(array) else None


def bound_to(array: Any) -> Any:
    """As `place`; None where jax moves an array to the devices of others."""
    at = place(array)
    return at if at is not None and getattr(array, "committed", True) else None


def dtype(name: str) -> Any:
    return jnp.dtype(name)


def swap_last_axes(array: Any) -> Any:
    check_here(array, "what is transposed")
    return jnp.swapaxes(array, -1, -2)


def native(array: Any, fmt: str) -> Any:
    dtype = NATIVE.get(fmt)
    if dtype is None or array.dtype == dtype:
        return array
    if is_here(array):
        return from_numpy(np.asarray(array).view(dtype), array)
    return jax.lax.bitcast_convert_type(array, dtype)


def to_dlpack(array: Any) -> tuple[Any, str]:
    if not is_concrete(array):
        raise TypeError("a traced array has no memory to hand over: move it outside of jit")
    name = array.dtype.name
    if len(array.devices()) > 1:  # what DLPack hands over is on one
        array = jax.device_put(array, _devices(array)[0])
    if name not in ("bfloat16", *NATIVE):
        return array, name
    if on_cpu(array):
        host = np.asarray(array)
        exported = from_numpy(host.view(np.uint16 if name == "bfloat16" else np.uint8), array)
    else:
        exported = jax.lax.bitcast_convert_type(array, jnp.uint16 if name == "bfloat16" else jnp.uint8)
    return exported, name


def from_dlpack(exporter: Any, name: str) -> Any:
    array = from_numpy(exporter) if isinstance(exporter, np.ndarray) else jax.dlpack.from_dlpack(exporter)
    if name in ("bfloat16", "int8"):
        dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.int8
        if on_cpu(array):
            return from_numpy(np.asarray(array).view(dtype), array)
        return jax.lax.bitcast_convert_type(array, dtype)
    return array


def to_pickle(array: Any) -> tuple[Any, str]:
    return array, array.dtype.name


def from_pickle(array: Any, name: str) -> Any:
    return array


def to_device(array: Any, device: Any) -> Any:
    if isinstance(device, str):
        try:
            device = jax.devices(device)[0]
        except RuntimeError as error:
            raise ValueError(f"target must be a framework or a JAX device, got {device!r}: {error}") from None
    if isinstance(device, jax.sharding.NamedSharding):
        device = cuts.dividing(array.shape, device)
    return jax.device_put(array, device)


def cast(x: Any, recipe: ScalingRecipe) -> ScaledTensor:
    return cast_with(x, recipe, _NEAREST)


def cast_with(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    trees.register_with_flax()
    x = floats(x, "x")
    _core.plan_cast(list(x.shape), _spec(recipe))  # checks the shape
    if options.importance is not None and not (_is_known(options.seed) and is_concrete(x)):
        raise ValueError("x must not be traced for importance=, which searches on the CPU: cast outside of jax.jit")
    known_amax = all(map(is_concrete, jax.tree.leaves(options.amax)))
    if is_here(x) and _is_known(options.seed) and known_amax and all(isinstance(n, int) for n in options.offset):
        made = callbacks.cast_now(np.asarray(x), recipe, **options.core_arguments)
    elif options.importance is not None:
        made = callbacks.cast_now(np.asarray(x), recipe, **options.core_arguments)
        tensor = tensor_of(made, recipe, x.shape, x.dtype.name, x)
        return tensor if len(x.devices()) == 1 else tensor.to(x.sharding)
    elif options.amax is not None or not all(isinstance(n, int) and n == 0 for n in options.offset):
        if options.amax is not None and known_amax:
            side_array(options.amax, "amax")  # refuses what is not of numbers
        made = _cast_part(jax.lax.stop_gradient(x), recipe, options)
    else:
        seed = None if options.seed is None else _halves(options.seed)
        made = _cast(jax.lax.stop_gradient(x), seed, recipe, options.hadamard, options.square_blocks)
    return tensor_of(made, recipe, x.shape, x.dtype.name, x)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _cast(x: Any, seed: Any, recipe: ScalingRecipe, hadamard: Hadamard | None, square_blocks: bool) -> Any:
    pair = None if hadamard is None else (hadamard.block, hadamard.seed)

    def by_core(x: Any, seed: Any = None, amax: Any = None) -> Any:
        return ffi.cast(x, seed, recipe, pair, square_blocks, amax)

    def by_jnp(x: Any, seed: Any = None, **more: Any) -> Any:
        rounding = "nearest" if seed is None else "stochastic"
        options = CastOptions(rounding, None if seed is None else (seed[0], seed[1]), hadamard, square_blocks, **more)
        return as_outputs(whole_array.cast(namespace, x.astype(jnp.float32), recipe, options), recipe)

    whole, inside = ffi.ways(by_core, by_jnp)
    _, given = ffi.ways(lambda x, amax: by_core(x, amax=amax), lambda x, amax: by_jnp(x, amax=amax))
    operands = (x,) if seed is None else (x, seed)
    rotated = hadamard is not None
    return partition.cast(whole, inside, given, by_jnp, operands, recipe, rotated=rotated, square=square_blocks)


def _cast_part(x: Any, recipe: ScalingRecipe, options: CastOptions) -> Any:
    """Of a larger tensor; its amax and position may be traced."""
    seed = None if options.seed is None else tuple(_halves(options.seed))
    options = CastOptions(options.rounding, seed, options.hadamard, options.square_blocks, options.amax, options.offset)

    def part(x: Any) -> Any:
        return as_outputs(whole_array.cast(namespace, x.astype(jnp.float32), recipe, options), recipe)

    return partition.gathered(part, x)


def _halves(seed: Any) -> Any:
    """The low and the high 32 bits of an integer, of whatever width it is."""
    if isinstance(seed, int):
        return np.array([seed & 0xFFFF_FFFF, seed >> 32 & 0xFFFF_FFFF], np.uint32)
    seed = jnp.asarray(seed)
    if seed.size != 1 or not jnp.issubdtype(seed.dtype, jnp.integer):
        raise TypeError(f"seed must be one integer, got shape {seed.shape} of {seed.dtype}")
    high = (seed >> 31) >> 1 if seed.dtype.itemsize >= 4 else seed >> 31
    return jnp.stack([seed.reshape(()).astype(jnp.uint32), high.reshape(()).astype(jnp.uint32)])


def _is_known(seed: Any) -> bool:
    return seed is None or isinstance(seed, (int, np.integer)) or (isinstance(seed, jax.Array) and is_concrete(seed))


def cast_scaled(x: Any, recipe: ScalingRecipe, factor: Any, options: CastOptions) -> ScaledTensor:
    x = floats(x, "x")
    factor = jnp.asarray(factor, jnp.float32)
    if is_here(x) and is_concrete(factor) and _is_known(options.seed):
        made = callbacks.cast_now(np.asarray(x), recipe, factor=float(factor), **options.core_arguments)
        return tensor_of(made, recipe, x.shape, x.dtype.name, x)
    values = jax.lax.stop_gradient(x).astype(jnp.float32)
    codes = whole_array.cast_scaled(namespace, values, recipe, factor, options)
    data = jax.lax.bitcast_convert_type(codes, NATIVE[recipe.element])
    return ScaledTensor._of(cast_form(recipe, x.shape, x.dtype.name), data, 1 / factor)


def dequantize(scaled: ScaledTensor, dtype: Any, out: Any) -> Any:
    if out is not None:
        raise TypeError("out must be None: JAX arrays are immutable")
    parts_here(scaled, "scaled")
    name = dtype_name(dtype)
    if is_here(scaled.data):
        return from_numpy(callbacks.dequantize_now(scaled, name), scaled.data)
    return _dequantize(jax.lax.stop_gradient(scaled), name)


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(scaled: ScaledTensor, name: str) -> Any:
    def plain(scaled: ScaledTensor) -> Any:
        return jnp.broadcast_to(whole_array.dequantize(namespace, scaled, raw), scaled.shape).astype(name)

    ways = ffi.ways(functools.partial(ffi.dequantize, name=name), plain)
    if scaled.layout.axis == -2:
        return jnp.swapaxes(partition.dequantize(*ways, scaled.mT), -1, -2)
    return partition.dequantize(*ways, scaled)


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    if is_here(parts_here(scaled, "scaled").data):
        made = callbacks.requantize_now(scaled, recipe)
    else:
        made = _requantize(jax.lax.stop_gradient(scaled), recipe)
    return tensor_of(made, recipe, scaled.shape, scaled.original_dtype, scaled.data)


@functools.partial(jax.jit, static_argnums=1)
def _requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> Any:
    def plain(scaled: ScaledTensor) -> Any:
        return as_outputs(whole_array.requantize(namespace, scaled, recipe, raw), recipe)

    ways = ffi.ways(functools.partial(ffi.requantize, recipe=recipe), plain)
    return partition.requantize(*ways, scaled, recipe)


def straight_through(x: Any, recipe: ScalingRecipe, clip: tuple[Any, Any] | None) -> Any:
    with in_reverse("a cast"):
        return _straight_through(floats(x, "x"), recipe, clip)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _straight_through(x: Any, recipe: ScalingRecipe, clip: Any) -> Any:
    return _straight_through_forward(x, recipe, clip)[0]


def _straight_through_forward(x: Any, recipe: ScalingRecipe, clip: Any) -> Any:
    scaled = cast(x, recipe)
    values = partition.split_as(x, dequantize(scaled, x.dtype.name, None))
    if clip is None:
        return values, None
    bounds = partition.gathered(lambda scaled: whole_array.saturation(namespace, scaled, raw), scaled)
    low, high = (bounds[i] if clip[i] is None else clip[i] for i in range(2))
    return values, (x >= low) & (x <= high)


def _straight_through_backward(recipe: ScalingRecipe, clip: Any, inside: Any, grad: Any) -> Any:
    return (grad if inside is None else jnp.where(inside, grad, 0),)


_straight_through.defvjp(_straight_through_forward, _straight_through_backward)


def linear(x: Any, w: Any, products: Any, seed: Any) -> Any:
    if seed is None and products.recipes.stochastic:
        raise ValueError("seed is required for stochastic rounding in JAX: pass a new integer every step")
    seed = jnp.asarray(0 if seed is None else seed, jnp.int32)
    x = floats(x, "x")
    x = x.astype("float32") if products.wide else x
    with in_reverse("a product"):
        return _linear(x, floats(w, "w"), products.recipes, products.scales, seed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x: Any, w: Any, recipes: Any, scales: Any, seed: Any) -> Any:
    return _linear_forward(x, w, recipes, scales, seed)[0]


def _linear_forward(x: Any, w: Any, recipes: Any, scales: Any, seed: Any) -> Any:
    from breccia.autograd import Products

    return Products(recipes, scales).forward(x, w), (x, w, scales, seed)


def _linear_backward(recipes: Any, saved: Any, grad: Any) -> Any:
    from breccia.autograd import Products

    x, w, scales, seed = saved
    products = Products(recipes, scales)
    grad_x, grad_w = products.grad_x(grad, w, seed).astype(x.dtype), products.grad_w(grad, x, seed).astype(w.dtype)
    return partition.split_as(x, grad_x), partition.split_as(w, grad_w), None, None


_linear.defvjp(_linear_forward, _linear_backward)


def as_outputs(parts: whole_array.Parts, recipe: ScalingRecipe) -> tuple[Any, ...]:
    """The parts of a cast in JAX's dtypes; those that exist."""
    fmt = recipes.scale_format(recipe)
    element = _spec(recipe).element
    data = parts.data if element not in NATIVE else jax.lax.bitcast_convert_type(parts.data, NATIVE[element])
    scale = parts.scale if fmt is None else jax.lax.bitcast_convert_type(parts.scale, NATIVE[fmt])
    return tuple(part for part in (data, scale, parts.zero_point, parts.global_scale) if part is not None)
