# SPDX-License-Identifier: Apache-2.0
"""Products of two quantized matrices whose elements no tensor core multiplies as they are: what their codes become.

Codes of at most 8 bits are exact in bfloat16, and so are those of MX and NVFP4 times the scales of their blocks. Scales
that are floats, and the global one of NVFP4, multiply sums in float32 instead: nothing is rounded but the sum.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton import recipes
from breccia.kernels.triton.conversions.dequant import dequantize as dequantize_2d
from breccia.kernels.triton.ops import dequantize_operand
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import constant, launch, overlaps

# By the block of a float scale (rows, elements of K), which `dense_matmul` takes.
_SCALES = {(0, 0): "whole", (1, 0): "whole", (1, 128): "block", (128, 128): "block"}
_INTEGERS = ("int8", "int4", "uint4")
MAX_DEPTH = 2**31 // 255**2  # of sums of products of two differences of int8, in int32


@cache
def one(index: int | None) -> torch.Tensor:
    """The scale of what has none."""
    device = "cpu" if index is None else f"cuda:{index}"
    return constant(lambda: torch.ones((1, 1), dtype=torch.float32, device=device))


def scale_of(op: recipes.Operand) -> str | None:
    """What is left of an operand's scales where its codes are bfloat16: "whole", a number for all or one per row,
    "block", one per 128 of K, or None, where some would have to be rounded."""
    if op.global_scale is not None and op.global_scale.numel() != 1:
        return None
    if op.sfmt != "float":
        return "whole" if op.element != "int8" and op.zero_point is None else None
    if op.zero_point is not None or op.global_scale is not None:
        return None
    block = op.block if op.scale.numel() > 1 else (0, 0)
    if block[0] == 1 and op.scale.numel() != op.scale.shape[-1] * _rows(op):
        return None  # one per column
    tiles = block[0] == 128 and len(op.shape) > 2  # which would run into the next matrix
    return None if tiles else _SCALES.get(block)


def is_exact(op: recipes.Operand) -> bool:
    """Whether an operand is bfloat16 values and at most a number for all of them."""
    return op.sfmt != "float" and scale_of(op) is not None


def _rows(op: recipes.Operand) -> int:
    return math.prod(op.shape[:-1])


def halves(op: recipes.Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, K) bfloat16 and the float32 scales left, (1, 1), (rows, 1) or by blocks, for what has a `scale_of`."""
    rows, k = _rows(op), op.shape[-1]
    unit = one(op.codes.device.index)
    if op.sfmt != "float":
        values = dequantize_operand(op, torch.bfloat16, apply_global=False).reshape(rows, k)
        return values, unit if op.global_scale is None else op.global_scale.reshape(1, 1)
    codes = op.codes.reshape(rows, op.codes.shape[-1])
    ones, block = (unit.expand(rows, k // 128), (1, 128)) if k % 128 == 0 else (unit, (0, 0))
    plain = Source(codes, ones, op.element, "float", (rows, k), block, op.packed)
    return dequantize_2d(plain, torch.bfloat16), flat_scale(op)


def flat_scale(op: recipes.Operand) -> torch.Tensor:
    """An operand's scales with two axes."""
    return op.scale.reshape(1, 1) if op.scale.numel() == 1 else op.scale.flatten(0, -2)


def by_blocks(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """Scales of `dense_matmul` with block=True, from those or from a number for all or one per row."""
    blocks = -(-k // 128)
    return scale.expand(rows, blocks) if scale.shape[1] == 1 and scale.shape[0] in (1, rows) else scale


def rows_by_weight(x: recipes.Operand, w: recipes.Operand) -> tuple[torch.Tensor, recipes.Operand]:
    """x as bfloat16 rows, and w. Global scales of x go to w's; scales that are floats round x once."""
    rows, k = _rows(x), x.shape[-1]
    if x.sfmt == "float" or x.global_scale is None or x.global_scale.numel() != 1:
        return dequantize_operand(x, torch.bfloat16).reshape(rows, k), w
    values = dequantize_operand(x, torch.bfloat16, apply_global=False).reshape(rows, k)
    level = x.global_scale.reshape(1)
    return values, replace(w, global_scale=level if w.global_scale is None else multiplied(level, w.global_scale))


def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of two float32 numbers on a device: a launch, which plans repeat."""
    out = torch.empty(1, dtype=torch.float32, device=a.device)
    early = overlaps(a.device)
    launch(multiply_kernel, (1,), a, b, out, EARLY=early, num_warps=1, **({"launch_pdl": True} if early else {}))
    return out


@triton.jit
def multiply_kernel(a_ptr, b_ptr, out_ptr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out_ptr, tl.load(a_ptr) * tl.load(b_ptr))


def for_each(level: torch.Tensor, count: int) -> torch.Tensor:
    """A number for each of `count` matrices, of one for all or already so."""
    level = level.reshape(-1)
    if level.numel() == count:
        return level
    out = torch.empty(count, dtype=level.dtype, device=level.device)
    launch(spread_kernel, (triton.cdiv(count, 128),), level, out, count, N=128, num_warps=1)
    return out


@triton.jit
def spread_kernel(a_ptr, out_ptr, count, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + at, tl.zeros([N], out_ptr.dtype.element_ty) + tl.load(a_ptr), mask=at < count)


def is_integer(op: recipes.Operand) -> bool:
    """Whether `integers` takes an operand."""
    if op.element not in _INTEGERS or op.sfmt != "float" or op.global_scale is not None or len(op.shape) < 2:
        return False
    plain = replace(op, zero_point=None) if op.element != "int8" else op
    return scale_of(plain) is not None and op.codes.stride(-1) == 1


def is_whole_integer(op: recipes.Operand) -> bool:
    """Whether an operand is INT8 with a scale, and perhaps a zero point, for all or one per row."""
    block = op.block if op.scale.numel() > 1 else (0, 0)
    per_row = block == (1, 0) and op.scale.numel() == _rows(op)
    return op.element == "int8" and op.sfmt == "float" and (block == (0, 0) or per_row)


def integers(op: recipes.Operand) -> torch.Tensor:
    """(rows, K) int8: the codes of `is_integer`, less the zero points of 4 bits."""
    codes = op.codes.reshape(_rows(op), op.codes.shape[-1])
    if not op.packed:
        return codes.view(torch.int8)
    zero = None if op.zero_point is None else op.zero_point.reshape(flat_scale(op).shape)
    return unpacked(codes, op.shape[-1], op.element == "int4", zero, op.block[1])


def unpacked(
    codes: torch.Tensor, k: int, signed: bool, zero: torch.Tensor | None = None, group: int = 0
) -> torch.Tensor:
    """int8 (rows, k) from two 4-bit codes a byte, less the zero point of each group of K, one byte each."""
    rows = codes.shape[0]
    out = torch.empty((rows, k), dtype=torch.int8, device=codes.device)
    if out.numel() == 0:
        return out
    width = min(2048, triton.next_power_of_2(codes.shape[1]))
    launch(
        unpack_kernel,
        (rows, triton.cdiv(codes.shape[1], width)),
        codes,
        codes if zero is None else zero,
        out,
        k,
        codes.stride(0),
        *((0, 0) if zero is None else zero.stride()),
        SIGNED=signed,
        ZERO=zero is not None,
        G=max(2, group if group else k),
        W=width,
        num_warps=4 if width >= 128 else 1,
    )
    return out


@triton.jit
def unpack_kernel(
    code_ptr, zero_ptr, out_ptr, K, stride, z_row, z_col, SIGNED: tl.constexpr, ZERO: tl.constexpr, G: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * W + tl.arange(0, W)
    byte = tl.load(code_ptr + row * stride + at, mask=2 * at < K, other=0).to(tl.int32)
    low, high = byte & 0xF, byte >> 4
    if SIGNED:
        low, high = (low ^ 8) - 8, (high ^ 8) - 8
    if ZERO:
        zero = tl.load(zero_ptr + row * z_row + 2 * at // G * z_col, mask=2 * at < K, other=0).to(tl.int32)
        low, high = low - zero, high - zero
    out = tl.reshape(tl.join(low, high), [2 * W])
    cols = tl.program_id(1) * 2 * W + tl.arange(0, 2 * W)
    tl.store(out_ptr + row * K + cols, out.to(tl.int8), mask=cols < K)


def zeros_of(op: recipes.Operand) -> Any:
    """int8 zero points of an INT8 operand, one per row, or None."""
    return None if op.zero_point is None else op.zero_point.reshape(-1).view(torch.int8).expand(_rows(op))
