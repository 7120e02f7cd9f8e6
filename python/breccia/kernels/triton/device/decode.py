# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; there is no `in`.
# ruff: noqa: PLR1714, RET505
"""Words of packed weights to the tensor cores' register operand, in Gluon.

A slice is 128 of K: 16 words of eight 4-bit codes or 32 words of four 8-bit codes a row. It decodes in two units of 64,
one register operand each; thread t of a row takes words 4t to 4t + 3 of every 16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _four_pairs(step: str) -> gl.constexpr:
    """`step` for the pairs (n_p, n_p+4) of a word $4 of eight codes, which it finds at the low ends of u's halves, to
    $0 ... $3."""
    body = "".join(f"shr.b32 u, $4, {4 * p}; " + step.replace("OUT", f"${p}") for p in range(4))
    return gl.constexpr("{ .reg .b32 s, t, u; " + body + "}")


def _four_e2m1(product: str, after: str = "") -> gl.constexpr:
    """The same for E2M1, as bf16 in u that are the values times 2^-126. A product with 2^12 + 2^6 takes a code to where
    bf16 has its sign, and again to where it has the ends of exponent and fraction; two neighbours share a shift. SCALE
    is $5, for the last two pairs $6."""
    body = "shr.b32 t, $4, 8; mov.b32 s, 0x7E807E80; "
    for p in range(4):
        mask, factor = (0x00F000F0, 0x0104) if p % 2 else (0x000F000F, 0x1040)
        body += f"and.b32 u, {'t' if p > 1 else '$4'}, {mask:#x}; mul.lo.u32 u, u, {factor:#x}; "
        scaled = product.replace("SCALE", "$6" if p > 1 else "$5")
        body += "and.b32 u, u, 0x81C081C0; " + scaled.replace("OUT", f"${p}")
    body += "".join(after.replace("OUT", f"${p}") for p in range(4))
    return gl.constexpr("{ .reg .b32 s, t, u; " + body + "}")


E2M1_ASM = _four_e2m1("mul.bf16x2 OUT, u, s; ", "mul.bf16x2 OUT, OUT, $5; ")
# With one product the scale comes times 2^112, and 2^14 is left to the end.
E2M1_ONCE_ASM = _four_e2m1("mul.bf16x2 OUT, u, SCALE; ")
# INT4 codes are mantissas under the exponent of 128: 136 more than their value. (u & a) ^ b is one instruction only
# where it is written as one. The fused product of 64 rows has registers for a subtraction, w4_gemv for a multiply-add.
_INT4 = "lop3.b32 u, u, 0x000F000F, 0x43084308, 0x6A; "
_INT4_LESS_136 = _INT4 + "mov.b32 t, 0x43084308; sub.bf16x2 "
INT4_ASM = _four_pairs(_INT4_LESS_136 + "OUT, u, t; ")
INT4_FMA_ASM = _four_pairs(_INT4 + "mov.b32 s, 0x3F803F80; mov.b32 t, 0xC308C308; fma.rn.bf16x2 OUT, u, s, t; ")
# Times a scale in two parts, $5 and the rest of it, $6: one instruction a pair more than by a bfloat16 scale, two less
# than in float32. Rounded once where the rest times a code is exact, as of float16 scales, which have 11 bits.
SCALED_INT4_ASM = _four_pairs(_INT4_LESS_136 + "u, u, t; mul.bf16x2 t, u, $6; fma.rn.bf16x2 OUT, u, $5, t; ")
# A float32 scale $2 to bf16x2 with equal halves: its first 8 bits, not rounded up to infinity, and the next 8.
TWO_PARTS_ASM = gl.constexpr("""{
.reg .b32 h; .reg .f32 f, g;
prmt.b32 $0, $2, 0, 0x3232; and.b32 h, $2, 0xFFFF0000; mov.b32 f, h; mov.b32 g, $2;
sub.f32 f, g, f; cvt.rn.bf16x2.f32 $1, f, f;
}""")


def _two_pairs(fmt: str, scaled: bool) -> gl.constexpr:
    """Four 8-bit codes to two pairs of neighbours, $0 and $1, perhaps times the float32 scale $3 and then rounded once.
    FP8 goes by float16, which holds every value and keeps NaN and infinities; an offset INT8 code is the low byte of a
    float32 of 2^23 and more."""
    body = "xor.b32 v, $2, 0x80808080; " if fmt == "int8" else "mov.b32 {l, h}, $2; "
    for p, half in enumerate("lh"):
        if fmt == "int8":
            for q, name in enumerate("fg"):
                body += f"prmt.b32 u, v, 0x4B000000, 0x744{2 * p + q}; mov.b32 {name}, u; "
                body += f"add.f32 {name}, {name}, 0fCB000080; "
        else:
            body += f"cvt.rn.f16x2.{fmt}x2 v, {half}; mov.b32 {{a, b}}, v; cvt.f32.f16 f, a; cvt.f32.f16 g, b; "
        body += "mul.f32 f, f, $3; mul.f32 g, g, $3; " if scaled else ""
        body += f"cvt.rn.bf16x2.f32 ${p}, g, f; "
    return gl.constexpr("{ .reg .b16 l, h, a, b; .reg .b32 u, v; .reg .f32 f, g; " + body + "}")


E4M3_ASM, E5M2_ASM = (_two_pairs(fmt, False) for fmt in ("e4m3", "e5m2"))
# INT8: the low seven bits above 128, less 128, or 256 where the sign is set: (t & a) | b twice.
INT8_ASM = gl.constexpr(
    "{ .reg .b32 s, t, u; mov.b32 s, 0x3F803F80; "
    + "".join(
        f"prmt.b32 t, $2, 0, {bytes_of_pair:#x}; lop3.b32 u, t, 0x007F007F, 0x43004300, 0xEA; "
        f"lop3.b32 t, t, 0x00800080, 0xC300C300, 0xEA; fma.rn.bf16x2 ${p}, u, s, t; "
        for p, bytes_of_pair in enumerate((0x4140, 0x4342))
    )
    + "}"
)
SCALED_E4M3_ASM, SCALED_E5M2_ASM, SCALED_INT8_ASM = (_two_pairs(fmt, True) for fmt in ("e4m3", "e5m2", "int8"))
# Two E4M3 scales times 2^112 to bf16x2 with equal halves.
SCALES_ASM = gl.constexpr("""{
.reg .b32 h; .reg .b16 a, b; .reg .f32 f;
cvt.rn.f16x2.e4m3x2 h, $2; mov.b32 {a, b}, h;
cvt.f32.f16 f, a; mul.f32 f, f, 0f77800000; cvt.rn.bf16x2.f32 $0, f, f;
cvt.f32.f16 f, b; mul.f32 f, f, 0f77800000; cvt.rn.bf16x2.f32 $1, f, f;
}""")


# 16 bytes of a row, $4 to $7, to what each of four threads decodes of them, $0 to $3, so that the result has the order
# of the activations. Nibble p of $t is the low, p + 4 the high nibble of byte t of word p.
TURN_NIBBLES_ASM = gl.constexpr(
    "{ .reg .b32 a, b, c, d, t, u; "
    + "".join(
        f"shl.b32 t, ${4 + p + 1}, 4; lop3.b32 {low}, ${4 + p}, t, 0x0F0F0F0F, 0xE4; "
        f"shr.b32 t, ${4 + p}, 4; lop3.b32 {high}, t, ${4 + p + 1}, 0x0F0F0F0F, 0xE4; "
        for p, low, high in ((0, "a", "c"), (2, "b", "d"))
    )
    + "".join(
        f"prmt.b32 t, a, b, {first:#x}; prmt.b32 u, c, d, {first:#x}; "
        f"prmt.b32 ${t}, t, u, 0x5410; prmt.b32 ${t + 1}, t, u, 0x7632; "
        for t, first in ((0, 0x5140), (2, 0x7362))
    )
    + "}"
)
# The same for 8-bit codes: bytes 2t and 2t + 1 of either half.
TURN_PAIRS_ASM = gl.constexpr(
    "prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632; "
    "prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;"
)


@gluon.constexpr_function
def words_layout(words):
    """[64 rows, 16 or 32 words]: thread t of a quad takes words 4t to 4t + 3 of every 16, in two neighbouring rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0]] + ([[0, 16]] if words == 32 else []),
        lane_bases=[[0, 4], [0, 8], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, words],
    )


@gluon.constexpr_function
def scales_layout():
    """[64 rows, 4 threads of a quad]"""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0]],
        lane_bases=[[0, 1], [0, 2], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def rows_layout():
    """[64 rows], the same for all threads of a quad"""
    return gl.DistributedLinearLayout(
        reg_bases=[[1]], lane_bases=[[0], [0], [2], [4], [8]], warp_bases=[[16], [32]], block_bases=[], shape=[64]
    )


@gluon.jit
def load_scales(
    s_ptr, rows, base, k, slices, N, s_row, s_col, KIND: gl.constexpr, SN: gl.constexpr, ROUND: gl.constexpr,
    NATURAL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Scales of slice k: per row and thread a pair of E4M3 (nvfp4), one E8M0 (mxfp4) or one a unit (mxfp8); one number
    per row (int4, block), with ROUND for each thread, else in the order of the tensor cores' rows; nothing (whole).
    NATURAL: words of four one-byte scales, a row's for all of its threads. s_col: the stride along K of block."""
    k = gl.minimum(k, slices - 1)
    if KIND == "block":
        k = k * s_col
    if KIND == "whole":
        return k
    elif NATURAL and (KIND == "mxfp4" or KIND == "mxfp8"):
        r = rows + gl.arange(0, 64, layout=rows_layout())
        return gl.load(s_ptr + base + r.to(gl.int64) * s_row + k, mask=r < N, other=0)
    elif NATURAL and KIND == "nvfp4":
        r = rows + gl.arange(0, 64, layout=rows_layout())
        at = s_ptr + base + r.to(gl.int64) * s_row + k * 2
        return gl.join(gl.load(at, mask=r < N, other=0), gl.load(at + 1, mask=r < N, other=0))
    elif (KIND == "int4" or KIND == "block") and not ROUND:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        r = rows + (i & 48) + ((i & 7) << 1) + ((i >> 3) & 1)
        return gl.load(s_ptr + base + (r // SN).to(gl.int64) * s_row + k, mask=r < N, other=0)
    else:
        L: gl.constexpr = scales_layout()
        r = rows + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        t = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0)
        at = base + gl.expand_dims((r // SN).to(gl.int64) * s_row, 1) + k * (1 if ROUND else 4)
        inside = gl.expand_dims(r < N, 1)
        if KIND == "mxfp8":
            low = gl.load(s_ptr + at + t // 2, mask=inside, other=0)
            high = gl.load(s_ptr + at + t // 2 + 2, mask=inside, other=0)
            return gl.join(low, high)
        elif ROUND:
            return gl.load(s_ptr + at + t * 0, mask=inside, other=0).to(gl.float32)
        else:
            return gl.load(s_ptr + at + t, mask=inside, other=0)


@gluon.jit
def e4m3_pair(raw):
    """bf16x2 with equal halves of the low and of the high E4M3 byte, times 2^112."""
    return gl.inline_asm_elementwise(
        SCALES_ASM, "=r,=r,h", [raw.to(gl.int16)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def power(raw, ONCE: gl.constexpr):
    """bf16x2 with equal halves of E8M0 bytes, with ONCE (see `scale_range`) times 2^112."""
    e = raw.to(gl.int32) & 0xFF
    if ONCE:
        return e * 0x00800080 + 0x38003800
    else:
        bits = gl.where(e == 0, 0x0040, gl.where(e == 255, 0x7FC0, e << 7))
        return bits | (bits << 16)


@gluon.jit
def natural_scales(
    raw, U: gl.constexpr, KIND: gl.constexpr, ONCE: gl.constexpr, PER: gl.constexpr, WORDS: gl.constexpr
):  # fmt: skip
    """The scales of unit U where K has its own order, as bf16x2 for each word of a row: for its first and for its
    second half, which differ in nvfp4. WORDS: the layout of the words."""
    L: gl.constexpr = gl.SliceLayout(1, WORDS)
    if KIND == "nvfp4":
        low, high = gl.split(raw)
        word = high if U else low
        a0, b0 = e4m3_pair(word)
        a1, b1 = e4m3_pair(word >> 16)
        first, second = gl.join(a0, a1), gl.join(b0, b1)
    else:
        p0, p1 = power(raw >> (16 * U), ONCE), power(raw >> (16 * U + 8), ONCE)
        first = gl.join(p0, p1)
        if PER == 4:
            first = gl.reshape(gl.join(first, first), [64, 4])
        second = first
    first = gl.expand_dims(gl.convert_layout(first, L, assert_trivial=True), 1)
    second = gl.expand_dims(gl.convert_layout(second, L, assert_trivial=True), 1)
    return first, second


@gluon.jit
def unit_scale(raw, U: gl.constexpr, KIND: gl.constexpr, ONCE: gl.constexpr):
    """The scale of each thread's words in unit U, [64, 4]."""
    if KIND == "nvfp4":
        low, high = e4m3_pair(raw)
        return high if U else low
    elif KIND == "mxfp4":
        return power(raw, ONCE)
    elif KIND == "mxfp8":
        low, high = gl.split(raw)
        return power(high if U else low, False)
    else:
        return raw


@gluon.jit
def halves(pair):
    low = (pair & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = ((pair >> 16) & 0xFFFF).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def spread(scale, words):
    """[64, 4] scales to the words of each thread."""
    twice = gl.join(scale, scale)
    if words.type.shape[2] == 4:
        twice = gl.reshape(gl.join(twice, twice), [64, 4, 4])
    return gl.convert_layout(twice, words.type.layout, assert_trivial=True)


@gluon.jit
def decode_unit(
    words, U: gl.constexpr, scale, KIND: gl.constexpr, FMT: gl.constexpr, ROUND: gl.constexpr, NATURAL: gl.constexpr,
    ONCE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """[64, 16 or 32] words to the register operand [64, 64] of one unit, rows in the tensor cores' order. With ROUND
    the scales of int4 and block are multiplied in, else left out. NATURAL: the words were turned, K has its own
    order. ONCE: E2M1 takes its scales in one product and comes 2^-14 times as large; for E8M0 see `scale_range`."""
    PER: gl.constexpr = words.type.shape[1] // 8  # words of a thread and unit
    if PER == 2:
        pair = gl.permute(gl.reshape(words, [64, 4, 2, 2]), (0, 1, 3, 2))  # row, t, q, u
    else:
        pair = gl.permute(gl.reshape(words, [64, 2, 4, 4]), (0, 2, 3, 1))
    low, high = gl.split(pair)
    w = high if U else low
    if KIND == "nvfp4" or KIND == "mxfp4" or KIND == "mxfp8":
        if NATURAL:
            WORDS: gl.constexpr = w.type.layout
            first, second = natural_scales(scale, U, KIND, ONCE, PER, WORDS)
        else:
            first = spread(unit_scale(scale, U, KIND, ONCE), w)
            second = first
    if PER == 2:
        if KIND == "int4" and ROUND:
            most, rest = gl.inline_asm_elementwise(
                TWO_PARTS_ASM, "=r,=r,r", [scale.to(gl.int32, bitcast=True)],
                dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                SCALED_INT4_ASM, "=r,=r,=r,=r,r,r,r", [w, spread(most, w), spread(rest, w)],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        elif KIND == "int4":
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r", [w], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
            )
        else:
            E2M1: gl.constexpr = E2M1_ONCE_ASM if ONCE else E2M1_ASM
            p0, p1, p2, p3 = gl.inline_asm_elementwise(
                E2M1, "=r,=r,=r,=r,r,r,r", [w, first, second],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        a = gl.join(gl.join(halves(p0), halves(p1)), gl.join(halves(p2), halves(p3)))  # row, t, q, i, h, a
        a = gl.permute(gl.reshape(a, [4, 8, 2, 4, 2, 2, 2, 2]), (0, 2, 1, 4, 7, 6, 3, 5))
    else:
        if KIND == "block" and ROUND:
            SCALED: gl.constexpr = (
                SCALED_INT8_ASM if FMT == "int8" else SCALED_E5M2_ASM if FMT == "e5m2" else SCALED_E4M3_ASM
            )
            p0, p1 = gl.inline_asm_elementwise(
                SCALED, "=r,=r,r,f", [w, spread(scale, w)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
        else:
            PLAIN: gl.constexpr = INT8_ASM if FMT == "int8" else E5M2_ASM if FMT == "e5m2" else E4M3_ASM
            p0, p1 = gl.inline_asm_elementwise(PLAIN, "=r,=r,r", [w], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
        if KIND == "mxfp8":
            p0, p1 = gl.inline_asm_elementwise(
                "mul.bf16x2 $0, $2, $4; mul.bf16x2 $1, $3, $4;", "=r,=r,r,r,r",
                [p0, p1, first], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        a = gl.join(halves(p0), halves(p1))  # row, t, q, i, h
        a = gl.permute(gl.reshape(a, [4, 8, 2, 4, 4, 2, 2]), (0, 2, 1, 4, 6, 3, 5))
    return gl.convert_layout(gl.reshape(a, [64, 64]), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
