# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; x != x is NaN.
# ruff: noqa: PLR0124, RET505
"""Cast with one scale per tensor or per row. The maximum of a tensor never leaves the device: partial maxima, one
program that turns them into the scale, then the codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_block import cast_block
from breccia.kernels.triton.device.codecs import absmax, divide, encode_element, encode_nan, positive, unit_power, widen
from breccia.kernels.triton.device.elements import ELEMENTS, Form
from breccia.kernels.triton.device.words import takes
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import launch, launch_tiles
from breccia.kernels.triton.turn import contiguous_rows

PARTIALS = 1024
TILE, WARPS = 2048, 4  # elements and warps of a program that encodes


@triton.jit
def amax_kernel(x_ptr, part_ptr, M, K, x_stride, k_tiles, tiles, BM: tl.constexpr, BK: tl.constexpr, N: tl.constexpr):
    """Largest finite magnitude and largest magnitude of all, per program."""
    pid = tl.program_id(0)
    best = tl.zeros([BM, BK], tl.float32)
    worst = tl.zeros([BM, BK], tl.float32)
    for tile in range(pid, tiles, tl.num_programs(0)):
        rows = (tile // k_tiles) * BM + tl.arange(0, BM)
        cols = (tile % k_tiles) * BK + tl.arange(0, BK)
        inside = (rows < M)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=inside, other=0).to(tl.float32)
        a = tl.abs(x)
        worst = tl.maximum(worst, a, propagate_nan=tl.PropagateNan.ALL)
        best = tl.maximum(best, tl.where(a < float("inf"), a, 0.0))
    tl.store(part_ptr + pid, tl.max(tl.max(best, axis=1), axis=0))
    tl.store(part_ptr + N + pid, absmax(absmax(worst, 1), 0))


@triton.jit
def finish_kernel(
    part_ptr, stat_ptr, scale_ptr, count, RULE: tl.constexpr, MAX: tl.constexpr, MARGIN: tl.constexpr, N: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """One program: the partial maxima to the numbers every later program reads. GIVEN: part_ptr has the maximum of a
    larger tensor, and nobody has looked for infinities and NaNs.

    tensor rules: scale and multiplier. nvfp4: e / 6, 1 / e, g and 1 / g, where e = 2688 / amax and g is the
    global scale.
    stat[4] is not 0 where an element is infinite or NaN.
    """
    at = tl.arange(0, N)
    amax = tl.max(tl.load(part_ptr + at, mask=at < count, other=0), axis=0)
    if GIVEN:
        tl.store(stat_ptr + 4, 1.0)
    else:
        worst = absmax(tl.load(part_ptr + N + at, mask=at < count, other=0), 0)
        tl.store(stat_ptr + 4, tl.where(worst < float("inf"), 0.0, 1.0))
    if RULE == "nvfp4":
        e = tl.div_rn(2688.0, amax)
        tiny = e == float("inf")
        e = tl.where(amax == 0, 1.0, tl.where(tiny, 3.4028234663852886e38, e))
        g = tl.where(amax == 0, 1.0, tl.where(tiny, tl.div_rn(1.0, e), tl.div_rn(amax, 2688.0)))
        tl.store(stat_ptr, e * 0.16666667163372040)
        tl.store(stat_ptr + 1, tl.div_rn(1.0, e))
        tl.store(stat_ptr + 2, g)
        tl.store(stat_ptr + 3, tl.div_rn(1.0, g))
        tl.store(scale_ptr, g)
    else:
        s, m = tensor_scale(amax, RULE, MAX, MARGIN)
        tl.store(stat_ptr, s)
        tl.store(stat_ptr + 1, m)
        tl.store(scale_ptr, s)


@triton.jit
def largest_kernel(part_ptr, out_ptr, count, N: tl.constexpr):
    """The largest of `count` numbers that are not negative."""
    at = tl.arange(0, N)
    tl.store(out_ptr, tl.max(tl.load(part_ptr + at, mask=at < count, other=0), axis=0))


@triton.jit
def tensor_scale(amax, RULE: tl.constexpr, MAX: tl.constexpr, MARGIN: tl.constexpr):
    """(stored scale, multiplier) from the maximum of a tensor or row; `multiply` is TransformerEngine's rule."""
    one = tl.full(amax.shape, 1.0, tl.float32)
    top = tl.full(amax.shape, MAX, tl.float32)
    if RULE == "divide":
        s = tl.div_rn(amax, top) * MARGIN
        s = tl.where(amax == 0, 1.0, positive(s, tl.float32))
        return s, one
    else:
        m = tl.minimum(tl.div_rn(top, amax), 3.4028234663852886e38) * (1.0 / MARGIN)
        s = tl.where(amax == 0, 1.0, positive(tl.div_rn(one, m), tl.float32))
        return s, tl.where(amax == 0, 1.0, m)


@triton.jit
def scaled_codes(x, raw, s, m, wild, FORM: tl.constexpr, FINE: tl.constexpr):
    """Codes of a tile x, raw as it was loaded; s and m have one element. `wild`: x may hold infinities and NaNs."""
    ELEMENT: tl.constexpr = FORM.element
    y = x
    if FORM.rule == "divide":
        s0 = tl.max(tl.max(s, axis=1), axis=0)
        if wild | (s0 < 1.0e-24) | (s0 > 1.0e24):
            power = unit_power(s)
            d = s * power
            y = x * power
            y = tl.minimum(
                tl.maximum(y, -3.0e30, propagate_nan=tl.PropagateNan.ALL), 3.0e30, propagate_nan=tl.PropagateNan.ALL
            )  # far beyond every code, and a divisor's multiples stay finite
            y = divide(y, d, 1.0 / d, True)
        else:
            y = divide(x, s, 1.0 / s, FINE)
    else:
        y = x * m
    code = encode_element(y, ELEMENT)
    if wild:
        code = encode_nan(code, widen(raw), ELEMENT)
    return code


@triton.jit
def cast_tensor_kernel(
    x_ptr, code_ptr, stat_ptr, M, K, x_stride, k_tiles, tiles, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile = tiles - 1 - tl.program_id(0)  # backwards: the end of x is what the first pass left in the cache
    rows = (tile // k_tiles) * BM + tl.arange(0, BM)
    cols = (tile % k_tiles) * BK + tl.arange(0, BK)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    raw = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=inside, other=0)
    x = raw.to(tl.float32)
    zero = tl.zeros([1, 1], tl.float32)
    s = tl.load(stat_ptr).to(tl.float32) + zero
    m = tl.load(stat_ptr + 1) + zero
    wild = tl.load(stat_ptr + 4) != 0
    fine: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    code = scaled_codes(x, raw, s, m, wild, FORM, fine)
    tl.store(code_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], code, mask=inside)


@triton.jit
def cast_row_kernel(
    x_ptr, code_ptr, scale_ptr, M, K, x_stride, FORM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One row a program, read twice: for rows too long for the registers and for the rules of one factor per row."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.zeros([1, BK], tl.float32)
    worst = tl.zeros([1, BK], tl.float32)
    cols = tl.arange(0, BK)[None, :]
    for k0 in range(0, K, BK):
        a = tl.abs(tl.load(x_ptr + row * x_stride + k0 + cols, mask=k0 + cols < K, other=0).to(tl.float32))
        worst = tl.maximum(worst, a, propagate_nan=tl.PropagateNan.ALL)
        best = tl.maximum(best, tl.where(a < float("inf"), a, 0.0))
    amax = tl.max(best, axis=1, keep_dims=True)
    top = tl.expand_dims(absmax(worst, 1), 1)
    RULE: tl.constexpr = FORM.rule
    s, m = tensor_scale(amax, RULE, FORM.element.max, 1.0)
    s = positive(s, scale_ptr.dtype.element_ty)
    nan = top != top
    stored = s if FORM.element.has_nan else tl.where(nan, float("nan"), s.to(tl.float32)).to(scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + row + tl.zeros([1, 1], tl.int32), stored)
    wild = tl.max(tl.max(tl.where(top < float("inf"), 0, 1), axis=1), axis=0) != 0
    for k0 in range(0, K, BK):
        inside = k0 + cols < K
        raw = tl.load(x_ptr + row * x_stride + k0 + cols, mask=inside, other=0)
        x = raw.to(tl.float32)
        if not FORM.element.has_nan:
            x = tl.where(nan, 0.0, x)
        code = scaled_codes(x, raw, s.to(tl.float32), m, wild, FORM, True)
        tl.store(code_ptr + row * K + k0 + cols, code, mask=inside)


def partial_maxima(x: torch.Tensor, parts: torch.Tensor) -> int:
    """Their number; parts gets those of finite magnitudes first, those of all magnitudes from PARTIALS on."""
    if x.is_contiguous() and x.numel() < 2**31 and takes(x, "e4m3", (1, 16), "divide"):
        from breccia.kernels.triton.casts.cast_words import amax_words

        return amax_words(x, parts, PARTIALS)
    rows, cols = x.shape
    bk = min(1024, max(16, triton.next_power_of_2(cols)))
    bm = max(1, 4096 // bk)
    k_tiles = -(-cols // bk)
    tiles = k_tiles * -(-rows // bm)
    count: int = max(1, min(tiles, PARTIALS if x.is_cuda else 4))
    launch(
        amax_kernel, (count,), x, parts, rows, cols, x.stride(0), k_tiles, tiles, BM=bm, BK=bk, N=PARTIALS, num_warps=4
    )
    return count


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of a 2-D tensor that has elements, 0-d float32. Two launches."""
    x = contiguous_rows(x)
    parts = torch.empty((2 * PARTIALS,), dtype=torch.float32, device=x.device)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    launch(largest_kernel, (1,), parts, out, partial_maxima(x, parts), N=PARTIALS, num_warps=4)
    return out


def statistics(
    x: torch.Tensor, rule: str, top: float, margin: float, scale: torch.Tensor, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """What `finish_kernel` computes from all of x, or from `amax`, one float32 on its device; `scale` gets the stored
    scale."""
    parts = torch.empty((2 * PARTIALS + 8,), dtype=torch.float32, device=x.device)
    count = partial_maxima(x, parts) if amax is None else 1
    stats = parts[2 * PARTIALS :]
    launch(
        finish_kernel, (1,), parts if amax is None else amax, stats, scale, count,
        RULE=rule, MAX=top, MARGIN=margin, N=PARTIALS, GIVEN=amax is not None, num_warps=4,
    )  # fmt: skip
    return stats


def cast_tensor(
    x: torch.Tensor, fmt: str, rule: str = "divide", margin: float = 1.0, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a 2-D tensor and its one scale (0-d float32). The caller may give the maximum that it follows from."""
    x = contiguous_rows(x)
    element = ELEMENTS[fmt]
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if codes.numel() == 0:
        return codes, torch.ones((), dtype=torch.float32, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    stats = statistics(x, rule, element.max, margin, scale, amax)
    bk = min(512, max(16, triton.next_power_of_2(x.shape[1])))
    bm = max(1, TILE // bk)
    launch_tiles(
        cast_tensor_kernel, (x, codes, stats), x.shape, (x.stride(0),), (bm, bk),
        FORM=Form(element, rule=rule), BM=bm, BK=bk, num_warps=WARPS,
    )  # fmt: skip
    return codes, scale


def cast_row(x: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a 2-D tensor and one scale per row, shape (rows, 1)."""
    rows, cols = x.shape
    if plan.fits_rows(cols):
        return cast_block(x, plan.over_rows(cols))
    x = contiguous_rows(x)
    codes = torch.empty((rows, cols), dtype=torch.uint8, device=x.device)
    scales = torch.ones((rows, 1), dtype=plan.scale_dtype, device=x.device)
    if codes.numel() == 0:
        return codes, scales
    launch(
        cast_row_kernel, (rows,), x, codes, scales, rows, cols, x.stride(0),
        FORM=Form(ELEMENTS[plan.element], rule=plan.rule, rows=1),
        BK=min(4096, max(16, triton.next_power_of_2(cols))), num_warps=8,
    )  # fmt: skip
    return codes, scales
