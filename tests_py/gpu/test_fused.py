# SPDX-License-Identifier: Apache-2.0
"""Casts fused with what comes before: the bytes of a cast of what torch computes."""

from __future__ import annotations

from typing import Any

import breccia
import cases
import pytest
import torch
from breccia.frameworks.torch import launches
from breccia.kernels.triton import ops, recipes
from breccia.kernels.triton.casts import cast_fused
from breccia.nn import functional

FUSED = [name for name, recipe in cases.RECIPES.items() if cast_fused.takes(recipes.plan(recipe), 4096)]
SHAPES = [(37, 256), (1, 4096), (300, 384), (5, 14336)]


def as_bytes(part: Any) -> torch.Tensor:
    return part.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def same(made: Any, expected: Any) -> None:
    for name in ("data", "scale", "zero_point", "global_scale"):
        ours, theirs = getattr(made, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.shape == theirs.shape, name
            assert torch.equal(as_bytes(ours), as_bytes(theirs)), name


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """±1, ±2 and ±3: the sum of their squares is exact in any order."""
    numbers = torch.from_numpy(cases.normal(shape, 7, 2.0)).round().clamp(-3, 3)
    return torch.where(numbers == 0, 1, numbers).to(dtype)


def test_what_is_fused() -> None:
    assert {"block", "mxfp8", "mxfp4", "mxfp6-e2m3", "nvfp4-one-level"} <= set(FUSED)
    assert not {"current", "nvfp4", "block-128x128"} & set(FUSED)


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(5, 256), (1, 128), (3, 384)], ids=str)
def test_kernels(name: str, shape: tuple[int, int], device: str) -> None:
    recipe = cases.RECIPES[name]
    plan = recipes.plan(recipe)
    if device == "cpu" and plan.scale_dtype == torch.bfloat16:
        pytest.skip("the interpreter does not round to bfloat16")
    if shape[1] % cases.block_width(recipe):
        pytest.skip("no whole blocks")
    gate, up = (torch.from_numpy(cases.normal(shape, seed, 2.0)).half().to(device) for seed in (1, 2))
    x, weight = whole_numbers(shape, torch.float16).to(device), (gate[0] + 1).contiguous()
    expected = ops.cast_parts(torch.nn.functional.rms_norm(x, shape[-1:], weight, 1e-6), recipe)
    made = cast_fused.rms_norm(x, None, weight, 1e-6, plan)
    added = cast_fused.rms_norm(x - 1, torch.ones_like(x), weight, 1e-6, plan)
    for got in (made, added[:2]):
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(as_bytes(ours), as_bytes(theirs))
    assert torch.equal(added[2], x)
    values = torch.nn.functional.silu(gate) * up
    for ours, theirs in zip(cast_fused.silu_mul(gate, up, plan), ops.cast_parts(values, recipe), strict=True):
        different = (as_bytes(ours) != as_bytes(theirs)).float().mean()
        assert different == 0 if device == "cuda" else different < 0.05  # NumPy's exponential is another


@pytest.mark.parametrize("name", cases.RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_silu_mul_equals_the_cast_of_torchs_values(name: str, dtype: torch.dtype) -> None:
    recipe = cases.RECIPES[name]
    for rows, columns in SHAPES:
        if columns % max(1, cases.block_width(recipe)):
            continue
        both = torch.randn(rows, 2 * columns, device="cuda", dtype=torch.float32).mul_(3).to(dtype)
        gate, up = both.chunk(2, -1)  # strides of a fused projection
        for _ in range(2):  # the second time by its launch plan
            made = functional.silu_mul(gate, up, recipe)
            same(made, breccia.cast(torch.nn.functional.silu(gate) * up, recipe))


@pytest.mark.parametrize("name", cases.RECIPES)
def test_repeated_calls_have_plans(name: str) -> None:
    """One of the fused kernel, or one of the cast after torch's operators."""
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    launches.refusals.clear()
    for _ in range(3):
        functional.silu_mul(x, x + 1, cases.RECIPES[name])
        functional.rms_norm(x, x[0].clone(), cases.RECIPES[name], residual=x + 1)
        breccia.cast(x, cases.RECIPES[name])
    refused = {key[0]: why for key, why in launches.refusals.items()}
    assert "silu mul" not in refused, refused
    assert "rms norm" not in refused, refused


def test_silu_mul_of_every_bfloat16() -> None:
    gate = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(512, 128)
    up = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    for name in FUSED:
        if 128 % cases.block_width(cases.RECIPES[name]) == 0:
            made = functional.silu_mul(gate, up, cases.RECIPES[name])
            same(made, breccia.cast(torch.nn.functional.silu(gate) * up, cases.RECIPES[name]))


@pytest.mark.parametrize("name", cases.RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rms_norm(name: str, dtype: torch.dtype) -> None:
    recipe = cases.RECIPES[name]
    for rows, columns in SHAPES:
        if columns % max(1, cases.block_width(recipe)):
            continue
        weight = torch.rand(columns, device="cuda").add_(0.5).to(dtype)
        x = whole_numbers((rows, columns), dtype).cuda()
        expected = breccia.cast(torch.nn.functional.rms_norm(x, (columns,), weight, 1e-5), recipe)
        for _ in range(2):
            same(functional.rms_norm(x, weight, recipe, 1e-5), expected)
            scaled, total = functional.rms_norm(x - 1, weight, recipe, 1e-5, residual=torch.ones_like(x))
            same(scaled, expected)
            assert torch.equal(total, x)


def test_rms_norm_of_any_numbers() -> None:
    """Sums of squares round by their order: a code in a thousand may be its neighbour."""
    sizes = torch.logspace(-3, 3, 300, device="cuda")[:, None]
    x = (torch.randn(300, 4096, device="cuda") * sizes).bfloat16()
    weight = torch.rand(4096, device="cuda").bfloat16()
    for name in FUSED:
        made = functional.rms_norm(x, weight, cases.RECIPES[name])
        values = torch.nn.functional.rms_norm(x, (4096,), weight, 1e-6)
        expected = breccia.cast(values, cases.RECIPES[name])
        assert (as_bytes(made.data) != as_bytes(expected.data)).float().mean() < 2e-3
        exact = torch.nn.functional.rms_norm(x.double(), (4096,), weight.double(), 1e-6)
        ours, theirs = ((breccia.dequantize(q).double() - exact).norm() for q in (made, expected))
        assert ours < theirs * 1.001


def test_compiled_and_in_a_graph() -> None:
    recipe = breccia.Float8BlockScaling()
    w = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    layer = breccia.nn.QuantizedLinear(breccia.cast(w, breccia.Float8BlockScaling(block_m=128)))
    weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)

    def block(x: torch.Tensor, r: torch.Tensor) -> Any:
        q, total = functional.rms_norm(x, weight, recipe, residual=r)
        return layer(q), functional.silu_mul(total, x, recipe).data.view(torch.uint8)

    x, r = (torch.randn(64, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    expected = block(x, r)
    compiled = torch.compile(block, fullgraph=True)(x, r)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(x, r)
    graph.replay()
    for made in (compiled, captured):
        for ours, theirs in zip(made, expected, strict=True):
            assert torch.equal(ours, theirs)
