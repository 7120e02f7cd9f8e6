# SPDX-License-Identifier: Apache-2.0
"""Products by block scales on Blackwell, as far as they can be tested without one: the order of scales, what torch
checks, and the values, with `torch._scaled_mm` computed from what it is handed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import breccia
import cases
import pytest
import torch
from breccia.kernels.triton import recipes
from breccia.kernels.triton.products import blackwell

pytestmark = pytest.mark.offline
RECIPES = {"mxfp8": breccia.MXFP8BlockScaling(), "nvfp4": breccia.NVFP4BlockScaling()}
SHAPES = [(1, 16, 32), (4, 128, 256), (130, 96, 544), (300, 64, 1024)]


def operand(rows: int, k: int, recipe: Any, seed: int) -> recipes.Operand:
    return recipes.operand(breccia.cast(torch.from_numpy(cases.normal((rows, k), seed)), recipe))


@pytest.mark.parametrize("shape", [(1, 1), (32, 4), (128, 4), (129, 5), (300, 33)], ids=str)
def test_scales_lie_as_cublas_and_torchao_want_them(shape: tuple[int, int]) -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    made = blackwell.swizzled(scale)
    assert torch.equal(made, utils.to_blocked(scale).flatten())
    rows, blocks = shape
    r, b = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    tile = (r // 128) * -(-blocks // 4) + b // 4
    assert torch.equal(made[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + b % 4], scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_torch_accepts_the_operands(name: str, shape: tuple[int, int, int]) -> None:
    """torch's own checks of `_scaled_mm`, which meta tensors pass through; a scale too few does not."""
    m, n, k = shape

    def away(op: recipes.Operand) -> recipes.Operand:
        level = None if op.global_scale is None else op.global_scale.to("meta")
        return replace(op, codes=op.codes.to("meta"), scale=op.scale.to("meta"), global_scale=level)

    x, w = (away(operand(rows, k, RECIPES[name], i)) for i, rows in enumerate((m, n)))
    assert blackwell.takes(x, w)
    for dtype in (torch.bfloat16, torch.float32):
        y = blackwell.product(x, w, dtype)
        assert y.shape == (m, n)
        assert y.dtype == dtype
    with pytest.raises(RuntimeError, match="scale"):
        blackwell.product(replace(x, scale=x.scale.new_empty((m + 128, x.scale.shape[1]))), w, torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_values(name: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k = shape
    block = {"mxfp8": 32, "nvfp4": 16}[name]

    def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows, blocks = codes.shape[0], k // block
        r, b = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
        at = 512 * ((r // 128) * -(-blocks // 4) + b // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + b % 4
        scales = breccia.formats.decode(scale.view(torch.uint8)[at].numpy(), str(scale.dtype).removeprefix("torch."))
        raw = codes.contiguous().view(torch.uint8)
        if codes.dtype == torch.float4_e2m1fn_x2:
            values = breccia.formats.decode(torch.stack([raw & 15, raw >> 4], -1).flatten(1).numpy(), "float4_e2m1fn")
        else:
            values = codes.float().numpy()
        return torch.from_numpy(values).double() * torch.from_numpy(scales).double().repeat_interleave(block, 1)

    def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> torch.Tensor:
        return (decoded(a, scale_a) @ decoded(b.T, scale_b).T).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    tensors = [
        breccia.cast(torch.from_numpy(cases.normal((rows, k), i)), RECIPES[name]) for i, rows in enumerate((m, n))
    ]
    x, w = (recipes.operand(tensor) for tensor in tensors)
    bias = torch.from_numpy(cases.normal((n,), 2))
    left, right = (breccia.dequantize(tensor).double() for tensor in tensors)
    y = blackwell.product(x, w, torch.float32, bias)
    assert float((y.double() - left @ right.T - bias).norm() / y.double().norm()) < 1e-6


def test_what_is_not_taken() -> None:
    mx, nv = (operand(32, 64, recipe, 0) for recipe in RECIPES.values())
    assert not blackwell.takes(mx, nv)
    assert not blackwell.takes(mx, operand(24, 64, RECIPES["mxfp8"], 0))  # 24 columns
    assert not blackwell.takes(*(operand(32, 64, breccia.MXFP4BlockScaling(), 0) for _ in range(2)))
