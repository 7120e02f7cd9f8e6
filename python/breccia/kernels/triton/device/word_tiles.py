# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; tuples have no stars.
# ruff: noqa: RET505, RUF005
"""Tiles of words of two bf16 or fp16 values, in Gluon: their scales, and their codes by the PTX of `words`.

A thread has eight words side by side, so that loads and stores are wide without a detour through shared memory. Most
tiles are ordinary: finite, and their scales far from the ends of every range. Those take short forms; the others take
`cast_block`'s arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from breccia.kernels.triton.device.elements import ELEMENTS, Element
from breccia.kernels.triton.device.words import FP6, Snippet, cast_snippet, method

F32_MAX = gl.constexpr(3.4028234663852886e38)


@dataclass(frozen=True)
class WordForm:
    """What a kernel is compiled for: the values, the format, and `words` words by `rows` rows per scale."""

    source: str  # bf16 or fp16
    element: Element
    rule: str
    nvfp4: bool
    rows: int
    words: int
    shift: int  # factors are powers of two lower than what the scale says
    infinity: int  # of the source, in the high half of a word
    how: str  # of ordinary blocks
    fast: Snippet
    careful: Snippet
    low: float  # ordinary maxima lie between these
    high: float

    @staticmethod
    def of(
        dtype: torch.dtype, fmt: str, block: tuple[int, int], rule: str, scale: torch.dtype, nvfp4: bool = False
    ) -> WordForm:
        """scale: as it is stored."""
        element = ELEMENTS[fmt]
        source = "bf16" if dtype == torch.bfloat16 else "fp16"
        how = method(source, fmt, rule, nvfp4, scale in (torch.float16, torch.bfloat16))
        exact = "exact" if rule == "divide" else "multiply"
        low, high = (6.2e-5 * element.max, 6.0e4 * element.max) if scale == torch.float16 else (1.0e-24, 1.0e24)
        return WordForm(
            source, element, rule, nvfp4, block[0], block[1] // 2,
            shift=FP6[fmt][2] if fmt in FP6 else 0,
            infinity=0x7F800000 if source == "bf16" else 0x7C000000,
            how=how,
            fast=cast_snippet(source, fmt, how, careful=False, saturate=rule in ("floor", "even")),
            careful=cast_snippet(source, fmt, exact, careful=True, saturate=True),
            low=low,
            high=high,
        )  # fmt: skip


@gluon.constexpr_function
def words_layout(cols, warps, tall):
    """Rows of `cols` words over lanes and warps, eight a thread. tall: warps one below the other."""
    lanes = min(32, max(1, cols // 8))
    across = 1 if tall else min(warps, max(1, cols // (8 * lanes)))
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps // across, across], [1, 0])


@gluon.jit
def divide_exactly(a, b):
    return gl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(s):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [s], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def invert(s, CAREFUL: gl.constexpr):
    """1 / s, correctly rounded. Short for s well inside float32's range; then of 0 it is NaN."""
    if CAREFUL:
        return gl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [s], dtype=gl.float32, is_pure=True, pack=1)
    else:
        r = reciprocal(s)
        return gl.fma(gl.fma(-s, r, 1.0), r, r)


@gluon.jit
def larger_bf16(a, b):
    return gl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def larger_fp16(a, b):
    return gl.inline_asm_elementwise(
        "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def largest(w, FORM: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr):
    """Per block the largest magnitude as the high half of an int32. NaN > Inf > finite."""
    u = gl.reshape(w & 0x7FFF7FFF, [BM // FORM.rows, FORM.rows, BW // FORM.words, FORM.words])
    if FORM.source == "bf16":
        m = gl.reduce(gl.reduce(u, 3, larger_bf16), 1, larger_bf16)
    else:
        m = gl.reduce(gl.reduce(u, 3, larger_fp16), 1, larger_fp16)
    return gl.maximum(m, m << 16) & 0x7FFF0000


@gluon.jit
def largest_finite(w, FORM: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr):
    high, low = w & 0x7FFF0000, (w << 16) & 0x7FFF0000
    finite = gl.maximum(gl.where(high < FORM.infinity, high, 0), gl.where(low < FORM.infinity, low, 0))
    finite = gl.reshape(finite, [BM // FORM.rows, FORM.rows, BW // FORM.words, FORM.words])
    return gl.max(gl.max(finite, axis=3), axis=1)


@gluon.jit
def half_value(m, SOURCE: gl.constexpr):
    if SOURCE == "bf16":
        return m.to(gl.float32, bitcast=True)
    else:
        return (m >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def at_least(v, BITS: gl.constexpr):
    """The larger of v, which is not negative, and the float32 of BITS (a literal would become a float64)."""
    return gl.maximum(v.to(gl.int32, bitcast=True), BITS).to(gl.float32, bitcast=True)


@gluon.jit
def exact_scale(amax, FORM: gl.constexpr, SDT: gl.constexpr):
    """`cast_block.block_scale`: (stored scale, divisor or, for powers of two, factor)."""
    if FORM.rule == "divide":
        s = gl.where(amax == 0, 1.0, divide_exactly(amax, gl.full_like(amax, FORM.element.max)))
        stored = s.to(SDT)
        v = stored.to(gl.float32)
        if gl.float16 == SDT:
            v = gl.minimum(gl.maximum(v, 5.960464477539063e-08), 65504.0)
        elif gl.bfloat16 == SDT:
            v = gl.minimum(at_least(v, 0x10000), 3.3895313892515355e38)
        else:
            v = at_least(v, 1)
        return v.to(SDT), v
    else:
        if FORM.rule == "rceil":
            bits = divide_exactly(amax, gl.full_like(amax, FORM.element.max)).to(gl.int32, bitcast=True)
            e = bits >> 23
            up = gl.where((bits & 0x7FFFFF) != 0, 1, 0)
            e = gl.where(e == 0, gl.where(bits > 0x00400000, 1, 0), e + up)
        else:
            e = gl.minimum(moved_exponent(amax, FORM), 254)
        low: gl.constexpr = 0 if FORM.rule == "rceil" else 1
        factor = gl.where(e == 254, 0x00400000, (254 - gl.maximum(e, low)) << 23)
        if FORM.rule == "rceil":
            factor = gl.where(e == 0, 0x3F800000, factor)
        return e.to(gl.uint8), factor.to(gl.float32, bitcast=True) * (2.0**-FORM.shift)


@gluon.jit
def moved_exponent(amax, FORM: gl.constexpr):
    """The E8M0 code of floor, ceil and even."""
    bits = amax.to(gl.int32, bitcast=True)
    if FORM.rule == "even":
        bits = bits + (1 << (22 - FORM.element.mantissa))
    if FORM.rule == "ceil":
        bits = bits + 0x7FFFFF
    return gl.maximum((bits >> 23) - FORM.element.emax, 0)


@gluon.constexpr_function
def mantissa(v):
    return int((v / 2.0 ** math.floor(math.log2(v)) - 1) * 2**23)


@gluon.jit
def short_scale(amax, FORM: gl.constexpr, SDT: gl.constexpr):
    """`exact_scale` of an ordinary amax."""
    if FORM.rule == "divide":
        q = amax * (1.0 / FORM.element.max)
        q = gl.fma(gl.fma(q, FORM.element.max, -amax), -1.0 / FORM.element.max, q)
        q = gl.fma(gl.fma(q, FORM.element.max, -amax), -1.0 / FORM.element.max, q)
        stored = gl.where(amax == 0, 1.0, q).to(SDT)
        return stored, stored.to(gl.float32)
    else:
        if FORM.rule == "rceil":  # up by one where amax's mantissa passes that of the largest value
            bits = amax.to(gl.int32, bitcast=True) + (0x7FFFFF - mantissa(FORM.element.max))
            e = gl.maximum((bits >> 23) - FORM.element.emax, 0)
        else:
            e = moved_exponent(amax, FORM)
        return e.to(gl.uint8), ((254 - FORM.shift - gl.maximum(e, 1)) << 23).to(gl.float32, bitcast=True)


E4M3_ASM = gl.constexpr("""{
.reg .b16 h, low, high; .reg .b32 both;
cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, $2; cvt.u32.u16 $0, h;
cvt.rn.f16x2.e4m3x2 both, h; mov.b32 {low, high}, both; cvt.f32.f16 $1, low;
}""")


@gluon.jit
def nvfp4_scale(amax, stat_ptr, FORM: gl.constexpr, CAREFUL: gl.constexpr):
    """(E4M3 code of the scale, factor): see `cast_nvfp4.cast_nvfp4_kernel`."""
    if FORM.rule == "transformer_engine":
        b = amax * gl.load(stat_ptr)
    elif FORM.rule == "torchao":
        g = gl.load(stat_ptr + 2)
        b = divide_exactly(divide_exactly(amax, gl.full_like(amax, 6.0)), gl.full_like(amax, 1.0) * g)
        b = gl.maximum(b, 0.015625)
    else:
        b = divide_exactly(amax, gl.full_like(amax, 6.0))
    code, b = gl.inline_asm_elementwise(E4M3_ASM, "=r,=r,r", [b], dtype=(gl.int32, gl.float32), is_pure=True, pack=1)
    if FORM.rule == "transformer_engine":
        r = invert(b * gl.load(stat_ptr + 1), CAREFUL)
    elif FORM.rule == "torchao":
        r = divide_exactly(gl.full_like(amax, 1.0) * gl.load(stat_ptr + 3), b)
    else:
        r = invert(b, CAREFUL)
    return code.to(gl.uint8), gl.minimum(r, F32_MAX)


@gluon.jit
def spread(s, like, G: gl.constexpr, FORM: gl.constexpr):
    """A 32-bit value per block to one for each of its G elements in every row of `like`."""
    BM: gl.constexpr = like.shape[0]
    BW: gl.constexpr = like.shape[1]
    blocks = gl.reshape(like, [BM // FORM.rows, FORM.rows, BW // G, G])
    s = gl.convert_layout(s.to(gl.int32, bitcast=True), gl.SliceLayout(1, gl.SliceLayout(3, blocks.type.layout)))
    s = gl.expand_dims(gl.expand_dims(s, 1), 3) | (blocks ^ blocks)
    return gl.convert_layout(gl.reshape(s, [BM, BW]), like.type.layout)


@gluon.jit
def split_words(w, N: gl.constexpr):
    """N tensors: the words 0, N, 2N, …, those after them, …"""
    BM: gl.constexpr = w.shape[0]
    BW: gl.constexpr = w.shape[1]
    if N == 2:
        return gl.split(gl.reshape(w, [BM, BW // 2, 2]))
    else:
        even, odd = gl.split(gl.reshape(w, [BM, BW // 4, 2, 2]))
        w0, w2 = gl.split(even)
        w1, w3 = gl.split(odd)
        return w0, w1, w2, w3


@gluon.jit
def encode(w, factor, FORM: gl.constexpr, CAREFUL: gl.constexpr):
    """Words of codes; factor is what `exact_scale` gives of each block."""
    SNIPPET: gl.constexpr = FORM.careful if CAREFUL else FORM.fast
    G: gl.constexpr = FORM.words // SNIPPET.words
    words = split_words(w, SNIPPET.words)
    if FORM.how == "snap" and not CAREFUL:
        factor = reciprocal(factor)
    values = words + (spread(factor, words[0], G, FORM).to(gl.float32, bitcast=True),)
    if FORM.how == "divide" and not CAREFUL:
        values = values + (spread(reciprocal(factor), words[0], G, FORM).to(gl.float32, bitcast=True),)
    return gl.inline_asm_elementwise(SNIPPET.asm, SNIPPET.constraints, values, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def is_ordinary(amax, factor, FORM: gl.constexpr):
    if FORM.nvfp4:  # the scale is not so coarse that the largest value rounds past 6
        return amax * factor < 7.0
    else:
        return ((amax < FORM.high) & (amax > FORM.low)) | (amax == 0)


@gluon.jit
def cast_tile(
    w, m0, w0, code_ptr, scale_ptr, stat_ptr, M, W, s_row, s_col, FORM: gl.constexpr, BM: gl.constexpr,
    BW: gl.constexpr,
):  # fmt: skip
    """Scales and codes of the BM by BW words at row m0 and word w0; code_ptr points to words."""
    SDT: gl.constexpr = scale_ptr.dtype.element_ty
    SOURCE: gl.constexpr = FORM.source
    top = largest(w, FORM, BM, BW)
    amax = half_value(top, SOURCE)
    if FORM.nvfp4:
        scale, factor = nvfp4_scale(amax, stat_ptr, FORM, False)
    else:
        scale, factor = short_scale(amax, FORM, SDT)
    wild = gl.where(is_ordinary(amax, factor, FORM), 0, 1)
    odd = gl.max(gl.reshape(wild, [BM // FORM.rows * (BW // FORM.words)]), axis=0) != 0
    if FORM.rule == "transformer_engine":  # `invert` is short
        level = gl.load(stat_ptr + 1)
        odd = odd | (level < 1.0e-24) | (level > 1.0e24)
    if odd:
        amax = half_value(largest_finite(w, FORM, BM, BW), SOURCE)
        if FORM.nvfp4:
            scale, factor = nvfp4_scale(amax, stat_ptr, FORM, True)
        else:
            scale, factor = exact_scale(amax, FORM, SDT)
        if not FORM.element.has_nan:
            nan = top > FORM.infinity
            w = gl.where(spread(gl.where(nan, 1, 0), w, FORM.words, FORM) != 0, 0, w)
            if FORM.rule == "divide":
                scale = gl.where(nan, float("nan"), scale.to(gl.float32)).to(SDT)
            else:
                scale = gl.where(nan, 0x7F if FORM.nvfp4 else 0xFF, scale.to(gl.int32)).to(gl.uint8)
        code = encode(w, factor, FORM, True)
    else:
        code = encode(w, factor, FORM, False)
    N: gl.constexpr = FORM.fast.words
    L: gl.constexpr = code.type.layout
    rows = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(w0 // N + gl.arange(0, BW // N, layout=gl.SliceLayout(0, L)), 0)
    gl.store(code_ptr + rows.to(gl.int64) * (W // N) + cols, code, mask=(rows < M) & (cols < W // N))
    SL: gl.constexpr = scale.type.layout
    srow = gl.expand_dims(m0 // FORM.rows + gl.arange(0, BM // FORM.rows, layout=gl.SliceLayout(1, SL)), 1)
    scol = gl.expand_dims(w0 // FORM.words + gl.arange(0, BW // FORM.words, layout=gl.SliceLayout(0, SL)), 0)
    keep = (srow * FORM.rows < M) & (scol * FORM.words < W)
    gl.store(scale_ptr + srow.to(gl.int64) * s_row + scol * s_col, scale, mask=keep)


@gluon.jit
def load_tile(x_ptr, m0, w0, M, W, x_stride, FORM: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr):
    L: gl.constexpr = words_layout(BW, gl.num_warps(), FORM.rows > 1)
    rows = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(w0 + gl.arange(0, BW, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(x_ptr + rows.to(gl.int64) * x_stride + cols, mask=(rows < M) & (cols < W), other=0)
