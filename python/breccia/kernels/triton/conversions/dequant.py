# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Codes and scales back to numbers: (decode(code) - zero point) * (scale * global scale), in float32, then rounded
once."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.device.codecs import decode_element, decode_scale
from breccia.kernels.triton.device.words import takes_packed
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import launch_tiles, overlaps


@triton.jit
def canonical(v):
    """v with the NaN of the core. The GPU's arithmetic makes every NaN the largest positive integer of its size."""
    if v.dtype == tl.float32:
        return tl.minimum(v.to(tl.int32, bitcast=True), 0x7FC0_0000).to(tl.float32, bitcast=True)
    elif v.dtype == tl.bfloat16:
        return tl.minimum(v.to(tl.int16, bitcast=True), 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return tl.minimum(v.to(tl.int16, bitcast=True), 0x7E00).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def load_values(
    code_ptr, scale_ptr, zero_ptr, global_ptr, m0, k0, M, K, code_stride, s_row, s_col,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The float32 of a tile, and 0 outside of the matrix."""
    SM: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    ELEMENT: tl.constexpr = FORM.element
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    live = (rows < M)[:, None]
    if FORM.packed:
        half = k0 // 2 + tl.arange(0, BK // 2)
        at = rows.to(tl.int64)[:, None] * code_stride + half[None, :]
        byte = tl.load(code_ptr + at, mask=live & (half < (K + 1) // 2)[None, :], other=0)
        raw = tl.reshape(tl.join(byte & 0xF, byte >> 4), [BM, BK])
    else:
        inside = live & (cols < K)[None, :]
        raw = tl.load(code_ptr + rows.to(tl.int64)[:, None] * code_stride + cols[None, :], mask=inside, other=0)
    v = decode_element(raw, ELEMENT)
    # One load and one decode per scale where a tile holds whole blocks, then broadcast.
    GK: tl.constexpr = BK if G == 0 else (1 if G & (G - 1) else (G if G < BK else BK))
    srow = (rows // SM if SM > 0 else rows * 0).to(tl.int64)
    scol = (k0 + tl.arange(0, BK // GK) * GK) // G if G > 0 else tl.zeros([1], tl.int32)
    smask = live & (scol * (G if G > 0 else 1) < K)[None, :]
    sat = srow[:, None] * s_row + scol[None, :] * s_col
    s = load_scale(scale_ptr, global_ptr, sat, smask, FORM)
    v = tl.reshape(v, [BM, BK // GK, GK])
    if FORM.zero_point:
        v = v - tl.expand_dims(tl.load(zero_ptr + sat, mask=smask, other=0).to(tl.float32), 2)
    return tl.reshape(v * tl.expand_dims(s, 2), [BM, BK])


@triton.jit
def load_scale(scale_ptr, global_ptr, at, mask, FORM: tl.constexpr):
    """float32 scales, the global one included."""
    raw = tl.load(scale_ptr + at, mask=mask, other=0)
    SCALE: tl.constexpr = FORM.scale
    s = decode_scale(raw, SCALE)
    if FORM.global_scale:
        s = s * tl.load(global_ptr)
    return s


@triton.jit
def dequantize_kernel(
    code_ptr, scale_ptr, zero_ptr, global_ptr, out_ptr, M, K, code_stride, s_row, s_col, k_tiles,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """EARLY: the kernel may begin before the one before it has ended, and lets the next one do so."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    m0 = (pid // k_tiles) * BM
    k0 = (pid % k_tiles) * BK
    v = load_values(
        code_ptr, scale_ptr, zero_ptr, global_ptr, m0, k0, M, K, code_stride, s_row, s_col, FORM, BM, BK
    )  # fmt: skip
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    to = out_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(to, canonical(v.to(out_ptr.dtype.element_ty)), mask=(rows < M)[:, None] & (cols < K)[None, :])


def dequantize(source: Source, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A 2-D tensor from its codes."""
    rows, cols = source.shape
    codes, scale, block = source.codes, source.scale, source.block
    out = torch.empty(source.shape, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    codes = codes.view(torch.uint8) if codes.dtype != torch.uint8 else codes
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    scale = scale.view(torch.uint8) if source.sfmt in ("e8m0", "e4m3") and scale.dtype != torch.uint8 else scale
    source = replace(source, codes=codes, scale=scale)
    words = source.zero_point is None and scale.ndim == 2 and source.packed
    if words and takes_packed(codes, source.element, cols, block, dtype):
        from breccia.kernels.triton.conversions.dequant_words import dequantize_words

        return dequantize_words(source, dtype)
    s_row, s_col = (scale.stride(0), scale.stride(1)) if scale.ndim == 2 else (0, 0)
    bk = min(256, max(16, triton.next_power_of_2(cols)))
    # A few rows, as of activations, take less time in many small programs.
    bm = (4096 if rows * cols > 1 << 20 else 512) // bk
    early = overlaps(codes.device)
    launch_tiles(
        dequantize_kernel, (*source.pointers(), out), source.shape, (codes.stride(0), s_row, s_col), (bm, bk),
        FORM=source.form(), BM=bm, BK=bk, EARLY=early, num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
