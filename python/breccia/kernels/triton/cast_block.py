# SPDX-License-Identifier: Apache-2.0
"""Cast with one scale per block of SM rows by G columns, all statistics and codes in one pass over the input."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .codecs import (
    abs_bits,
    as_float,
    encode_element,
    encode_nan,
    mx_exponent,
    nearby_divide,
    pack_nibbles,
    round_int,
)
from .runtime import HW, ELEMENTS, contiguous_rows, launch, out_dtype_of_scale


@triton.jit
def block_scale(amax, RULE: tl.constexpr, MAX: tl.constexpr, SDT: tl.constexpr, EMAX: tl.constexpr, MANT: tl.constexpr):
    """(stored scale, divisor, multiplier) of blocks whose finite absolute maximum is amax."""
    if RULE == "divide":
        s = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
        s = tl.where(amax == 0, 1.0, s).to(SDT)
        d = s.to(tl.float32)
        return s, d, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), d)
    else:
        e = mx_exponent(amax, MAX, EMAX, MANT, RULE)
        if RULE == "rceil":
            up = tl.where(e == 254, 0x0040_0000, (254 - e) << 23)
            up = tl.where(e == 0, 0x3F80_0000, up)  # a block below every scale keeps its own values
            m = as_float(up)
            return e.to(tl.uint8), m, m
        else:
            d = as_float(tl.maximum(e, 1) << 23)  # never a subnormal divisor
            m = as_float(tl.where(e == 254, 0x0040_0000, (254 - tl.maximum(e, 1)) << 23))
            return e.to(tl.uint8), d, m


@triton.jit
def scale_values(x, d, m, RULE: tl.constexpr, CAREFUL: tl.constexpr):
    if RULE == "divide":
        if CAREFUL:
            return tl.div_rn(x, tl.broadcast_to(d, x.shape))
        else:
            return nearby_divide(x, d, m)
    else:
        return x * m  # a power of two: the product is the quotient


@triton.jit
def element_codes(y, FMT: tl.constexpr, HW: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr):
    if FMT == "int":
        return round_int(y, LO, HI).to(tl.uint8)
    else:
        return encode_element(y, FMT, HW)


@triton.jit
def cast_block_kernel(
    x_ptr, code_ptr, scale_ptr, M, K, x_stride, scale_stride, k_tiles,
    RULE: tl.constexpr, FMT: tl.constexpr, MAX: tl.constexpr, EMAX: tl.constexpr, MANT: tl.constexpr,
    LO: tl.constexpr, HI: tl.constexpr, SM: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, HAS_NAN: tl.constexpr, HW: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    m0 = (pid // k_tiles) * BM
    k0 = (pid % k_tiles) * BK
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows.to(tl.int64)[:, None] * x_stride + cols[None, :]
    x = tl.reshape(tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32), [BM // SM, SM, BK // G, G])
    bits = abs_bits(x)
    top = tl.max(tl.max(bits, axis=3), axis=1)
    # Ordinary blocks: finite, and far enough from the ends of float32 for the short division. 2^-80 and 2^80.
    odd = (top >= 0x6780_0000) | ((top < 0x1780_0000) & (top != 0))
    if tl.max(tl.max(odd.to(tl.int32), axis=1), axis=0) != 0:
        finite = tl.where(bits < 0x7F80_0000, bits, 0)
        amax = as_float(tl.max(tl.max(finite, axis=3), axis=1))
        scale, d, m = block_scale(amax, RULE, MAX, scale_ptr.dtype.element_ty, EMAX, MANT)
        d = tl.expand_dims(tl.expand_dims(d, 1), 3)
        m = tl.expand_dims(tl.expand_dims(m, 1), 3)
        y = scale_values(x, d, m, RULE, True)
        y = tl.where(bits < 0x7F80_0000, y, x)  # an infinite or NaN element is not scaled
        if HAS_NAN:
            code = encode_nan(element_codes(y, FMT, HW, LO, HI), x, FMT)
        else:
            nan = top > 0x7F80_0000
            if RULE == "divide":
                scale = tl.where(nan, float("nan"), scale.to(tl.float32)).to(scale_ptr.dtype.element_ty)
            else:
                scale = tl.where(nan, 255, scale.to(tl.int32)).to(tl.uint8)
            nan4 = tl.expand_dims(tl.expand_dims(nan, 1), 3)
            y = tl.where(nan4, 0.0, y)
            code = element_codes(y, FMT, HW, LO, HI)
    else:
        scale, d, m = block_scale(as_float(top), RULE, MAX, scale_ptr.dtype.element_ty, EMAX, MANT)
        d = tl.expand_dims(tl.expand_dims(d, 1), 3)
        m = tl.expand_dims(tl.expand_dims(m, 1), 3)
        code = element_codes(scale_values(x, d, m, RULE, False), FMT, HW, LO, HI)
    code = tl.reshape(code, [BM, BK])
    srows = m0 // SM + tl.arange(0, BM // SM)
    scols = k0 // G + tl.arange(0, BK // G)
    smask = (srows < tl.cdiv(M, SM))[:, None] & (scols < tl.cdiv(K, G))[None, :]
    tl.store(scale_ptr + srows.to(tl.int64)[:, None] * scale_stride + scols[None, :], scale, mask=smask)
    if PACKED:
        width = (K + 1) // 2
        half = k0 // 2 + tl.arange(0, BK // 2)
        to = rows.to(tl.int64)[:, None] * width + half[None, :]
        tl.store(code_ptr + to, pack_nibbles(code, BM, BK), mask=(rows < M)[:, None] & (half < width)[None, :])
    else:
        tl.store(code_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], code, mask=inside)


def cast_block(
    x: torch.Tensor,
    fmt: str,
    block: tuple[int, int],
    rule: str = "divide",
    scale_dtype: torch.dtype = torch.float32,
    packed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and scales of a 2-D tensor. `block` is (rows, columns), powers of two; `rule` divide, rceil, floor, ceil, even."""
    x = contiguous_rows(x)
    rows, cols = x.shape
    sm, g = block
    element = ELEMENTS[fmt]
    width = (cols + 1) // 2 if packed else cols
    codes = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty(
        (triton.cdiv(rows, sm), triton.cdiv(cols, g)), dtype=out_dtype_of_scale(rule, scale_dtype), device=x.device
    )
    if codes.numel() == 0:
        return codes, scales
    bk = max(g, min(256 if sm == 1 else 128, triton.next_power_of_2(cols)), 2)
    bm = max(sm, min(4096 // bk, 64)) if sm == 1 else sm
    k_tiles = triton.cdiv(cols, bk)
    args: dict[str, Any] = dict(
        RULE=rule, FMT=element.code, MAX=element.max, EMAX=element.emax, MANT=element.mant, LO=element.lo, HI=element.hi,
        SM=sm, G=g, BM=bm, BK=bk, PACKED=packed, HAS_NAN=element.has_nan, HW=HW,
    )  # fmt: skip
    warps = 4 if bm * bk <= 8192 else 8
    launch(
        cast_block_kernel, (triton.cdiv(rows, bm) * k_tiles,), x,
        x, codes, scales, rows, cols, x.stride(0), scales.stride(0), k_tiles, num_warps=warps, **args,
    )  # fmt: skip
    return codes, scales
