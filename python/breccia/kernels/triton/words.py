# SPDX-License-Identifier: Apache-2.0
"""PTX for the casts and decodes of 16-bit floats, two in a 32-bit word: what a thread does with four words at once.

Each snippet is elementwise: byte (or half word) i of the result belongs to word i. Written in PTX because the bytes of
four words are put together with one multiply-add a code, and because min and max, of which the encoders need many, run
at half the rate of multiply-adds on Hopper.
"""

from __future__ import annotations

import torch

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
    ".reg .b32 l, b, p0, p1, p2; .reg .b16 h0, h1, c0, c1; .reg .f32 x0, x1, y0, y1, n, t0, t1, t2, nr; .reg .pred q;"
)


def cast_asm(source: str, fmt: str, divide: bool, careful: bool) -> tuple[str, str, int]:
    """(PTX, constraints, words at once) of a cast: inputs are words, factors and, to divide, their reciprocals.

    source: bf16 or fp16; fmt: e4m3 or e5m2 (a half word of codes per word), e2m1, int4 or uint4 (a byte per word).
    careful: for any numbers, NaN and infinities included (for formats without NaN the caller makes those zero).
    """
    how = ("exact" if careful else "divide") if divide else "multiply"
    packed = fmt in ("e2m1", "int4", "uint4")
    words = 4 if packed else 2
    w = [f"${1 + i}" for i in range(words)]
    f = [f"${1 + words + i}" for i in range(words)]
    r = [f"${1 + 2 * words + i}" for i in range(words)] if how == "divide" else f
    lines = [REGISTERS]
    if packed:
        lines.append(f"mov.b32 b, {_START[fmt]};")
    for i in range(words):
        lines.append(UNPACK[source].format(w=w[i]))
        if how == "divide":
            lines.append(f"neg.f32 nr, {r[i]};")
        lines += [SCALE[how].format(i=j, f=f[i], r=r[i], nr="nr") for j in (0, 1)]
        if packed:
            lines += [_CODE[fmt].format(j=j, power=1 << (8 * i + 4 * j)) for j in (0, 1)]
        else:
            lines.append(f"cvt.rn.satfinite.{fmt}x2.f32 c{i}, y1, y0;")
            if careful:
                lines += _nan_codes(fmt, w[i], i)
    lines.append(_FINISH[fmt].format(w0=w[0], w1=w[1], w2=w[-2], w3=w[-1]) if packed else "mov.b32 $0, {c0, c1};")
    inputs = (3 if how == "divide" else 2) * words
    return "{" + "\n".join(lines) + "}", ",".join(["=r", *["r"] * inputs]), words


# What the magic numbers leave in the word once every code has been added in its place.
_START = {"e2m1": "0x05000000", "int4": "0xC0C00000", "uint4": "0xC0C00000"}
_E2M1 = (
    "abs.f32 n, y{j}; min.f32 n, n, 0f40C00000; fma.rn.f32 t0, n, 0f40000000, 0f4B000000; add.f32 t1, n, 0f4B000002;"
    " fma.rn.f32 t2, n, 0f3F000000, 0f4B000004; min.f32 t0, t0, t1; min.f32 t0, t0, t2;"
    " mov.b32 l, t0; mad.lo.u32 b, l, {power}, b;"
)
_INT = (
    "max.f32 n, y{{j}}, {low}; min.f32 n, n, {high}; add.f32 n, n, {magic};"
    " mov.b32 l, n; mad.lo.u32 b, l, {{power}}, b;"
)
_CODE = {
    "e2m1": _E2M1,
    "int4": _INT.format(low="0fC1000000", high="0f40E00000", magic="0f4B400008"),
    "uint4": _INT.format(low="0f00000000", high="0f41700000", magic="0f4B400000"),
}
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
        and fmt in ("e4m3", "e5m2", *_CODE)
        and rule in ("divide", "rceil", "floor", "ceil", "even", "transformer_engine", "torchao", "single")
        and block[1] >= 16
        and x.shape[1] % 32 == 0
        and x.stride(0) % 32 == 0
        and x.data_ptr() % 16 == 0
        and block[0] * block[1] <= 16384
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
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
