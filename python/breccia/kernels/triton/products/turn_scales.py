# SPDX-License-Identifier: Apache-2.0
"""Scales of 1 x 128 activations as FP8 products read them: the one of row m and block k at [k, m]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.runtime import launch


def scales_along_rows(scale: torch.Tensor) -> torch.Tensor:
    """(rows, K blocks) scales as (K blocks, rows) with aligned rows: what the copy engine reads. Free if stored that
    way."""
    s = scale.T
    if (
        s.dtype == torch.float32
        and s.stride(1) == 1
        and s.stride(0) % 4 == 0
        and s.data_ptr() % 16 == 0
        and s.shape[0] > 0
    ):
        return s
    blocks, rows = s.shape
    turned = torch.empty((blocks, -(-rows // 4) * 4), dtype=torch.float32, device=s.device)[:, :rows]
    grid = (triton.cdiv(rows, 64), triton.cdiv(blocks, 32))
    launch(turn_kernel, grid, s, s, turned, rows, blocks, *s.stride(), turned.stride(0), BR=64, BC=32, num_warps=4)
    return turned


def scales_along_blocks(scale: torch.Tensor) -> torch.Tensor:
    """(rows, K blocks) scales with unit stride along K: what kernels of weights read. Free if stored that way."""
    if scale.ndim != 2 or scale.stride(-1) == 1 or scale.dtype != torch.float32:
        return scale if scale.stride(-1) == 1 else scale.contiguous()
    rows, blocks = scale.shape
    out = torch.empty((rows, blocks), dtype=torch.float32, device=scale.device)
    grid = (triton.cdiv(blocks, 64), triton.cdiv(rows, 32))
    launch(turn_kernel, grid, scale, scale, out, blocks, rows, *scale.stride(), blocks, BR=64, BC=32, num_warps=4)
    return out


@triton.jit
def turn_kernel(x_ptr, out_ptr, rows, blocks, x_col, x_row, out_stride, BR: tl.constexpr, BC: tl.constexpr):
    """out[block, row] = x[row, block], in float32."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    block = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (block < blocks)[:, None] & (row < rows)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[None, :] * x_row + block.to(tl.int64)[:, None] * x_col, mask=inside)
    tl.store(out_ptr + block.to(tl.int64)[:, None] * out_stride + row[None, :], x.to(tl.float32), mask=inside)
