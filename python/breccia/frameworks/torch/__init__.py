# SPDX-License-Identifier: Apache-2.0
"""torch tensors: on a CPU the core reads and writes them in place; on other devices, and while torch traces, the
same verbs are the custom operators ``torch.ops.breccia``."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from breccia import _core, formats
from breccia.frameworks import numpy
from breccia.frameworks.torch import direct, gradients, launches, operators, tensors, trees  # noqa: F401 (torch.ops.breccia)
from breccia.frameworks.torch.direct import EXACT_TYPES, check_tangents, check_transforms, is_plain, needs_grad
from breccia.frameworks.torch.functions import call as called  # noqa: F401 (torch's functions of ScaledTensors)
from breccia.frameworks.torch.meta import flatten, recipe_key
from breccia.frameworks.torch.weights import LinearWeight
from breccia.kernels import whole_array
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor, data_of
from breccia.value.inputs import check_float32
from breccia.verbs.cast_options import CastOptions

namespace = tensors.NAMESPACE
products_follow = True  # products have the dtype of the operand that is a tensor, as torch's have


def to_core(array: Any, argument: str) -> Any:
    if not isinstance(array, torch.Tensor):
        raise TypeError(f"{argument} must be a torch tensor like data, got {type(array).__name__}")
    _check_dense(array, argument)
    return tensors.core_array(array, argument, null=not is_plain(array, writes=False))


def place(array: Any) -> Any:
    return array.device


def dtype(name: str) -> Any:
    return getattr(torch, name)


def swap_last_axes(array: Any) -> Any:
    return array.transpose(-1, -2)


def native(array: Any, fmt: str) -> Any:
    dtype = tensors.NATIVE.get(fmt)
    return array if dtype is None or array.dtype == dtype else array.view(dtype)


def pack_sixes(codes: Any) -> Any:
    """See `breccia.value.sixes`; by the core where it may read the memory, else by torch's operators (None)."""
    codes = codes.view(torch.uint8)
    return torch.from_numpy(numpy.pack_sixes(_lent(codes))) if is_plain(codes) else None


def unpack_sixes(packed: Any) -> Any:
    """The same; on a GPU by a kernel."""
    if is_plain(packed):
        return torch.from_numpy(numpy.unpack_sixes(_lent(packed)))
    return launches.unpack_sixes(packed) if launches.quiet(packed) else None


def _lent(array: torch.Tensor) -> Any:
    """The same memory as NumPy's. After ``numpy()`` torch would not resize it, as FSDP does of what it has gathered."""
    return np.from_dlpack(array.detach())


def to_dlpack(array: Any) -> tuple[Any, str]:
    name = tensors.dtype_name(array)
    array = array.detach()
    if array.dtype == torch.bfloat16:
        return array.view(torch.uint16), name
    return (array.view(torch.uint8) if array.dtype in tensors.NATIVE.values() else array), name


def from_dlpack(exporter: Any, name: str) -> Any:
    array = torch.from_dlpack(exporter)
    if name == "bfloat16":
        return array.view(torch.bfloat16)
    return array.view(torch.int8) if name == "int8" else array


def to_pickle(array: Any) -> tuple[Any, str]:
    name = tensors.dtype_name(array)
    return (array.view(torch.uint8) if array.dtype in tensors.NATIVE.values() else array), name


def from_pickle(array: Any, name: str) -> Any:
    return native(array, name)


def to_device(array: Any, device: Any) -> Any:
    try:
        return array.to(torch.device(device))
    except NotImplementedError:  # of the meta device, which has no values to move
        raise
    except (AssertionError, RuntimeError) as error:  # torch asserts that it was built for a GPU
        raise ValueError(f"target must be a framework or a torch device, got {device!r}: {error}") from None


# Casts of tensors that other modules know more about, by type: (x, recipe, options).
casts_of_subclasses: dict[type, Any] = {}
# The same of conversions: (scaled, recipe), by the type of its data.
conversions_of_subclasses: dict[type, Any] = {}
# The same for weights: what `LinearWeight._quantize` gives, or None for one of floats.
weights_of_subclasses: dict[type, Any] = {}


def _has_rules_to_load(x: Any) -> bool:
    """Whether x is a DTensor in a program that has not imported breccia.distributed, whose rules are then loaded."""
    if type(x) is torch.Tensor or x.__class__.__module__.partition(".tensor")[0] != "torch.distributed":
        return False
    importlib.import_module("breccia.distributed.rules")  # which lies above the frameworks
    return type(x) in casts_of_subclasses


def cast(x: Any, recipe: ScalingRecipe) -> ScaledTensor:
    x = floats(x, "x")
    if type(x) in casts_of_subclasses:
        return casts_of_subclasses[type(x)](x.detach(), recipe, CastOptions())  # type: ignore[no-any-return]
    if is_plain(x):
        return tensors.cast_here(x, recipe)
    if launches.quiet(x):
        return launches.cast(x, recipe)
    _check_fake(x=x)
    check_transforms(x=x.detach())  # whose derivatives do not go through codes
    if _has_rules_to_load(x):
        return cast(x, recipe)
    name = tensors.dtype_name(x)
    return tensors.parts_to_tensor(torch.ops.breccia.cast(x.detach(), recipe_key(recipe)), x.shape, recipe, name)


def cast_with(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    x = floats(x, "x")
    if is_plain(x):
        return tensors.cast_here(x, recipe, **options.core_arguments)
    if type(x) in casts_of_subclasses:
        return casts_of_subclasses[type(x)](x.detach(), recipe, options)  # type: ignore[no-any-return]
    if _has_rules_to_load(x):
        return cast_with(x, recipe, options)
    if options.importance is not None:
        return _by_core(x, recipe, options)
    if options.amax is not None:
        amax = torch.as_tensor(options.amax, dtype=torch.float32, device=x.device)
        if options.is_plain and launches.takes_amax(x, recipe, amax):
            return launches.cast_with_amax(x, recipe, amax)
        options = dataclasses.replace(options, amax=amax)
    return tensors.parts_to_tensor(
        tensors.whole_array_cast(x.detach(), recipe, options), x.shape, recipe, tensors.dtype_name(x)
    )


def _by_core(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    """The cast of a copy in the CPU's memory, back on the device of x."""
    if x.device.type == "meta" or torch.compiler.is_compiling():
        raise ValueError("x must have values for importance=, which searches on the CPU, got one of none")
    made = tensors.cast_here(x.detach().cpu(), recipe, **options.core_arguments)
    return made if x.device.type == "cpu" else made.to(x.device)


def cast_scaled(x: Any, recipe: ScalingRecipe, factor: Any, options: CastOptions) -> ScaledTensor:
    x = floats(x, "x")
    if is_plain(x):
        return tensors.cast_here(x, recipe, factor=float(factor), **options.core_arguments)
    values = x.detach().float()
    largest = formats.finfo(recipe.element).max
    factor = torch.as_tensor(factor, dtype=torch.float32, device=x.device)
    dtype = tensors.data_dtype(recipe.element)
    if options.is_default and dtype != torch.uint8:  # torch's own conversion rounds as the core's does
        data = (values * factor).clamp(-largest, largest).to(dtype)
    else:
        data = whole_array.cast_scaled(namespace, values, recipe, factor, options).view(dtype)
    return tensors.parts_to_tensor([data.contiguous(), 1 / factor], x.shape, recipe, tensors.dtype_name(x))


def silu_mul(gate: Any, up: Any, recipe: ScalingRecipe) -> ScaledTensor:
    gate, up = gate.detach(), up.detach()
    if launches.quiet(gate) and launches.quiet(up):
        return launches.silu_mul(gate, up, recipe)
    made = torch.ops.breccia.silu_mul_cast(gate, up, recipe_key(recipe))
    return tensors.parts_to_tensor(made, gate.shape, recipe, tensors.dtype_name(gate))


def rms_norm(x: Any, weight: Any, recipe: ScalingRecipe, eps: float, residual: Any) -> Any:
    operands = [operand.detach() for operand in (x, weight, residual) if operand is not None]
    x, weight, residual = (*operands, None)[:3]
    if all(launches.quiet(operand) for operand in operands):
        scaled, total = launches.rms_norm(x, residual, weight, eps, recipe)
        return scaled if residual is None else (scaled, total)
    made = torch.ops.breccia.rms_norm_cast(x, residual, weight, eps, recipe_key(recipe))
    scaled = tensors.parts_to_tensor(made, x.shape, recipe, tensors.dtype_name(x))
    return scaled if residual is None else (scaled, made[-1])


def dequantize(scaled: ScaledTensor, dtype: Any, out: Any) -> Any:
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch tensor, got {type(out).__name__}")
    kind = tensors.float_dtype(dtype) if out is None else out.dtype
    if not is_plain(scaled.data):
        _check_operands(scaled=scaled)
        if out is None and launches.quiet(scaled.data):
            return launches.dequantize(scaled, kind)
        made = torch.ops.breccia.dequantize(*flatten(scaled), kind)
        if out is None:
            return made
        if out.shape != made.shape:
            raise ValueError(f"out must have shape {tuple(made.shape)}, got {tuple(out.shape)}")
        return out.copy_(made)
    if out is None:
        out = torch.empty(scaled.shape, dtype=kind)
    elif out.device != scaled.data.device:
        raise TypeError(f"out must be on the device of data, {scaled.data.device}, got {out.device}")
    elif out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out must not require a gradient")
    _core.dequantize_into(scaled._core, tensors.core_array(out, "out"))
    return out


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    if type(scaled.data) in conversions_of_subclasses:
        return conversions_of_subclasses[type(scaled.data)](scaled, recipe)  # type: ignore[no-any-return]
    if not is_plain(scaled.data):
        _check_operands(scaled=scaled)
        made = torch.ops.breccia.requantize(*flatten(scaled), recipe_key(recipe))
        return tensors.parts_to_tensor(made, scaled.shape, recipe, scaled.original_dtype)
    return tensors.requantize_here(scaled, recipe)


def transpose(scaled: ScaledTensor, group: int) -> tuple[ScaledTensor, int, int] | None:
    """`breccia.transpose` by a kernel; None where there is none."""
    if not launches.quiet(scaled.data):
        return None
    from breccia.kernels.triton import ops

    return ops.transpose(scaled, group)


def matmul(a: Any, b: Any, out_dtype: Any, precision: str) -> Any:
    a, b = _operand(a, "a"), _operand(b, "b")
    kind = tensors.float_dtype(out_dtype)
    if forward_ad._current_level >= 0:
        check_tangents(a=a, b=b)
    if not is_plain(data_of(a), data_of(b)) or needs_grad(a) or needs_grad(b):
        _check_operands(a=a, b=b)
        return torch.ops.breccia.matmul(*flatten(a), *flatten(b), kind, precision)
    out = torch.empty(_core.matmul_shape(list(a.shape), list(b.shape)), dtype=kind)
    _core.matmul_into(_readable(a, "a"), _readable(b, "b"), tensors.core_array(out, "out"), precision)
    return out


def direct_linear(x: Any, w: ScaledTensor, out_dtype: Any, precision: str, bias: Any = None) -> Any:
    """``x @ w.T + bias`` without torch's dispatcher, of x with a gradient ``x @ w.T`` alone; None where torch must see
    the call, or `matmul` has more to say of the operands."""
    kind, y = tensors.float_dtype(out_dtype), None
    if forward_ad._current_level >= 0:
        check_tangents(x=x)
    if not (isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()):
        y = direct.linear(x, w, kind, precision, bias)
    elif bias is not None:
        return None
    elif precision == "exact" and (not w.data.is_cpu or is_plain(x, w.data)):
        y = gradients.eager(x, w, None, "", kind)
    if y is None and w.data.is_cpu and not is_plain(x, w.data):
        _check_operands(x=x, w=w)
    return y


def grouped_again(x: Any, w_stack: ScaledTensor, offsets: Any, out_dtype: Any) -> Any:
    """The product that `grouped_matmul` has given for operands of this form, in less time; None where it has not."""
    if forward_ad._current_level >= 0:
        check_tangents(x=x)
    return None if w_stack.data.is_cpu else launches.grouped_again(x, w_stack, offsets, out_dtype)


def grouped_matmul(x: Any, w_stack: ScaledTensor, offsets: Any, out_dtype: Any) -> Any:
    if not isinstance(offsets, torch.Tensor) or offsets.is_floating_point() or offsets.is_complex():
        got = f"one of {offsets.dtype}" if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise TypeError(f"offsets must be a tensor of integers, got {got}")
    if offsets.device != w_stack.data.device:
        raise TypeError(f"offsets must be on the device of w_stack, {w_stack.data.device}, got {offsets.device}")
    given, kind = _operand(x, "x"), tensors.float_dtype(out_dtype)
    if forward_ad._current_level >= 0:
        check_tangents(x=given)
    check_transforms(x=given)
    made = None if w_stack.data.is_cpu else launches.grouped_matmul(given, w_stack, offsets, kind)
    if made is not None:
        return made
    return torch.ops.breccia.grouped_matmul(*flatten(given), *flatten(w_stack), offsets, kind)


def straight_through(x: Any, recipe: ScalingRecipe, clip: tuple[Any, Any] | None) -> Any:
    x = floats(x, "x")
    if forward_ad._current_level >= 0:
        check_tangents(x=x)
    if x.requires_grad:
        check_transforms(x=x)
    low, high = clip or (None, None)
    values, _ = torch.ops.breccia.straight_through(x, recipe_key(recipe), clip is not None, low, high)
    return values


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, products: Any, seed: Any) -> Any:
        ctx.save_for_backward(x, w)
        ctx.products, ctx.seed = products, seed
        return products.forward(x, _operand_of(w, products))

    @staticmethod
    @gradients.once_of_saved(2)  # x and W: dx is G · W, dW is Gᵀ · x
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        grad = grad.to(x.dtype) if ctx.products.wide else grad
        needs_x, needs_w = ctx.needs_input_grad[:2]
        grad_x = ctx.products.grad_x(grad, _operand_of(w, ctx.products), ctx.seed).to(x.dtype) if needs_x else None
        grad_w = ctx.products.grad_w(grad, x, ctx.seed).to(w.dtype) if needs_w else None
        return grad_x, grad_w, None, None


def _operand_of(w: Any, products: Any) -> Any:
    """The weight as products take it: itself, or what it is quantized to."""
    if isinstance(w, LinearWeight):
        made = type(w)._quantize(w)
    elif type(w) in weights_of_subclasses:
        made = weights_of_subclasses[type(w)](w)
    else:
        made = None
    if made is None:
        return w
    wanted = products.recipes
    if recipe_key(made.scaled.recipe) != recipe_key(wanted.w) or made.square_blocks != wanted.square_weights:
        raise ValueError(
            f"w must be quantized as recipes.w says, {wanted.w} (square_weights={wanted.square_weights}), got "
            f"{made.scaled.recipe} (square_blocks={made.square_blocks})"
        )
    return made


def linear(x: Any, w: Any, products: Any, seed: Any) -> Any:
    if seed is None and products.recipes.stochastic:
        seed = int(torch.randint(2**31, ()))
    x, w = floats(x, "x"), floats(w, "w")
    check_transforms(x=x, w=w)
    return _Linear.apply(x, w, products, seed)


def _readable(operand: Any, argument: str) -> Any:
    if not isinstance(operand, ScaledTensor):
        return tensors.core_array(operand, argument)
    if type(operand) is not ScaledTensor or operand.__dict__["_made"] is not None:
        return operand._core
    return tensors.core_of(*flatten(operand))  # a transposed view is a new tensor each time


def _operand(x: Any, argument: str) -> Any:
    return x if isinstance(x, ScaledTensor) else floats(x, argument)


def floats(x: Any, argument: str) -> Any:
    """``x`` as floats; integers and booleans as float32."""
    _check_dense(x, argument)
    if x.dtype in tensors.FLOATS:
        if x.dtype == torch.float64 and is_plain(x):
            check_float32(x.detach().resolve_neg().numpy(), argument)
        return x
    if x.dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        return x.float()
    raise TypeError(f"{argument} must be a float32, float64, float16 or bfloat16 tensor (or integers), got {x.dtype}")


def _check_dense(x: Any, argument: str) -> None:
    if torch.compiler.is_dynamo_compiling():  # which knows dense tensors only
        return
    if x.layout != torch.strided or x.is_nested:
        got = "a nested one" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{argument} must be a dense tensor (layout torch.strided), got {got}")


def _check_operands(**operands: Any) -> None:
    """Refuses what `_check_fake` refuses, and what a transform of torch.func follows, for which operators have no
    rules."""
    check_transforms(**operands)
    _check_fake(**operands)


def _check_fake(**operands: Any) -> None:
    """Refuses real tensors where one is fake, or where a mode makes all so: torch would."""
    arrays = {argument: data_of(operand) for argument, operand in operands.items()}
    if torch.compiler.is_dynamo_compiling() or (
        all(type(array) in EXACT_TYPES for array in arrays.values()) and not torch._C._len_torch_dispatch_stack()
    ):
        return
    mode = torch._guards.detect_fake_mode(list(arrays.values()))
    if mode is None or mode.allow_non_fake_inputs:
        return
    for argument, array in arrays.items():
        if type(array) in EXACT_TYPES and not array.is_meta:
            raise TypeError(
                f"{argument} must be of fake tensors as the rest is, got real ones: make it under the same "
                f"FakeTensorMode, or give that allow_non_fake_inputs=True"
            )


trees.register()
