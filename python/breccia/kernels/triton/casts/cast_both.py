# SPDX-License-Identifier: Apache-2.0
"""A matrix and its transpose, each cast along its own rows, from one read: what the products of a training step need of
an activation or a gradient."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from breccia.kernels.triton import recipes
from breccia.kernels.triton.casts.cast_block import cast_tile, inside
from breccia.kernels.triton.casts.cast_tensor import cast_tensor, statistics
from breccia.kernels.triton.device.words import takes
from breccia.kernels.triton.runtime import empty_parts, launch_tiles
from breccia.kernels.triton.turn import contiguous_rows, turned


@triton.jit
def cast_transpose_kernel(
    x_ptr, code_ptr, scale_ptr, turned_ptr, turned_scale_ptr, stat_ptr, M, K, x_stride, s_row, t_row, k_tiles,
    FORM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One tile of B by B, as it is and turned."""
    m0 = (tl.program_id(0) // k_tiles) * B
    k0 = (tl.program_id(0) % k_tiles) * B
    rows = m0 + tl.arange(0, B)
    cols = k0 + tl.arange(0, B)
    at = rows.to(tl.int64)[:, None] * x_stride + cols[None, :]
    raw = tl.load(x_ptr + at, mask=inside((m0, k0, M, K), B, B), other=0)
    turned = tl.trans(raw)
    cast_tile(raw, (x_ptr, at), (code_ptr, scale_ptr, s_row, 1), (m0, k0, M, K), stat_ptr, FORM, B, B)
    to = (turned_ptr, turned_scale_ptr, t_row, 1)
    cast_tile(turned, (x_ptr, tl.trans(at)), to, (k0, m0, K, M), stat_ptr, FORM, B, B)


def cast_transpose_parts(x: torch.Tensor, plan: recipes.Plan) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """(codes, scales and, with two levels, the global scale) of x and of its transpose; None where blocks do not fit.

    Both axes are multiples of the block, or the blocks are tiles.
    """
    x = contiguous_rows(x)
    rows, cols = x.shape
    sm, g = plan.block
    if plan.kind == "tensor":
        codes, scale = cast_tensor(x, plan.element, plan.rule, plan.margin)
        return [codes, scale], [turned(codes), scale]
    if plan.kind not in ("block", "nvfp4") or max(sm, g) > 128 or (sm > 1 and sm != g):
        return None
    made = [list(empty_parts(shape, plan, x.device)) for shape in ((rows, cols), (cols, rows))]
    stats = made[0][1]
    if plan.kind == "nvfp4" and plan.two_level:
        global_scale = torch.ones((), dtype=torch.float32, device=x.device)
        stats = statistics(x, "nvfp4", 6.0, 1.0, global_scale)
        for parts in made:
            parts.append(global_scale)
    elif plan.kind == "nvfp4":
        plan = replace(plan, rule="single")
    if takes(x, plan.element, plan.block, plan.rule) and rows % 32 == 0:
        from breccia.kernels.triton.casts.cast_words import cast_turn_words

        cast_turn_words(x, plan, stats, *made)
        return made[0], made[1]
    size = max(64, g)
    one, other = made
    launch_tiles(
        cast_transpose_kernel, (x, *one[:2], *other[:2], stats), x.shape,
        (x.stride(0), one[1].stride(0), other[1].stride(0)), (size, size),
        FORM=plan.form, B=size, num_warps=4 if size == 64 else 8,
    )  # fmt: skip
    return one, other
