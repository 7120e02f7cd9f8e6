# SPDX-License-Identifier: Apache-2.0
"""The verbs on CUDA tensors: cast, dequantize and requantize, equal to the portable core byte for byte, without
synchronizing but for requantize to NVFP4, which looks at some values first.

What no kernel does (blocks that are not powers of two, a search over tiles or whole rows, NVFP4 with a divisor) are
whole-array operations of torch on the same device (`breccia.kernels.whole_array`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from breccia import _core, frameworks
from breccia.frameworks.torch import tensors
from breccia.frameworks.torch.meta import flatten
from breccia.kernels.triton import recipes
from breccia.kernels.triton.casts import cast_block, cast_fused, cast_nvfp4, cast_tensor
from breccia.kernels.triton.casts.cast_both import cast_transpose_parts
from breccia.kernels.triton.casts.cast_search import cast_search
from breccia.kernels.triton.conversions import transpose as turning
from breccia.kernels.triton.conversions.conversion import requantize as fused_requantize
from breccia.kernels.triton.conversions.dequant import dequantize as dequantize_2d
from breccia.kernels.triton.device.elements import BY_FORMAT, ELEMENTS
from breccia.kernels.triton.products.turn_scales import scales_along_rows
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import along_rows, empty_along_rows
from breccia.kernels.triton.turn import contiguous_rows
from breccia.recipes import _spec, scale_format
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs.cast_options import CastOptions


def cast(x: torch.Tensor, recipe: Any) -> ScaledTensor:
    """`breccia.cast` of a CUDA tensor."""
    if x.dtype not in tensors.FLOATS:
        raise TypeError(f"x must be a float32, float64, float16 or bfloat16 tensor, got {x.dtype}")
    return tensors.parts_to_tensor(cast_parts(x, recipe), x.shape, recipe, tensors.dtype_name(x))


def takes_amax(recipe: Any) -> bool:
    """Whether `cast_parts` takes the largest magnitude of a larger tensor: FP8 of one scale, NVFP4 of two levels."""
    plan = recipes.plan(recipe)
    return (plan.kind == "tensor" and ELEMENTS[plan.element].has_nan) or (plan.kind == "nvfp4" and plan.two_level)


def cast_parts(x: torch.Tensor, recipe: Any, amax: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The data and scale of `cast` and, where the recipe has them, zero point and global scale. `amax`, where
    `takes_amax`: one float32 on x's device. The core refuses a shape that does not suit the recipe before any
    launch."""
    shapes = _core.plan_cast(list(x.shape), _spec(recipe))
    if x.numel() == 0 and amax is None:
        empty = torch.empty(x.shape, dtype=x.dtype)
        return [part.to(x.device) for part in flatten(tensors.cast_here(empty, recipe))[0]]
    x = x.detach()
    x = x.float() if x.dtype == torch.float64 else x
    plan = recipes.plan(recipe)
    ragged = plan.block[0] > 1 and x.ndim > 2 and x.shape[-2] % plan.block[0]  # tiles would run into the next matrix
    if plan.kind == "core" or ragged:
        return tensors.whole_array_cast(x, recipe, CastOptions(amax=amax))
    flat = x.flatten(0, -2) if x.ndim >= 2 else x.reshape(1, -1)
    parts = _flat_parts(flat, plan, amax)
    if _along_rows(plan):
        parts[1] = scales_along_rows(parts[1]).T  # a copy where x is a transposed view
    return _native(parts, shapes, recipe)


def fuses(x: torch.Tensor, recipe: Any) -> bool:
    """Whether one kernel makes values like x and casts them."""
    return x.numel() > 0 and x.dtype != torch.float64 and cast_fused.takes(recipes.plan(recipe), x.shape[-1])


def silu_mul_parts(gate: torch.Tensor, up: torch.Tensor, recipe: Any) -> list[torch.Tensor]:
    """`cast_parts` of silu(gate) * up in one kernel, for a gate and a recipe that `fuses` names."""
    plan, shapes = recipes.plan(recipe), _core.plan_cast(list(gate.shape), _spec(recipe))
    return _native(cast_fused.silu_mul(_rows(gate), _rows(up), plan), shapes, recipe)


def rms_norm_parts(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, recipe: Any
) -> list[torch.Tensor]:
    """`cast_parts` of the RMS norm of x, or of x + residual, which is then the last result; in one kernel, for an x
    and a recipe that `fuses` names."""
    plan, shapes = recipes.plan(recipe), _core.plan_cast(list(x.shape), _spec(recipe))
    made = cast_fused.rms_norm(_rows(x), None if residual is None else _rows(residual), weight, eps, plan)
    return _native(made[:2], shapes, recipe) + [total.reshape(x.shape) for total in made[2:]]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return contiguous_rows(x.detach().flatten(0, -2))


def _along_rows(plan: recipes.Plan) -> bool:
    return plan.kind == "block" and along_rows(plan)


def scale_strides(scale: list[int], recipe: Any) -> tuple[int, ...] | None:
    """Strides of the scales of that shape that `cast` makes; None where they are contiguous."""
    if 0 in scale or not _along_rows(recipes.plan(recipe)):
        return None
    rows = math.prod(scale[:-1])
    return tuple(empty_along_rows(rows, scale[-1], "meta").reshape(scale).stride())


def cast_transpose(x: torch.Tensor, recipe: Any) -> tuple[ScaledTensor, ScaledTensor]:
    """``cast(x, recipe)`` and ``cast(x.T, recipe)`` of a CUDA matrix, byte for byte, in one read of x where blocks are
    of at most 128 (FP8 blocks and tiles, MX, NVFP4, INT4, INT8).

    Raises:
        ValueError: x is not 2-D, or one of its axes does not suit the recipe.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be 2-D, got shape {tuple(x.shape)}")
    plans = [_core.plan_cast(list(shape), _spec(recipe)) for shape in (x.shape, x.T.shape)]
    plan = recipes.plan(recipe)
    fits = x.numel() and x.dtype != torch.float64 and plan.kind != "core"
    made = cast_transpose_parts(x.detach(), plan) if fits else None
    if made is None:
        return cast(x, recipe), cast(x.T, recipe)
    name = tensors.dtype_name(x)
    one, other = (
        tensors.parts_to_tensor(_native(parts, shapes, recipe), shape, recipe, name)
        for parts, shapes, shape in zip(made, plans, (x.shape, x.T.shape), strict=True)
    )
    return one, other


def _flat_parts(x: torch.Tensor, plan: recipes.Plan, amax: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Codes, scales and, where there are any, zero points and the global scale of a 2-D tensor."""
    if plan.kind == "tensor":
        return list(cast_tensor.cast_tensor(x, plan.element, plan.rule, plan.margin, amax=amax))
    if plan.kind == "row":
        return list(cast_tensor.cast_row(x, plan))
    if plan.kind == "search":
        return cast_search(x, plan)
    if plan.kind == "nvfp4":
        codes, scale, global_scale = cast_nvfp4.cast_nvfp4(x, plan.two_level, plan.rule, amax=amax)
        return [codes, scale] if global_scale is None else [codes, scale, global_scale]
    return list(cast_block.cast_block(x, plan))


def _native(parts: list[torch.Tensor], shapes: Any, recipe: Any) -> list[torch.Tensor]:
    """The parts in the shapes of the core's plan and torch's own dtypes."""
    codes, scale = parts[0].reshape(shapes["data"][0]), parts[1].reshape(shapes["scale"][0])
    fmt = scale_format(recipe)
    scale = scale if fmt is None else scale.view(tensors.NATIVE[fmt])
    made = [codes.view(tensors.data_dtype(recipe.element)), scale]
    if shapes["zero_point"] is not None:
        shape, dtype = shapes["zero_point"]
        return [*made, parts[2].reshape(shape).view(tensors.DTYPES[dtype])]
    return made + [part.reshape(shapes["global_scale"][0]) for part in parts[2:]]


def dequantize(scaled: ScaledTensor, dtype: Any = "float32", out: torch.Tensor | None = None) -> torch.Tensor:
    """`breccia.dequantize` of a CUDA ScaledTensor."""
    target = tensors.float_dtype(dtype if out is None else out.dtype)
    made = torch.float32 if target == torch.float64 else target
    if recipes.decodes(scaled):
        op = recipes.operand(scaled)
        values = dequantize_operand(op, made)
        values = values.transpose(-1, -2) if op.transposed else values
    else:
        values = tensors.whole_array_dequantize(scaled, made)
    values = values if target == made else values.to(target)
    if out is None:
        return values
    if out.shape != values.shape:
        raise ValueError(f"out must have shape {tuple(values.shape)}, got {tuple(out.shape)}")
    return out.copy_(values)


def dequantize_operand(op: recipes.Operand, dtype: torch.dtype, apply_global: bool = True) -> torch.Tensor:
    """Values of an operand in its own orientation (..., rows, K)."""
    if _per_matrix_scales(op, apply_global):
        return _per_matrix(op, dtype, apply_global).reshape(op.shape)
    flat = _flat(op)
    return dequantize_2d(flat if apply_global else replace(flat, global_scale=None), dtype).reshape(op.shape)


def source_of(op: recipes.Operand) -> Source | None:
    """An operand as one matrix, None where the scales of its matrices keep it from being one."""
    return None if _per_matrix_scales(op) else _flat(op)


def _matrices(op: recipes.Operand) -> tuple[int, int, int]:
    """How many, and their rows and columns."""
    shape = op.shape
    rows, cols = (shape[-2], shape[-1]) if len(shape) >= 2 else (1, shape[0] if shape else 1)
    return math.prod(shape[:-2]), rows, cols


def _per_matrix_scales(op: recipes.Operand, apply_global: bool = True) -> bool:
    """Whether matrices on top of each other are not one matrix: tiles would run into the next, or each has a global
    scale."""
    batches, rows, _ = _matrices(op)
    globals_ = op.global_scale if apply_global else None
    sm = op.block[0]
    return batches > 1 and ((sm > 1 and rows % sm != 0) or (globals_ is not None and globals_.numel() > 1))


def _flat(op: recipes.Operand) -> Source:
    """All matrices as one."""
    batches, rows, cols = _matrices(op)
    codes = op.codes.reshape(batches * rows, op.codes.shape[-1] if op.codes.ndim else 1)
    scale, zero, block = op.scale, op.zero_point, op.block
    if scale.numel() == 1:
        block, scale = (0, 0), scale.reshape(1, 1)
    elif scale.ndim > 2:
        scale = scale.flatten(0, -2)
    if op.sfmt != "float":
        scale = scale.view(torch.uint8)
    if zero is not None:
        zero = zero.reshape(scale.shape).contiguous()
        scale = scale.contiguous()
        zero = zero.view(torch.int8) if op.element == "int8" else zero
    shape = (batches * rows, cols)
    return Source(codes, scale, op.element, op.sfmt, shape, block, op.packed, zero, op.global_scale)


def _per_matrix(op: recipes.Operand, dtype: torch.dtype, apply_global: bool) -> torch.Tensor:
    batches, rows, cols = _matrices(op)
    codes = op.codes.flatten(0, -3)
    scale = op.scale.flatten(0, -3)
    globals_ = op.global_scale.reshape(-1) if op.global_scale is not None and apply_global else None
    out = torch.empty((batches, rows, cols), dtype=dtype, device=codes.device)
    for i in range(batches):
        part = None if globals_ is None else globals_[i if globals_.numel() > 1 else 0]
        matrix = Source(codes[i], scale[i], op.element, op.sfmt, (rows, cols), op.block, op.packed, global_scale=part)
        out[i] = dequantize_2d(matrix, dtype)
    return out


def requantize(scaled: ScaledTensor, recipe: Any) -> ScaledTensor:
    """`breccia.requantize` of a CUDA ScaledTensor."""
    if scaled.recipe == recipe and scaled.layout == recipe.layout:
        return scaled
    return frameworks.of(scaled.data).requantize(scaled, recipe)


def requantize_parts(scaled: ScaledTensor, recipe: Any) -> list[torch.Tensor]:
    """The outputs of `requantize`: from registers to registers where the kernel finds every scale that loses nothing,
    else as whole-array operations."""
    shapes = _core.plan_cast(list(scaled.shape), _spec(recipe))
    if 0 in scaled.shape:
        return [part.contiguous() for part in cast_parts(dequantize(scaled).contiguous(), recipe)]
    if not recipes.decodes(scaled):
        return tensors.whole_array_requantize(scaled, recipe)
    plan, op = recipes.plan(recipe), recipes.operand(scaled)
    batches, rows, _ = _matrices(op)
    tiled = plan.kind == "block" and not (batches > 1 and rows % max(1, plan.block[0]))
    finds_all = tiled and recipes.finds_exact_scales(scaled.recipe, scaled.layout, recipe)
    upright = not op.transposed and not _per_matrix_scales(op)
    if upright and finds_all:
        return _native(fused_requantize(_flat(op), plan), shapes, recipe)
    return tensors.whole_array_requantize(scaled, recipe)


def transpose(scaled: ScaledTensor, group: int) -> tuple[ScaledTensor, int, int] | None:
    """`breccia.transpose` of a CUDA ScaledTensor with blocks of `group`, and its counts, which it waits for; None where
    no kernel does it.
    """
    row = BY_FORMAT.get(scaled.recipe.element)
    rows, columns = scaled.shape
    if row is None or not turning.takes(row, group) or rows % group:
        return None  # the core refuses what does not suit
    codes, scale = contiguous_rows(scaled.data.view(torch.uint8)), scaled.scale.view(torch.uint8)
    if not row.has_nan and bool((scale == 255).any()):
        return None
    made = turning.transpose(codes, scale, row.name, group)
    parts = [
        made.codes.view(tensors.data_dtype(scaled.recipe.element)),
        made.scale.view(tensors.NATIVE["float8_e8m0fnu"]),
    ]
    counts = [0, 0] if made.counts is None else made.counts.tolist()
    turned = tensors.parts_to_tensor(parts, (columns, rows), scaled.recipe, scaled.original_dtype)
    return turned, counts[0], counts[1]
