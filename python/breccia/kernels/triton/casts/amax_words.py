# SPDX-License-Identifier: Apache-2.0
"""The largest magnitude of bf16 and fp16 tensors at the speed of memory: `cast_tensor.amax_kernel` on words of two
values."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from breccia.kernels.triton.device.word_tiles import half_value
from breccia.kernels.triton.runtime import launch


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
