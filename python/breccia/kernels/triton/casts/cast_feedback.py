# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""GPTQ's codes of a run of columns: rows do not know of each other, so that a program goes through the columns of a
few rows, what remainders add to later columns in its registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.device.codecs import decode_element, encode_element
from breccia.kernels.triton.device.elements import BY_FORMAT, Form
from breccia.kernels.triton.runtime import launch

ROWS, WARPS = 16, 4  # of a program


@triton.jit
def _code_of(scaled, zero, FORM: tl.constexpr):
    """As OneCode of the core."""
    ELEMENT: tl.constexpr = FORM.element
    if FORM.zero_point:
        low, high = ELEMENT.lo * 1.0 - zero, ELEMENT.hi * 1.0 - zero
        whole = tl.minimum(tl.maximum(scaled, low), high) + 12582912.0
        return ((whole.to(tl.int32, bitcast=True) - 0x4B40_0000) + zero.to(tl.int32)).to(tl.uint8)
    else:
        return encode_element(scaled, ELEMENT)


@triton.jit
def round_run_kernel(
    x_ptr, code_ptr, fed_ptr, share_ptr, order_ptr, scale_ptr, factor_ptr, zero_ptr, M, begin, width, x_stride,
    fed_stride, share_stride, grid_cols, block_rows, block_cols, FED: tl.constexpr, MULTIPLY: tl.constexpr,
    FORM: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """x[:, begin + c] becomes the remainder, code[:, begin + c] its code, for c < width; `share_ptr` and `order_ptr`
    begin at the run, of which shares have zeros up to the diagonal."""
    ELEMENT: tl.constexpr = FORM.element
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < M
    cols = tl.arange(0, W)
    long_rows = rows.to(tl.int64)
    added = tl.zeros([R, W], tl.float32)
    if FED:
        both = inside[:, None] & (cols < width)[None, :]
        added = tl.load(fed_ptr + long_rows[:, None] * fed_stride + cols[None, :], mask=both, other=0)
    at = long_rows * x_stride + begin
    block_row = (rows // block_rows) * grid_cols
    for c in range(width):
        block = block_row + tl.load(order_ptr + c).to(tl.int32) // block_cols
        x = tl.load(x_ptr + at + c, mask=inside, other=0)
        scale = tl.load(scale_ptr + block, mask=inside, other=1)
        factor = scale
        if MULTIPLY:
            factor = tl.load(factor_ptr + block, mask=inside, other=1)
        zero = tl.zeros([R], tl.float32)
        if FORM.zero_point:
            zero = tl.load(zero_ptr + block, mask=inside, other=0)
        value = x + tl.sum(tl.where((cols == c)[None, :], added, 0.0), axis=1)
        scaled = value * factor if MULTIPLY else tl.div_rn(value, factor)
        code = _code_of(scaled, zero, FORM)
        rest = x - (decode_element(code, ELEMENT) - zero) * scale
        known = (tl.abs(x) < float("inf")) & (tl.abs(scale) < float("inf"))
        rest = tl.where(known, rest, 0.0)
        tl.store(code_ptr + at + c, code, mask=inside & known)
        tl.store(x_ptr + at + c, rest, mask=inside)
        share = tl.load(share_ptr + c * share_stride + cols, mask=cols < width, other=0)
        added += rest[:, None] * share[None, :]


def round_run(
    x: torch.Tensor,
    codes: torch.Tensor,
    fed: torch.Tensor | None,
    shares: torch.Tensor,
    order: torch.Tensor,
    begin: int,
    end: int,
    scale: torch.Tensor,
    factor: torch.Tensor,
    zero_point: torch.Tensor | None,
    block: tuple[int, int],
    element: str,
    multiply: bool,
) -> None:
    """Columns [begin, end), at most 128, of x (M, K) float32, in whose place remainders come, and of codes (M, K)
    uint8, which stay where a number or a scale is not finite; both are contiguous. `fed` (M, end - begin) is what
    columns before add, `shares` and `order` are those of `error_feedback.Feed`, `scale`, `factor` and `zero_point` are
    of blocks in float32. Values are multiplied by the factor (`multiply`) or divided by the scale."""
    form = Form(BY_FORMAT[element], zero_point=zero_point is not None)
    run = shares[begin:, begin:]
    scale, factor = scale.contiguous(), factor.contiguous()
    zeros = scale if zero_point is None else zero_point.contiguous()
    launch(
        round_run_kernel, (triton.cdiv(x.shape[0], ROWS),), x, codes, x if fed is None else fed, run, order[begin:],
        scale, factor, zeros, x.shape[0], begin, end - begin, x.stride(0), 0 if fed is None else fed.stride(0),
        run.stride(0), scale.shape[1], *block, FED=fed is not None, MULTIPLY=multiply, FORM=form, R=ROWS,
        W=max(16, triton.next_power_of_2(end - begin)), num_warps=WARPS,
    )  # fmt: skip
