# SPDX-License-Identifier: Apache-2.0
"""One plain Triton matmul for everything the tuned kernels do not take: x (T, K) by quantized weights (N, K) or (E,
N, K).

x is bf16/fp16, or FP8 with a scale per row and 128 elements. Weights decode on the fly. Power-of-two and E4M3 scales
of 4-, 6- and 8-bit floats are exact in bf16 and go into the decode; other scales multiply the float32 product of their
own slice of K. With experts, program ids are dealt out from the offsets on the device: no synchronization, no padding
of the rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.device.codecs import FP8, HW, as_hardware, decode_element, decode_scale
from breccia.kernels.triton.device.elements import ELEMENTS
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import launch


@triton.jit
def find_tile(pid, offset_ptr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, end row) of the pid-th row tile; past the last one, expert is E and the rows are those that
    belong to no expert."""
    at = tl.arange(0, EP)
    start = tl.load(offset_ptr + at, mask=at < E, other=0).to(tl.int32)
    end = tl.load(offset_ptr + at + 1, mask=at < E, other=0).to(tl.int32)
    tiles = tl.where(at < E, (end - start + BM - 1) // BM, 0)
    done = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((done <= pid) & (at < E), 1, 0), 0)
    mine = at == expert
    first = tl.sum(tl.where(mine, start + (pid - (done - tiles)) * BM, 0), 0)
    if expert >= E:
        first = tl.max(tl.where(at < E, end, 0), 0) + (pid - tl.sum(tiles, 0)) * BM
    return expert, first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def gemm_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, z_ptr, g_ptr, bias_ptr, out_ptr, offset_ptr, T, N, K, x_stride, xs_row, xs_col,
    w_expert, w_stride, s_expert, s_row, s_col, out_stride, X: tl.constexpr, FORM: tl.constexpr, FOLD: tl.constexpr,
    BIAS: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """X: the element format of x, None where it is a float. FORM: of w."""
    ELEMENT: tl.constexpr = FORM.element
    SCALE: tl.constexpr = FORM.scale
    SN: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    if E > 0:
        expert, m0, m_end = find_tile(tl.program_id(0), offset_ptr, E, EP, BM)
        if expert >= E:
            rows = m0 + tl.arange(0, BM)
            cols = tl.program_id(1) * BN + tl.arange(0, BN)
            to = rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
            zero = tl.zeros([BM, BN], out_ptr.dtype.element_ty)
            tl.store(out_ptr + to, zero, mask=(rows < T)[:, None] & (cols < N)[None, :])
            return
    else:
        expert = 0
        m0 = tl.program_id(0) * BM
        m_end = T
    w_ptr += expert.to(tl.int64) * w_expert if E > 0 else 0
    s_ptr += expert.to(tl.int64) * s_expert if E > 0 else 0
    z_ptr += expert.to(tl.int64) * s_expert if E > 0 else 0
    rows = m0 + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    live_m, live_n = rows < m_end, cols < N
    srow = (cols // SN if SN > 0 else cols * 0).to(tl.int64) * s_row
    GK: tl.constexpr = BK if (G == 0 or G > BK) else G
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :], mask=live_m[:, None] & (k < K)[None, :], other=0
        )
        if FORM.packed:
            half = k0 // 2 + tl.arange(0, BK // 2)
            byte = tl.load(
                w_ptr + cols.to(tl.int64)[:, None] * w_stride + half[None, :],
                mask=live_n[:, None] & (half < (K + 1) // 2)[None, :],
                other=0,
            )
            raw = tl.reshape(tl.join(byte & 0xF, byte >> 4), [BN, BK])
        else:
            raw = tl.load(
                w_ptr + cols.to(tl.int64)[:, None] * w_stride + k[None, :],
                mask=live_n[:, None] & (k < K)[None, :],
                other=0,
            )
        raw = as_hardware(raw, ELEMENT)
        scol = ((k0 + tl.arange(0, BK // GK) * GK) // G if G > 0 else tl.zeros([BK // GK], tl.int32)) * s_col
        smask = live_n[:, None] & ((k0 + tl.arange(0, BK // GK) * GK) < K)[None, :]
        sraw = tl.load(s_ptr + srow[:, None] + scol[None, :], mask=smask, other=0)
        s = decode_scale(sraw, SCALE)
        if X is not None:
            if FP8:
                part = tl.dot(as_hardware(x, X), tl.trans(raw))
            elif HW:
                part = tl.dot(
                    decode_element(x, X).to(tl.bfloat16), tl.trans(decode_element(raw, ELEMENT).to(tl.bfloat16))
                )
            else:
                part = tl.dot(decode_element(x, X), tl.trans(decode_element(raw, ELEMENT)))
            xs = tl.load(xs_ptr + rows.to(tl.int64) * xs_row + (k0 // 128) * xs_col, mask=live_m, other=0)
            acc += part * xs[:, None] * tl.reshape(s, [BN])[None, :]
        else:
            v = tl.reshape(decode_element(raw, ELEMENT), [BN, BK // GK, GK])
            if FORM.zero_point:
                v -= tl.expand_dims(
                    tl.load(z_ptr + srow[:, None] + scol[None, :], mask=smask, other=0).to(tl.float32), 2
                )
            if FOLD:
                v = v * tl.expand_dims(s, 2)
            if not HW:
                x = x.to(tl.float32)  # the interpreter has no bf16 product; both sides are exact in either
            w = tl.reshape(v, [BN, BK]).to(x.dtype)
            if FOLD:
                acc = tl.dot(x, tl.trans(w), acc)
            else:
                acc += tl.dot(x, tl.trans(w)) * tl.reshape(s, [BN])[None, :]
    if FORM.global_scale:
        acc = acc * tl.load(g_ptr + expert)
    if BIAS:
        acc += tl.load(bias_ptr + cols, mask=live_n, other=0).to(tl.float32)[None, :]
    to = rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


def gemm(
    x: torch.Tensor,
    w: Source,
    out_dtype: torch.dtype,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (T, K) by w (N, K) transposed, or by expert e's w[e] for rows offsets[e] to offsets[e + 1].

    K blocks of w are powers of two. `x_scale` (T, K/128) comes with FP8 x and block (1 or 128, 128).
    """
    t, k = x.shape
    codes, scale = w.codes, w.scale
    n = codes.shape[-2]
    out = torch.empty((t, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    x_element = None
    if x_scale is not None:
        x_element = ELEMENTS["e4m3" if x.dtype == torch.float8_e4m3fn else "e5m2"]
        x = x.view(torch.uint8)
    codes = codes if codes.stride(-1) == 1 else codes.contiguous()
    codes = codes if codes.dtype == torch.uint8 else codes.view(torch.uint8)
    if scale.ndim < codes.ndim:
        scale = scale.reshape((*scale.shape, *(1,) * (codes.ndim - scale.ndim)))
    fold = w.sfmt in ("e8m0", "e4m3")
    scale = scale.view(torch.uint8) if fold and scale.dtype != torch.uint8 else scale
    experts = 0 if offsets is None else codes.shape[0]
    bm, bn, bk = _tile(t, w.block[1], fold, max(1, experts))
    tiles = triton.cdiv(t, bm) + experts
    launch(
        gemm_kernel,
        (tiles, triton.cdiv(n, bn)),
        x,
        scale if x_scale is None else x_scale,
        *replace(w, codes=codes, scale=scale).pointers(),
        scale if bias is None else bias,
        out,
        scale if offsets is None else offsets,
        t,
        n,
        k,
        x.stride(0),
        *((0, 0) if x_scale is None else x_scale.stride()),
        codes.stride(0) if codes.ndim == 3 else 0,
        codes.stride(-2),
        *_scale_strides(scale),
        out.stride(0),
        X=x_element,
        FORM=w.form(),
        FOLD=fold,
        BIAS=bias is not None,
        E=experts,
        EP=triton.next_power_of_2(max(1, experts)),
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=4 if bm <= 64 else 8,
        num_stages=3,
    )
    return out


def _tile(rows: int, group: int, fold: bool, experts: int) -> tuple[int, int, int]:
    """Rows, columns and elements of K of a tile."""
    bk = 128 if (fold and group <= 128) or group == 0 or group >= 128 else group
    # Tiles of 16 rows with 16 of K give wrong products in Triton 3.6, not in its interpreter.
    bm = 16 if rows <= 16 * experts and bk > 16 else 64 if rows <= 64 * experts else 128
    return bm, 64 if bm <= 64 else 128, bk


def _scale_strides(scale: torch.Tensor) -> tuple[int, int, int]:
    """Along experts, rows and K; 0 where one scale is for all."""
    if scale.numel() <= 1:
        return 0, 0, 0
    return (scale.stride(-3) if scale.ndim == 3 else 0), scale.stride(-2), scale.stride(-1)
