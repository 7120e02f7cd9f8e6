# SPDX-License-Identifier: Apache-2.0
"""PTX for the casts and decodes of 16-bit floats, two in a 32-bit word: what a thread does with four words at once.

Written in PTX because the codes of several words are put together by bytes, and because min and max, of which the
encoders need many, run at half the rate of multiply-adds on Hopper: they are left out wherever a block cannot saturate,
and kept in pairs, which are one instruction.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from breccia.kernels.triton.device.elements import ELEMENTS

UNPACK = {
    "bf16": "shl.b32 l, {w}, 16; mov.b32 x0, l; and.b32 l, {w}, 0xFFFF0000; mov.b32 x1, l;",
    "fp16": "mov.b32 {{h0, h1}}, {w}; cvt.f32.f16 x0, h0; cvt.f32.f16 x1, h1;",
}
# x0, x1 to quotients y0, y1. `divide` is `codecs.divide` for 16-bit input: one correction.
SCALE = {
    "multiply": "mul.f32 y{i}, x{i}, {f};",
    "divide": "mul.f32 y{i}, x{i}, {r}; neg.f32 n, x{i}; fma.rn.f32 n, y{i}, {f}, n; fma.rn.f32 y{i}, n, {nr}, y{i};",
    "exact": "div.rn.f32 y{i}, x{i}, {f};",
}
REGISTERS = (
    ".reg .b32 l, b, u, p0, p1, p2, k<4>; .reg .b16 h0, h1, c0, c1; .reg .f32 x0, x1, y0, y1, n, t0, t1, t2, nr;"
    " .reg .pred q;"
)
# FP6 codes are those of an FP8 format with as many mantissa bits, of values so small that the exponents line up.
FP6 = {
    row.name: (fp8.name, row.max, row.emin - fp8.emin)
    for row in ELEMENTS.values()
    for fp8 in ELEMENTS.values()
    if row.bits == 6 and fp8.hardware and row.mantissa == fp8.mantissa
}
PACKED = ("e2m1", "int4", "uint4")


def method(source: str, fmt: str, rule: str, nvfp4: bool, short_scale: bool) -> str:
    """How `cast_snippet` comes to the codes of ordinary blocks.

    halves: bf16 by a power of two to E2M1, two values an instruction. snap: integers by 16-bit scales, where a
    quotient is a tie or stays away from one. divide, multiply: float32 arithmetic.
    """
    if rule == "divide":
        return "snap" if short_scale and fmt in ("int4", "uint4") else "divide"
    return "halves" if source == "bf16" and fmt == "e2m1" and not nvfp4 else "multiply"


@dataclass(frozen=True)
class Snippet:
    asm: str
    constraints: str
    words: int  # that make one of codes


def cast_snippet(source: str, fmt: str, how: str, careful: bool, saturate: bool) -> Snippet:
    """A cast of words to one of codes. Inputs are the words, their factor and, to divide, its reciprocal.

    source: bf16 or fp16; fmt: FP8 or FP6 (from two words), e2m1, int4 or uint4 (from four).
    how: `method`'s, or exact. careful: for any numbers, NaN and infinities included (for formats without NaN the
    caller makes those zero). saturate: whether quotients may pass the largest value of E2M1, FP6 or integers.
    """
    words = 4 if fmt in PACKED else 2
    w = [f"${1 + i}" for i in range(words)]
    f, r = f"${1 + words}", f"${2 + words}" if how == "divide" else f"${1 + words}"
    lines = [REGISTERS]
    if how == "halves":
        lines += [_halves(w[i], f, i, saturate) for i in range(words)] + [_GATHER]
    elif words == 4:
        lines.append(f"mov.b32 b, {_START[fmt]};")
        lines += [_packed(source, fmt, how, w[i], f, r, i, saturate) for i in range(words)]
    else:
        lines += [_bytes(source, fmt, how, w[i], f, r, i, careful, saturate) for i in range(words)]
        lines.append("mov.b32 $0, {c0, c1};" if fmt not in FP6 else _FP6_SIGNS)
    if words == 4:
        lines.append(_FINISH[fmt].format(w0=w[0], w1=w[1], w2=w[-2], w3=w[-1]))
    inputs = words + (2 if how == "divide" else 1)
    return Snippet("{" + "\n".join(lines) + "}", ",".join(["=r", *["r"] * inputs]), words)


def _scaled(source: str, how: str, w: str, f: str, r: str) -> str:
    lines = [UNPACK[source].format(w=w)]
    if how == "divide":
        lines.append(f"neg.f32 nr, {r};")
    if how != "snap":
        lines += [SCALE[how].format(i=j, f=f, r=r, nr="nr") for j in (0, 1)]
    return "\n".join(lines)


def _packed(source: str, fmt: str, how: str, w: str, f: str, r: str, i: int, saturate: bool) -> str:
    """Adds the codes of word i to b."""
    lines = [_scaled(source, how, w, f, r)]
    for j in (0, 1):
        if fmt == "e2m1":
            code = (_E2M1_SATURATE if saturate else "") + _E2M1
        elif how == "snap":
            code = _SNAP[fmt]
        else:
            code = (_INT_SATURATE[fmt] if saturate or fmt == "uint4" else "") + _INT[fmt]
        lines.append(
            (code + "mov.b32 l, t0; mad.lo.u32 b, l, {power}, b;").format(j=j, f=f, power=1 << (8 * i + 4 * j))
        )
    return "\n".join(lines)


def _bytes(source: str, fmt: str, how: str, w: str, f: str, r: str, i: int, careful: bool, saturate: bool) -> str:
    """The two codes of word i in c0 or c1."""
    lines = [_scaled(source, how, w, f, r)]
    through = fmt
    if fmt in FP6:
        through, top, shift = FP6[fmt]
        if saturate:
            lines += [f"min.xorsign.abs.f32 y{j}, y{j}, {_f32(top * 2.0**-shift)};" for j in (0, 1)]
    lines.append(f"cvt.rn.satfinite.{through}x2.f32 c{i}, y1, y0;")
    if careful and fmt not in FP6:
        lines += _nan_codes(fmt, w, i)
    return "\n".join(lines)


def _halves(w: str, f: str, i: int, saturate: bool) -> str:
    """E2M1 magnitudes of word i in bytes 0 and 2 of k<i>. See _E2M1: 128 is for bfloat16 what 2^23 is for float32."""
    lines = [
        f"and.b32 u, {w}, 0x7FFF7FFF; prmt.b32 p1, {f}, {f}, 0x3232;",
        "add.u32 p0, p1, 0x00800080; sub.u32 p2, p1, 0x00800080; mov.b32 l, 0x43004300;",
        f"fma.rn.bf16x2 k{i}, u, p0, l; mov.b32 l, 0x43024302; fma.rn.bf16x2 p1, u, p1, l; mov.b32 l, 0x43044304;",
        f"fma.rn.bf16x2 p2, u, p2, l; min.bf16x2 k{i}, k{i}, p1; min.bf16x2 k{i}, k{i}, p2;",
    ]
    if saturate:
        lines.append(f"mov.b32 l, 0x43074307; min.bf16x2 k{i}, k{i}, l;")
    return "\n".join(lines)


def _f32(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


# What the magic numbers leave in the word once every code has been added in its place.
_START = {"e2m1": "0x05000000", "int4": "0xC0C00000", "uint4": "0xC0C00000"}
# The format is three straight lines; the code is the lowest of their rounded values.
_E2M1_SATURATE = "abs.f32 y{j}, y{j}; min.f32 y{j}, y{j}, 0f40C00000;"
_E2M1 = (
    "abs.f32 n, y{j}; fma.rn.f32 t0, n, 0f40000000, 0f4B000000; add.f32 t1, n, 0f4B000002;"
    " fma.rn.f32 t2, n, 0f3F000000, 0f4B000004; mov.b32 l, t0; mov.b32 u, t1; min.u32 l, l, u;"
    " mov.b32 u, t2; min.u32 l, l, u; mov.b32 t0, l;"
)
_INT_SATURATE = {
    "int4": "max.f32 y{j}, y{j}, 0fC1000000; min.f32 y{j}, y{j}, 0f40E00000;",
    "uint4": "max.f32 y{j}, y{j}, 0f00000000; min.f32 y{j}, y{j}, 0f41700000;",
}
_INT = {"int4": "add.f32 t0, y{j}, 0f4B400008;", "uint4": "add.f32 t0, y{j}, 0f4B400000;"}
# x times the reciprocal, rounded to a multiple of 2^-16 and then to an integer. x has at most 11 significant bits and
# so has the scale: a quotient that is not a tie is at least 2^-14 away from one, and one that is becomes one.
_SNAP = {
    "int4": "fma.rn.f32 t0, x{j}, {f}, 0f43400000; add.f32 t0, t0, 0f4B3FFF48;",
    "uint4": "fma.rn.f32 t0, x{j}, {f}, 0f43400000; add.f32 t0, t0, 0f4B3FFF40; max.f32 t0, t0, 0f4B400000;",
}
_GATHER = (
    "prmt.b32 p0, k0, k1, 0x6420; prmt.b32 p1, k2, k3, 0x6420; prmt.b32 b, p0, p1, 0x7531; prmt.b32 p0, p0, p1, 0x6420;"
    " mad.lo.u32 b, b, 16, p0;"
)
# Signs from bit 7 of every byte to bit 5.
_FP6_SIGNS = (
    "mov.b32 b, {c0, c1}; shr.u32 l, b, 2; and.b32 l, l, 0x20202020; and.b32 b, b, 0x1F1F1F1F; or.b32 $0, b, l;"
)
_FINISH = {
    # The signs of eight halves, gathered by bytes.
    "e2m1": "prmt.b32 p0, {w0}, {w1}, 0x7351; prmt.b32 p1, {w2}, {w3}, 0x7351; prmt.b32 p2, p0, p1, 0x5410;"
    " prmt.b32 p1, p0, p1, 0x7632; shr.u32 p2, p2, 4; and.b32 p2, p2, 0x08080808; and.b32 p1, p1, 0x80808080;"
    " or.b32 p1, p1, p2; or.b32 $0, b, p1;",
    "int4": "xor.b32 $0, b, 0x88888888;",
    "uint4": "mov.b32 $0, b;",
}


def _nan_codes(fmt: str, word: str, i: int) -> list[str]:
    """The format's own NaN, with the sign of the input, in place of what the conversion makes of one."""
    nan = 0x7F7F if fmt == "e4m3" else 0x7E7E
    lines = [f"cvt.u32.u16 l, c{i};"]
    for j, mask in ((0, 0x00FF), (1, 0xFF00)):
        lines += [
            f"and.b32 p0, l, {0xFFFF ^ mask}; or.b32 p0, p0, {nan & mask};",
            f"setp.nan.f32 q, x{j}, x{j}; selp.b32 l, p0, l, q;",
        ]
    lines.append(f"prmt.b32 p0, {word}, 0, 0x4431; and.b32 p0, p0, 0x8080; or.b32 l, l, p0; cvt.u16.u32 c{i}, l;")
    return lines


def decode_asm(fmt: str, target: str) -> tuple[str, str]:
    """(PTX, constraints) that turn four bytes of packed codes and their four scales into four words."""
    nan = "0x7FC07FC0" if target == "bf16" else "0x7E007E00"
    lines = [f".reg .b32 s, t, nan; .reg .f32 v0, v1; mov.b32 nan, {nan};"]
    for i in range(4):
        for j in (0, 1):
            at = 8 * i + 4 * j
            if fmt == "e2m1":  # into float32's fields: the value times 2^-126
                lines += [_shift("s", 28 - at), _shift("t", 22 - at), "and.b32 s, s, 0x80000000;"]
                lines += ["and.b32 t, t, 0x01C00000; or.b32 s, s, t;", f"mov.b32 v{j}, s;"]
                lines.append(f"mul.f32 v{j}, v{j}, 0f7E800000;")
            else:
                flip, bias = ("0x4B000008", "0fCB000008") if fmt == "int4" else ("0x4B000000", "0fCB000000")
                lines += [_shift("s", -at), f"and.b32 s, s, 15; xor.b32 s, s, {flip};", f"mov.b32 v{j}, s;"]
                lines.append(f"add.f32 v{j}, v{j}, {bias};")
            lines.append(f"mul.f32 v{j}, v{j}, ${5 + i};")
        half = {"bf16": "bf16", "fp16": "f16"}[target]
        lines.append(f"cvt.rn.{half}x2.f32 ${i}, v1, v0; min.s16x2 ${i}, ${i}, nan;")
    return "{" + "\n".join(lines) + "}", ",".join(["=&r"] * 4 + ["r"] * 5)


def _shift(to: str, left: int) -> str:
    return f"shl.b32 {to}, $4, {left};" if left >= 0 else f"shr.u32 {to}, $4, {-left};"


def takes(x: torch.Tensor, fmt: str, block: tuple[int, int], rule: str) -> bool:
    """Whether `cast_words.cast_words` takes this cast: 16-bit values in aligned rows on a GPU with FP8 conversions."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and fmt in ("e4m3", "e5m2", *FP6, *PACKED)
        and rule in ("divide", "rceil", "floor", "ceil", "even", "transformer_engine", "torchao", "single")
        and block[1] >= 16
        and x.shape[1] % 32 == 0
        and x.stride(0) % 32 == 0
        and x.data_ptr() % 16 == 0
        and block[0] * block[1] <= 16384
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
    )


def takes_turned(x: torch.Tensor, fmt: str, block: tuple[int, int], rule: str) -> bool:
    """Whether it also takes this cast of a transposed view, in square tiles."""
    return (
        x.stride(0) == 1
        and x.stride(1) != 1
        and takes(x.T, fmt, block, rule)
        and x.shape[1] % max(32, block[1]) == 0
        and block[1] <= 128
        and block[0] in (1, block[1])
    )


def takes_packed(codes: torch.Tensor, fmt: str, cols: int, block: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether `dequant_words.dequantize_words` takes these: whole blocks of packed codes in aligned rows, to a 16-bit
    float, on a GPU with the instructions."""
    return (
        codes.is_cuda
        and fmt in ("e2m1", "int4", "uint4")
        and dtype in (torch.bfloat16, torch.float16)
        and cols % 32 == 0
        and block[0] > 0
        and block[1] >= 8
        and block[1] & (block[1] - 1) == 0
        and codes.stride(-1) == 1
        and codes.stride(0) % 16 == 0
        and codes.data_ptr() % 16 == 0
        and torch.cuda.get_device_capability(codes.device) >= (9, 0)
    )
