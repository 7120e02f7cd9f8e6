# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Packed 4-bit codes to bf16 or fp16 at the speed of memory, in Gluon: a thread turns four bytes into four words, so
that both sides stay coalesced without a detour through shared memory. `dequant` holds the same arithmetic for any
format."""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.device.words import decode_asm
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import launch_tiles

WARPS, REPEATS = 4, 2  # warps of a program and words of four bytes per thread


@gluon.constexpr_function
def bytes_layout(per_thread, cols, warps):
    """Rows of `cols` over lanes and warps."""
    lanes = min(32, max(1, cols // per_thread))
    across = min(warps, max(1, cols // (per_thread * lanes)))
    return gl.BlockedLayout([1, per_thread], [32 // lanes, lanes], [warps // across, across], [1, 0])


E4M3_ASM = gl.constexpr("""{
.reg .b16 h, low, high; .reg .b32 both;
cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 both, h; mov.b32 {low, high}, both; cvt.f32.f16 $0, low;
}""")


@gluon.jit
def scale_value(raw, SFMT: gl.constexpr):
    """float32 of a scale: `codecs.decode_scale`."""
    if SFMT == "e8m0":
        b = raw.to(gl.int32) & 0xFF
        bits = gl.where(b == 255, 0x7FC00000, gl.where(b == 0, 0x00400000, b << 23))
        return bits.to(gl.float32, bitcast=True)
    elif SFMT == "e4m3":
        return gl.inline_asm_elementwise(
            E4M3_ASM, "=r,r", [raw.to(gl.int32) & 0xFF], dtype=gl.float32, is_pure=True, pack=1
        )
    else:
        return raw.to(gl.float32)


@gluon.jit
def dequantize_words_kernel(
    code_ptr, scale_ptr, global_ptr, out_ptr, M, W, code_stride, s_row, s_col, tiles_across,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, SFMT: gl.constexpr, GLOBAL: gl.constexpr, SM: gl.constexpr,
    G: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """W bytes of codes a row, and as many words of results; G bytes and SM rows per scale."""
    gdc_launch_dependents()
    L: gl.constexpr = bytes_layout(4, BW, gl.num_warps())
    S: gl.constexpr = bytes_layout(1, BW // 4, gl.num_warps())  # one scale for the four bytes of a thread
    m0 = (gl.program_id(0) // tiles_across) * BM
    w0 = (gl.program_id(0) % tiles_across) * BW
    rows = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(w0 + gl.arange(0, BW, layout=gl.SliceLayout(0, L)), 0)
    inside = (rows < M) & (cols < W)
    srows = gl.expand_dims(m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, S)), 1)
    scols = gl.expand_dims(w0 // 4 + gl.arange(0, BW // 4, layout=gl.SliceLayout(0, S)), 0)
    sat = (srows // SM).to(gl.int64) * s_row + (scols // (G // 4)) * s_col
    gdc_wait()
    codes = gl.load(code_ptr + rows.to(gl.int64) * code_stride + cols, mask=inside, other=0)
    s = scale_value(gl.load(scale_ptr + sat, mask=(srows < M) & (scols * 4 < W), other=0), SFMT)
    if GLOBAL:
        s = s * gl.load(global_ptr)
    like = gl.reshape(codes.to(gl.int32), [BM, BW // 4, 4])
    s = gl.convert_layout(s, gl.SliceLayout(2, like.type.layout))
    s = gl.expand_dims(s.to(gl.int32, bitcast=True), 2) | (like ^ like)
    s = gl.convert_layout(gl.reshape(s, [BM, BW]), L).to(gl.float32, bitcast=True)
    words = gl.inline_asm_elementwise(ASM, CONSTRAINTS, [codes, s], dtype=gl.int32, is_pure=True, pack=4)
    gl.store(out_ptr + rows.to(gl.int64) * W + cols, words, mask=inside)


def dequantize_words(source: Source, dtype: torch.dtype) -> torch.Tensor:
    """`dequant.dequantize` of packed codes with a scale per block."""
    codes, scale, block = source.codes, source.scale, source.block
    rows, width = codes.shape
    out = torch.empty((rows, 2 * width), dtype=dtype, device=codes.device)
    asm, constraints = decode_asm(source.element, "bf16" if dtype == torch.bfloat16 else "fp16")
    bw = min(128, triton.next_power_of_2(width))
    bm = 32 * WARPS * 4 * REPEATS // bw
    launch_tiles(
        dequantize_words_kernel,
        (codes, scale, scale if source.global_scale is None else source.global_scale, out.view(torch.int32)),
        codes.shape, (codes.stride(0), *scale.stride()), (bm, bw), ASM=asm, CONSTRAINTS=constraints,
        SFMT=source.sfmt, GLOBAL=source.global_scale is not None, SM=block[0], G=block[1] // 2, BM=bm, BW=bw,
        num_warps=WARPS, launch_pdl=True,
    )  # fmt: skip
    return out
