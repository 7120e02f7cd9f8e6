# SPDX-License-Identifier: Apache-2.0
"""Kernels on raw tensors against the core, on a GPU or, slowly, in Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import breccia
import cases
import numpy as np
import pytest
import torch
from breccia.kernels.triton import ops, recipes
from breccia.kernels.triton.casts import cast_block, cast_both, cast_nvfp4, cast_search, cast_tensor
from breccia.kernels.triton.conversions import dequant
from breccia.kernels.triton.device import elements
from breccia.kernels.triton.ops import source_of
from breccia.kernels.triton.products import dispatch as products
from breccia.kernels.triton.products import gemm, gemv, order_activations
from breccia.kernels.triton.recipes import Source

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def run(x: torch.Tensor, recipe: Any, amax: Any = None) -> tuple[torch.Tensor, ...]:
    plan = recipes.plan(recipe)
    if plan.kind == "tensor":
        return cast_tensor.cast_tensor(x, plan.element, plan.rule, plan.margin, amax=amax)
    if plan.kind == "row":
        return cast_tensor.cast_row(x, plan)
    if plan.kind == "search":
        return tuple(cast_search.cast_search(x, plan))
    if plan.kind == "nvfp4":
        codes, scale, global_scale = cast_nvfp4.cast_nvfp4(x, plan.two_level, plan.rule, amax=amax)
        return (codes, scale) if global_scale is None else (codes, scale, global_scale)
    return cast_block.cast_block(x, plan)


def bytes_of(t: Any) -> Any:
    return np.frombuffer(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes(), np.uint8)


def troubled(width: int) -> torch.Tensor:
    x = torch.from_numpy(cases.normal((9, 2 * width), 5, 2.0))
    x[0, 3], x[1, 4], x[2, 5], x[4] = float("nan"), float("inf"), -float("inf"), 0.0
    x[5], x[6] = x[5] * 1e-39, x[6] * 1e37
    return x


@cases.ALL
@pytest.mark.parametrize("make", ["normal", "troubled"])
def test_cast(recipe: Any, make: str, device: str) -> None:
    if recipes.plan(recipe).kind == "core":
        pytest.skip("the core's own")
    if device == "cpu" and "bf16" in (getattr(recipe, "scale_format", ""), getattr(recipe, "scale_dtype", "")):
        pytest.skip("the interpreter does not round to bfloat16")
    width = max(32, cases.block_width(recipe))
    rows = 5 if device == "cpu" and recipes.plan(recipe).kind == "search" else 37  # a search takes the interpreter long
    x = torch.from_numpy(cases.normal((rows, 2 * width))) if make == "normal" else troubled(width)
    made, core = run(x.to(device), recipe), breccia.cast(x, recipe)
    parts = [part for part in (core.data, core.scale, core.zero_point, core.global_scale) if part is not None]
    for ours, theirs in zip(made, parts, strict=True):
        assert np.array_equal(bytes_of(ours), bytes_of(theirs))


@cases.ALL
@pytest.mark.parametrize("make", ["normal", "troubled"])
def test_cast_with_the_amax_of_a_larger_tensor(recipe: Any, make: str, device: str) -> None:
    if not ops.takes_amax(recipe):
        pytest.skip("whole-array operations take these")
    x = torch.from_numpy(cases.normal((37, 96))) if make == "normal" else troubled(48)
    for amax in (1e4, 1.0, 0.0, 1e-40, 3e38):  # beyond x's own, below it, and where scales would leave float32
        made = run(x.to(device), recipe, torch.tensor([amax], device=device))
        core = breccia.cast(x, recipe, amax=amax)
        parts = [part for part in (core.data, core.scale, core.global_scale) if part is not None]
        for ours, theirs in zip(made, parts, strict=True):
            assert np.array_equal(bytes_of(ours), bytes_of(theirs)), amax


def test_an_element_format_without_kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A new format of the core works on GPUs at once, by torch's operations, or says that it does not."""
    w = breccia.cast(torch.from_numpy(cases.normal((32, 64))), "mxfp6").to(device)
    known = ops.dequantize(w)
    monkeypatch.delitem(elements.BY_FORMAT, "float6_e2m3fn")
    assert w.recipe.element == "float6_e2m3fn"
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ops.dequantize(w, dtype), known.to(dtype))
    assert torch.equal(ops.dequantize(w.mT), known.mT)
    x = torch.from_numpy(cases.normal((3, 64), 1)).to(device)
    assert torch.allclose(products.matmul(x, w.mT), x @ known.mT)
    with pytest.raises(TypeError, match=r"^no GPU kernel decodes float6_e2m3fn: move the tensor to the CPU with .to"):
        known_operand(w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_amax(dtype: torch.dtype, device: str) -> None:
    x = torch.from_numpy(cases.normal((37, 96))).to(dtype)
    x[3, 3], x[4, 4], x[5, 5], x[36, 95] = float("nan"), float("inf"), -float("inf"), -77.0
    for given in (x, x.T, x[:, 1:], torch.zeros_like(x)):
        expected = torch.where(given.isfinite(), given.abs(), 0).max().float()
        assert torch.equal(cast_tensor.finite_amax(given.to(device)).cpu(), expected)


@cases.some("block mxfp8 mxfp4 nvfp4 int4-32 int4-fp32")
def test_cast_transpose(recipe: Any, device: str) -> None:
    plan = recipes.plan(recipe)
    if plan.kind == "core" or (device == "cpu" and torch.bfloat16 in (plan.scale_dtype,)):
        pytest.skip("the core's own, or rounding to bfloat16, which the interpreter does not do")
    tiles = 1 if device == "cpu" and plan.packed else 2  # each takes the interpreter seconds
    x = torch.from_numpy(cases.normal((128, 128 * tiles), 3, 2.0))
    x[0, 3], x[5, 7] = float("nan"), float("inf")
    made = cast_both.cast_transpose_parts(x.to(device), plan)
    if made is None:
        pytest.skip("tiles that are not square")
    for parts, given in zip(made, (x, x.T.contiguous()), strict=True):
        core = breccia.cast(given, recipe)
        for ours, theirs in zip(parts, (core.data, core.scale, core.global_scale), strict=False):
            assert np.array_equal(bytes_of(ours), bytes_of(theirs))


REQUANTIZED = {
    "fp8 to mx": ("block", "mxfp8"),
    "mx to fp8": ("mxfp8", "block"),
    "tiles": ("block-128x128", "block"),
    "to tiles": ("block", "block-128x128"),
    "to small tiles": ("mxfp8", "block-tile-bf16"),
    "small tiles to mx": ("block-tile-bf16", "mxfp8"),
    "wider range": ("block", "block-64-e5m2"),
    "mx4 to fp8": ("mxfp4", "block"),
    "mx4 to mx8": ("mxfp4", "mxfp8"),
    "mx6 to mx8": ("mxfp6-e2m3", "mxfp8"),
    "nv to fp8": ("nvfp4", "block"),
    "nv to mx": ("nvfp4", "mxfp8"),
    "fp8 to nv": ("block", "nvfp4"),
    "fp8 to one level": ("block", "nvfp4-one-level"),
    "divisor": ("nvfp4-divisor", "mxfp4"),
    "finer integers": ("int4-fp32", "int8-32"),
    "asymmetric": ("int4-asymmetric", "int8-fp16"),
    "negative scales": ("int4-mse", "int8-32"),
    "integers to fp8": ("int4", "block"),
    "one scale": ("current", "mxfp8"),
    "rows": ("current-row", "block"),
    "to rows": ("mxfp8", "current-row"),
    "four bits": ("mxfp4", "nvfp4"),
    "four bits, divided": ("mxfp4", "nvfp4-divisor"),
    "integers to four bits": ("int4-mse", "mxfp4"),
    "to one scale": ("mxfp4", "current"),
    "zero points": ("int4-32-bf16", "int4-asymmetric"),
}


@pytest.mark.parametrize(("source", "target"), REQUANTIZED.values(), ids=REQUANTIZED.keys())
@pytest.mark.parametrize("make", ["normal", "troubled", "ties", "powers"])
def test_requantize(source: str, target: str, make: str, device: str) -> None:
    given, goal = cases.RECIPES[source], cases.RECIPES[target]
    if device == "cpu" and "bf16" in (getattr(goal, "scale_format", ""), getattr(goal, "scale_dtype", "")):
        pytest.skip("the interpreter does not round to bfloat16")
    shape = (9, 256)
    x = {
        "normal": lambda: torch.from_numpy(cases.normal(shape)),
        "troubled": lambda: troubled(128),
        "ties": lambda: torch.from_numpy(cases.heavy_tailed("ties", shape)),
        "powers": lambda: torch.from_numpy(cases.heavy_tailed("powers", shape)),
    }[make]()
    scaled = breccia.cast(x, given)
    core = breccia.requantize(scaled, goal)
    made = ops.requantize_parts(scaled.to(device) if device != "cpu" else scaled, goal)
    parts = [p for p in (core.data, core.scale, core.zero_point, core.global_scale) if p is not None]
    for ours, theirs in zip(made, parts, strict=True):
        assert np.array_equal(bytes_of(ours), bytes_of(theirs))


def known_operand(scaled: Any) -> Any:
    """What kernels take of a tensor; a test ends where its element has none, which is said by name."""
    try:
        return recipes.operand(scaled)
    except TypeError as error:
        assert "no GPU kernel decodes" in str(error)
        assert scaled.recipe.element not in elements.BY_FORMAT or scaled.exponents is not None
        pytest.skip(str(error))


@cases.ALL
def test_dequantize(recipe: Any, device: str) -> None:
    scaled = breccia.cast(torch.from_numpy(cases.normal((9, 2 * max(32, cases.block_width(recipe))))), recipe)
    op = known_operand(scaled)
    scale, block = (op.scale.reshape(1, 1), (0, 0)) if op.scale.numel() == 1 else (op.scale, op.block)
    zero = op.zero_point
    if zero is not None and op.element == "int8":
        zero = zero.view(torch.int8)

    def move(t: Any) -> Any:
        return None if t is None else t.to(device)

    form = (op.element, op.sfmt, op.shape, block, op.packed)
    source = Source(move(op.codes), move(scale), *form, move(zero), move(op.global_scale))
    values = dequant.dequantize(source)
    assert torch.equal(values.cpu(), breccia.dequantize(scaled))


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> None:
    error = (ours.double().cpu() - theirs.double().cpu()).norm() / theirs.double().norm().cpu()
    assert error < bound, float(error)


@cases.some("mxfp4 nvfp4 int4 block-128x128 mxfp8 mxfp6 int8")
@pytest.mark.parametrize("m", [1, 3, 20])
def test_weight_only(recipe: Any, m: int, device: str) -> None:
    w = breccia.cast(torch.from_numpy(cases.normal((24, 512))), recipe)
    x = torch.from_numpy(cases.normal((m, 512), 1)).to(torch.float16).to(device)
    op = known_operand(w)
    if op.zero_point is not None and op.element == "int8":
        pytest.skip("covered by dequantize")

    def move(t: Any) -> Any:
        return None if t is None else t.to(device)

    ref = x.double().cpu() @ breccia.dequantize(w).double().T
    form = (op.element, op.sfmt, op.shape, op.block, op.packed)
    source = Source(move(op.codes), move(op.scale), *form, move(op.zero_point), move(op.global_scale))
    y = gemm.gemm(x, source, torch.float32)
    close(y, ref, 2e-5 if op.zero_point is None else 1e-3)
    if m <= 4 and op.packed and op.zero_point is None and op.element != "uint4":
        y = gemv.gemv(x, source, torch.float32)
        close(y, ref, 2e-5)


@cases.some("current block-128x128 mxfp8 int8")
def test_gemv8(recipe: Any, device: str) -> None:
    w = breccia.cast(torch.from_numpy(cases.normal((24, 512))), recipe)
    op = known_operand(w)
    if op.zero_point is not None:
        pytest.skip("decoded first")
    x = torch.from_numpy(cases.normal((2, 512), 1)).to(torch.float16).to(device)
    scale, block = (op.scale.reshape(1, 1), (0, 0)) if op.scale.numel() == 1 else (op.scale, op.block)
    source = Source(op.codes.to(device), scale.to(device), op.element, op.sfmt, op.shape, block)
    y = gemv.gemv8(x, source, torch.float32)
    close(y, x.double().cpu() @ breccia.dequantize(w).double().T, 2e-5)


def test_grouped_fp8(device: str) -> None:
    experts, n, k = 3, 40, 256
    w = torch.from_numpy(cases.normal((experts, n, k), 2)).to(device)
    parts = [cast_block.cast_block(w[e], recipes.Plan("block", "e4m3", block=(128, 128))) for e in range(experts)]
    codes, scale = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    x = torch.from_numpy(cases.normal((21, k), 3)).to(device)
    xc, xs = cast_block.cast_block(x, recipes.Plan("block", "e4m3", block=(1, 128)))
    offsets = torch.tensor([0, 5, 5, 21], dtype=torch.int32, device=device)
    experts_codes = Source(codes, scale, "e4m3", "float", (experts, n, k), (128, 128))
    y = gemm.gemm(xc.view(torch.float8_e4m3fn), experts_codes, torch.float32, xs, offsets=offsets)
    xd = dequant.dequantize(Source(xc, xs, "e4m3", "float", (21, k), (1, 128)))
    for e, (a, b) in enumerate(((0, 5), (5, 5), (5, 21))):
        wd = dequant.dequantize(Source(codes[e], scale[e], "e4m3", "float", (n, k), (128, 128)))
        if b > a:
            close(y[a:b], xd[a:b].double() @ wd.double().T, 1e-3)


@pytest.mark.parametrize("form", ["multiplier", "divisor"])
def test_grouped_nvfp4(device: str, form: str) -> None:
    w = breccia.cast(
        torch.from_numpy(cases.normal((3, 40, 128), 2)).to(device), breccia.NVFP4BlockScaling(global_scale_form=form)
    )
    x = torch.from_numpy(cases.normal((21, 128), 3)).to(device).bfloat16()
    y = products.grouped_matmul(x, w, torch.tensor([0, 5, 5, 21], dtype=torch.int32, device=device), torch.float32)
    values = breccia.dequantize(w).double()
    for e, (a, b) in enumerate(((0, 5), (5, 5), (5, 21))):
        if b > a:
            close(y[a:b], x[a:b].double() @ values[e].T, 1e-3)


def in_order(x: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, K) as weights of that many bits decode."""
    slices = x.reshape(-1, 4, 4, 2, 2, 2) if bits == 4 else x.reshape(-1, 4, 4, 2, 2)
    return (slices.permute(0, 2, 4, 5, 1, 3) if bits == 4 else slices.permute(0, 2, 3, 1, 4)).reshape(x.shape)


@pytest.mark.parametrize("bits", [4, 8])
@cases.ALL
def test_order_of_codes(recipe: Any, bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized activations decode on their way into that order; global scales wait for the product."""
    if device == "cpu":
        for name in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(order_activations, name, lambda: None)
    x = breccia.cast(torch.from_numpy(cases.normal((9, 384))), recipe).to(device)
    source = source_of(known_operand(x))
    assert source is not None
    levels = 2 if source.global_scale is not None else 0
    form = source.form() if not levels else replace(source.form(), global_scale=False)
    ordered = torch.zeros((9, 384), dtype=torch.float32, device=device)
    w_level, product = torch.full((1,), 0.75, device=device), torch.zeros(1, device=device)
    order_activations.order_kernel[(9, 2)](
        *source.pointers(), ordered, ordered, ordered, w_level, product, 9, 384, *source.strides(), 6, FORM=form,
        LEVELS=levels, BITS=bits, E=0, EP=1, BN=4, BK=256, num_warps=4,
    )  # fmt: skip
    values = breccia.dequantize(x)
    if levels:
        assert torch.equal(product, (0.75 * source.global_scale).reshape(1))
        values = values / source.global_scale
    assert torch.allclose(ordered, in_order(values, bits), rtol=1e-6 if levels else 0, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_order(bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which weights decode, and the table of row tiles."""
    if device == "cpu":
        for name in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(order_activations, name, lambda: None)
    x = torch.arange(9 * 384, dtype=torch.float32, device=device).reshape(9, 384)
    ordered, table = torch.empty_like(x), torch.full((6, 3), -1, dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    order_activations.order_kernel[(9, 2)](
        x, x, x, x, ordered, table, offsets, x, x, 9, 384, 384, 0, 0, 6, FORM=None, LEVELS=0, BITS=bits, E=3, EP=4,
        BN=4, BK=256, num_warps=4,
    )  # fmt: skip
    assert torch.equal(ordered, in_order(x, bits))
    assert table[:3].tolist() == [[0, 0, 3], [2, 3, 8], [2, 7, 8]]
    assert table[3:, 0].tolist() == [3, 3, 3] and table[3:, 1].tolist() == [8, 12, 16]


@cases.some("current-fnuz delayed-b11 row-fnuz-e5m2 expanded expanded-32-e5m2 int8-expanded")
def test_grouped_of_codes_that_no_kernel_decodes(recipe: Any, device: str) -> None:
    """On either side: their values are multiplied."""
    w = breccia.cast(torch.from_numpy(cases.normal((3, 40, 256), 2)).to(device), recipe)
    offsets = torch.tensor([0, 5, 5, 19], dtype=torch.int32, device=device)
    values = breccia.dequantize(w, torch.bfloat16).double()
    x = torch.from_numpy(cases.normal((21, 256), 3)).to(device).bfloat16()
    rows = breccia.cast(x, cases.RECIPES["row-fnuz-e5m2"])
    for given in (x, rows):
        for dtype, bound in ((torch.bfloat16, 3e-3), (torch.float32, 1e-6)):
            y = products.grouped_matmul(given, w, offsets, dtype)
            exact = (x if given is x else breccia.dequantize(given, torch.bfloat16)).double()
            assert y.dtype == dtype
            for e, (a, b) in enumerate(((0, 5), (5, 19))):
                close(y[a:b], exact[a:b] @ values[2 * e].T, bound)
            assert (y[19:] == 0).all()
    with pytest.raises(ValueError, match=r"offsets must have shape \(4,\), got \(3,\)"):
        products.grouped_matmul(x, w, offsets[1:])
