# SPDX-License-Identifier: Apache-2.0
"""The verbs as operators of ``torch.ops.breccia``: the core on CPUs, Triton kernels on CUDA, the whole-array kernels
on other devices, shapes and dtypes for the compiler, and gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch

from breccia import _core, recipes
from breccia.cast_options import CastOptions
from breccia.frameworks._torch_meta import flatten, recipe_key, recipe_of, unflatten
from breccia.frameworks._torch_namespace import Torch
from breccia.kernels import triton, whole_array
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor, packing_for

NAMESPACE = Torch()

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "uint16": torch.uint16,
}
# Formats with a torch dtype. The others are uint8.
NATIVE = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.float8_e8m0fnu,
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
    "int8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in {**NATIVE, **DTYPES}.items()}


def dtype_name(x: Any) -> str:
    return _NAMES.get(x.dtype, str(x.dtype).removeprefix("torch."))


def _memory(x: Any, argument: str, null: bool = False) -> tuple[int, Any, Any, str]:
    """The tensor's address, shape, strides in elements and dtype for the core."""
    name = _NAMES.get(x.dtype)
    if name is None:
        raise TypeError(f"{argument} must be of a dtype the core has, got {x.dtype}")
    if not null and x.is_neg():
        raise TypeError(f"{argument} must not be a lazily negated view: call resolve_neg()")
    return 0 if null else x.data_ptr(), x.shape, x.stride(), name


def core_array(x: Any, argument: str, null: bool = False) -> _core.Array:
    """The tensor's memory for the core, as long as the tensor lives."""
    return _core.Array.of_elements(*_memory(x, argument, null))


def data_dtype(element: str) -> torch.dtype:
    return NATIVE.get("float4_e2m1fn_x2" if element == "float4_e2m1fn" else element, torch.uint8)


# Shape, strides and dtype of data, scale, zero_point and global_scale, with None for what there is not.
_Parts = list[tuple[Any, Any, torch.dtype] | None]


def _output_parts(shape: Any, key: str) -> _Parts:
    recipe = recipe_of(key)
    spec = _spec(recipe)
    plan: Any = _core.plan_cast(shape, spec)
    fmt = recipes.scale_format(recipe)
    dtypes = (
        data_dtype(spec.element),
        DTYPES[plan["scale"][1]] if fmt is None else NATIVE[fmt],
        None if plan["zero_point"] is None else DTYPES[plan["zero_point"][1]],
        torch.float32,
    )
    return [
        None if part is None or dtype is None else (part[0], torch.empty(part[0], device="meta").stride(), dtype)
        for part, dtype in zip(plan.values(), dtypes, strict=True)
    ]


@functools.lru_cache(maxsize=1024)
def _known_parts(shape: Any, key: str) -> tuple[Any, ...]:
    """The four parts of a cast, and how it packs: a small one would spend its time in finding out."""
    return (*_output_parts(shape, key), _packing(shape, recipe_of(key)))


def _packing(shape: Any, recipe: ScalingRecipe) -> str:
    return packing_for(recipe._traits[0], shape[-1] if shape else 1)  # type: ignore[attr-defined]


def _empty(parts: _Parts, device: Any) -> list[Any]:
    return [torch.empty_strided(part[0], part[1], dtype=part[2], device=device) for part in parts if part is not None]


def cast_here(x: Any, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    """The cast of memory the core may read."""
    memory = _memory(x, "x")
    return _converted(_core.cast_at, memory, memory[1], x.device, recipe, memory[3], options)


def requantize_here(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """The same of a ScaledTensor."""
    device, dtype = scaled.data.device, scaled.original_dtype
    return _converted(_core.requantize_at, (scaled._core,), scaled.shape, device, recipe, dtype, {})


def _converted(
    convert: Any, source: Any, shape: Any, device: Any, recipe: ScalingRecipe, dtype: str, options: dict[str, Any]
) -> ScaledTensor:
    """What a function of the core makes of ``source``, its first arguments. Without loops and helpers, which would take
    a tenth of the time of a small cast; empty_strided takes two thirds of the time of empty."""
    new = torch.empty_strided
    data, scale, zero_point, global_scale, packing = _known_parts(shape, recipe_key(recipe))
    data = new(data[0], data[1], dtype=data[2], device=device)
    scale = new(scale[0], scale[1], dtype=scale[2], device=device)
    addresses = [data.data_ptr(), scale.data_ptr(), 0, 0]
    if zero_point is not None:
        zero_point = new(zero_point[0], zero_point[1], dtype=zero_point[2], device=device)
        addresses[2] = zero_point.data_ptr()
    if global_scale is not None:
        global_scale = new(global_scale[0], global_scale[1], dtype=global_scale[2], device=device)
        addresses[3] = global_scale.data_ptr()
    convert(*source, _spec(recipe), addresses, **options)
    return ScaledTensor._unchecked(packing, dtype, data, scale, recipe, recipe.layout, zero_point, global_scale)


def parts_to_tensor(made: Any, shape: Any, recipe: ScalingRecipe, original_dtype: str) -> ScaledTensor:
    """The ScaledTensor of an operator's outputs, which are those parts that there are."""
    _, has_zero_point, two_level = recipe._traits  # type: ignore[attr-defined]
    zero_point = made[2] if has_zero_point else None
    global_scale = made[2 + has_zero_point] if two_level else None
    return ScaledTensor._unchecked(
        _packing(shape, recipe), original_dtype, made[0], made[1], recipe, recipe.layout, zero_point, global_scale
    )


def raw(x: Any) -> Any:
    """Codes as uint8."""
    return x.view(torch.uint8) if x.dtype in NATIVE.values() else x


def _as_outputs(parts: whole_array.Parts, recipe: ScalingRecipe) -> list[Any]:
    spec = _spec(recipe)
    fmt = recipes.scale_format(recipe)
    data = parts.data.view(data_dtype(spec.element))
    scale = parts.scale if fmt is None else parts.scale.view(NATIVE[fmt])
    return [x for x in (data, scale, parts.zero_point, parts.global_scale) if x is not None]


def whole_array_cast(x: Any, recipe: ScalingRecipe, options: CastOptions) -> list[Any]:
    return _as_outputs(whole_array.cast(NAMESPACE, _widened(x), recipe, options), recipe)


def _widened(x: Any) -> Any:
    """float32 of x, the sign of a NaN kept, which a GPU's conversion from float16 loses."""
    values = x.to(torch.float32)
    if x.dtype != torch.float16:
        return values
    nan, negative = (
        torch.full((), bits, dtype=torch.int32, device=x.device).view(torch.float32) for bits in (0x7FC00000, -0x400000)
    )
    return torch.where(x.isnan(), torch.where(x.view(torch.int16) < 0, negative, nan), values)


# --- cast -----------------------------------------------------------------------------------------------------------

_library = torch.library.Library("breccia", "DEF")
_library.define("cast(Tensor x, str recipe) -> Tensor[]")
_library.define("dequantize(Tensor[] parts, str key, ScalarType dtype) -> Tensor")
_library.define("requantize(Tensor[] parts, str key, str recipe) -> Tensor[]")
_library.define("matmul(Tensor[] a, str a_key, Tensor[] b, str b_key, ScalarType out_dtype, str precision) -> Tensor")
_library.define(
    "grouped_matmul(Tensor[] x, str x_key, Tensor[] w, str w_key, Tensor offsets, ScalarType dtype) -> Tensor"
)
_library.define("straight_through(Tensor x, str recipe, bool clipped, float? low, float? high) -> (Tensor, Tensor)")


def _cast_cpu(x: Any, recipe: str) -> list[Any]:
    return flatten(cast_here(x, recipe_of(recipe)))[0]


def _cast_anywhere(x: Any, recipe: str) -> list[Any]:
    return whole_array_cast(x, recipe_of(recipe), CastOptions())


def _cast_cuda(x: Any, recipe: str) -> list[Any]:
    if not triton.TRITON_AVAILABLE:
        return _cast_anywhere(x, recipe)
    from breccia.kernels.triton import ops

    return ops.cast_parts(x, recipe_of(recipe))


def _cast_fake(x: Any, recipe: str) -> list[Any]:
    parts = _output_parts(list(x.shape), recipe)
    if x.is_cuda and triton.TRITON_AVAILABLE:
        from breccia.kernels.triton import ops

        strides = ops.scale_strides(list(x.shape), recipe_of(recipe))
        if strides is not None and parts[1] is not None:
            parts[1] = (parts[1][0], strides, parts[1][2])
    return _empty(parts, x.device)


# --- dequantize -----------------------------------------------------------------------------------------------------


def _dequantize_cpu(parts: list[Any], key: str, dtype: Any) -> Any:
    scaled = unflatten(parts, key)
    out = torch.empty(scaled.shape, dtype=dtype)
    _core.dequantize_into(scaled._core, core_array(out, "out"))
    return out


def _dequantize_anywhere(parts: list[Any], key: str, dtype: Any) -> Any:
    scaled = unflatten(parts, key)
    made = whole_array.dequantize(NAMESPACE, scaled, raw)
    nan = torch.full((), float("nan"), device=made.device)  # arithmetic may give a NaN any bits
    made = torch.where(made.isnan(), nan, made).expand(scaled.shape)
    return made.to(dtype) if dtype == torch.float64 else NAMESPACE.astype(made, _NAMES[dtype])


def _dequantize_cuda(parts: list[Any], key: str, dtype: Any) -> Any:
    if not triton.TRITON_AVAILABLE:
        return _dequantize_anywhere(parts, key, dtype)
    return triton.dequantize(unflatten(parts, key), dtype).contiguous()


def _dequantize_fake(parts: list[Any], key: str, dtype: Any) -> Any:
    return torch.empty(unflatten(parts, key).shape, dtype=dtype, device=parts[0].device)


# --- requantize -----------------------------------------------------------------------------------------------------


def _requantize_cpu(parts: list[Any], key: str, recipe: str) -> list[Any]:
    return flatten(requantize_here(unflatten(parts, key), recipe_of(recipe)))[0]


def whole_array_requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> list[Any]:
    return _as_outputs(whole_array.requantize(NAMESPACE, scaled, recipe, raw), recipe)


def _requantize_anywhere(parts: list[Any], key: str, recipe: str) -> list[Any]:
    return whole_array_requantize(unflatten(parts, key), recipe_of(recipe))


def _requantize_cuda(parts: list[Any], key: str, recipe: str) -> list[Any]:
    if not triton.TRITON_AVAILABLE:
        return _requantize_anywhere(parts, key, recipe)
    from breccia.kernels.triton import ops

    return ops.requantize_parts(unflatten(parts, key), recipe_of(recipe))


def _requantize_fake(parts: list[Any], key: str, recipe: str) -> list[Any]:
    return _empty(_output_parts(list(unflatten(parts, key).shape), recipe), parts[0].device)


# --- matmul ---------------------------------------------------------------------------------------------------------


def _core_operand(tensors: list[Any], key: str, argument: str) -> Any:
    return unflatten(tensors, key)._core if key else core_array(tensors[0], argument)


def _shape_of(tensors: list[Any], key: str) -> Any:
    return unflatten(tensors, key).shape


def _matmul_cpu(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    shape = _core.matmul_shape(list(_shape_of(a, a_key)), list(_shape_of(b, b_key)))
    out = torch.empty(shape, dtype=out_dtype)
    _core.matmul_into(_core_operand(a, a_key, "a"), _core_operand(b, b_key, "b"), core_array(out, "out"), precision)
    return out


def _matmul_anywhere(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    values = [
        _dequantize_anywhere(tensors, key, torch.float32) if key else tensors[0].float()
        for tensors, key in ((a, a_key), (b, b_key))
    ]
    _core.matmul_shape(list(values[0].shape), list(values[1].shape))
    return torch.matmul(*values).to(out_dtype)


def _matmul_cuda(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    if not triton.TRITON_AVAILABLE:
        return _matmul_anywhere(a, a_key, b, b_key, out_dtype, precision)
    return triton.matmul(unflatten(a, a_key), unflatten(b, b_key), out_dtype).contiguous()


def _matmul_fake(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    left, right = _shape_of(a, a_key), _shape_of(b, b_key)
    batch = torch.broadcast_shapes(left[:-2], right[:-2])
    return torch.empty((*batch, left[-2], right[-1]), dtype=out_dtype, device=a[0].device)


def _matmul_context(ctx: Any, inputs: Any, output: Any) -> None:
    a, a_key, b, b_key, *_ = inputs
    ctx.keys = (a_key, b_key, len(a))
    ctx.save_for_backward(*a, *b)


def _matmul_backward(ctx: Any, grad: Any) -> Any:
    a_key, b_key, count = ctx.keys
    tensors = list(ctx.saved_tensors)
    left, right = unflatten(tensors[:count], a_key), unflatten(tensors[count:], b_key)
    grads: list[Any] = [[None] * count, None, [None] * (len(tensors) - count), None, None, None]
    if not a_key and ctx.needs_input_grad[0][0]:
        product = torch.ops.breccia.matmul([grad], "", *flatten(right.mT), left.dtype, "exact")
        grads[0] = [product.sum_to_size(left.shape)]
    if not b_key and ctx.needs_input_grad[2][0]:
        product = torch.ops.breccia.matmul(*flatten(left.mT), [grad], "", right.dtype, "exact")
        grads[2] = [product.sum_to_size(right.shape)]
    return tuple(grads)


# --- grouped matmul -------------------------------------------------------------------------------------------------


def _grouped_anywhere(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    from breccia.grouped import by_expert

    return by_expert(unflatten(x, x_key), unflatten(w, w_key), offsets.cpu(), dtype)


def _grouped_cuda(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    if not triton.TRITON_AVAILABLE:
        return _grouped_anywhere(x, x_key, w, w_key, offsets, dtype)
    return triton.grouped_matmul(unflatten(x, x_key), unflatten(w, w_key), offsets, dtype)


def _grouped_fake(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    rows, columns = _shape_of(x, x_key)[0], _shape_of(w, w_key)[1]
    return torch.empty((rows, columns), dtype=dtype, device=w[0].device)


# --- straight through -----------------------------------------------------------------------------------------------


def _straight_through(x: Any, recipe: str, clipped: bool, low: float | None, high: float | None) -> Any:
    what = recipe_of(recipe)
    made = torch.ops.breccia.cast(x, recipe)
    scaled = parts_to_tensor(made, x.shape, what, dtype_name(x))
    values = torch.ops.breccia.dequantize(*flatten(scaled), x.dtype)
    if not clipped:
        return values, torch.empty(0, dtype=torch.bool, device=x.device)
    bounds = whole_array.saturation(NAMESPACE, scaled, raw)
    lower = bounds[0] if low is None else low
    upper = bounds[1] if high is None else high
    return values, ((x >= lower) & (x <= upper)).expand(x.shape).contiguous()


def _straight_through_fake(x: Any, recipe: str, clipped: bool, low: Any, high: Any) -> Any:
    shape = x.shape if clipped else (0,)
    values = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return values, torch.empty(shape, dtype=torch.bool, device=x.device)


def _straight_through_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.clipped = inputs[2]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _straight_through_backward(ctx: Any, grad: Any, _: Any) -> Any:
    (inside,) = ctx.saved_tensors
    return (torch.where(inside, grad, 0) if ctx.clipped else grad), None, None, None, None


for _name, _cpu, _cuda, _anywhere, _fake in (
    ("cast", _cast_cpu, _cast_cuda, _cast_anywhere, _cast_fake),
    ("dequantize", _dequantize_cpu, _dequantize_cuda, _dequantize_anywhere, _dequantize_fake),
    ("requantize", _requantize_cpu, _requantize_cuda, _requantize_anywhere, _requantize_fake),
    ("matmul", _matmul_cpu, _matmul_cuda, _matmul_anywhere, _matmul_fake),
    ("grouped_matmul", _grouped_anywhere, _grouped_cuda, _grouped_anywhere, _grouped_fake),
    ("straight_through", _straight_through, _straight_through, _straight_through, _straight_through_fake),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _cuda, "CUDA")
    _library.impl(_name, _anywhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"breccia::{_name}", _fake, lib=_library)
torch.library.register_autograd("breccia::matmul", _matmul_backward, setup_context=_matmul_context, lib=_library)
torch.library.register_autograd(
    "breccia::straight_through",
    _straight_through_backward,
    setup_context=_straight_through_context,
    lib=_library,
)
