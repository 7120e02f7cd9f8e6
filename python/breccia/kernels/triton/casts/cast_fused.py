# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Casts of what comes before a linear layer, from its inputs: an RMS norm and SwiGLU's product. The values between, in
the inputs' dtype, never reach memory.

The bytes are those of a cast of these values, which are rounded where torch rounds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from breccia.kernels.triton.casts.cast_block import cast_tile
from breccia.kernels.triton.casts.cast_nvfp4 import nvfp4_tile
from breccia.kernels.triton.device.codecs import HW
from breccia.kernels.triton.device.elements import ELEMENTS, Form
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import empty_parts, launch

MAX_ROW = 16384  # columns that one tile holds, where a scale belongs to a whole row


@triton.jit
def codes_and_scales(
    y, code_ptr, scale_ptr, m0, k0, M, K, s_row, s_col,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Casts the tile [BM, BK] of values y at (m0, k0)."""
    if FORM.scale == "e4m3":
        nvfp4_tile(y, code_ptr, scale_ptr, code_ptr, m0, k0, M, K, "single", BM, BK)
    else:
        cast_tile(y, y, code_ptr, scale_ptr, y, m0, k0, M, K, s_row, s_col, FORM, BM, BK, False)


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
    codes_and_scales(y, code_ptr, scale_ptr, m0, k0, M, K, s_row, s_col, FORM, BM, BK)


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
        codes_and_scales(y, code_ptr, scale_ptr, m0, k0, M, K, s_row, s_col, FORM, BM, BK)


def takes(plan: Plan, columns: int) -> bool:
    """Whether a scale follows from a piece of one row that a tile holds."""
    if plan.kind == "row":
        return plan.rule == "divide" and 0 < columns <= MAX_ROW
    one_level = plan.kind == "nvfp4" and not plan.two_level
    return one_level or (plan.kind == "block" and plan.block[0] == 1)


def _form(plan: Plan, columns: int) -> Form:
    if plan.kind == "row":
        return Form(ELEMENTS[plan.element], rule=plan.rule, rows=1, cols=max(16, triton.next_power_of_2(columns)))
    scale = "e4m3" if plan.kind == "nvfp4" else "float" if plan.rule == "divide" else "e8m0"
    return Form(ELEMENTS[plan.element], scale, plan.rule, 1, plan.block[1], plan.packed)


def _results(plan: Plan, rows: int, columns: int, device: Any) -> list[torch.Tensor]:
    """Memory for codes and scales, laid out as `cast_block` and `cast_nvfp4` do."""
    whole = replace(plan, block=(1, columns)) if plan.kind == "row" else plan
    return list(empty_parts((rows, columns), whole, device, along=plan.kind == "block"))


def silu_mul(gate: torch.Tensor, up: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """Codes and scales of silu(gate) * up, two matrices of unit stride along their rows, for a plan that `takes`
    them."""
    rows, columns = gate.shape
    codes, scales = _results(plan, rows, columns, gate.device)
    form = _form(plan, columns)
    wide = max(form.cols, min(512, max(32, triton.next_power_of_2(columns))))
    high = max(1, 1024 // wide)
    k_tiles = triton.cdiv(columns, wide)
    launch(
        silu_mul_kernel, (triton.cdiv(rows, high) * k_tiles,), gate, up, codes, scales, rows, columns,
        gate.stride(0), up.stride(0), *scales.stride(), k_tiles, FORM=form, BM=high, BK=wide,
        num_warps=_warps(high * wide),
    )  # fmt: skip
    return [codes, scales]


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, plan: Plan
) -> list[torch.Tensor]:
    """Codes and scales of weight * x / sqrt(mean(x²) + eps), rows of unit stride, for a plan that `takes` them. With
    a residual x + residual stands for x and is the third result."""
    rows, columns = x.shape
    codes, scales = _results(plan, rows, columns, x.device)
    total = None if residual is None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    form = _form(plan, columns)
    wide = max(form.cols, min(4096, max(32, triton.next_power_of_2(columns))))
    high = max(1, 1024 // wide)
    launch(
        rms_norm_kernel, (triton.cdiv(rows, high),), x, x if residual is None else residual,
        x if total is None else total, weight, codes, scales, rows, columns, x.stride(0),
        0 if residual is None else residual.stride(0), *scales.stride(), eps, ADD=residual is not None,
        FORM=form, BM=high, BK=wide, num_warps=_warps(high * wide),
    )  # fmt: skip
    return [codes, scales] if total is None else [codes, scales, total]


def _warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 32
