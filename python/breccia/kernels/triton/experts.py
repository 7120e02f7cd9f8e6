# SPDX-License-Identifier: Apache-2.0
"""What a layer of experts does between its products, on CUDA: rows of FP8 codes in the order of their experts, SwiGLU
with its cast and its gradient, and the sum of a token's rows. Scales are of 1 × 128 and powers of two.

What these compute is defined by `breccia.nn.expert_products`, whose whole-array forms run elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_block import cast_tile
from breccia.kernels.triton.casts.cast_fused import exponential
from breccia.kernels.triton.device.elements import ELEMENTS, Form
from breccia.kernels.triton.recipes import plan
from breccia.kernels.triton.runtime import launch, launch_tiles

GROUP = tl.constexpr(128)
_ROWS, _WIDE = 16, 1024  # of a tile of codes that only move
_HIGH = 16  # rows of a tile that is cast, which has 128 columns


@triton.jit
def permute_kernel(
    code_ptr, scale_ptr, source_ptr, out_ptr, out_scale_ptr, R, K, code_stride, scale_row, scale_col,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Row r of the result is row source_ptr[r], or zeros where that is negative; its scales lie along rows."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    source = tl.load(source_ptr + rows, mask=rows < R, other=-1).to(tl.int64)
    there = (source >= 0)[:, None]
    code = tl.load(code_ptr + source[:, None] * code_stride + cols[None, :], mask=there & (cols < K)[None, :], other=0)
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], code, mask=(rows < R)[:, None] & (cols < K)[None, :]
    )
    blocks = tl.program_id(1) * (BK // GROUP) + tl.arange(0, BK // GROUP)
    real = (blocks * GROUP < K)[None, :]
    at = source[:, None] * scale_row + blocks.to(tl.int64)[None, :] * scale_col
    scale = tl.load(scale_ptr + at, mask=there & real, other=0)
    to = out_scale_ptr + blocks.to(tl.int64)[None, :] * R + rows[:, None]
    tl.store(to, scale, mask=(rows < R)[:, None] & real)


@triton.jit
def gated(gate, up):
    """silu(gate), its derivative, and up, of float32."""
    g = gate.to(tl.float32)
    s = 1.0 / (1.0 + exponential(-g))
    return g * s, s * (1.0 + g * (1.0 - s)), up.to(tl.float32)


@triton.jit
def swiglu_kernel(
    x_ptr, weight_ptr, code_ptr, scale_ptr, R, K, x_stride, k_tiles, FORM: tl.constexpr, BM: tl.constexpr
):
    """Casts weight · silu(gate) · up, gate and up beside each other in x."""
    m0 = (tl.program_id(0) // k_tiles) * BM
    k0 = (tl.program_id(0) % k_tiles) * GROUP
    rows = m0 + tl.arange(0, BM)
    at = rows.to(tl.int64)[:, None] * x_stride + (k0 + tl.arange(0, GROUP))[None, :]
    live = (rows < R)[:, None]
    silu, _, up = gated(tl.load(x_ptr + at, mask=live, other=0), tl.load(x_ptr + at + K, mask=live, other=0))
    weight = tl.load(weight_ptr + rows, mask=rows < R, other=0)
    y = weight[:, None] * (silu * up)
    cast_tile(y, None, (code_ptr, scale_ptr, 1, R), (m0, k0, R, K), None, FORM, BM, GROUP)


@triton.jit
def swiglu_gradient_kernel(
    x_ptr, weight_ptr, grad_ptr, d_code_ptr, d_scale_ptr, code_ptr, scale_ptr, d_weight_ptr, R, K, x_stride,
    grad_stride, k_tiles, FORM: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Casts the gradients of gate and up beside each other, and again what `swiglu_kernel` did; the gradients of the
    weights, those of each 128 columns by themselves."""
    m0 = (tl.program_id(0) // k_tiles) * BM
    tile = tl.program_id(0) % k_tiles
    k0 = tile * GROUP
    rows = m0 + tl.arange(0, BM)
    live = (rows < R)[:, None]
    weight = tl.load(weight_ptr + rows, mask=rows < R, other=0)[:, None]
    cols = (k0 + tl.arange(0, GROUP))[None, :]
    at = rows.to(tl.int64)[:, None] * x_stride + cols
    silu, slope, up = gated(tl.load(x_ptr + at, mask=live, other=0), tl.load(x_ptr + at + K, mask=live, other=0))
    grad = tl.load(grad_ptr + rows.to(tl.int64)[:, None] * grad_stride + cols, mask=live, other=0).to(tl.float32)
    tl.store(d_weight_ptr + tile.to(tl.int64) * R + rows, tl.sum(grad * (silu * up), 1), mask=rows < R)
    y = weight * (silu * up)
    cast_tile(y, None, (code_ptr, scale_ptr, 1, R), (m0, k0, R, K), None, FORM, BM, GROUP)
    grad = weight * grad
    to = (d_code_ptr, d_scale_ptr, 1, R)
    cast_tile(grad * up * slope, None, to, (m0, k0, R, 2 * K), None, FORM, BM, GROUP)
    cast_tile(grad * silu, None, to, (m0, K + k0, R, 2 * K), None, FORM, BM, GROUP)


@triton.jit
def combine_kernel(y_ptr, place_ptr, out_ptr, K, CHOICES: tl.constexpr, BK: tl.constexpr):
    """Row t of the result is the sum of the rows that place_ptr[t] names, none where negative."""
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BK + tl.arange(0, BK)
    total = tl.zeros([BK], tl.float32)
    for i in tl.static_range(CHOICES):
        row = tl.load(place_ptr + t * CHOICES + i).to(tl.int64)
        total += tl.load(y_ptr + row * K + cols, mask=(row >= 0) & (cols < K), other=0).to(tl.float32)
    tl.store(out_ptr + t * K + cols, total.to(out_ptr.dtype.element_ty), mask=cols < K)


@triton.jit
def turn_stack_kernel(x_ptr, out_ptr, M, N, SIDE: tl.constexpr):
    """out[e, n, m] = x[e, m, n] of bytes."""
    rows = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    cols = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    first = tl.program_id(2).to(tl.int64) * M * N
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + first + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=inside, other=0)
    at = out_ptr + first + cols.to(tl.int64)[:, None] * M + rows[None, :]
    tl.store(at, tl.trans(x), mask=tl.trans(inside))


def permute(codes: torch.Tensor, scale: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    """Rows of codes (T, K) and of their scales (T, K / 128), both bytes, in the order of `source` (R,)."""
    rows, columns = source.shape[0], codes.shape[1]
    out, out_scale = _rows_of_codes(rows, columns, codes.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _WIDE))
    strides = (codes.stride(0), *scale.stride())
    given = (codes, scale, source, out, out_scale, rows, columns, *strides)
    launch(permute_kernel, grid, *given, BM=_ROWS, BK=_WIDE, num_warps=4)
    return [out, out_scale.T]


def swiglu(x: torch.Tensor, weights: torch.Tensor, recipe: Any) -> list[torch.Tensor]:
    """Codes and scales of weights · silu(gate) · up, where x (R, 2 K) is gate and up; K is a multiple of 128."""
    rows, columns = x.shape[0], x.shape[1] // 2
    codes, scale = _rows_of_codes(rows, columns, x.device)
    launch_tiles(
        swiglu_kernel, (x, weights, codes, scale), (rows, columns), (x.stride(0),), (_HIGH, 128),
        FORM=_form(recipe), BM=_HIGH, num_warps=4,
    )  # fmt: skip
    return [codes, scale.T]


def swiglu_gradient(x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, recipe: Any) -> list[torch.Tensor]:
    """Codes and scales of the gradient of x, those of `swiglu`, and the gradient of the weights, that of each 128
    columns by itself (K / 128, R)."""
    rows, columns = x.shape[0], x.shape[1] // 2
    codes, scale = _rows_of_codes(rows, columns, x.device)
    d_codes, d_scale = _rows_of_codes(rows, 2 * columns, x.device)
    d_weights = torch.empty((columns // 128, rows), dtype=torch.float32, device=x.device)
    launch_tiles(
        swiglu_gradient_kernel, (x, weights, grad, d_codes, d_scale, codes, scale, d_weights), (rows, columns),
        (x.stride(0), grad.stride(0)), (_HIGH, 128), FORM=_form(recipe), BM=_HIGH, num_warps=4,
    )  # fmt: skip
    return [d_codes, d_scale.T, codes, scale.T, d_weights]


def combine(y: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """(T, K) sums of the rows of y (R, K) that `place` (T, k) names."""
    tokens, columns = place.shape[0], y.shape[1]
    out = torch.empty((tokens, columns), dtype=y.dtype, device=y.device)
    grid = (tokens, triton.cdiv(columns, _WIDE))
    launch(combine_kernel, grid, y, place, out, columns, CHOICES=place.shape[1], BK=_WIDE, num_warps=4)
    return out


def turn_stack(codes: torch.Tensor) -> torch.Tensor:
    """(E, K, N) of contiguous bytes (E, N, K)."""
    stack, rows, columns = codes.shape
    out = torch.empty((stack, columns, rows), dtype=codes.dtype, device=codes.device)
    grid = (triton.cdiv(rows, 128), triton.cdiv(columns, 128), stack)
    launch(turn_stack_kernel, grid, codes, out, rows, columns, SIDE=128, num_warps=8)
    return out


def _rows_of_codes(rows: int, columns: int, device: Any) -> list[torch.Tensor]:
    """Memory for codes, and for scales along rows."""
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=device)
    return [codes, torch.empty((columns // 128, rows), dtype=torch.uint8, device=device)]


def _form(recipe: Any) -> Form:
    found = plan(recipe)
    return Form(ELEMENTS[found.element], "e8m0", found.rule, 1, 128)
