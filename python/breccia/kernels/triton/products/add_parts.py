# SPDX-License-Identifier: Apache-2.0
"""The sum of the parts of a product whose K was divided among programs, always in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from breccia.kernels.triton.runtime import launch

BLOCK = 512


def add_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out (M, N) = parts[0] + parts[1] + ... + bias, added in float32; parts is (P, M, N), contiguous."""
    count, rows, columns = parts.shape
    total = rows * columns
    launch(
        add_kernel,
        (triton.cdiv(total, BLOCK),),
        parts,
        parts if bias is None else bias,
        out,
        total,
        columns,
        out.stride(0),
        PARTS=count,
        BIAS=bias is not None,
        BLOCK=BLOCK,
        num_warps=4,
        launch_pdl=True,
    )


@triton.jit
def add_kernel(
    parts_ptr, bias_ptr, out_ptr, total, columns, out_stride, PARTS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row = at // columns
    column = at - row * columns
    gdc_wait()
    y = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        y += tl.load(parts_ptr + tl.cast(total, tl.int64) * part + at, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)
