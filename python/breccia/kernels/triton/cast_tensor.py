# SPDX-License-Identifier: Apache-2.0
"""Cast with one scale per tensor or per row, and the two-level NVFP4 cast, which needs the tensor's maximum as well.

The maximum stays on the device: a first kernel leaves up to 1024 partial maxima, every program of the second reduces them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .cast_block import element_codes
from .codecs import abs_bits, as_float, decode_fp8_int, encode_element, encode_nan, nearby_divide, pack_nibbles
from .runtime import ELEMENTS, HW, contiguous_rows, launch

PARTIALS = 1024


@triton.jit
def amax_kernel(x_ptr, part_ptr, M, K, x_stride, k_tiles, tiles, BM: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    best = tl.zeros([BM, BK], tl.int32)
    for tile in range(pid, tiles, tl.num_programs(0)):
        rows = (tile // k_tiles) * BM + tl.arange(0, BM)
        cols = (tile % k_tiles) * BK + tl.arange(0, BK)
        inside = (rows < M)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=inside, other=0)
        bits = abs_bits(x.to(tl.float32))
        best = tl.maximum(best, tl.where(bits < 0x7F80_0000, bits, 0))
    tl.store(part_ptr + pid, tl.max(tl.max(best, axis=1), axis=0))


@triton.jit
def read_amax(part_ptr, count, N: tl.constexpr):
    at = tl.arange(0, N)
    return as_float(tl.max(tl.load(part_ptr + at, mask=at < count, other=0), axis=0))


@triton.jit
def tensor_scale(amax, RULE: tl.constexpr, MAX: tl.constexpr, MARGIN: tl.constexpr):
    """(stored scale, multiplier) from the maximum of a tensor or row; `multiply` is TransformerEngine's rule."""
    one = tl.full(amax.shape, 1.0, tl.float32)
    top = tl.full(amax.shape, MAX, tl.float32)
    if RULE == "divide":
        s = tl.div_rn(amax, top) * MARGIN
        s = tl.where(amax == 0, 1.0, s)
        return s, tl.div_rn(one, s)
    else:
        m = tl.div_rn(top, amax)
        m = tl.where((amax == 0) | (m == float("inf")), 1.0, m) * (1.0 / MARGIN)
        return tl.div_rn(one, m), m


@triton.jit
def scaled_codes(x, s, m, RULE: tl.constexpr, FMT: tl.constexpr, HW: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
                 HAS_NAN: tl.constexpr):  # fmt: skip
    """Codes of a tile of any values; s and m broadcast over it."""
    if RULE == "divide":
        near = (s > 8.3e-25) & (s < 1.2e24)  # 2^-80 ... 2^80: the short division is exact there
        if tl.min(near.to(tl.int32)) != 0:
            y = nearby_divide(x, s, m)
        else:
            y = tl.div_rn(x, tl.broadcast_to(s, x.shape))
    else:
        y = x * m
    bits = abs_bits(x)
    y = tl.where(bits < 0x7F80_0000, y, x)
    if HAS_NAN:
        return encode_nan(element_codes(y, FMT, HW, LO, HI), x, FMT)
    else:
        return element_codes(tl.where(bits > 0x7F80_0000, 0.0, y), FMT, HW, LO, HI)


@triton.jit
def cast_tensor_kernel(
    x_ptr, code_ptr, scale_ptr, part_ptr, parts, M, K, x_stride, k_tiles, tiles,
    RULE: tl.constexpr, FMT: tl.constexpr, MAX: tl.constexpr, MARGIN: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    GIVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, HW: tl.constexpr, HAS_NAN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = tiles - 1 - pid  # backwards: the end of x is what the first pass left in the cache
    rows = (tile // k_tiles) * BM + tl.arange(0, BM)
    cols = (tile % k_tiles) * BK + tl.arange(0, BK)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=inside, other=0).to(tl.float32)
    if GIVEN:
        s = tl.load(scale_ptr).to(tl.float32)
        m = tl.div_rn(1.0, s)
    else:
        s, m = tensor_scale(read_amax(part_ptr, parts, N), RULE, MAX, MARGIN)
        tl.store(scale_ptr, s, mask=pid == 0)
    code = scaled_codes(x, s + tl.zeros([1, 1], tl.float32), m + tl.zeros([1, 1], tl.float32), RULE, FMT, HW, LO, HI, HAS_NAN)
    tl.store(code_ptr + rows.to(tl.int64)[:, None] * K + cols[None, :], code, mask=inside)


@triton.jit
def cast_row_kernel(
    x_ptr, code_ptr, scale_ptr, M, K, x_stride,
    RULE: tl.constexpr, FMT: tl.constexpr, MAX: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, HW: tl.constexpr, HAS_NAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best = tl.zeros([1, BK], tl.int32)
    worst = tl.zeros([1, BK], tl.int32)
    cols = tl.arange(0, BK)[None, :]
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < K, other=0).to(tl.float32)  # a row of up to BK is read once
    for k0 in range(0, K, BK):
        if not WHOLE:
            x = tl.load(x_ptr + row * x_stride + k0 + cols, mask=k0 + cols < K, other=0).to(tl.float32)
        bits = abs_bits(x)
        best = tl.maximum(best, tl.where(bits < 0x7F80_0000, bits, 0))
        worst = tl.maximum(worst, bits)
    amax = as_float(tl.max(best, axis=1, keep_dims=True))
    s, m = tensor_scale(amax, RULE, MAX, 1.0)
    s = s.to(scale_ptr.dtype.element_ty)
    d = s.to(tl.float32)
    m = tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d) if RULE == "divide" else m
    nan = tl.max(worst, axis=1, keep_dims=True) > 0x7F80_0000
    if not HAS_NAN:
        s = tl.where(nan, float("nan"), s.to(tl.float32)).to(scale_ptr.dtype.element_ty)
    tl.store(scale_ptr + row + tl.zeros([1, 1], tl.int32), s)
    for k0 in range(0, K, BK):
        inside = k0 + cols < K
        if not WHOLE:
            x = tl.load(x_ptr + row * x_stride + k0 + cols, mask=inside, other=0).to(tl.float32)
        code = scaled_codes(x, d, m, RULE, FMT, HW, LO, HI, HAS_NAN)
        if not HAS_NAN:
            code = tl.where(nan, 0, code.to(tl.int32)).to(tl.uint8)
        tl.store(code_ptr + row * K + k0 + cols, code, mask=inside)


@triton.jit
def cast_nvfp4_kernel(
    x_ptr, code_ptr, scale_ptr, global_ptr, part_ptr, parts, M, K, x_stride, scale_stride, k_tiles, tiles,
    RULE: tl.constexpr, TWO_LEVEL: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, HW: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = tiles - 1 - pid
    m0 = (tile // k_tiles) * BM
    k0 = (tile % k_tiles) * BK
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    at = rows.to(tl.int64)[:, None] * x_stride + cols[None, :]
    x = tl.reshape(tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32), [BM, BK // 16, 16])
    bits = abs_bits(x)
    top = tl.max(bits, axis=2)
    if tl.max(tl.max(top, axis=1), axis=0) >= 0x7F80_0000:
        amax = as_float(tl.max(tl.where(bits < 0x7F80_0000, bits, 0), axis=2))
    else:
        amax = as_float(top)
    if TWO_LEVEL:
        g_amax = read_amax(part_ptr, parts, N)
    else:
        g_amax = 2688.0
    # e: what x is multiplied by before the blocks are scaled; its reciprocal is the global scale that goes with it.
    e = tl.div_rn(2688.0, g_amax)
    e = tl.minimum(tl.where(g_amax == 0, 1.0, e), 3.4028234663852886e38)
    if TWO_LEVEL:
        tl.store(global_ptr, tl.div_rn(g_amax, 2688.0) if RULE == "store_amax" else tl.div_rn(1.0, e), mask=pid == 0)
    if RULE == "torchao":
        g = tl.div_rn(g_amax, 2688.0)
        b = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
        b = tl.div_rn(b, tl.full(amax.shape, 1.0, tl.float32) * g)
        b = tl.minimum(tl.maximum(b, 0.015625), 448.0)
    else:
        b = amax * (e * 0.16666667163372040)
    code8 = encode_element(b, "e4m3", HW)
    b = code8.to(tl.float8e4nv, bitcast=True).to(tl.float32) if HW else decode_fp8_int(code8.to(tl.int32), "e4m3")
    one = tl.full(b.shape, 1.0, tl.float32)
    if RULE == "torchao":
        r = tl.div_rn(one * tl.div_rn(1.0, tl.div_rn(g_amax, 2688.0)), b)
    else:
        r = tl.minimum(tl.div_rn(one, b * tl.div_rn(1.0, e)), 3.4028234663852886e38)
    nan = top > 0x7F80_0000
    y = x * tl.expand_dims(r, 2)
    # Inf * r saturates; 0 * r with the largest r is 0; NaN blocks hold zeros under a NaN scale.
    y = tl.where(tl.expand_dims(nan, 2), 0.0, y)
    code = tl.reshape(encode_element(y, "e2m1", HW), [BM, BK])
    code8 = tl.where(nan, 0x7F, code8.to(tl.int32)).to(tl.uint8)
    scols = k0 // 16 + tl.arange(0, BK // 16)
    smask = (rows < M)[:, None] & (scols < tl.cdiv(K, 16))[None, :]
    tl.store(scale_ptr + rows.to(tl.int64)[:, None] * scale_stride + scols[None, :], code8, mask=smask)
    width = (K + 1) // 2
    half = k0 // 2 + tl.arange(0, BK // 2)
    to = rows.to(tl.int64)[:, None] * width + half[None, :]
    tl.store(code_ptr + to, pack_nibbles(code, BM, BK), mask=(rows < M)[:, None] & (half < width)[None, :])


def amax_partials(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Finite absolute maxima (float32 bits) of a 2-D tensor, one per program, and how many there are."""
    rows, cols = x.shape
    bk = min(1024, max(16, triton.next_power_of_2(cols)))
    bm = max(1, 4096 // bk)
    k_tiles = triton.cdiv(cols, bk)
    tiles = k_tiles * triton.cdiv(rows, bm)
    count = max(1, min(tiles, PARTIALS if x.is_cuda else 4))
    parts = torch.empty((PARTIALS,), dtype=torch.int32, device=x.device)
    launch(amax_kernel, (count,), x, x, parts, rows, cols, x.stride(0), k_tiles, tiles, BM=bm, BK=bk, num_warps=4)
    return parts, count


def cast_tensor(
    x: torch.Tensor, fmt: str, rule: str = "divide", margin: float = 1.0, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a 2-D tensor and its one scale (0-d float32), which the caller may also give."""
    x = contiguous_rows(x)
    rows, cols = x.shape
    element = ELEMENTS[fmt]
    codes = torch.empty((rows, cols), dtype=torch.uint8, device=x.device)
    out_scale = torch.ones((), dtype=torch.float32, device=x.device) if scale is None else scale
    if codes.numel() == 0:
        return codes, out_scale
    parts, count = amax_partials(x) if scale is None else (out_scale, 0)
    bk = min(512, max(16, triton.next_power_of_2(cols)))
    bm = max(1, 4096 // bk)
    k_tiles = triton.cdiv(cols, bk)
    tiles = k_tiles * triton.cdiv(rows, bm)
    launch(
        cast_tensor_kernel, (tiles,), x,
        x, codes, out_scale, parts, count, rows, cols, x.stride(0), k_tiles, tiles,
        RULE=rule, FMT=element.code, MAX=element.max, MARGIN=margin, LO=element.lo, HI=element.hi,
        GIVEN=scale is not None, BM=bm, BK=bk, HW=HW, HAS_NAN=element.has_nan, N=PARTIALS, num_warps=4,
    )  # fmt: skip
    return codes, out_scale


def cast_row(
    x: torch.Tensor, fmt: str, rule: str = "divide", scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a 2-D tensor and one scale per row, shape (rows, 1)."""
    x = contiguous_rows(x)
    rows, cols = x.shape
    element = ELEMENTS[fmt]
    codes = torch.empty((rows, cols), dtype=torch.uint8, device=x.device)
    scales = torch.ones((rows, 1), dtype=scale_dtype, device=x.device)
    if codes.numel() == 0:
        return codes, scales
    bk = min(8192, max(16, triton.next_power_of_2(cols)))
    launch(
        cast_row_kernel, (rows,), x, x, codes, scales, rows, cols, x.stride(0),
        RULE=rule, FMT=element.code, MAX=element.max, LO=element.lo, HI=element.hi, BK=bk, WHOLE=bk >= cols,
        HW=HW, HAS_NAN=element.has_nan, num_warps=4 if bk <= 4096 else 8,
    )  # fmt: skip
    return codes, scales


def cast_nvfp4(
    x: torch.Tensor, two_level: bool = True, rule: str = "transformer_engine", amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Packed codes, E4M3 block scales (as uint8) and the global scale. `amax` (float32, one element) skips the first pass."""
    x = contiguous_rows(x)
    rows, cols = x.shape
    codes = torch.empty((rows, (cols + 1) // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, triton.cdiv(cols, 16)), dtype=torch.uint8, device=x.device)
    global_scale = torch.ones((), dtype=torch.float32, device=x.device) if two_level else None
    if codes.numel() == 0:
        return codes, scales, global_scale
    parts, count = codes, 0
    if two_level:
        parts, count = (amax.view(torch.int32), 1) if amax is not None else amax_partials(x)
    bk = min(256, max(16, triton.next_power_of_2(cols)))
    bm = 4096 // bk
    k_tiles = triton.cdiv(cols, bk)
    tiles = k_tiles * triton.cdiv(rows, bm)
    args: dict[str, Any] = dict(RULE=rule, TWO_LEVEL=two_level, BM=bm, BK=bk, HW=HW, N=PARTIALS, num_warps=4)
    launch(
        cast_nvfp4_kernel, (tiles,), x, x, codes, scales, codes if global_scale is None else global_scale, parts, count,
        rows, cols, x.stride(0), scales.stride(0), k_tiles, tiles, **args,
    )  # fmt: skip
    return codes, scales, global_scale
