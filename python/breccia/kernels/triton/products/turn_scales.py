# SPDX-License-Identifier: Apache-2.0
"""Scales of 1 x 128 activations as FP8 products read them: the one of row m and block k at [k, m]."""

from __future__ import annotations

import torch

from breccia.kernels.triton.turn import contiguous_rows, turned


def scales_along_rows(scale: torch.Tensor) -> torch.Tensor:
    """(rows, K blocks) scales as (K blocks, rows) with aligned rows: what the copy engine reads. Free if stored that
    way."""
    s = scale.T
    if (
        s.dtype == torch.float32
        and s.stride(1) == 1
        and s.stride(0) % 4 == 0
        and s.data_ptr() % 16 == 0
        and s.shape[0] > 0
    ):
        return s
    return turned(contiguous_rows(scale), 4, torch.float32)
