# SPDX-License-Identifier: Apache-2.0
"""The verbs on CUDA ScaledTensors: cast, dequantize and requantize, equal to the portable core byte for byte.

What no kernel does (a search for the best scale, zero points found by cast, blocks that are not powers of two,
float64 input) goes through the core on the CPU and back.
"""

from __future__ import annotations

from typing import Any

import torch

from breccia import frameworks
from breccia.scaled_tensor import ScaledTensor

from . import cast_block, cast_nvfp4, cast_tensor, recipes
from .dequant import dequantize as dequantize_2d

FLOATS = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


def float_dtype(dtype: Any) -> torch.dtype:
    """A torch dtype from a dtype or name of any framework."""
    if isinstance(dtype, torch.dtype) and dtype in FLOATS.values():
        return dtype
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if name not in FLOATS:
        raise TypeError(f"dtype must be float32, float64, float16 or bfloat16, got {dtype!r}")
    return FLOATS[name]


def cast(x: torch.Tensor, recipe: Any) -> ScaledTensor:
    """`breccia.cast` of a CUDA tensor: on its device, without synchronizing."""
    plan = recipes.plan(recipe)
    _check(x, recipe, plan)
    if plan.kind == "core" or x.dtype == torch.float64 or x.numel() == 0:
        return _through_core(x, recipe)
    batch = x.shape[:-2] if x.ndim >= 2 else ()
    if plan.block[0] > 1 and batch and x.shape[-2] % plan.block[0]:
        return _through_core(x, recipe)  # tiles would run from one matrix into the next
    flat = x.flatten(0, -2) if x.ndim >= 2 else x.reshape(1, -1)
    if plan.kind == "nvfp4" and batch and plan.two_level:
        return _through_core(x, recipe)  # one global scale per matrix
    zero = global_scale = None
    if plan.kind == "tensor":
        codes, scale = cast_tensor.cast_tensor(flat, plan.element, plan.rule, plan.margin)
    elif plan.kind == "row":
        codes, scale = cast_tensor.cast_row(flat, plan.element, plan.rule, plan.scale_dtype)
    elif plan.kind == "nvfp4":
        codes, scale, global_scale = cast_nvfp4.cast_nvfp4(flat, plan.two_level, plan.rule)
    else:
        codes, scale = cast_block.cast_block(flat, plan.element, plan.block, plan.rule, plan.scale_dtype, plan.packed)
    codes = codes.reshape(*x.shape[:-1], codes.shape[-1]) if x.ndim else codes.reshape(())
    layout = recipe.layout
    if plan.kind != "tensor":
        scale = scale.reshape(layout.scale_shape(tuple(x.shape)))
    return _wrap(codes, scale, recipe, layout, zero, global_scale, tuple(x.shape), str(x.dtype).removeprefix("torch."))


def dequantize(scaled: ScaledTensor, dtype: Any = "float32", out: torch.Tensor | None = None) -> torch.Tensor:
    """`breccia.dequantize` of a CUDA ScaledTensor."""
    target = float_dtype(dtype if out is None else out.dtype)
    op = recipes.operand(scaled)
    made = torch.float32 if target == torch.float64 else target
    values = dequantize_operand(op, made)
    values = values.transpose(-1, -2) if op.transposed else values
    values = values if target == made else values.to(target)
    if out is None:
        return values
    if out.shape != values.shape:
        raise ValueError(f"out must have shape {tuple(values.shape)}, got {tuple(out.shape)}")
    return out.copy_(values)


def dequantize_operand(op: recipes.Operand, dtype: torch.dtype, apply_global: bool = True) -> torch.Tensor:
    """Values of an operand in its own orientation (..., rows, K)."""
    shape = op.shape
    rows, cols = (shape[-2], shape[-1]) if len(shape) >= 2 else (1, shape[0] if shape else 1)
    global_scale = op.global_scale if apply_global else None
    sm, g = op.block
    batches = 1
    for n in shape[:-2]:
        batches *= n
    per_matrix = batches > 1 and (
        (sm > 1 and rows % sm != 0) or (global_scale is not None and global_scale.numel() > 1)
    )
    if per_matrix:
        return _per_matrix(op, dtype, apply_global, batches).reshape(shape)
    codes = op.codes.reshape(batches * rows, op.codes.shape[-1] if op.codes.ndim else 1)
    scale, zero = op.scale, op.zero_point
    if scale.numel() == 1:
        sm, g, scale = 0, 0, scale.reshape(1, 1)
    else:
        scale = scale.flatten(0, -2) if scale.ndim > 2 else scale
    if zero is not None:
        zero = zero.reshape(scale.shape).contiguous()
        scale = scale.contiguous()
        zero = zero.view(torch.int8) if op.element == "int8" else zero
    values = dequantize_2d(
        codes, scale, op.element, op.sfmt, (batches * rows, cols), (sm, g), op.packed, dtype, zero, global_scale
    )
    return values.reshape(shape)


def _per_matrix(op: recipes.Operand, dtype: torch.dtype, apply_global: bool, batches: int) -> torch.Tensor:
    rows, cols = op.shape[-2:]
    codes = op.codes.flatten(0, -3)
    scale = op.scale.flatten(0, -3)
    globals_ = op.global_scale.reshape(-1) if op.global_scale is not None and apply_global else None
    out = torch.empty((batches, rows, cols), dtype=dtype, device=codes.device)
    for i in range(batches):
        part = None if globals_ is None else globals_[i if globals_.numel() > 1 else 0]
        out[i] = dequantize_2d(
            codes[i], scale[i], op.element, op.sfmt, (rows, cols), op.block, op.packed, dtype, None, part
        )
    return out


def requantize(scaled: ScaledTensor, recipe: Any) -> ScaledTensor:
    """`breccia.requantize`. Its lossless scales are the core's to find: the bytes travel to the CPU and back."""
    if scaled.recipe == recipe and scaled.layout == recipe.layout:
        return scaled
    from breccia.ops import requantize as on_core

    return _to_device(on_core(_to_device(scaled, "cpu"), recipe), scaled.data.device)


def _check(x: torch.Tensor, recipe: Any, plan: recipes.Plan) -> None:
    """The core's own errors, before any launch: it validates an empty tensor of the same trailing shape."""
    bad_dtype = x.dtype not in FLOATS.values()
    width = plan.block[1] or 1
    short = plan.kind in ("block", "nvfp4") and (x.ndim < 2 or (plan.block[0] == 1 and x.shape[-1] % width))
    if bad_dtype or short or (x.ndim == 0 and plan.kind == "row"):
        _through_core(x, recipe)
        raise TypeError(f"x of dtype {x.dtype} and shape {tuple(x.shape)} does not suit the recipe")


def _through_core(x: torch.Tensor, recipe: Any) -> ScaledTensor:
    from breccia.ops import cast as on_core

    return _to_device(on_core(x.cpu(), recipe), x.device)


def _to_device(scaled: ScaledTensor, device: Any) -> ScaledTensor:
    def move(t: Any) -> Any:
        return None if t is None else t.to(device)

    return ScaledTensor(
        move(scaled.data),
        move(scaled.scale),
        scaled.recipe,
        scaled.layout,
        move(scaled.zero_point),
        global_scale=move(scaled.global_scale),
        shape=scaled.shape,
        original_dtype=scaled.original_dtype,
    )


def _wrap(
    codes: torch.Tensor,
    scale: torch.Tensor,
    recipe: Any,
    layout: Any,
    zero: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    shape: tuple[int, ...],
    original: str,
) -> ScaledTensor:
    from breccia import recipes as public

    native = frameworks.of(codes).native
    packed = codes.shape != shape
    data = native(codes, recipe.element + ("_x2" if packed else ""))
    scale_format = public.scale_format(recipe)
    scale = scale if scale_format is None else native(scale, scale_format)
    return ScaledTensor(
        data, scale, recipe, layout, zero, global_scale=global_scale, shape=shape, original_dtype=original
    )


__all__ = ["cast", "dequantize", "dequantize_operand", "float_dtype", "requantize"]
