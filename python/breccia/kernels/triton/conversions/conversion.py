# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; Triton's conditional expressions want plain numbers.
# ruff: noqa: RET505, SIM108
"""From one block format to another: a tile is decoded, its scales are chosen and its codes made, all in registers.

A block keeps a scale that loses nothing, as in the core: the source's own where it lies in one of the source's blocks,
or a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_block import block_scale, spread, store_tile
from breccia.kernels.triton.conversions.dequant import load_scale, load_values
from breccia.kernels.triton.device import codecs
from breccia.kernels.triton.recipes import Plan, Source
from breccia.kernels.triton.runtime import empty_parts, launch_tiles


@triton.jit
def scaled(x, factor, odd, RULE: tl.constexpr):
    """x [a, SM, b, G] over or times a factor [a, b]."""
    f = spread(factor)
    if RULE == "divide":
        if odd:
            y = tl.div_rn(x, tl.broadcast_to(f, x.shape))
        else:
            y = codecs.divide(x, f, 1.0 / f, True)
    else:
        y = x * f
    return y


@triton.jit
def exactly(s, RULE: tl.constexpr, SDT: tl.constexpr):
    """(what is stored for s, factor, whether that is s itself)."""
    bits = s.to(tl.int32, bitcast=True)
    if RULE == "divide":
        stored = s.to(SDT)
        finite = (bits & 0x7FFF_FFFF) < 0x7F80_0000
        return stored, s, (stored.to(tl.float32) == s) & finite & (s != 0)
    else:
        code = bits >> 23
        fits = ((bits & 0x7F_FFFF) == 0) & (code > 0) & (code < 255)
        tiny = bits == 0x0040_0000
        code = tl.where(fits, code, 0)
        factor = tl.where(code == 254, 0x0040_0000, (254 - code) << 23)
        return code.to(tl.uint8), codecs.as_float(factor), fits | tiny


@triton.jit
def keeps(x, s, factor, odd, FORM: tl.constexpr):
    """Of each block, whether codes made with the factor, times the scale s, are x again to the bit."""
    ELEMENT: tl.constexpr = FORM.element
    RULE: tl.constexpr = FORM.rule
    y = scaled(x, factor, odd, RULE)
    if ELEMENT.is_integer:  # which has one zero
        different = tl.where(codecs.round_int(y, ELEMENT.lo, ELEMENT.hi).to(tl.float32) * spread(s) != x, 1, 0)
    else:
        v = codecs.decode_element(codecs.encode_element(y, ELEMENT), ELEMENT) * spread(s)
        different = tl.where(v.to(tl.int32, bitcast=True) != x.to(tl.int32, bitcast=True), 1, 0)
    return tl.max(tl.max(different, axis=3), axis=1) == 0


@triton.jit
def some(condition):
    return tl.max(tl.max(tl.where(condition, 1, 0), axis=1), axis=0) != 0


@triton.jit
def exact_tile(v, own, to, place, FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """`cast_block.cast_tile` of values that may have a scale without loss; own is the source's, 0 where there are
    several."""
    ELEMENT: tl.constexpr = FORM.element
    RULE: tl.constexpr = FORM.rule
    SM: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    SDT: tl.constexpr = to[1].dtype.element_ty
    x = tl.reshape(v, [BM // SM, SM, BK // G, G])
    if not ELEMENT.is_integer:  # whose codes have the sign of the value
        own = tl.abs(own)
    top = codecs.absmax(codecs.absmax(x, 3), 1)
    finite = top < float("inf")
    nan = top != top  # noqa: PLR0124
    amax = top
    if some(~finite):
        amax = codecs.absmax(codecs.absmax(tl.where(tl.abs(x) < float("inf"), x, 0.0), 3), 1)
        if not ELEMENT.has_nan:
            x = tl.where(spread(tl.where(nan, 1, 0)) != 0, 0.0, x)
    scale, factor = block_scale(amax, FORM, SDT, True)
    stored, by, fits = exactly(own, RULE, SDT)
    fits = fits & finite
    # `divide` is for divisors well inside float32's range.
    size = tl.abs(own)
    wild = ((amax > 1.0e24) | (amax < 1.0e-24)) & (amax != 0)
    odd = some(wild | ~finite | (fits & ((size > 1.0e24) | (size < 1.0e-24))))
    done = fits & ~finite
    if some(fits):
        done = fits & keeps(x, own, tl.where(fits, by, 1.0), odd, FORM)
        scale = tl.where(done, stored.to(tl.float32), scale.to(tl.float32)).to(SDT)
        factor = tl.where(done, by, factor)
    if not ELEMENT.is_integer:
        bits = tl.div_rn(amax, tl.full(amax.shape, ELEMENT.max, tl.float32)).to(tl.int32, bitcast=True)
        up = (bits + 0x7F_FFFF) & 0x7F80_0000
        power = codecs.as_float(tl.where((up < 0x7F80_0000) & (amax != 0), up, 0))
        stored, by, fits = exactly(power, RULE, SDT)
        fits = fits & finite & ~done
        if some(fits):
            kept = fits & keeps(x, power, tl.where(fits, by, 1.0), odd, FORM)
            scale = tl.where(kept, stored.to(tl.float32), scale.to(tl.float32)).to(SDT)
            factor = tl.where(kept, by, factor)
    code = tl.reshape(codecs.encode_element(scaled(x, factor, odd, RULE), ELEMENT), [BM, BK])
    if ELEMENT.has_nan:
        code = codecs.encode_nan(code, v, ELEMENT)
    elif RULE == "divide":
        scale = tl.where(nan, float("nan"), scale.to(tl.float32)).to(SDT)
    else:
        scale = tl.where(nan, 255, scale.to(tl.int32)).to(tl.uint8)
    store_tile(code, scale, to, place, FORM, BM, BK)


@triton.jit
def requantize_kernel(
    code_ptr, scale_ptr, zero_ptr, global_ptr, to_ptr, to_scale_ptr, M, K, code_stride, s_row, s_col, t_row, k_tiles,
    FORM: tl.constexpr, TO: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """From FORM to TO."""
    SM: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    TM: tl.constexpr = TO.rows
    TG: tl.constexpr = TO.cols
    m0 = (tl.program_id(0) // k_tiles) * BM
    k0 = (tl.program_id(0) % k_tiles) * BK
    v = load_values(
        code_ptr, scale_ptr, zero_ptr, global_ptr, m0, k0, M, K, code_stride, s_row, s_col, FORM, BM, BK
    )  # fmt: skip
    row = m0 + tl.arange(0, BM // TM) * TM
    col = k0 + tl.arange(0, BK // TG) * TG
    r0 = row // SM if SM > 0 else row * 0
    r1 = (tl.minimum(row + TM, M) - 1) // SM if SM > 0 else row * 0
    c0 = col // G if G > 0 else col * 0
    c1 = (tl.minimum(col + TG, K) - 1) // G if G > 0 else col * 0
    alone = ((row < M) & (r0 == r1))[:, None] & ((col < K) & (c0 == c1))[None, :]
    at = r0.to(tl.int64)[:, None] * s_row + c0[None, :] * s_col
    own = tl.where(alone, load_scale(scale_ptr, global_ptr, at, alone, FORM), 0.0)
    exact_tile(v, own, (to_ptr, to_scale_ptr, t_row, 1), (m0, k0, M, K), TO, BM, BK)


def requantize(source: Source, plan: Plan) -> list[torch.Tensor]:
    """Codes (uint8) and scales by a plan of kind block."""
    codes, scales = empty_parts(source.shape, plan, source.codes.device)
    tm, tg = plan.block
    bk = max(tg, min(256 if tm == 1 else 128, triton.next_power_of_2(source.shape[1])), 2)
    bm = max(tm, 2048 // bk)
    launch_tiles(
        requantize_kernel, (*source.pointers(), codes, scales), source.shape,
        (*source.strides(), scales.stride(0)), (bm, bk), FORM=source.form(), TO=plan.form, BM=bm, BK=bk,
        num_warps=4 if bm * bk <= 4096 else 8 if bm * bk <= 8192 else 16,
    )  # fmt: skip
    return [codes, scales]
