# SPDX-License-Identifier: Apache-2.0
"""The sum of each row's INT8 codes, which the zero points of the other side are multiplied by."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.runtime import launch

WIDTH = 1024


def code_sums(codes: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
    """int32 (rows,): the sums of int8 codes (rows, K), each less its row's zero point, int8 (rows,), if given."""
    rows, k = codes.shape
    out = torch.empty(rows, dtype=torch.int32, device=codes.device)
    if rows:
        codes = codes if codes.stride(1) == 1 else codes.contiguous()
        given = codes if zero is None else zero
        launch(
            sum_kernel, (rows,), codes, given, out, k, codes.stride(0), ZERO=zero is not None, BK=WIDTH,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def sum_kernel(code_ptr, zero_ptr, out_ptr, K, stride, ZERO: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BK)
    sums = tl.zeros([BK], tl.int32)
    for k in range(0, K, BK):
        sums += tl.load(code_ptr + row * stride + k + at, mask=k + at < K, other=0).to(tl.int32)
    total = tl.sum(sums, 0)
    if ZERO:
        total -= tl.load(zero_ptr + row).to(tl.int32) * K
    tl.store(out_ptr + row, total)
