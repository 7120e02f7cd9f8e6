# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""A few bf16/fp16 rows by 4-bit or FP8 weights: bound by reading the weights, so every instruction per code counts.

Four bytes become eight fp16 numbers by shifts and masks: an E2M1 code's bits in fp16's fields are its value times
2^-14, which the scale pays back; an INT4 code is a mantissa under the exponent of 1024.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.device.codecs import HW, decode_element, decode_scale
from breccia.kernels.triton.device.elements import ELEMENTS, Form
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import launch

E2M1_ASM = tl.constexpr("""{
.reg .b32 p, q, s, t;
prmt.b32 p, $4, 0, 0x4140; prmt.b32 q, $4, 0, 0x4342;
shl.b32 s, p, 12; and.b32 s, s, 0x80008000; shl.b32 t, p, 9; and.b32 t, t, 0x0E000E00; or.b32 $0, s, t;
shl.b32 s, q, 12; and.b32 s, s, 0x80008000; shl.b32 t, q, 9; and.b32 t, t, 0x0E000E00; or.b32 $1, s, t;
shl.b32 s, p, 8; and.b32 s, s, 0x80008000; shl.b32 t, p, 5; and.b32 t, t, 0x0E000E00; or.b32 $2, s, t;
shl.b32 s, q, 8; and.b32 s, s, 0x80008000; shl.b32 t, q, 5; and.b32 t, t, 0x0E000E00; or.b32 $3, s, t;
}""")
INT4_ASM = tl.constexpr("""{
.reg .b32 p, q, s, bias;
prmt.b32 p, $4, 0, 0x4140; prmt.b32 q, $4, 0, 0x4342; mov.b32 bias, 0x64086408;
lop3.b32 s, p, 0x000F000F, 0x64086408, 0x6A; sub.f16x2 $0, s, bias;
lop3.b32 s, q, 0x000F000F, 0x64086408, 0x6A; sub.f16x2 $1, s, bias;
shr.b32 p, p, 4; shr.b32 q, q, 4;
lop3.b32 s, p, 0x000F000F, 0x64086408, 0x6A; sub.f16x2 $2, s, bias;
lop3.b32 s, q, 0x000F000F, 0x64086408, 0x6A; sub.f16x2 $3, s, bias;
}""")  # (code & 15) ^ 0x6408 is 1024 + (code + 8)


@triton.jit
def decode_pair(byte, ELEMENT: tl.constexpr):
    """(even, odd) elements of packed bytes as float32, E2M1 times 2^-14."""
    if HW and ELEMENT.name == "e2m1":
        lo, hi = tl.inline_asm_elementwise(
            E2M1_ASM, "=r,=r,=r,=r,r", [byte], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        return lo.to(tl.float32), hi.to(tl.float32)
    elif HW and ELEMENT.name == "int4":
        lo, hi = tl.inline_asm_elementwise(
            INT4_ASM, "=r,=r,=r,=r,r", [byte], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        return lo.to(tl.float32), hi.to(tl.float32)
    else:
        shrink: tl.constexpr = 0.00006103515625 if ELEMENT.name == "e2m1" else 1.0
        return decode_element(byte & 0xF, ELEMENT) * shrink, decode_element(byte >> 4, ELEMENT) * shrink


@triton.jit
def unpack_halves(word, HALF: tl.constexpr):
    """The two 16-bit floats of an int32, as float32."""
    if tl.bfloat16 == HALF:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        lo = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        hi = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return lo.to(tl.float32), hi.to(tl.float32)


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    g_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    x_stride,
    w_stride,
    s_row,
    s_col,
    out_stride,
    FORM: tl.constexpr,
    HALF: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x_ptr: pairs of activations as int32. K is a multiple of BK, BK of the group G."""
    ELEMENT: tl.constexpr = FORM.element
    SCALE: tl.constexpr = FORM.scale
    G: tl.constexpr = FORM.cols
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64)
    live = (rows < N)[:, None]
    half = tl.arange(0, BK // 2)
    groups = tl.arange(0, BK // G)
    w_at = w_ptr + rows.to(tl.int64)[:, None] * w_stride + half[None, :]
    s_at = s_ptr + rows.to(tl.int64)[:, None] * s_row + groups[None, :] * s_col
    acc = tl.zeros([BN, BK // G], tl.float32)
    byte = tl.load(w_at, mask=live, other=0)
    for k0 in range(0, K, BK):
        xw = tl.load(x_ptr + m * x_stride + k0 // 2 + half)
        sraw = tl.load(s_at + (k0 // G) * s_col, mask=live, other=0)
        after = tl.load(w_at + (k0 + BK) // 2, mask=live & (k0 + BK < K), other=0)
        even, odd = decode_pair(byte, ELEMENT)
        x_even, x_odd = unpack_halves(xw, HALF)
        p = even * x_even[None, :] + odd * x_odd[None, :]
        s = decode_scale(sraw, SCALE)
        acc += tl.sum(tl.reshape(p, [BN, BK // G, G // 2]), axis=2) * s
        byte = after
    y = tl.sum(acc, axis=1)
    if ELEMENT.name == "e2m1":
        y = y * 16384.0
    if FORM.global_scale:
        y = y * tl.load(g_ptr)
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(out_ptr + m * out_stride + rows, y.to(out_ptr.dtype.element_ty), mask=rows < N)


@triton.jit
def gemv8_kernel(
    x_ptr,
    w_ptr,
    s_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    x_stride,
    w_stride,
    s_row,
    s_col,
    out_stride,
    FORM: tl.constexpr,
    BIAS: tl.constexpr,
    EARLY: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """8-bit codes: the same loop without the unpacking. SN rows share a scale (0: all of them).
    EARLY: the kernel begins before the one before it has ended."""
    ELEMENT: tl.constexpr = FORM.element
    SCALE: tl.constexpr = FORM.scale
    SN: tl.constexpr = FORM.rows
    G: tl.constexpr = FORM.cols
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1).to(tl.int64)
    live = (rows < N)[:, None]
    cols = tl.arange(0, BK)
    w_at = w_ptr + rows.to(tl.int64)[:, None] * w_stride + cols[None, :]
    s_at = (
        s_ptr
        + (rows // SN if SN > 0 else rows * 0).to(tl.int64)[:, None] * s_row
        + tl.arange(0, BK // G)[None, :] * s_col
    )
    acc = tl.zeros([BN, BK // G], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    code = tl.load(w_at, mask=live, other=0, eviction_policy="evict_first")
    for k0 in range(0, K, BK):
        x = tl.load(x_ptr + m * x_stride + k0 + cols).to(tl.float32)
        sraw = tl.load(s_at + (k0 // G) * s_col, mask=live, other=0)
        after = tl.load(w_at + k0 + BK, mask=live & (k0 + BK < K), other=0, eviction_policy="evict_first")
        p = decode_element(code, ELEMENT) * x[None, :]
        acc += tl.sum(tl.reshape(p, [BN, BK // G, G]), axis=2) * decode_scale(sraw, SCALE)
        code = after
    y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0).to(tl.float32)
    tl.store(out_ptr + m * out_stride + rows, y.to(out_ptr.dtype.element_ty), mask=rows < N)


def gemv8(
    x: torch.Tensor, w: Source, out_dtype: torch.dtype, bias: torch.Tensor | None = None, early: bool = False
) -> torch.Tensor:
    """x (M, K) by 8-bit weights (N, K); K is a multiple of 256. `early`: on a GPU that can, the kernel begins before
    the one before it has ended."""
    (m, k), n = x.shape, w.codes.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    scale, block = w.scale, w.block
    scale = scale.view(torch.uint8) if w.sfmt == "e8m0" and scale.dtype != torch.uint8 else scale
    s_row, s_col = (scale.stride(0), scale.stride(1) if block[1] else 0) if scale.numel() > 1 else (0, 0)
    chunk = math.gcd(k, 1024)
    launch(
        gemv8_kernel,
        (triton.cdiv(n, 2), m),
        x,
        w.codes,
        scale,
        scale if bias is None else bias,
        out,
        n,
        k,
        x.stride(0),
        w.codes.stride(0),
        s_row,
        s_col,
        out.stride(0),
        FORM=Form(ELEMENTS[w.element], w.sfmt, rows=block[0], cols=min(block[1] or 256, chunk)),
        BIAS=bias is not None,
        EARLY=early,
        BN=2,
        BK=chunk,
        num_warps=2,
        **({"launch_pdl": True} if early else {}),
    )
    return out


def gemv(x: torch.Tensor, w: Source, out_dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) by packed weights (N, K/2 bytes) with a scale per row and group; K is a multiple of 256."""
    (m, k), n = x.shape, w.codes.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = x.contiguous()
    scale, block = w.scale, w.block
    scale = scale.view(torch.uint8) if w.sfmt in ("e8m0", "e4m3") and scale.dtype != torch.uint8 else scale
    group = min(block[1], k) if block[1] else 256
    s_col = scale.stride(1) if block[1] else 0
    chunk = math.gcd(k, 1024)
    launch(
        gemv_kernel,
        (triton.cdiv(n, 8), m),
        x.view(torch.int32),
        w.codes,
        scale,
        scale if w.global_scale is None else w.global_scale,
        scale if bias is None else bias,
        out,
        n,
        k,
        x.stride(0) // 2,
        w.codes.stride(0),
        scale.stride(0),
        s_col,
        out.stride(0),
        FORM=Form(ELEMENTS[w.element], w.sfmt, rows=1, cols=min(group, chunk), global_scale=w.global_scale is not None),
        HALF=triton.language.bfloat16 if x.dtype == torch.bfloat16 else triton.language.float16,
        BIAS=bias is not None,
        BN=8,
        BK=chunk,
        num_warps=4,
    )
    return out
