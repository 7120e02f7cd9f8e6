# SPDX-License-Identifier: Apache-2.0
"""Transposes by a kernel."""

from __future__ import annotations

import pytest
import torch
from breccia.kernels.triton.turn import contiguous_rows, turned


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 67), (5, 300), (0, 4), (257, 1)], ids=str)
def test_turned(dtype: torch.dtype, shape: tuple[int, int], device: str) -> None:
    rows, cols = shape
    wide = torch.randint(0, 120, (rows, 2 * cols), dtype=torch.uint8).to(device).to(dtype)
    for x in (wide[:, :cols], wide[:, :cols].contiguous()):
        made = turned(x)
        assert made.is_contiguous()
        assert made.dtype == dtype
        assert torch.equal(made.float(), x.T.float())


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 4, 6, 130])
def test_turned_into_rows_that_begin_at_multiples(rows: int, device: str) -> None:
    x = torch.arange(3.0 * rows).reshape(rows, 3).to(device)
    made = turned(x, multiple=4)
    assert made.stride() == (-(-rows // 4) * 4, 1)
    assert torch.equal(made, x.T)


@pytest.mark.interpreted
def test_contiguous_rows(device: str) -> None:
    x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).to(device)
    assert contiguous_rows(x) is x
    assert torch.equal(contiguous_rows(x.T), x.T)
    assert contiguous_rows(x.T).is_contiguous()
    x = x.float()
    assert torch.equal(contiguous_rows(x.T), x.T)
    spread = x[:, ::2]
    assert torch.equal(contiguous_rows(spread), spread)
    one = torch.arange(24.0).reshape(6, 4).to(device)[:, 1:2].T  # of one row, whose stride says nothing
    for row in (one, one.as_strided(one.shape, (7, 4), one.storage_offset())):
        assert torch.equal(contiguous_rows(row), one)
        assert contiguous_rows(row).is_contiguous()
