# SPDX-License-Identifier: Apache-2.0
"""NVFP4: E2M1 codes, an E4M3 scale for every 16 of them and one float32 global scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_block import cast_tile, inside
from breccia.kernels.triton.casts.cast_tensor import statistics
from breccia.kernels.triton.device.words import takes, takes_turned
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import empty_parts, launch_tiles
from breccia.kernels.triton.turn import contiguous_rows

TILE, WARPS = 1024, 1  # elements and warps of a program


@triton.jit
def cast_nvfp4_kernel(
    x_ptr, code_ptr, scale_ptr, stat_ptr, M, K, x_stride, k_tiles, tiles,
    FORM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile, backwards: the end of x is what the pass before left in the cache."""
    tile = tiles - 1 - tl.program_id(0)
    place = ((tile // k_tiles) * BM, (tile % k_tiles) * BK, M, K)
    rows = place[0] + tl.arange(0, BM)
    cols = place[1] + tl.arange(0, BK)
    live = inside(place, BM, BK)
    raw = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=live, other=0)
    cast_tile(raw, None, (code_ptr, scale_ptr, 0, 0), place, stat_ptr, FORM, BM, BK)


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
    plan = Plan("nvfp4", "e2m1", rule if two_level else "single", (1, 16), packed=True, two_level=two_level)
    turned = takes_turned(x, plan.element, plan.block, plan.rule)
    x = x if turned else contiguous_rows(x)
    codes, scales = empty_parts(x.shape, plan, x.device)
    if codes.numel() == 0:
        return codes, scales, torch.ones((), dtype=torch.float32, device=x.device) if two_level else None
    global_scale = torch.empty((), dtype=torch.float32, device=x.device) if two_level else None
    if global_scale is None:
        stats = codes
    elif stats is None:
        stats = statistics(x.T if turned else x, "nvfp4", 6.0, 1.0, global_scale, amax)
    else:
        global_scale = stats[2]
    if turned or takes(x, plan.element, plan.block, plan.rule):
        from breccia.kernels.triton.casts.cast_words import cast_words

        return *cast_words(x, plan, stats), global_scale
    bk = min(256, max(16, triton.next_power_of_2(x.shape[1])))
    bm = TILE // bk
    launch_tiles(
        cast_nvfp4_kernel, (x, codes, scales, stats), x.shape, (x.stride(0),), (bm, bk),
        FORM=plan.form, BM=bm, BK=bk, num_warps=WARPS,
    )  # fmt: skip
    return codes, scales, global_scale
