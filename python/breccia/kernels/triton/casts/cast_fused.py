# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Casts of what comes before a linear layer, from its inputs: an RMS norm and SwiGLU's product. The values between, in
the inputs' dtype, never reach memory.

The bytes are those of a cast of these values, which are rounded where torch rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from breccia.kernels.triton.casts.cast_block import cast_tile
from breccia.kernels.triton.device.codecs import HW
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import empty_parts, launch, launch_tiles


@triton.jit
def silu_mul_kernel(
    gate_ptr, up_ptr, code_ptr, scale_ptr, M, K, gate_stride, up_stride, s_row, s_col, k_tiles,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of silu(gate) * up, each rounded to the inputs' dtype."""
    m0 = (tl.program_id(0) // k_tiles) * BM
    k0 = (tl.program_id(0) % k_tiles) * BK
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    gate = tl.load(gate_ptr + rows.to(tl.int64)[:, None] * gate_stride + cols[None, :], mask=inside, other=0)
    up = tl.load(up_ptr + rows.to(tl.int64)[:, None] * up_stride + cols[None, :], mask=inside, other=0)
    x = gate.to(tl.float32)
    silu = tl.div_rn(x, 1.0 + exponential(-x)).to(gate.dtype)
    y = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    cast_tile(y, None, (code_ptr, scale_ptr, s_row, s_col), (m0, k0, M, K), None, FORM, BM, BK)


@triton.jit
def exponential(x):
    """exp as CUDA's math library has it, and so torch."""
    if HW:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, sum_ptr, weight_ptr, code_ptr, scale_ptr, M, K, x_stride, residual_stride, s_row, s_col, eps,
    ADD: tl.constexpr,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows, read twice: for the sum of their squares, then tile by tile. ADD: of x + residual, which sum_ptr
    gets."""
    m0 = tl.program_id(0) * BM
    rows = (m0 + tl.arange(0, BM)).to(tl.int64)[:, None]
    live = rows < M
    squares = tl.zeros([BM, BK], tl.float32)
    for k0 in range(0, K, BK):
        cols = (k0 + tl.arange(0, BK))[None, :]
        inside = live & (cols < K)
        v = tl.load(x_ptr + rows * x_stride + cols, mask=inside, other=0)
        if ADD:
            r = tl.load(residual_ptr + rows * residual_stride + cols, mask=inside, other=0)
            v = (v.to(tl.float32) + r.to(tl.float32)).to(v.dtype)
            tl.store(sum_ptr + rows * K + cols, v, mask=inside)
        squares += v.to(tl.float32) * v.to(tl.float32)
    total = tl.sum(squares, axis=1, keep_dims=True)
    factor = tl.rsqrt(tl.div_rn(total, tl.zeros([BM, 1], tl.float32) + K) + eps)
    if ADD:
        tl.debug_barrier()  # the program reads the sums again
    for k0 in range(0, K, BK):
        cols = (k0 + tl.arange(0, BK))[None, :]
        inside = live & (cols < K)
        if ADD:
            v = tl.load(sum_ptr + rows * K + cols, mask=inside, other=0)
        else:
            v = tl.load(x_ptr + rows * x_stride + cols, mask=inside, other=0)
        w = tl.load(weight_ptr + cols, mask=cols < K, other=0).to(tl.float32)
        y = (w * (factor * v.to(tl.float32))).to(v.dtype)
        cast_tile(y, None, (code_ptr, scale_ptr, s_row, s_col), (m0, k0, M, K), None, FORM, BM, BK)


def takes(plan: Plan, columns: int) -> bool:
    """Whether a scale follows from a piece of one row that a tile holds."""
    if plan.kind == "row":
        return plan.fits_rows(columns)
    one_level = plan.kind == "nvfp4" and not plan.two_level
    return one_level or (plan.kind == "block" and plan.block[0] == 1)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """Codes and scales of silu(gate) * up, two matrices of unit stride along their rows, for a plan that `takes`
    them."""
    plan = plan.over_rows(gate.shape[1])
    codes, scales = empty_parts(gate.shape, plan, gate.device, along=plan.kind == "block")
    wide = max(plan.block[1], min(512, max(32, triton.next_power_of_2(gate.shape[1]))))
    high = max(1, 1024 // wide)
    launch_tiles(
        silu_mul_kernel, (gate, up, codes, scales), gate.shape,
        (gate.stride(0), up.stride(0), *scales.stride()), (high, wide),
        FORM=plan.form, BM=high, BK=wide, num_warps=_warps(high * wide),
    )  # fmt: skip
    return [codes, scales]


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plan: Plan
) -> list[torch.Tensor]:
    """Codes and scales of weight * x / sqrt(mean(x²) + eps), rows of unit stride, for a plan that `takes` them. With
    a residual x + residual stands for x and is the third result."""
    rows, columns = x.shape
    plan = plan.over_rows(columns)
    codes, scales = empty_parts(x.shape, plan, x.device, along=plan.kind == "block")
    total = None if residual is None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    wide = max(plan.block[1], min(4096, max(32, triton.next_power_of_2(columns))))
    high = max(1, 1024 // wide)
    launch(
        rms_norm_kernel, (triton.cdiv(rows, high),), x, x if residual is None else residual,
        x if total is None else total, weight, codes, scales, rows, columns, x.stride(0),
        0 if residual is None else residual.stride(0), *scales.stride(), eps, ADD=residual is not None,
        FORM=plan.form, BM=high, BK=wide, num_warps=_warps(high * wide),
    )  # fmt: skip
    return [codes, scales] if total is None else [codes, scales, total]


def _warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 32
