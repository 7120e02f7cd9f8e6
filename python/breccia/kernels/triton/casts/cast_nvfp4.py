# SPDX-License-Identifier: Apache-2.0
# Device code: x != x is NaN.
# ruff: noqa: PLR0124
"""NVFP4: E2M1 codes, an E4M3 scale for every 16 of them and one float32 global scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_tensor import statistics
from breccia.kernels.triton.device.codecs import (
    E2M1,
    E4M3,
    absmax,
    decode_element,
    encode_element,
    nvfp4_factor,
    nvfp4_wanted,
    pack_nibbles,
)
from breccia.kernels.triton.device.words import takes, takes_turned
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import launch
from breccia.kernels.triton.turn import contiguous_rows

TILE, WARPS = 1024, 1  # elements and warps of a program


@triton.jit
def nvfp4_tile(
    raw,
    code_ptr,
    scale_ptr,
    stat_ptr,
    m0,
    k0,
    M,
    K,
    RULE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """Scales and codes of the tile whose values are raw."""
    rows = m0 + tl.arange(0, BM)
    x = tl.reshape(raw.to(tl.float32), [BM, BK // 16, 16])
    top = absmax(x, 2)
    amax = top
    nan = tl.where(top != top, 1, 0)
    if tl.max(tl.max(tl.where(top < float("inf"), 0, 1), axis=1), axis=0) != 0:
        amax = absmax(tl.where(tl.abs(x) < float("inf"), x, 0.0), 2)
        x = tl.where(tl.expand_dims(nan, 2) != 0, 0.0, x)
    code8 = encode_element(nvfp4_wanted(amax, stat_ptr, RULE), E4M3)
    y = x * tl.expand_dims(nvfp4_factor(decode_element(code8, E4M3), stat_ptr, RULE), 2)
    code = tl.reshape(encode_element(y, E2M1), [BM, BK])
    code8 = tl.where(nan != 0, 0x7F, code8.to(tl.int32)).to(tl.uint8)
    scols = k0 // 16 + tl.arange(0, BK // 16)
    blocks = tl.cdiv(K, 16)
    smask = (rows < M)[:, None] & (scols < blocks)[None, :]
    tl.store(scale_ptr + rows.to(tl.int64)[:, None] * blocks + scols[None, :], code8, mask=smask)
    width = (K + 1) // 2
    half = k0 // 2 + tl.arange(0, BK // 2)
    to = rows.to(tl.int64)[:, None] * width + half[None, :]
    tl.store(code_ptr + to, pack_nibbles(code, BM, BK), mask=(rows < M)[:, None] & (half < width)[None, :])


@triton.jit
def cast_nvfp4_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    stat_ptr,
    M,
    K,
    x_stride,
    k_tiles,
    tiles,
    RULE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """RULE: transformer_engine or torchao (two-level), single (one level)."""
    tile = tiles - 1 - tl.program_id(0)
    m0 = (tile // k_tiles) * BM
    k0 = (tile % k_tiles) * BK
    rows = m0 + tl.arange(0, BM)
    cols = k0 + tl.arange(0, BK)
    inside = (rows < M)[:, None] & (cols < K)[None, :]
    raw = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=inside, other=0)
    nvfp4_tile(raw, code_ptr, scale_ptr, stat_ptr, m0, k0, M, K, RULE, BM, BK)


def cast_nvfp4(
    x: torch.Tensor,
    two_level: bool = True,
    rule: str = "transformer_engine",
    stats: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Packed codes, E4M3 block scales (as uint8) and the global scale of a 2-D tensor.

    `stats` is what an earlier `cast_tensor.statistics(x, "nvfp4", ...)` returned, for callers that know the maximum;
    `amax` is the maximum itself.
    """
    turned = takes_turned(x, "e2m1", (1, 16), rule if two_level else "single")
    x = x if turned else contiguous_rows(x)
    rows, cols = x.shape
    codes = torch.empty((rows, (cols + 1) // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, triton.cdiv(cols, 16)), dtype=torch.uint8, device=x.device)
    if codes.numel() == 0:
        return codes, scales, torch.ones((), dtype=torch.float32, device=x.device) if two_level else None
    global_scale = torch.empty((), dtype=torch.float32, device=x.device) if two_level else None
    if global_scale is None:
        rule, stats = "single", codes
    elif stats is None:
        stats = statistics(x.T if turned else x, "nvfp4", 6.0, 1.0, global_scale, amax)
    else:
        global_scale = stats[2]
    if turned or takes(x, "e2m1", (1, 16), rule):
        from breccia.kernels.triton.casts.cast_words import cast_words

        return *cast_words(x, Plan("nvfp4", "e2m1", rule, (1, 16), packed=True), stats), global_scale
    bk = min(256, max(16, triton.next_power_of_2(cols)))
    bm = TILE // bk
    k_tiles = triton.cdiv(cols, bk)
    tiles = k_tiles * triton.cdiv(rows, bm)
    launch(
        cast_nvfp4_kernel,
        (tiles,),
        x,
        codes,
        scales,
        stats,
        rows,
        cols,
        x.stride(0),
        k_tiles,
        tiles,
        RULE=rule,
        BM=bm,
        BK=bk,
        num_warps=WARPS,
    )
    return codes, scales, global_scale
