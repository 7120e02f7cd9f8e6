# SPDX-License-Identifier: Apache-2.0
"""Casts of bf16 and fp16 tensors, and their largest magnitudes, at the speed of memory, in Gluon: `word_tiles` over
whole tensors.

`cast_block` and `cast_nvfp4` hold the same arithmetic for any input, and hand over what `words.takes` accepts.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from breccia.kernels.triton.device.word_tiles import WordForm, cast_tile, half_value, load_tile, words_layout
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import empty_parts, launch, launch_tiles

PER_THREAD = 8  # words: 32 bytes of input


@gluon.jit
def cast_words_kernel(
    x_ptr, code_ptr, scale_ptr, stat_ptr, M, W, x_stride, s_row, s_col, tiles_across,
    FORM: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """One tile. With NVFP4 backwards: the end of x is what the pass before left in the cache."""
    tile = gl.num_programs(0) - 1 - gl.program_id(0) if FORM.nvfp4 else gl.program_id(0)
    m0 = (tile // tiles_across) * BM
    w0 = (tile % tiles_across) * BW
    w = load_tile(x_ptr, m0, w0, M, W, x_stride, FORM, BM, BW)
    cast_tile(w, m0, w0, code_ptr, scale_ptr, stat_ptr, M, W, s_row, s_col, FORM, BM, BW)


@gluon.jit
def turned(w, FORM: gl.constexpr, B: gl.constexpr):
    """The words of the transpose of a square tile."""
    rows: gl.constexpr = words_layout(B // 2, gl.num_warps(), FORM.rows > 1)
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (B // 16), B // 16], [gl.num_warps(), 1], [1, 0])
    pair = gl.join((w & 0xFFFF).to(gl.int16), (w >> 16).to(gl.int16))
    x = gl.convert_layout(gl.permute(gl.reshape(pair, [B, B]), (1, 0)), wide)
    low, high = gl.split(gl.reshape(x, [B, B // 2, 2]))
    return gl.convert_layout((low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16), rows)


@gluon.jit
def cast_turn_kernel(
    x_ptr, code_ptr, scale_ptr, turned_ptr, turned_scale_ptr, stat_ptr, M, W, x_stride, s_row, t_row, tiles_across,
    FORM: gl.constexpr, BOTH: gl.constexpr, BM: gl.constexpr, BW: gl.constexpr,
):  # fmt: skip
    """A square tile (BM values by BW words) turned and, with BOTH, as it is."""
    m0 = (gl.program_id(0) // tiles_across) * BM
    w0 = (gl.program_id(0) % tiles_across) * BW
    w = load_tile(x_ptr, m0, w0, M, W, x_stride, FORM, BM, BW)
    if BOTH:
        cast_tile(w, m0, w0, code_ptr, scale_ptr, stat_ptr, M, W, s_row, 1, FORM, BM, BW)
    t = turned(w, FORM, BM)
    cast_tile(t, 2 * w0, m0 // 2, turned_ptr, turned_scale_ptr, stat_ptr, 2 * W, M // 2, t_row, 1, FORM, BM, BW)


def tile_of(words: int, sm: int, g: int, warps: int, repeats: int) -> tuple[int, int]:
    """(rows, words) of a tile: `repeats` times eight words a thread, whole blocks, and no wider than the matrix."""
    size = 32 * warps * PER_THREAD * repeats
    across = max(g, min(triton.next_power_of_2(words), 32 * PER_THREAD if sm == 1 else g))
    return max(sm, size // across), across


def cast_words(x: torch.Tensor, plan: Plan, stats: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast_block.cast_block` and, of NVFP4, the codes and scales of `cast_nvfp4.cast_nvfp4`."""
    rows, cols = x.shape
    sm, g = plan.block[0], plan.block[1] // 2
    upright = x.stride(1) == 1
    codes, scales = empty_parts(x.shape, plan, x.device, along=upright)
    if codes.numel() == 0:
        return codes, scales
    if not upright:  # `words.takes_turned`
        cast_turn_words(x.T, plan, scales if stats is None else stats, None, [codes, scales])
        return codes, scales
    warps, repeats = default_shape(plan.block)
    bm, bw = tile_of(cols // 2, sm, g, warps, repeats)
    launch_tiles(
        cast_words_kernel,
        (x.view(torch.int32), codes.view(torch.int32), scales, scales if stats is None else stats),
        (rows, cols // 2), (x.stride(0) // 2, *scales.stride()), (bm, bw),
        FORM=_form(x, plan, scales), BM=bm, BW=bw, num_warps=warps,
    )  # fmt: skip
    return codes, scales


def _form(x: torch.Tensor, plan: Plan, scales: torch.Tensor) -> WordForm:
    return WordForm.of(x.dtype, plan.element, plan.block, plan.rule, scales.dtype, plan.kind == "nvfp4")


def cast_turn_words(
    x: torch.Tensor, plan: Plan, stats: torch.Tensor, one: list[torch.Tensor] | None, other: list[torch.Tensor]
) -> None:
    """Writes (codes, scales) of x to `one`, if there is one, and those of its transpose to `other`."""
    both = one is not None
    one = other if one is None else one
    rows, cols = x.shape
    size = max(64, plan.block[1])
    pointers = (one[0].view(torch.int32), one[1], other[0].view(torch.int32), other[1])
    launch_tiles(
        cast_turn_kernel, (x.view(torch.int32), *pointers, stats), (rows, cols // 2),
        (x.stride(0) // 2, one[1].stride(0), other[1].stride(0)), (size, size // 2),
        FORM=_form(x, plan, one[1]), BOTH=both, BM=size, BW=size // 2, num_warps=4 if size == 64 else 8,
    )  # fmt: skip


def default_shape(block: tuple[int, int]) -> tuple[int, int]:
    """(warps, repeats): measured on an H200."""
    size = block[0] * block[1]
    return (8, max(1, size // 4096)) if size >= 4096 else (4, 2)


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
        amax_words_kernel, (count,), x.view(torch.int32), parts, words, tiles,
        SOURCE=source, B=size, N=programs, num_warps=8,
    )  # fmt: skip
    return count
