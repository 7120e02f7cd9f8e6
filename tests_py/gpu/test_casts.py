# SPDX-License-Identifier: Apache-2.0
"""cast, dequantize and requantize on the GPU equal the portable core byte for byte."""

from __future__ import annotations

from typing import Any

import breccia
import cases
import numpy as np
import pytest
import torch
from breccia.kernels.triton import ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def raw(t: Any) -> Any:
    if t is None:
        return None
    t = t.cpu().contiguous()
    return (t if t.dtype in (torch.float32, torch.float16, torch.int8) else t.view(torch.uint8)).numpy()


def same(ours: Any, theirs: Any) -> None:
    for name in ("data", "scale", "zero_point", "global_scale"):
        a, b = raw(getattr(ours, name)), raw(getattr(theirs, name))
        if a is None or b is None:
            assert a is None and b is None, name
            continue
        assert a.shape == b.shape, name
        a8, b8 = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (a, b))
        assert np.array_equal(a8, b8), f"{name}: {int((a8 != b8).sum())} of {a8.size} bytes differ"
    assert ours.shape == theirs.shape and ours.layout == theirs.layout


def shapes(recipe: Any) -> list[tuple[int, ...]]:
    width = max(32, cases.block_width(recipe))
    found = [(1, width), (70, 3 * width), (2, 5, 2 * width)]
    return [*found, (130, 3 * width + 40), (3, 128, width)] if cases.may_be_ragged(recipe) else found


@cases.ALL
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cast_equals_core(recipe: Any, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(shapes(recipe)):
        x = torch.from_numpy(cases.normal(shape, seed, 3.0)).to(dtype)
        same(ops.cast(x.cuda(), recipe), breccia.cast(x, recipe))


@cases.ALL
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cast_of_a_part_equals_core(recipe: Any, dtype: torch.dtype) -> None:
    """With the whole's amax, wherever the core takes one."""
    x = torch.from_numpy(cases.normal((64, 256), 1, 3.0)).to(dtype)
    for amax in (100.0, torch.linspace(50, 100, 64)):
        try:
            core = breccia.cast(x, recipe, amax=amax)
        except ValueError:
            with pytest.raises(ValueError, match="amax"):
                breccia.cast(x.cuda(), recipe, amax=amax)
            continue
        given = amax.cuda() if isinstance(amax, torch.Tensor) else amax
        same(breccia.cast(x.cuda(), recipe, amax=given), core)


@cases.ALL
@pytest.mark.parametrize("kind", cases.DATA)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_trouble(recipe: Any, kind: str, dtype: torch.dtype) -> None:
    x = torch.from_numpy(cases.heavy_tailed(kind, (64, 2 * max(32, cases.block_width(recipe))))).to(dtype)
    same(ops.cast(x.cuda(), recipe), breccia.cast(x, recipe))


@cases.ALL
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values(recipe: Any, dtype: torch.dtype) -> None:
    x = torch.from_numpy(cases.normal((16, 4 * max(32, cases.block_width(recipe)))))
    x[0, 3], x[1, 4], x[2, 5], x[4] = float("nan"), float("inf"), -float("inf"), 0.0
    x[5, 1], x[6, 2] = -float("nan"), 1e-42
    x[7, :4] = torch.tensor([1e38, -3e38, 0.0, -0.0])
    for factor in (1.0, 1e-38, 1e-6, 1e4):
        y = (x * factor).to(dtype)
        same(ops.cast(y.cuda(), recipe), breccia.cast(y, recipe))
        same_values(
            ops.dequantize(ops.cast(y.cuda(), recipe), dtype), breccia.dequantize(breccia.cast(y, recipe), dtype)
        )


def same_values(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bit for bit, NaNs included."""
    integer = torch.int32 if ours.dtype == torch.float32 else torch.int16
    assert torch.equal(ours.cpu().view(integer), theirs.view(integer))


@cases.ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value(recipe: Any, dtype: torch.dtype) -> None:
    """All 65,536 numbers of a 16-bit type, among neighbours of every size."""
    width = max(256, cases.block_width(recipe))
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(-1, width)
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(1))
    for y in (x, x.view(torch.int16).flatten()[order].view(dtype).reshape(-1, width)):
        same(ops.cast(y.cuda(), recipe), breccia.cast(y, recipe))


SEARCHED = {
    "e4m3": breccia.Float8BlockScaling(scale_search="mse"),
    "e5m2 by 64": breccia.Float8BlockScaling(fp8_format="E5M2", block_k=64, scale_search="mse"),
    "bf16": breccia.Float8BlockScaling(block_k=16, scale_format="bf16", scale_search="mse"),
    "e2m3": breccia.MXFP6BlockScaling(scale_search="mse"),
    "e3m2": breccia.MXFP6BlockScaling(fp6_format="E3M2", scale_rounding="floor", scale_search="mse"),
    "mxfp4": breccia.MXFP4BlockScaling(scale_search="mse"),
    "nvfp4": breccia.NVFP4BlockScaling(scale_search="mse"),
    "torchao": breccia.NVFP4BlockScaling(scale_rule="torchao", scale_search="mse"),
    "one level": breccia.NVFP4BlockScaling(two_level=False, scale_search="mse"),
    "int4": breccia.INT4Scaling(scale_search="mse"),
    "unsigned": breccia.INT4Scaling(group_size=64, signed=False, scale_search="mse"),
    "zero points": breccia.INT4Scaling(group_size=64, symmetric=False, signed=False, scale_search="mse"),
    "int8": breccia.INT8Scaling(group_size=128, scale_search="mse"),
    "int8 zero points": breccia.INT8Scaling(group_size=16, symmetric=False, scale_search="mse"),
}


@pytest.mark.parametrize("recipe", SEARCHED.values(), ids=SEARCHED.keys())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_search_of_many_blocks(recipe: Any, dtype: torch.dtype) -> None:
    for kind in ("normal", "student", "ties"):
        x = torch.from_numpy(cases.heavy_tailed(kind, (300, 1024))).to(dtype)
        same(ops.cast(x.cuda(), recipe), breccia.cast(x, recipe))


@cases.ALL
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cast_transpose(recipe: Any, dtype: torch.dtype) -> None:
    width = max(128, cases.block_width(recipe))
    x = torch.from_numpy(cases.normal((2 * width, 3 * width))).to(dtype)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    for given in (x, x[:, : 2 * width], x.T):
        for ours, theirs in zip(ops.cast_transpose(given.cuda(), recipe), (given, given.T), strict=True):
            same(ours, breccia.cast(theirs, recipe))


@cases.ALL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_transposed_words(recipe: Any, dtype: torch.dtype) -> None:
    width = max(128, cases.block_width(recipe))
    x = torch.from_numpy(cases.normal((2 * width, 3 * width + 32))).to(dtype)
    x[0, 3], x[1, 4], x[2, 5], x[3] = float("nan"), float("inf"), -float("inf"), 0.0
    moved = x.cuda()
    for at in (slice(None), slice(2 * width), slice(8, 2 * width + 8)):
        same(ops.cast(moved[:, at].T, recipe), breccia.cast(x[:, at].T, recipe))


@cases.ALL
def test_strided_and_transposed(recipe: Any) -> None:
    width = 2 * max(32, cases.block_width(recipe))
    x = torch.from_numpy(cases.normal((2 * width, width + 8)))
    same(ops.cast(x.cuda().T[3 : width + 3], recipe), breccia.cast(x.T[3 : width + 3], recipe))
    same(ops.cast(x.cuda()[:, 8:], recipe), breccia.cast(x[:, 8:].contiguous(), recipe))


@cases.ALL
def test_dequantize_equals_core(recipe: Any) -> None:
    for shape in shapes(recipe):
        scaled = breccia.cast(torch.from_numpy(cases.normal(shape, 1, 0.02)), recipe)
        moved = scaled.to("cuda")
        for name in ("float32", "bfloat16", "float16", "float64"):
            ours, theirs = ops.dequantize(moved, name).cpu(), breccia.dequantize(scaled, name)
            assert torch.equal(ours, theirs), name
        ours, theirs = ops.dequantize(moved.mT), breccia.dequantize(scaled.mT)
        assert torch.equal(ours.cpu(), theirs)


SOURCES = (
    "current", "current-row", "block", "block-128x128", "block-tile-bf16", "mxfp8", "mxfp6-e3m2", "mxfp4", "nvfp4",
    "nvfp4-divisor", "int4", "int4-asymmetric", "int4-mse", "int8-32",
)  # fmt: skip
GOALS = (
    "current", "current-row", "block", "block-64-e5m2", "block-128x128", "block-tile-bf16", "mxfp8", "mxfp6-e2m3",
    "mxfp4", "mxfp4-mse", "nvfp4", "nvfp4-one-level", "nvfp4-torchao", "int8-32", "int8-asymmetric",
)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("goal", GOALS)
def test_requantize_equals_core(source: str, goal: str) -> None:
    recipe = cases.RECIPES[goal]
    special = torch.from_numpy(cases.normal((16, 512)))
    special[0, 3], special[1, 4], special[2, 5], special[4] = float("nan"), float("inf"), -float("inf"), 0.0
    special[5], special[6] = special[5] * 1e-39, special[6] * 1e37
    for x in (
        torch.from_numpy(cases.normal((70, 384))),
        torch.from_numpy(cases.normal((2, 128, 256), 1)),
        torch.from_numpy(cases.heavy_tailed("ties", (32, 512))),
        torch.from_numpy(cases.heavy_tailed("spread", (32, 512))),
        special,
    ):
        scaled = breccia.cast(x, cases.RECIPES[source])
        same(ops.requantize(scaled.to("cuda"), recipe), breccia.requantize(scaled, recipe))
    turned = breccia.cast(torch.from_numpy(cases.normal((128, 256))), cases.RECIPES[source]).mT
    same(ops.requantize(turned.to("cuda"), recipe), breccia.requantize(turned, recipe))


@cases.ALL
def test_empty(recipe: Any) -> None:
    width = max(32, cases.block_width(recipe))
    made = ops.cast(torch.empty((0, width), device="cuda"), recipe)
    assert made.shape == (0, width) and made.data.is_cuda
    assert ops.dequantize(made).shape == (0, width)


@cases.some("block mxfp8 nvfp4 int4")
def test_errors_equal_core(recipe: Any) -> None:
    width = cases.block_width(recipe)
    for bad in (torch.zeros(4, width + 1), torch.zeros(width), torch.zeros(4, width, dtype=torch.complex64)):
        try:
            breccia.cast(bad, recipe)
        except (TypeError, ValueError) as error:
            with pytest.raises(type(error), match=r"\bx(\.| must)"):
                ops.cast(bad.cuda(), recipe)
