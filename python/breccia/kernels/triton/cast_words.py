# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return and `if` over assignments are compile-time branches.
# ruff: noqa: RET505, SIM108
"""Casts of bf16 and fp16 tensors at the speed of memory, in Gluon: a thread takes eight words of two values, so that
loads and stores are wide without a detour through shared memory, and `words` encodes four of them at once.

`cast_block` and `cast_nvfp4` hold the same arithmetic for any input, and hand over what `takes` accepts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .runtime import ELEMENTS, contiguous_rows, launch, out_dtype_of_scale
from .words import cast_asm

F32_MAX = gl.constexpr(3.4028234663852886e38)
PER_THREAD = 8  # words: 32 bytes of input


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
    return gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=r,r", [s], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def largest(w, SM: gl.constexpr, BM: gl.constexpr, G: gl.constexpr, BW: gl.constexpr):
    """Per block of SM rows and G words, the largest magnitude as the high half of an int32. NaN > Inf > finite."""
    u = w & 0x7FFF7FFF
    m = gl.maximum(u, u << 16)
    m = gl.max(gl.max(gl.reshape(m, [BM // SM, SM, BW // G, G]), axis=3), axis=1)
    return m & 0x7FFF0000


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
def block_scale(amax, RULE: gl.constexpr, MAX: gl.constexpr, EMAX: gl.constexpr, MANT: gl.constexpr, SDT: gl.constexpr):
    """`cast_block.block_scale`: (stored scale, divisor or, for powers of two, factor)."""
    if RULE == "divide":
        s = gl.where(amax == 0, 1.0, divide_exactly(amax, gl.full_like(amax, MAX)))
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
        if RULE == "rceil":
            bits = divide_exactly(amax, gl.full_like(amax, MAX)).to(gl.int32, bitcast=True)
            e = bits >> 23
            up = gl.where((bits & 0x7FFFFF) != 0, 1, 0)
            e = gl.where(e == 0, gl.where(bits > 0x00400000, 1, 0), e + up)
        else:
            bits = amax.to(gl.int32, bitcast=True)
            if RULE == "even":
                bits = bits + (1 << (22 - MANT))
            e = (bits >> 23) - EMAX
            if RULE == "ceil":
                e = e + gl.where((bits & 0x7FFFFF) != 0, 1, 0)
            e = gl.minimum(gl.maximum(e, 0), 254)
        low: gl.constexpr = 0 if RULE == "rceil" else 1
        factor = gl.where(e == 254, 0x00400000, (254 - gl.maximum(e, low)) << 23)
        if RULE == "rceil":
            factor = gl.where(e == 0, 0x3F800000, factor)
        return e.to(gl.uint8), factor.to(gl.float32, bitcast=True)


E4M3_ASM = gl.constexpr("""{
.reg .b16 h, low, high; .reg .b32 both;
cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, $2; cvt.u32.u16 $0, h;
cvt.rn.f16x2.e4m3x2 both, h; mov.b32 {low, high}, both; cvt.f32.f16 $1, low;
}""")


@gluon.jit
def nvfp4_scale(amax, stat_ptr, RULE: gl.constexpr):
    """(E4M3 code of the scale, factor): see `cast_nvfp4.cast_nvfp4_kernel`."""
    if RULE == "transformer_engine":
        b = amax * gl.load(stat_ptr)
    elif RULE == "torchao":
        g = gl.load(stat_ptr + 2)
        b = divide_exactly(divide_exactly(amax, gl.full_like(amax, 6.0)), gl.full_like(amax, 1.0) * g)
        b = gl.maximum(b, 0.015625)
    else:
        b = divide_exactly(amax, gl.full_like(amax, 6.0))
    code, b = gl.inline_asm_elementwise(E4M3_ASM, "=r,=r,r", [b], dtype=(gl.int32, gl.float32), is_pure=True, pack=1)
    one = gl.full_like(amax, 1.0)
    if RULE == "transformer_engine":
        r = divide_exactly(one, b * gl.load(stat_ptr + 1))
    elif RULE == "torchao":
        r = divide_exactly(one * gl.load(stat_ptr + 3), b)
    else:
        r = divide_exactly(one, b)
    return code.to(gl.uint8), gl.minimum(r, F32_MAX)


@gluon.jit
def spread(s, w, SM: gl.constexpr, BM: gl.constexpr, G: gl.constexpr, BW: gl.constexpr):
    """A 32-bit value per block to one per word, in the layout of the words w."""
    like = gl.reshape(w, [BM // SM, SM, BW // G, G])
    s = gl.expand_dims(gl.expand_dims(s.to(gl.int32, bitcast=True), 1), 3) | (like ^ like)
    return gl.convert_layout(gl.reshape(s, [BM, BW]), words_layout(BW, gl.num_warps(), SM > 1))


@gluon.jit
def encode(w, factor, r, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, DIVIDE: gl.constexpr):
    """Bytes (four words at once) or half words (two) of codes."""
    if DIVIDE:
        arguments = [w, factor, r]
    else:
        arguments = [w, factor]
    if PACK == 4:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=gl.int8, is_pure=True, pack=4)
    else:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, arguments, dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def cast_words_tile(
    w, m0, w0, code_ptr, scale_ptr, stat_ptr, M, W, s_row, s_col,
    RULE: gl.constexpr, MAX: gl.constexpr, EMAX: gl.constexpr, MANT: gl.constexpr, SOURCE: gl.constexpr,
    NVFP4: gl.constexpr, HAS_NAN: gl.constexpr, ASM: gl.constexpr, CAREFUL: gl.constexpr, CONSTRAINTS: gl.constexpr,
    CAREFUL_CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, SM: gl.constexpr, G: gl.constexpr, BM: gl.constexpr,
    BW: gl.constexpr,
):  # fmt: skip
    """Scales and codes of the BM by BW words at row m0 and word w0; G words and SM rows per scale."""
    L: gl.constexpr = words_layout(BW, gl.num_warps(), SM > 1)
    rows = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(w0 + gl.arange(0, BW, layout=gl.SliceLayout(0, L)), 0)
    inside = (rows < M) & (cols < W)
    INFINITY: gl.constexpr = 0x7F800000 if SOURCE == "bf16" else 0x7C000000
    DIVIDE: gl.constexpr = RULE == "divide"
    top = largest(w, SM, BM, G, BW)
    amax = half_value(top, SOURCE)
    if NVFP4:
        wild = gl.where(top < INFINITY, 0, 1)
    else:
        wild = gl.where(((amax < 1.0e24) & (amax > 1.0e-24)) | (amax == 0), 0, 1)
    odd = gl.max(gl.max(wild, axis=1), axis=0) != 0
    if odd:
        high, low = w & 0x7FFF0000, (w << 16) & 0x7FFF0000
        finite = gl.maximum(gl.where(high < INFINITY, high, 0), gl.where(low < INFINITY, low, 0))
        finite = gl.max(gl.max(gl.reshape(finite, [BM // SM, SM, BW // G, G]), axis=3), axis=1)
        amax = half_value(finite, SOURCE)
    if NVFP4:
        scale, factor = nvfp4_scale(amax, stat_ptr, RULE)
    else:
        scale, factor = block_scale(amax, RULE, MAX, EMAX, MANT, scale_ptr.dtype.element_ty)
    f = spread(factor, w, SM, BM, G, BW).to(gl.float32, bitcast=True)
    r = spread(reciprocal(factor), w, SM, BM, G, BW).to(gl.float32, bitcast=True) if DIVIDE else f
    if odd:
        if not HAS_NAN:
            nan = top > INFINITY
            w = gl.where(spread(gl.where(nan, 1, 0), w, SM, BM, G, BW) != 0, 0, w)
            if DIVIDE:
                scale = gl.where(nan, float("nan"), scale.to(gl.float32)).to(scale_ptr.dtype.element_ty)
            else:
                scale = gl.where(nan, 0x7F if NVFP4 else 0xFF, scale.to(gl.int32)).to(gl.uint8)
        code = encode(w, f, r, CAREFUL, CAREFUL_CONSTRAINTS, PACK, False)
    else:
        code = encode(w, f, r, ASM, CONSTRAINTS, PACK, DIVIDE)
    gl.store(code_ptr + rows.to(gl.int64) * W + cols, code, mask=inside)
    SL: gl.constexpr = scale.type.layout
    srow = gl.expand_dims(m0 // SM + gl.arange(0, BM // SM, layout=gl.SliceLayout(1, SL)), 1)
    scol = gl.expand_dims(w0 // G + gl.arange(0, BW // G, layout=gl.SliceLayout(0, SL)), 0)
    keep = (srow * SM < M) & (scol * G < W)
    gl.store(scale_ptr + srow.to(gl.int64) * s_row + scol * s_col, scale, mask=keep)


@gluon.jit
def load_tile(x_ptr, m0, w0, M, W, x_stride, SM: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr):
    L: gl.constexpr = words_layout(BW, gl.num_warps(), SM > 1)
    rows = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(w0 + gl.arange(0, BW, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(x_ptr + rows.to(gl.int64) * x_stride + cols, mask=(rows < M) & (cols < W), other=0)


@gluon.jit
def cast_words_kernel(
    x_ptr, code_ptr, scale_ptr, stat_ptr, M, W, x_stride, s_row, s_col, tiles_across,
    RULE: gl.constexpr, MAX: gl.constexpr, EMAX: gl.constexpr, MANT: gl.constexpr, SOURCE: gl.constexpr,
    NVFP4: gl.constexpr, HAS_NAN: gl.constexpr, ASM: gl.constexpr, CAREFUL: gl.constexpr, CONSTRAINTS: gl.constexpr,
    CAREFUL_CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, SM: gl.constexpr, G: gl.constexpr, BM: gl.constexpr,
    BW: gl.constexpr,
):  # fmt: skip
    """One tile. With NVFP4 backwards: the end of x is what the pass before left in the cache."""
    tile = gl.num_programs(0) - 1 - gl.program_id(0) if NVFP4 else gl.program_id(0)
    m0 = (tile // tiles_across) * BM
    w0 = (tile % tiles_across) * BW
    cast_words_tile(
        load_tile(x_ptr, m0, w0, M, W, x_stride, SM, BM, BW), m0, w0, code_ptr, scale_ptr, stat_ptr, M, W, s_row, s_col,
        RULE, MAX, EMAX, MANT, SOURCE, NVFP4, HAS_NAN, ASM, CAREFUL, CONSTRAINTS, CAREFUL_CONSTRAINTS, PACK, SM, G,
        BM, BW,
    )  # fmt: skip


@gluon.jit
def turned(w, SM: gl.constexpr, B: gl.constexpr):
    """The words of the transpose of a square tile."""
    rows: gl.constexpr = words_layout(B // 2, gl.num_warps(), SM > 1)
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (B // 16), B // 16], [gl.num_warps(), 1], [1, 0])
    pair = gl.join((w & 0xFFFF).to(gl.int16), (w >> 16).to(gl.int16))
    x = gl.convert_layout(gl.permute(gl.reshape(pair, [B, B]), (1, 0)), wide)
    low, high = gl.split(gl.reshape(x, [B, B // 2, 2]))
    return gl.convert_layout((low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16), rows)


@gluon.jit
def cast_turn_kernel(
    x_ptr, code_ptr, scale_ptr, turned_ptr, turned_scale_ptr, stat_ptr, M, W, x_stride, s_row, t_row, tiles_across,
    RULE: gl.constexpr, MAX: gl.constexpr, EMAX: gl.constexpr, MANT: gl.constexpr, SOURCE: gl.constexpr,
    NVFP4: gl.constexpr, HAS_NAN: gl.constexpr, ASM: gl.constexpr, CAREFUL: gl.constexpr, CONSTRAINTS: gl.constexpr,
    CAREFUL_CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, SM: gl.constexpr, G: gl.constexpr, BM: gl.constexpr,
    BW: gl.constexpr,
):  # fmt: skip
    """A square tile (BM values by BW words), and its transpose."""
    m0 = (gl.program_id(0) // tiles_across) * BM
    w0 = (gl.program_id(0) % tiles_across) * BW
    w = load_tile(x_ptr, m0, w0, M, W, x_stride, SM, BM, BW)
    cast_words_tile(
        w, m0, w0, code_ptr, scale_ptr, stat_ptr, M, W, s_row, 1,
        RULE, MAX, EMAX, MANT, SOURCE, NVFP4, HAS_NAN, ASM, CAREFUL, CONSTRAINTS, CAREFUL_CONSTRAINTS, PACK, SM, G,
        BM, BW,
    )  # fmt: skip
    cast_words_tile(
        turned(w, SM, BM), 2 * w0, m0 // 2, turned_ptr, turned_scale_ptr, stat_ptr, 2 * W, M // 2, t_row, 1,
        RULE, MAX, EMAX, MANT, SOURCE, NVFP4, HAS_NAN, ASM, CAREFUL, CONSTRAINTS, CAREFUL_CONSTRAINTS, PACK, SM, G,
        BM, BW,
    )  # fmt: skip


@gluon.jit
def amax_words_kernel(
    x_ptr, part_ptr, W, tiles, SOURCE: gl.constexpr, B: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """`cast_tensor.amax_kernel` of W words one after the other: per program, the largest finite magnitude and the
    largest of all."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    INFINITY: gl.constexpr = 0x7F800000 if SOURCE == "bf16" else 0x7C000000
    at = gl.arange(0, B, layout=L)
    best = gl.zeros([B], gl.int32, L)
    worst = gl.zeros([B], gl.int32, L)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        where = tile * B + at
        w = gl.load(x_ptr + where.to(gl.int64), mask=where < W, other=0)
        high, low = w & 0x7FFF0000, (w << 16) & 0x7FFF0000
        worst = gl.maximum(worst, gl.maximum(high, low))
        best = gl.maximum(best, gl.maximum(gl.where(high < INFINITY, high, 0), gl.where(low < INFINITY, low, 0)))
    gl.store(part_ptr + gl.program_id(0), half_value(gl.max(best, axis=0), SOURCE))
    gl.store(part_ptr + N + gl.program_id(0), half_value(gl.max(worst, axis=0), SOURCE))


def amax_words(x: torch.Tensor, parts: torch.Tensor, programs: int) -> int:
    """Partial maxima of a contiguous x: of its finite elements in parts[:programs], of all of them in the next
    `programs`. Returns how many there are."""
    words = x.numel() // 2
    size = 4096
    tiles = -(-words // size)
    count: int = max(1, min(programs, tiles))
    source = "bf16" if x.dtype == torch.bfloat16 else "fp16"
    launch(
        amax_words_kernel,
        (count,),
        x,
        x.view(torch.int32),
        parts,
        words,
        tiles,
        SOURCE=source,
        B=size,
        N=programs,
        num_warps=8,
    )
    return count


def tile_of(words: int, sm: int, g: int, warps: int, repeats: int) -> tuple[int, int]:
    """(rows, words) of a tile: `repeats` times eight words a thread, whole blocks, and no wider than the matrix."""
    size = 32 * warps * PER_THREAD * repeats
    across = max(g, min(triton.next_power_of_2(words), 32 * PER_THREAD if sm == 1 else g))
    return max(sm, size // across), across


def cast_words(
    x: torch.Tensor,
    fmt: str,
    block: tuple[int, int],
    rule: str,
    scale_dtype: torch.dtype = torch.float32,
    stats: torch.Tensor | None = None,
    nvfp4: bool = False,
    warps: int = 0,
    repeats: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast_block.cast_block` and, with nvfp4, the codes and scales of `cast_nvfp4.cast_nvfp4`."""
    x = contiguous_rows(x)
    rows, cols = x.shape
    element = ELEMENTS[fmt]
    packed = element.packed
    sm, g = block[0], block[1] // 2
    codes = torch.empty((rows, cols // 2 if packed else cols), dtype=torch.uint8, device=x.device)
    scales = torch.empty(
        (triton.cdiv(rows, sm), triton.cdiv(cols, block[1])),
        dtype=torch.uint8 if nvfp4 else out_dtype_of_scale(rule, scale_dtype),
        device=x.device,
    )
    if codes.numel() == 0:
        return codes, scales
    if not warps:
        warps, repeats = default_shape(block, packed)
    bm, bw = tile_of(cols // 2, sm, g, warps, repeats)
    across = triton.cdiv(cols // 2, bw)
    launch(
        cast_words_kernel,
        (across * triton.cdiv(rows, bm),),
        x,
        x.view(torch.int32),
        codes if packed else codes.view(torch.int16),
        scales,
        scales if stats is None else stats,
        rows,
        cols // 2,
        x.stride(0) // 2,
        *scales.stride(),
        across,
        num_warps=warps,
        **constants(x, fmt, rule, nvfp4, sm, g, bm, bw),
    )
    return codes, scales


def constants(x: torch.Tensor, fmt: str, rule: str, nvfp4: bool, sm: int, g: int, bm: int, bw: int) -> dict[str, Any]:
    """What a kernel of this file is compiled for; g and bw in words."""
    element = ELEMENTS[fmt]
    source = "bf16" if x.dtype == torch.bfloat16 else "fp16"
    asm, constraints, pack = cast_asm(source, fmt, rule == "divide", False)
    careful, careful_constraints, _ = cast_asm(source, fmt, rule == "divide", True)
    return {
        "RULE": rule,
        "MAX": element.max,
        "EMAX": element.emax,
        "MANT": element.mant,
        "SOURCE": source,
        "NVFP4": nvfp4,
        "HAS_NAN": element.has_nan,
        "ASM": asm,
        "CAREFUL": careful,
        "CONSTRAINTS": constraints,
        "CAREFUL_CONSTRAINTS": careful_constraints,
        "PACK": pack,
        "SM": sm,
        "G": g,
        "BM": bm,
        "BW": bw,
    }


def cast_turn_words(
    x: torch.Tensor,
    fmt: str,
    block: tuple[int, int],
    rule: str,
    stats: torch.Tensor,
    nvfp4: bool,
    one: list[torch.Tensor],
    other: list[torch.Tensor],
) -> None:
    """Writes (codes, scales) of x to `one` and those of its transpose to `other`."""
    rows, cols = x.shape
    size = max(64, block[1])
    packed = ELEMENTS[fmt].packed
    across = triton.cdiv(cols, size)
    launch(
        cast_turn_kernel,
        (across * triton.cdiv(rows, size),),
        x,
        x.view(torch.int32),
        one[0] if packed else one[0].view(torch.int16),
        one[1],
        other[0] if packed else other[0].view(torch.int16),
        other[1],
        stats,
        rows,
        cols // 2,
        x.stride(0) // 2,
        one[1].stride(0),
        other[1].stride(0),
        across,
        num_warps=4 if size == 64 else 8,
        **constants(x, fmt, rule, nvfp4, block[0], block[1] // 2, size, size // 2),
    )


def default_shape(block: tuple[int, int], packed: bool) -> tuple[int, int]:
    """(warps, repeats): measured on an H200."""
    size = block[0] * block[1]
    if size >= 4096:
        return 8, max(1, size // 4096)
    return (1, 4) if packed else (4, 2)
