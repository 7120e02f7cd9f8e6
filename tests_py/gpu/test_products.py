# SPDX-License-Identifier: Apache-2.0
"""Products on the GPU against float64 of the dequantized operands."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import breccia
import cases
import pytest
import torch
from breccia.kernels import triton as kernels
from breccia.kernels.triton import ops, recipes
from breccia.kernels.triton.products import (
    configs,
    dense_matmul,
    int8_gemm,
    pairs,
    paths,
    running,
    w4_gemv,
    weights_matmul,
)
from breccia.kernels.triton.products import dispatch as products
from breccia.kernels.triton.products.product import Product

BLOCK, TILE = breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128)
SHAPES = [(1, 8, 128), (7, 130, 256), (64, 200, 128), (129, 64, 384), (300, 520, 1024), (1000, 264, 640)]
BOUND = {torch.float32: 1.5e-3, torch.bfloat16: 4e-3, torch.float16: 1.7e-3}


def randn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(cases.normal(shape, seed)).cuda()


def exact(a: Any, b: Any) -> torch.Tensor:
    values = [ops.dequantize(t).double() if isinstance(t, breccia.ScaledTensor) else t.double() for t in (a, b)]
    return values[0] @ values[1]


def close(y: torch.Tensor, ref: torch.Tensor, bound: float | None = None) -> None:
    assert y.shape == ref.shape and y.is_cuda
    error = float((y.double() - ref).norm() / ref.norm())
    assert error < (BOUND[y.dtype] if bound is None else bound), error


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weights", [BLOCK, TILE], ids=["1x128", "128x128"])
def test_block(shape: tuple[int, int, int], weights: Any, dtype: torch.dtype) -> None:
    m, n, k = shape
    a, w = ops.cast(randn((m, k)), BLOCK), ops.cast(randn((n, k), 1), weights)
    close(kernels.block_scaled_matmul_triton(a, w.T, dtype), exact(a, w.T))
    close(kernels.matmul(a, w.T, dtype), exact(a, w.T))


@pytest.mark.parametrize("tile", [tile for _, _, tile in configs.TIMED], ids=lambda t: f"{t.rows}x{t.cols}")
@pytest.mark.parametrize("parts", configs.PARTS)
@pytest.mark.parametrize("k", [896, 1024])
def test_parts_and_pairs_of_k(tile: configs.Tile, parts: int, k: int) -> None:
    """Seven and eight slices in one to eight parts: odd counts, a last part that is shorter, one slice to a part."""
    if not configs.divides(parts, k):
        pytest.skip("a part would be empty")
    tile = dataclasses.replace(tile, parts=parts)
    m, n = (min(13, tile.cols), 150) if tile.swap else (tile.rows + 13, 150)
    bias = randn((n,), 2)
    for weights in (BLOCK, TILE):
        a, w = ops.cast(randn((m, k)), BLOCK), ops.cast(randn((n, k), 1), weights)
        for dtype in BOUND:
            given = (a.data, w.data, a.scale, w.scale, dtype, bias)
            y = dense_matmul.dense_matmul(*given, block=True, tile=tile)
            close(y, exact(a, w.T) + bias.double())
            assert torch.equal(y, dense_matmul.dense_matmul(*given, block=True, tile=tile))
    rows = breccia.Float8CurrentScaling(granularity="row")
    a, w = ops.cast(randn((m, k - 24)), rows), ops.cast(randn((n, k - 24), 1), rows)
    for fast in (False, True):
        y = dense_matmul.dense_matmul(a.data, w.data, a.scale, w.scale, bias=bias, fast=fast, tile=tile)
        close(y, exact(a, w.T) + bias.double(), 6e-3 if fast else None)


@pytest.mark.parametrize("shape", [(64, 2112, 7168), (128, 576, 7168), (16, 576, 7168), (200, 4096, 7168)], ids=str)
def test_products_with_few_tiles(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, w = ops.cast(randn((m, k)), BLOCK), ops.cast(randn((n, k), 1), TILE)
    y = breccia.linear(a, w, out_dtype=torch.bfloat16)
    close(y, exact(a, w.T))
    assert all(torch.equal(y, breccia.linear(a, w, out_dtype=torch.bfloat16)) for _ in range(3))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (33, 70, 200), (5, 17, 31)], ids=str)
@pytest.mark.parametrize("formats", [("E4M3", "E4M3"), ("E4M3", "E5M2"), ("E5M2", "E4M3")], ids=str)
def test_tensor_and_row(shape: tuple[int, int, int], formats: tuple[str, str], fast: bool) -> None:
    m, n, k = shape
    for granularity in ("tensor", "row"):
        left, right = (breccia.Float8CurrentScaling(fp8_format=f, granularity=granularity) for f in formats)
        a, w = ops.cast(randn((m, k)), left), ops.cast(randn((n, k), 1), right)
        bias = randn((n,), 2)
        for dtype in (torch.bfloat16, torch.float32):
            y = kernels.scaled_matmul_triton(a, w.T, dtype, fast_accumulate=fast, bias=bias)
            close(y, exact(a, w.T) + bias.double(), 6e-3 if fast else None)
    b = ops.cast(randn((k, n), 1), breccia.Float8CurrentScaling())
    a = ops.cast(randn((m, k)), breccia.Float8CurrentScaling())
    close(kernels.scaled_matmul_triton(a, b), exact(a, b))


@pytest.mark.parametrize("k", [4096, 16384])
def test_promotion_beats_the_short_accumulator(k: int) -> None:
    a, w = ops.cast(randn((256, k)).abs(), BLOCK), ops.cast(randn((256, k), 1).abs(), TILE)
    ref = exact(a, w.T)
    block = float((kernels.block_scaled_matmul_triton(a, w.T, "float32").double() - ref).norm() / ref.norm())
    one = breccia.Float8CurrentScaling()
    a, w = ops.cast(randn((256, k)).abs(), one), ops.cast(randn((256, k), 1).abs(), one)
    ref = exact(a, w.T)
    fast = float(
        (kernels.scaled_matmul_triton(a, w.T, "float32", fast_accumulate=True).double() - ref).norm() / ref.norm()
    )
    assert block * 4 < fast, (block, fast)


@cases.ALL
def test_every_recipe(recipe: Any) -> None:
    width = max(256, cases.block_width(recipe))
    w = ops.cast(randn((96, 2 * width), 1), recipe)
    for m in (1, 4, 40, 200):
        x = randn((m, 2 * width))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            close(kernels.linear(x.to(dtype), w, out_dtype=dtype), exact(x.to(dtype), w.T), 5e-3)
    a = ops.cast(randn((50, 2 * width)), recipe)
    close(kernels.matmul(a, w.T), exact(a, w.T), 2e-3)
    b = ops.cast(randn((2 * width, 2 * width), 3), recipe)
    close(kernels.matmul(a, b), exact(a, b), 2e-3)


QUANTIZED: dict[str, Any] = {
    "fp8": breccia.Float8CurrentScaling(),
    "fp8 rows": breccia.Float8CurrentScaling(granularity="row"),
    "e5m2": breccia.Float8CurrentScaling(fp8_format="E5M2"),
    "1x128": BLOCK,
    "128x128": TILE,
    "mxfp8": breccia.MXFP8BlockScaling(),
    "mxfp6": breccia.MXFP6BlockScaling(),
    "mxfp4": breccia.MXFP4BlockScaling(),
    "nvfp4": breccia.NVFP4BlockScaling(),
    "int4": breccia.INT4Scaling(),
    "int4 g32": breccia.INT4Scaling(group_size=32),
    "uint4": breccia.INT4Scaling(symmetric=False, signed=False),
    "int8": breccia.INT8Scaling(),
    "int8 g128": breccia.INT8Scaling(group_size=128),
    "int8 zeros": breccia.INT8Scaling(symmetric=False),
}


def bound_of_pair(left: str, right: str, m: int, dtype: torch.dtype) -> float:
    """Of the relative error. float32 results lose nothing but where FP8 meets FP8, added up in 14 bits,
    and where exact activations meet a weight that is rounded."""
    if dtype != torch.float32:
        return 5e-3
    fp8 = {"fp8", "fp8 rows", "e5m2", "1x128", "128x128"}
    if {left, right} <= fp8:
        return 1.5e-3
    exact_in_bf16 = {"mxfp8", "mxfp6", "mxfp4", "nvfp4"}
    if left in exact_in_bf16 and right not in exact_in_bf16:
        return 5e-3
    return 2e-5


@pytest.mark.parametrize("right", QUANTIZED)
@pytest.mark.parametrize("left", QUANTIZED)
def test_every_pair_of_recipes(left: str, right: str) -> None:
    n, k = 264, 640
    w = ops.cast(randn((n, k), 1), QUANTIZED[right])
    for m in (1, 16, 200, 600, 4100):
        x = ops.cast(randn((m, k)), QUANTIZED[left])
        ref = exact(x, w.T)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            close(kernels.linear(x, w, out_dtype=dtype), ref, bound_of_pair(left, right, m, dtype))


@pytest.mark.parametrize("zeros", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 17, 31), (2100, 1000, 384), (17, 4096, 4096)], ids=str)
def test_integers(shape: tuple[int, int, int], zeros: tuple[bool, bool]) -> None:
    """Sums of INT8 are exact: float32 results are those of float64, rounded by scales alone."""
    m, n, k = shape
    left, right = (breccia.INT8Scaling(symmetric=not zero) for zero in zeros)
    x, w, bias = ops.cast(randn((m, k)) + 0.5, left), ops.cast(randn((n, k), 1) - 0.3, right), randn((n,), 2)
    ref = exact(x, w.T)
    close(kernels.linear(x, w), ref, 2e-7)
    close(kernels.linear(x, w, bias), ref + bias.double(), 2e-7)
    close(kernels.linear(x, w, out_dtype="bfloat16"), ref, 2e-3)
    y = int8_gemm.int8_gemm(
        x.data.view(torch.int8), w.data.view(torch.int8), x.scale, w.scale, torch.float32, bias,
        *(None if t.zero_point is None else t.zero_point.reshape(-1).view(torch.int8) for t in (x, w)),
    )  # fmt: skip
    close(y, ref + bias.double(), 2e-7)


def test_integers_at_their_limit() -> None:
    """The longest sum of the largest codes that int32 is trusted with, and one more K, which is not left to it."""
    for k in (pairs.MAX_DEPTH // 16 * 16, pairs.MAX_DEPTH // 16 * 16 + 16):
        recipe = breccia.INT8Scaling(symmetric=False)
        x, w = ops.cast(torch.ones((3, k), device="cuda"), recipe), ops.cast(torch.ones((8, k), device="cuda"), recipe)
        close(kernels.linear(x, w), exact(x, w.T), 2e-5)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("shape", [(16, 130, 200), (64, 96, 384), (1100, 520, 640), (2100, 4100, 320)], ids=str)
def test_halves(shape: tuple[int, int, int], block: bool) -> None:
    """bf16 by bf16 in the dense kernel, with scales per row or per 128 of K."""
    m, n, k = shape
    x, w = randn((m, k)).bfloat16(), randn((n, k), 1).bfloat16()
    blocks = -(-k // 128)
    xs = randn((m, blocks if block else 1), 2).abs() + 0.5
    ws = randn((n, blocks if block else 1), 3).abs() + 0.5

    def scaled(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return t.double() * (s.repeat_interleave(128, 1)[:, :k] if block else s).double()

    y = dense_matmul.dense_matmul(x, w, xs, ws, torch.float32, block=block)
    close(y, scaled(x, xs) @ scaled(w, ws).T, 2e-6)


WEIGHTS = [
    breccia.NVFP4BlockScaling(),
    breccia.MXFP4BlockScaling(),
    breccia.INT4Scaling(),
    TILE,
    BLOCK,
    breccia.MXFP8BlockScaling(),
    breccia.Float8CurrentScaling(granularity="row"),
    breccia.Float8CurrentScaling(fp8_format="E5M2"),
    breccia.INT8Scaling(),
]


def kind_and_block(op: recipes.Operand) -> tuple[str, tuple[int, int]]:
    """What the kernels of weights call this format."""
    block = op.block if op.scale.numel() > 1 else (0, 0)
    kind = weights_matmul.kind_of(op.element, op.sfmt, block)
    assert kind is not None
    return kind, block


@pytest.mark.parametrize("recipe", WEIGHTS, ids=repr)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 72, 256),
        (1, 200, 1152),
        (2, 64, 128),
        (5, 200, 1024),
        (4, 72, 2048),  # two, four and five slices of K a warp, and some with one less
        (8, 100, 4096),
        (3, 40, 5120),
        (1, 72, 3840),
        (1, 72, 14336),
        (1, 4300, 1152),  # more programs of few rows than multiprocessors
        (2, 4300, 1024),
        (4, 4300, 2048),
        (8, 4300, 7168),
        (3, 4300, 5120),
        (16, 130, 384),
        (40, 96, 640),
        (64, 333, 2176),
        (100, 264, 512),
        (128, 130, 2176),
        (200, 333, 640),
        (300, 520, 1152),
        (600, 6000, 256),  # more tiles than multiprocessors
    ],
    ids=str,
)
def test_weights_decode_in_the_product(recipe: Any, shape: tuple[int, int, int]) -> None:
    """No weight is rounded, whatever its scale, but in large tiles."""
    m, n, k = shape
    w, bias = ops.cast(randn((n, k), 1), recipe), randn((n,), 2)
    op = recipes.operand(w)
    kind, block = kind_and_block(op)
    x = torch.cat([randn((m, k)), randn((m, k), 3)], 1).bfloat16()[:, :k]
    assert weights_matmul.takes(x, op.codes, kind)
    ref = exact(x, w.T) + bias.double()
    rounded = configs.weight_tile(m, n, k, kind).rounds(kind)
    for dtype, bound in ((torch.float32, 3e-3 if rounded else 2e-5), (torch.bfloat16, 4e-3)):
        y = weights_matmul.weights_matmul(x, op.codes, op.scale, kind, op.element, block, dtype, op.global_scale, bias)
        close(y, ref, bound)
    if kind in ("nvfp4", "mxfp4", "int4") and m <= 8:
        close(w4_gemv.w4_gemv(x, op.codes, op.scale, kind, torch.float32, op.global_scale, bias), ref, 2e-5)


@pytest.mark.parametrize("recipe", WEIGHTS, ids=repr)
@pytest.mark.parametrize("which", range(len(configs.WEIGHT_TILES[True])))
@pytest.mark.parametrize(("n", "parts"), [(6000, 1), (6004, 1), (1000, 2), (1004, 3)])
def test_every_tile_of_weights(recipe: Any, which: int, n: int, parts: int) -> None:
    """Whatever rows it is meant for, with more tiles than programs and with K in parts, of which the last is shorter;
    MXFP4 also by scales that want two products. Rows of 6,000 bf16 results are aligned for TMA, of 6,004 not."""
    w = ops.cast(randn((n, 1664), 1), recipe)
    op = recipes.operand(w)
    kind, block = kind_and_block(op)
    tile = configs.WEIGHT_TILES[kind in configs.FOUR_BITS][which][2]
    tile = dataclasses.replace(tile, parts=1 if tile.order == "x" else parts)
    x = randn((600 if tile.cols > 64 else tile.cols - 3, 1664)).bfloat16()
    for code in (None, 14, 143)[: 3 if kind == "mxfp4" else 1]:
        if code is not None:
            op.scale.view(torch.uint8)[-1, -1] = code
        y, short = (
            weights_matmul.weights_matmul(
                x, op.codes, op.scale, kind, op.element, block, dtype, op.global_scale, tile=tile
            )
            for dtype in (torch.float32, torch.bfloat16)
        )
        close(y, exact(x, w.T), 3e-3 if tile.rounds(kind) else 2e-5)
        assert torch.equal(short, y.bfloat16())


def by_packed(x: torch.Tensor, op: recipes.Operand, scale: torch.Tensor) -> torch.Tensor:
    """x by packed weights that have these scales: in the kernel of few rows, or the fused one."""
    kind, block = kind_and_block(op)
    if x.shape[0] <= 8:
        return w4_gemv.w4_gemv(x, op.codes, scale, kind, torch.float32, op.global_scale)
    return weights_matmul.weights_matmul(x, op.codes, scale, kind, op.element, block, torch.float32, op.global_scale)


@pytest.mark.parametrize("recipe", [breccia.NVFP4BlockScaling(), breccia.MXFP4BlockScaling(), breccia.INT4Scaling()])
@pytest.mark.parametrize("m", [1, 4, 16, 40])
def test_operands_at_odd_addresses(recipe: Any, m: int) -> None:
    w = ops.cast(randn((72, 256), 1), recipe)
    op = recipes.operand(w)
    scale = torch.empty(op.scale.numel() + 1, dtype=op.scale.dtype, device="cuda")[1:].view(op.scale.shape)
    scale.copy_(op.scale)
    x = torch.cat([randn((1,)), randn((m * 256,), 2)]).bfloat16()[1:].view(m, 256)
    close(by_packed(x, op, scale), exact(x, w.T), 2e-5)


FEW_ROWS = [(1, 128), (1, 1024), (3, 1024), (8, 20480), (16, 1024), (32, 5248), (50, 2176)]


@pytest.mark.parametrize(("m", "k"), [*FEW_ROWS, (70, 384), (200, 640), (300, 2176)])
@pytest.mark.parametrize("magnitudes", [(20.0,), (100.0,), (-100.0,), (-118.0,), (60.0, 0.0, -60.0)], ids=str)
def test_every_power_of_mxfp4(m: int, k: int, magnitudes: tuple[float, ...]) -> None:
    """Scales that one bfloat16 product does not reach take two."""
    powers = torch.tensor(magnitudes, device="cuda").repeat(100)[:100, None]
    w = ops.cast(randn((100, k), 1) * torch.exp2(powers), breccia.MXFP4BlockScaling())
    x = (randn((m, k)) * 2.0 ** -max(0.0, *magnitudes)).bfloat16()
    op = recipes.operand(w)
    y, ref = by_packed(x, op, op.scale), exact(x, w.T)
    assert ((y.double() - ref).norm(dim=0) / ref.norm(dim=0)).max() <= 2e-5
    w.scale.view(torch.uint8)[7, k // 64] = 255
    y = by_packed(x, op, op.scale)
    assert y[:, 7].isnan().all() and not y[:, :7].isnan().any() and not y[:, 8:].isnan().any()


@pytest.mark.parametrize("code", [14, 15, 16, 127, 142, 143])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(5, 100, 1024), (16, 100, 1024), (32, 100, 8320), (600, 6000, 256)],  # the last: programs of several tiles
)
def test_one_scale_beyond_the_rest(m: int, n: int, k: int, code: int) -> None:
    """The last scale of the last row, far from all others."""
    w = ops.cast(randn((n, k), 1), breccia.MXFP4BlockScaling())
    w.scale.view(torch.uint8)[-1, -1] = code
    x, op = randn((m, k)).bfloat16(), recipes.operand(w)
    close(by_packed(x, op, op.scale), exact(x, w.T), 2e-5)


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
@pytest.mark.parametrize("m", [1, 2, 16, 100])
def test_nan_weights_stay(fmt: str, m: int) -> None:
    values = randn((96, 256), 1)
    values[5, 17] = float("nan")
    w = ops.cast(values, breccia.Float8BlockScaling(block_m=1, fp8_format=fmt))
    w.data.view(torch.uint8)[9, 200] = 0x7F
    y = kernels.linear(randn((m, 256)).bfloat16(), w)
    assert torch.equal(y.isnan(), ops.dequantize(w).isnan().any(1).expand_as(y))


def test_batches() -> None:
    a, w = ops.cast(randn((2, 5, 256)), BLOCK), ops.cast(randn((64, 256), 1), TILE)
    close(kernels.matmul(a, w.T), exact(a, w.T))
    b = ops.cast(randn((2, 64, 256), 2), BLOCK)
    close(kernels.matmul(a, b.mT), exact(a, b.mT))
    x = randn((2, 3, 256)).bfloat16()
    close(
        kernels.linear(x, ops.cast(randn((64, 256)), breccia.NVFP4BlockScaling()), out_dtype="bfloat16"),
        exact(x, ops.cast(randn((64, 256)), breccia.NVFP4BlockScaling()).T),
        4e-3,
    )


@pytest.mark.parametrize(
    "recipe",
    [
        TILE,
        BLOCK,
        breccia.NVFP4BlockScaling(),
        breccia.MXFP4BlockScaling(),
        breccia.INT4Scaling(),
        breccia.MXFP8BlockScaling(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("quantized", [False, True])
def test_grouped(recipe: Any, quantized: bool) -> None:
    experts, n, k = 5, 200, 384
    stack = randn((experts, n, k), 1)
    w = ops.cast(stack, recipe)
    offsets = torch.tensor([0, 3, 3, 90, 300, 301], dtype=torch.int32, device="cuda")
    x = randn((301, k)).bfloat16()
    given = ops.cast(x, BLOCK) if quantized else x
    values = ops.dequantize(given).double() if quantized else x.double()
    y = kernels.grouped_matmul(given, w, offsets)
    for e in range(experts):
        a, b = int(offsets[e]), int(offsets[e + 1])
        if b > a:
            close(y[a:b], values[a:b] @ ops.dequantize(w)[e].double().T, 6e-3)


@pytest.mark.parametrize("each", [8, 100, 300, 500])
@pytest.mark.parametrize("weights", [TILE, BLOCK], ids=["128x128", "1x128"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_experts_of_fp8(each: int, weights: Any, out: torch.dtype) -> None:
    """Every tile, experts that begin anywhere or have no rows, columns beside the last tile, rows of none."""
    experts, n, k = 6, 200, 640
    ends = [0, 1, 1, 3 * each // 2, 5 * each // 2 + 3, 3 * each, 11 * each // 2]
    w, x = ops.cast(randn((experts, n, k), 1), weights), ops.cast(randn((6 * each, k)), BLOCK)
    left, right = ops.dequantize(x).double(), ops.dequantize(w).double()
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor(ends, dtype=dtype, device="cuda")
        path = paths.find(paths_seen(lambda offsets=offsets: kernels.grouped_matmul(x, w, offsets, out)))
        assert path.name == "Gluon, TMA and wgmma" or torch.cuda.get_device_capability()[0] != 9
        y = kernels.grouped_matmul(x, w, offsets, out)
        for e, (a, b) in enumerate(itertools.pairwise(ends)):
            if b > a:
                close(y[a:b], left[a:b] @ right[e].T, 3e-3)
        assert (y[ends[-1] :] == 0).all()


def paths_seen(call: Any) -> Product:
    """The product that a call makes."""
    seen: list[Product] = []
    find = paths.find
    with mock.patch.object(paths, "find", lambda p: seen.append(p) or find(p)):
        call()
    return seen[0]


@pytest.mark.parametrize("right", ["1x128", "128x128", "fp8 rows", "mxfp8", "mxfp4", "nvfp4", "int4", "int8"])
@pytest.mark.parametrize("left", QUANTIZED)
def test_left_sides_decode_into_order(left: str, right: str) -> None:
    """The same bits as by a left side that is decoded before."""
    x, w = ops.cast(randn((100, 512)), QUANTIZED[left]), ops.cast(randn((192, 512), 1), QUANTIZED[right])
    product = paths_seen(lambda: kernels.linear(x, w, out_dtype=torch.bfloat16))
    path = next((p for p in paths.PATHS if p.run is running.run_decoded_in_order), None)
    assert path is not None
    if not (torch.cuda.get_device_capability()[0] == 9 and path.takes(product)):
        pytest.skip("another path")
    assert torch.equal(path.run(product), paths._run_rows_by_weight(product))


def test_errors_before_any_launch() -> None:
    a, w = ops.cast(randn((8, 128)), BLOCK), ops.cast(randn((16, 128)), TILE)
    with pytest.raises(TypeError, match=r"^operands must be on one device, got cuda:\d and cpu$"):
        kernels.matmul(a, w.to("cpu").T)
    with pytest.raises(ValueError, match=r"must agree in K, got \(8, 128\) and \(16, 128\)$"):
        kernels.matmul(a, w)
    with pytest.raises(ValueError, match=r"^a \(M, K\) and b \(K, N\) must agree in K, got"):
        kernels.block_scaled_matmul_triton(a, w)
    with pytest.raises(TypeError, match=r"^b must be a ScaledTensor, got Tensor$"):
        kernels.scaled_matmul_triton(a, randn((128, 16)))
    with pytest.raises(TypeError, match=r"^b must be a float tensor or a ScaledTensor, got dtype torch.int32$"):
        kernels.matmul(a, torch.zeros(128, 16, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match=r"^w_stack must be a ScaledTensor \(E, N, K\), got shape \(16, 128\)$"):
        kernels.grouped_matmul(randn((4, 128)), w, torch.zeros(2, device="cuda", dtype=torch.int32))
    with pytest.raises(TypeError, match=r"^out_dtype must be float32, float64, float16 or bfloat16, got 'int8'$"):
        kernels.matmul(a, w.T, "int8")


def test_empty() -> None:
    a, w = ops.cast(torch.empty((0, 128), device="cuda"), BLOCK), ops.cast(randn((16, 128)), TILE)
    assert kernels.matmul(a, w.T).shape == (0, 16)
    assert kernels.linear(torch.empty((0, 128), device="cuda").bfloat16(), w).shape == (0, 16)


def test_autotune_keeps_its_choice(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from breccia.kernels.triton.products import autotune

    one = breccia.Float8CurrentScaling()
    a, w = ops.cast(randn((300, 512)), one), ops.cast(randn((256, 512), 1), one)
    for _ in range(2):
        close(kernels.scaled_matmul_triton(a, w.T, autotune=True), exact(a, w.T))
    assert autotune.cache_file().exists()


def test_exact_sums_are_reproducible() -> None:
    a, w = ops.cast(randn((512, 1024)), BLOCK), ops.cast(randn((512, 1024), 1), TILE)
    first = products.matmul(a, w.T)
    assert all(torch.equal(products.matmul(a, w.T), first) for _ in range(5))
