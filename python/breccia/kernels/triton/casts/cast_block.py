# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; x != x is NaN.
# ruff: noqa: PLR0124, RET505
"""Cast with one scale per block of SM rows by G columns, all statistics and codes in one pass over the input; NVFP4,
too, where the statistics of the whole are known."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.device import codecs
from breccia.kernels.triton.device.words import takes, takes_turned
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import empty_parts, launch_tiles
from breccia.kernels.triton.turn import contiguous_rows

# Elements and warps of a program: small, so that many loads are in flight on every multiprocessor.
TILE, WARPS, STEPS = 512, 1, 4


@triton.jit
def block_scale(amax, FORM: tl.constexpr, SDT: tl.constexpr, EXACT: tl.constexpr):
    """(stored scale, factor) of blocks whose finite absolute maximum is amax. The factor is the scale a quotient is
    taken by, or, where the scale is a power of two, what a value is multiplied by."""
    ELEMENT: tl.constexpr = FORM.element
    RULE: tl.constexpr = FORM.rule
    if RULE == "divide":
        if EXACT:
            s = tl.div_rn(amax, tl.full(amax.shape, ELEMENT.max, tl.float32))
        else:
            s = codecs.divide(amax, tl.full(amax.shape, ELEMENT.max, tl.float32), 1.0 / ELEMENT.max, True)
        s = codecs.positive(tl.where(amax == 0, 1.0, s), SDT)
        return s, s.to(tl.float32)
    else:
        e = codecs.mx_exponent(amax, ELEMENT, RULE, EXACT)
        low: tl.constexpr = 0 if RULE == "rceil" else 1  # floor, ceil and even never divide by a subnormal
        up = tl.where(e == 254, 0x0040_0000, (254 - tl.maximum(e, low)) << 23)
        if RULE == "rceil":
            up = tl.where(e == 0, 0x3F80_0000, up)  # a block below every scale keeps its own values
        return e.to(tl.uint8), codecs.as_float(up)


@triton.jit
def store_tile(code, scale, to, place, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Codes [BM, BK] and scales [BM / SM, BK / G] of the tile at `place`: its first row and column, and how many its
    matrix has. `to`: pointers to codes and scales, and the scales' strides; None for contiguous ones."""
    code_ptr, scale_ptr, s_row, s_col = to
    m0, k0, M, K = place
    SM: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    srows = m0 // SM + tl.arange(0, BM // SM)
    scols = k0 // G + tl.arange(0, BK // G)
    down = srows < tl.cdiv(M, SM)
    blocks = tl.cdiv(K, G)
    smask = down[:, None] & (scols < blocks)[None, :]
    if s_row is None:
        s_row = blocks
    tl.store(scale_ptr + srows.to(tl.int64)[:, None] * s_row + scols.to(tl.int64)[None, :] * s_col, scale, mask=smask)
    if FORM.packed:
        width = (K + 1) // 2
        half = k0 // 2 + tl.arange(0, BK // 2)
        at = rows.to(tl.int64)[:, None] * width + half[None, :]
        tl.store(code_ptr + at, codecs.pack_nibbles(code, BM, BK), mask=(rows < M)[:, None] & (half < width)[None, :])
    else:
        at = rows.to(tl.int64)[:, None] * K + cols[None, :]
        tl.store(code_ptr + at, code, mask=(rows < M)[:, None] & (cols < K)[None, :])


@triton.jit
def spread(s):
    """A number of each block [a, b] for its elements [a, SM, b, G]."""
    return tl.expand_dims(tl.expand_dims(s, 1), 3)


@triton.jit
def cast_tile(raw, again, to, place, stat_ptr, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Scales and codes of the tile whose values are raw: see `store_tile`. `again`: a pointer and offsets by which they
    are read again when their NaNs count, so that they need not be kept; None where they are kept. `stat_ptr`: of NVFP4,
    whose scales are contiguous whatever the strides."""
    if FORM.scale == "e4m3":
        _cast_nvfp4_tile(raw, to, place, stat_ptr, FORM, BM, BK)
    else:
        _cast_plain_tile(raw, again, to, place, FORM, BM, BK)


@triton.jit
def _cast_nvfp4_tile(raw, to, place, stat_ptr, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """FORM's rule: transformer_engine or torchao (two levels), single (one)."""
    RULE: tl.constexpr = FORM.rule
    x = tl.reshape(raw.to(tl.float32), [BM, BK // 16, 16])
    top = codecs.absmax(x, 2)
    amax = top
    nan = tl.where(top != top, 1, 0)
    if tl.max(tl.max(tl.where(top < float("inf"), 0, 1), axis=1), axis=0) != 0:
        amax = codecs.absmax(tl.where(tl.abs(x) < float("inf"), x, 0.0), 2)
        x = tl.where(tl.expand_dims(nan, 2) != 0, 0.0, x)
    code8 = codecs.encode_element(codecs.nvfp4_wanted(amax, stat_ptr, RULE), codecs.E4M3)
    y = x * tl.expand_dims(codecs.nvfp4_factor(codecs.decode_element(code8, codecs.E4M3), stat_ptr, RULE), 2)
    code = tl.reshape(codecs.encode_element(y, codecs.E2M1), [BM, BK])
    scale = tl.where(nan != 0, 0x7F, code8.to(tl.int32)).to(tl.uint8)
    store_tile(code, scale, (to[0], to[1], None, 1), place, FORM, BM, BK)


@triton.jit
def _cast_plain_tile(raw, again, to, place, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    SDT: tl.constexpr = to[1].dtype.element_ty
    ELEMENT: tl.constexpr = FORM.element
    SM: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    live = inside(place, BM, BK)
    x = tl.reshape(raw.to(tl.float32), [BM // SM, SM, BK // G, G])
    top = codecs.absmax(codecs.absmax(x, 3), 1)  # [BM / SM, BK / G]
    power = tl.full(top.shape, 1.0, tl.float32)
    # Ordinary blocks are finite, and for the short division far from the ends of float32's range.
    ordinary = (top < 1.0e24) & ((top > 1.0e-24) | (top == 0))
    odd = tl.max(tl.max(tl.where(ordinary, 0, 1), axis=1), axis=0) != 0
    nan = tl.where(ordinary, 0, 0)
    if odd:
        finite = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        amax = codecs.absmax(codecs.absmax(finite, 3), 1)
        poisoned = top != top
        nan = tl.where(poisoned, 1, 0)
        if not ELEMENT.has_nan:
            x = tl.where(spread(poisoned), 0.0, x)
        scale, factor = block_scale(amax, FORM, SDT, True)
        if FORM.rule == "divide":
            power = codecs.unit_power(factor)
            x = x * spread(power)
            x = tl.minimum(
                tl.maximum(x, -3.0e30, propagate_nan=tl.PropagateNan.ALL), 3.0e30, propagate_nan=tl.PropagateNan.ALL
            )
    else:
        scale, factor = block_scale(top, FORM, SDT, False)
    if FORM.rule == "divide":
        factor = factor * power
        r = 1.0 / factor
        fine: tl.constexpr = raw.dtype == tl.float32 or ELEMENT.hi > 15
        y = codecs.divide(x, spread(factor), spread(r), fine)
    else:
        y = x * spread(factor)  # a power of two: the product is the quotient
    code = tl.reshape(codecs.encode_element(y, ELEMENT), [BM, BK])
    if ELEMENT.has_nan:
        if odd:
            given = raw if again is None else tl.load(again[0] + again[1], mask=live, other=0)
            code = codecs.encode_nan(code, codecs.widen(given), ELEMENT)
    elif FORM.rule == "divide":
        scale = tl.where(nan != 0, float("nan"), scale.to(tl.float32)).to(SDT)
    else:
        scale = tl.where(nan != 0, 255, scale.to(tl.int32)).to(tl.uint8)
    store_tile(code, scale, to, place, FORM, BM, BK)


@triton.jit
def inside(place, BM: tl.constexpr, BK: tl.constexpr):
    """Which elements of the tile lie in its matrix."""
    m0, k0, M, K = place
    return (m0 + tl.arange(0, BM) < M)[:, None] & (k0 + tl.arange(0, BK) < K)[None, :]


@triton.jit
def cast_block_kernel(
    x_ptr, code_ptr, scale_ptr, M, K, x_stride, s_row, s_col, k_tiles, steps,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`steps` tiles one below the other; the next one is on its way while a tile is computed."""
    m0 = (tl.program_id(0) // k_tiles) * BM * steps
    k0 = (tl.program_id(0) % k_tiles) * BK
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    at = rows.to(tl.int64)[:, None] * x_stride + cols[None, :]
    live = (cols < K)[None, :]
    raw = tl.load(x_ptr + at, mask=(rows < M)[:, None] & live, other=0)
    for step in range(steps):
        rows += BM
        below = at + BM * x_stride
        after = tl.load(x_ptr + below, mask=((rows < M) & (step + 1 < steps))[:, None] & live, other=0)
        cast_tile(raw, (x_ptr, at), (code_ptr, scale_ptr, s_row, s_col), (m0, k0, M, K), None, FORM, BM, BK)
        m0 += BM
        at = below
        raw = after


def cast_block(x: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales of a 2-D tensor. The plan's block is (rows, columns), powers of two; its rule divide,
    rceil, floor, ceil, even."""
    asked = (plan.element, plan.block, plan.rule)
    turned = takes_turned(x, *asked)
    x = x if turned else contiguous_rows(x)
    rows, cols = x.shape
    if turned or takes(x, *asked):
        from breccia.kernels.triton.casts.cast_words import cast_words

        return cast_words(x, plan)
    sm, g = plan.block
    codes, scales = empty_parts(x.shape, plan, x.device, along=True)
    bk = max(g, min(256 if sm == 1 else 128, triton.next_power_of_2(cols)), 2)
    tile = 2 * TILE if plan.packed else TILE  # half the bytes to store: the longer tile fills the stores again
    bm = max(sm, tile // bk)  # fewer elements than lanes can take at once would leave some idle
    warps = WARPS if bm * bk <= tile else 4 if bm * bk <= 4096 else 8 if bm * bk <= 8192 else 16
    steps = STEPS if sm == 1 and rows * cols >= 1 << 22 else 1
    launch_tiles(
        cast_block_kernel, (x, codes, scales), x.shape, (x.stride(0), *scales.stride()), (bm * steps, bk), steps,
        FORM=plan.form, BM=bm, BK=bk, num_warps=warps,
    )  # fmt: skip
    return codes, scales
