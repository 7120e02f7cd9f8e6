# SPDX-License-Identifier: Apache-2.0
"""The verbs as operators of ``torch.ops.breccia``: the core on CPUs, Triton kernels on CUDA, the whole-array kernels
on other devices, shapes and dtypes for the compiler, and gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from breccia import _core
from breccia.frameworks.torch import launches, tensors
from breccia.frameworks.torch.meta import flatten, form_of, recipe_of, unflatten
from breccia.kernels import triton, whole_array
from breccia.kernels.whole_array.spec import Spec
from breccia.verbs.cast_options import CastOptions

if TYPE_CHECKING:
    from breccia.recipes import ScalingRecipe
    from breccia.scaled_tensor import ScaledTensor

_library = torch.library.Library("breccia", "DEF")
_library.define("cast(Tensor x, str recipe) -> Tensor[]")
_library.define("silu_mul_cast(Tensor gate, Tensor up, str recipe) -> Tensor[]")
_library.define("rms_norm_cast(Tensor x, Tensor? residual, Tensor weight, float eps, str recipe) -> Tensor[]")
_library.define("dequantize(Tensor[] parts, str key, ScalarType dtype) -> Tensor")
_library.define("requantize(Tensor[] parts, str key, str recipe) -> Tensor[]")
_library.define("matmul(Tensor[] a, str a_key, Tensor[] b, str b_key, ScalarType out_dtype, str precision) -> Tensor")
_library.define(
    "grouped_matmul(Tensor[] x, str x_key, Tensor[] w, str w_key, Tensor offsets, ScalarType dtype) -> Tensor"
)
_library.define("straight_through(Tensor x, str recipe, bool clipped, float? low, float? high) -> (Tensor, Tensor)")


def _cast_cpu(x: Any, recipe: str) -> list[Any]:
    return flatten(tensors.cast_here(x, recipe_of(recipe)))[0]


def _cast_anywhere(x: Any, recipe: str) -> list[Any]:
    return tensors.whole_array_cast(x, recipe_of(recipe), CastOptions())


def _cast_cuda(x: Any, recipe: str) -> list[Any]:
    from breccia.kernels.triton import ops

    return launches.repeated(("cast", recipe), [x], lambda: ops.cast_parts(x, recipe_of(recipe)))


def _cast_fake(x: Any, recipe: str) -> list[Any]:
    parts = tensors.output_parts(list(x.shape), recipe)
    if x.is_cuda and triton.TRITON_AVAILABLE and parts[1] is not None:
        from breccia.kernels.triton import ops

        strides = ops.scale_strides(list(parts[1][0]), recipe_of(recipe))
        parts[1] = parts[1] if strides is None else (parts[1][0], strides, parts[1][2])
    return tensors.empty(parts, x.device)


def _silu_mul_anywhere(gate: Any, up: Any, recipe: str) -> list[Any]:
    return list(torch.ops.breccia.cast(torch.nn.functional.silu(gate) * up, recipe))


def _silu_mul_cuda(gate: Any, up: Any, recipe: str) -> list[Any]:
    from breccia.kernels.triton import ops

    if not ops.fuses(gate, recipe_of(recipe)):
        return _silu_mul_anywhere(gate, up, recipe)
    return launches.repeated(("silu mul", recipe), [gate, up], lambda: ops.silu_mul_parts(gate, up, recipe_of(recipe)))


def _silu_mul_fake(gate: Any, up: Any, recipe: str) -> list[Any]:
    return _cast_fake(gate, recipe)


def _rms_norm_anywhere(x: Any, residual: Any, weight: Any, eps: float, recipe: str) -> list[Any]:
    total = x if residual is None else x + residual
    made = list(torch.ops.breccia.cast(torch.nn.functional.rms_norm(total, total.shape[-1:], weight, eps), recipe))
    return made if residual is None else [*made, total]


def _rms_norm_cuda(x: Any, residual: Any, weight: Any, eps: float, recipe: str) -> list[Any]:
    from breccia.kernels.triton import ops

    if not ops.fuses(x, recipe_of(recipe)):
        return _rms_norm_anywhere(x, residual, weight, eps, recipe)
    operands = [x, weight] if residual is None else [x, weight, residual]
    return launches.repeated(
        ("rms norm", recipe, eps), operands, lambda: ops.rms_norm_parts(x, residual, weight, eps, recipe_of(recipe))
    )


def _rms_norm_fake(x: Any, residual: Any, weight: Any, eps: float, recipe: str) -> list[Any]:
    return _cast_fake(x, recipe) if residual is None else [*_cast_fake(x, recipe), torch.empty_like(x)]


def _dequantize_cpu(parts: list[Any], key: str, dtype: Any) -> Any:
    scaled = unflatten(parts, key)
    out = torch.empty(scaled.shape, dtype=dtype)
    _core.dequantize_into(scaled._core, tensors.core_array(out, "out"))
    return out


def _dequantize_anywhere(parts: list[Any], key: str, dtype: Any) -> Any:
    return tensors.whole_array_dequantize(unflatten(parts, key), dtype)


def _dequantize_cuda(parts: list[Any], key: str, dtype: Any) -> Any:
    made = launches.repeated(
        ("dequantize", key, dtype), parts, lambda: [triton.dequantize(unflatten(parts, key), dtype).contiguous()]
    )
    return made[0]


def _dequantize_fake(parts: list[Any], key: str, dtype: Any) -> Any:
    return torch.empty(unflatten(parts, key).shape, dtype=dtype, device=parts[0].device)


def _requantize_cpu(parts: list[Any], key: str, recipe: str) -> list[Any]:
    return flatten(tensors.requantize_here(unflatten(parts, key), recipe_of(recipe)))[0]


def _requantize_anywhere(parts: list[Any], key: str, recipe: str) -> list[Any]:
    return tensors.whole_array_requantize(unflatten(parts, key), recipe_of(recipe))


def _requantize_cuda(parts: list[Any], key: str, recipe: str) -> list[Any]:
    from breccia.kernels.triton import ops

    return ops.requantize_parts(unflatten(parts, key), recipe_of(recipe))


def _requantize_fake(parts: list[Any], key: str, recipe: str) -> list[Any]:
    return tensors.empty(tensors.output_parts(list(unflatten(parts, key).shape), recipe), parts[0].device)


def _core_operand(parts: list[Any], key: str, argument: str) -> Any:
    return tensors.core_of(parts, key) if key else tensors.core_array(parts[0], argument)


def _shape_of(parts: list[Any], key: str) -> Any:
    return unflatten(parts, key).shape


@functools.cache
def _fits_bf16(recipe: ScalingRecipe) -> bool:
    """Whether bfloat16 holds each value but for the global scale: products of significands, for which it has 8 bits."""
    spec = Spec.of(recipe)
    scale_bits = {"e8m0": 1, "e4m3": 4}.get(spec.scale, 24)
    return not spec.element.is_integer and spec.element.mantissa_bits + 1 + scale_bits <= 8


def _by_bf16(a: Any, b: ScaledTensor, out_dtype: Any) -> Any:
    """a @ b by torch in bfloat16, of codes that run along the rows of b, as those of a layer's weight do in a backward
    pass: the core would multiply them as float32. None where values of b would be rounded, and without instructions
    for bfloat16. (AMD EPYC, Zen 4, NVFP4, 2048 x 2048: 1.3 ms against 8.6 of one row, 13 against 25 of 256.)"""
    if not a.dtype == out_dtype == torch.bfloat16 or a.ndim < 2 or len(b.shape) != 2:
        return None
    if b._form.axis != -1 or a.shape[-1] != b.shape[0] or not b._form.has_kernels:
        return None
    if not _fits_bf16(b.recipe) or _core.cpu_info()["backend"] not in ("avx512_bf16", "amx"):
        return None
    factor = 1.0
    if b.global_scale is not None:
        one = b.global_scale.reshape(())
        factor = float(1 / one if Spec.of(b.recipe).global_divides else one)  # of tensors: 1 / 0 is infinity
        b = b._with(global_scale=torch.ones_like(b.global_scale))
    values = _dequantize_cpu(*flatten(b), torch.bfloat16)
    rows = a.reshape(-1, a.shape[-1])
    # With beta = 0 the first operand counts for nothing; alpha multiplies before the one rounding.
    product = torch.addmm(values.new_empty(1), rows, values, beta=0, alpha=factor)
    return product.reshape(*a.shape[:-1], b.shape[-1])


def matmul_cpu(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    if b_key and not a_key:
        product = _by_bf16(a[0], unflatten(b, b_key), out_dtype)
        if product is not None:
            return product
    left, right = _core_operand(a, a_key, "a"), _core_operand(b, b_key, "b")
    shapes = [list(one.shape if key else parts[0].shape) for one, key, parts in ((left, a_key, a), (right, b_key, b))]
    out = torch.empty(_core.matmul_shape(*shapes), dtype=out_dtype)
    _core.matmul_into(left, right, tensors.core_array(out, "out"), precision)
    return out


def _matmul_anywhere(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    values = [
        _dequantize_anywhere(parts, key, torch.float32) if key else parts[0].float()
        for parts, key in ((a, a_key), (b, b_key))
    ]
    _core.matmul_shape(list(values[0].shape), list(values[1].shape))
    return torch.matmul(*values).to(out_dtype)


def _matmul_cuda(a: list[Any], a_key: str, b: list[Any], b_key: str, out_dtype: Any, precision: str) -> Any:
    if b_key and form_of(b_key).axis == -1:
        made = launches.by_values(unflatten(a, a_key), unflatten(b, b_key), out_dtype)
        if made is not None:
            return made
    made = launches.repeated(
        ("matmul", a_key, len(a), b_key, out_dtype),
        [*a, *b],
        lambda: [triton.matmul(unflatten(a, a_key), unflatten(b, b_key), out_dtype).contiguous()],
    )
    return made[0]


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
    saved = list(ctx.saved_tensors)
    left, right = unflatten(saved[:count], a_key), unflatten(saved[count:], b_key)
    grads: list[Any] = [[None] * count, None, [None] * (len(saved) - count), None, None, None]
    if not a_key and ctx.needs_input_grad[0][0]:
        product = torch.ops.breccia.matmul([grad], "", *flatten(right.mT), left.dtype, "exact")
        grads[0] = [product.sum_to_size(left.shape)]
    if not b_key and ctx.needs_input_grad[2][0]:
        product = torch.ops.breccia.matmul(*flatten(left.mT), [grad], "", right.dtype, "exact")
        grads[2] = [product.sum_to_size(right.shape)]
    return tuple(grads)


def _grouped_anywhere(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    from breccia.verbs.grouped import by_expert

    return by_expert(unflatten(x, x_key), unflatten(w, w_key), offsets.cpu(), dtype)


def _grouped_cpu(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    from breccia.verbs.grouped import checked_offsets

    rows, columns = _shape_of(x, x_key)[0], _shape_of(w, w_key)[1]
    ends = checked_offsets(offsets, rows)
    out = torch.empty((rows, columns), dtype=dtype)
    _core.grouped_matmul_into(
        _core_operand(x, x_key, "x"), tensors.core_of(w, w_key), ends, tensors.core_array(out, "out")
    )
    return out


def _grouped_cuda(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    made = launches.repeated(
        ("grouped", x_key, len(x), w_key, dtype),
        [*x, *w, offsets],
        lambda: [triton.grouped_matmul(unflatten(x, x_key), unflatten(w, w_key), offsets, dtype)],
    )
    return made[0]


def _grouped_fake(x: list[Any], x_key: str, w: list[Any], w_key: str, offsets: Any, dtype: Any) -> Any:
    rows, columns = _shape_of(x, x_key)[0], _shape_of(w, w_key)[1]
    return torch.empty((rows, columns), dtype=dtype, device=w[0].device)


def _straight_through(x: Any, recipe: str, clipped: bool, low: float | None, high: float | None) -> Any:
    what = recipe_of(recipe)
    made = torch.ops.breccia.cast(x, recipe)
    scaled = tensors.parts_to_tensor(made, x.shape, what, tensors.dtype_name(x))
    values = torch.ops.breccia.dequantize(*flatten(scaled), x.dtype)
    if not clipped:
        return values, torch.empty(0, dtype=torch.bool, device=x.device)
    bounds = whole_array.saturation(tensors.NAMESPACE, scaled, tensors.raw)
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


def _exportable(fake: Any) -> Any:
    """The shapes of an operator, of which torch.export.save can write programs: its table of dtypes has no pairs of
    FP4, which it then writes as the bytes that they are. A program that is loaded has uint8 in their places."""

    def run(*operands: Any) -> Any:
        if torch.compiler.is_exporting():
            from torch._export.serde import serialize

            serialize._TORCH_TO_SERIALIZE_DTYPE.setdefault(torch.float4_e2m1fn_x2, serialize.ScalarType.BYTE)
        return fake(*operands)

    return run


def _on_cuda(by_kernels: Any, anywhere: Any) -> Any:
    """An operator on CUDA: by kernels, where there is Triton for them."""

    def run(*operands: Any) -> Any:
        return (by_kernels if triton.TRITON_AVAILABLE else anywhere)(*operands)

    return run


for _name, _cpu, _cuda, _anywhere, _fake in (
    ("cast", _cast_cpu, _cast_cuda, _cast_anywhere, _cast_fake),
    ("silu_mul_cast", _silu_mul_anywhere, _silu_mul_cuda, _silu_mul_anywhere, _silu_mul_fake),
    ("rms_norm_cast", _rms_norm_anywhere, _rms_norm_cuda, _rms_norm_anywhere, _rms_norm_fake),
    ("dequantize", _dequantize_cpu, _dequantize_cuda, _dequantize_anywhere, _dequantize_fake),
    ("requantize", _requantize_cpu, _requantize_cuda, _requantize_anywhere, _requantize_fake),
    ("matmul", matmul_cpu, _matmul_cuda, _matmul_anywhere, _matmul_fake),
    ("grouped_matmul", _grouped_cpu, _grouped_cuda, _grouped_anywhere, _grouped_fake),
    ("straight_through", _straight_through, _straight_through, _straight_through, _straight_through_fake),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _on_cuda(_cuda, _anywhere), "CUDA")
    _library.impl(_name, _anywhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"breccia::{_name}", _exportable(_fake), lib=_library)
torch.library.register_autograd("breccia::matmul", _matmul_backward, setup_context=_matmul_context, lib=_library)
torch.library.register_autograd(
    "breccia::straight_through",
    _straight_through_backward,
    setup_context=_straight_through_context,
    lib=_library,
)
