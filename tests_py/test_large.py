# SPDX-License-Identifier: Apache-2.0
"""Sizes beyond the kernels' panels and pieces, threads, forks, and memory that is awkwardly placed."""

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import PerBlockMN, PerChannel, PerTensor, cast, dequantize, from_buffer, matmul, requantize
from test_ops import bound, check

FP8 = breccia.Float8CurrentScaling()
# Longer than the 4096 elements that go through a kernel at a time, and not a multiple of any vector.
LONG = 9001


@pytest.mark.parametrize(
    ("recipe", "top"),
    [
        (breccia.Float8CurrentScaling(), 448),
        (breccia.Float8CurrentScaling(granularity="row"), 448),
        (breccia.Float8BlockScaling(block_k=LONG), 448),
        (breccia.Float8BlockScaling(block_k=LONG, block_m=2), 448),
        (breccia.INT8Scaling(), 127),
        (breccia.INT8Scaling(group_size=LONG), 127),
        (breccia.INT4Scaling(group_size=LONG, scale_dtype="fp32"), 7),
    ],
    ids=str,
)
def test_long_rows(recipe, top):
    x = cases.heavy_tailed("student", (3, LONG))
    scaled = cast(x, recipe)
    amax = np.abs(x)
    if scaled.scale.ndim == 0:
        amax = amax.max()
    elif scaled.scale.shape[0] == 3:
        amax = amax.max(1, keepdims=True)
    else:
        amax = np.stack([amax[:2].max(), amax[2:].max()])[:, None]
    oracles.assert_same_bits(np.asarray(scaled.scale), np.asarray(amax / np.float32(top)), "scale")
    quotient = (x / oracles.spread(np.asarray(scaled.scale), scaled)).astype(np.float32)
    expected = oracles.expected_codes(quotient, oracles.element_format(recipe))
    np.testing.assert_array_equal(oracles.codes_of(scaled), expected)
    oracles.assert_same_bits(dequantize(scaled), oracles.dequantized(scaled))
    check(cases.normal((2, LONG), seed=1), scaled.T)


@cases.some("current block-128x128 mxfp4 nvfp4 int4-asymmetric int8")
def test_products_of_several_panels(recipe):
    k = 3 * 256 if cases.is_block(recipe) and not cases.may_be_ragged(recipe) else 700
    x, w = cases.normal((150, k)), cases.normal((270, k), seed=1)
    check(x, cast(w, recipe).T)
    check(cast(x, recipe), cast(w, recipe).T)
    check(cast(w.T.copy(), breccia.Float8CurrentScaling()).T, x.T)


def test_long_sums_of_equal_terms():
    """Every addition rounds the same way: a running sum, even one per vector lane, misses the bound."""
    x = np.full((3, 1 << 16), 0.9, np.float32)
    check(x, x.T)
    check(x, cast(x, breccia.Float8BlockScaling()).T)
    check(cast(x, breccia.INT8Scaling(group_size=128)), cast(x, breccia.NVFP4BlockScaling()).T)
    running = np.cumsum(np.reshape(x[0] * x[0], (-1, 16)), axis=0, dtype=np.float32)[-1].sum(dtype=np.float64)
    wide = x.astype(np.float64)
    assert abs(running - wide[0] @ wide[0]) > bound(wide, wide.T)[0, 0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_number_of_threads_does_not_matter(threads):
    x = cases.heavy_tailed("lognormal", (300, 1024))
    before = breccia.num_threads()
    for name in ("current", "block-128x128", "nvfp4-mse", "int4-asymmetric"):
        recipe = cases.RECIPES[name]
        expected = cast(x, recipe)
        product = matmul(x, expected.T)
        try:
            breccia.set_num_threads(threads)
            scaled = cast(x, recipe)
            np.testing.assert_array_equal(scaled.data, expected.data, err_msg=name)
            oracles.assert_same_bits(np.asarray(scaled.scale), np.asarray(expected.scale), name)
            np.testing.assert_array_equal(dequantize(scaled), dequantize(expected), err_msg=name)
            np.testing.assert_array_equal(matmul(x, scaled.T), product, err_msg=name)
        finally:
            breccia.set_num_threads(before)


def work(seed):
    x = cases.normal((200, 1024), seed)
    scaled = cast(x, breccia.NVFP4BlockScaling())
    return scaled.data.tobytes() + dequantize(requantize(scaled, breccia.Float8BlockScaling())).tobytes()


def test_callers_on_several_threads():
    expected = [work(seed) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(work, range(8))) == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_compute():
    """The pool of threads does not survive a fork; the child must notice instead of waiting for it."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork on this platform")
    # In an interpreter of its own: a library another test has imported may warn of forks.
    script = """
import multiprocessing, test_large
expected = test_large.work(0)  # the parent's pool is running
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply_async(test_large.work, (0,)).get(timeout=60) == expected
assert test_large.work(0) == expected
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def unaligned(array):
    """A copy that starts at an odd address."""
    array = np.asarray(array)
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy = memory[1:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    assert copy.ctypes.data % 2 == 1
    return copy


@cases.ALL
def test_unaligned_memory(recipe):
    x = cases.normal(cases.shape_for(recipe))
    scaled = cast(x, recipe)
    for dtype in (np.float32, np.float64, np.float16):
        again, expected = cast(unaligned(x.astype(dtype)), recipe), cast(x.astype(dtype), recipe)
        np.testing.assert_array_equal(again.data, expected.data)
        oracles.assert_same_bits(np.asarray(again.scale), np.asarray(expected.scale))
    parts = [None if p is None else unaligned(p) for p in (scaled.data, scaled.scale, scaled.zero_point)]
    moved = from_buffer(parts[0], parts[1], recipe, scaled.layout, parts[2], global_scale=scaled.global_scale)
    oracles.assert_same_bits(dequantize(moved), dequantize(scaled))
    np.testing.assert_array_equal(matmul(unaligned(x), moved.T), matmul(x, scaled.T))
    for dtype in (np.float32, np.float64, np.float16):
        out = unaligned(np.zeros(scaled.shape, dtype))
        oracles.assert_same_bits(dequantize(scaled, out=out), dequantize(scaled, out_dtype=dtype))


# --- combinations that a cast does not make but a checkpoint does -------------------------------------------


def test_a_global_scale_per_expert():
    x = cases.normal((3, 4, 32)) * np.float32([[[1]], [[100]], [[0.01]]])
    each = [cast(expert, breccia.NVFP4BlockScaling()) for expert in x]
    stacked = from_buffer(
        np.stack([e.data for e in each]),
        np.stack([e.scale for e in each]),
        breccia.NVFP4BlockScaling(),
        PerBlockMN(1, 16),
        global_scale=np.stack([e.global_scale for e in each]).reshape(3, 1, 1),
    )
    assert stacked.shape == x.shape
    oracles.assert_same_bits(dequantize(stacked), np.stack([dequantize(e) for e in each]))
    oracles.assert_same_bits(dequantize(stacked.mT), dequantize(stacked).swapaxes(-1, -2))
    check(cases.normal((3, 2, 32), seed=1), stacked.mT)
    again = requantize(stacked, breccia.MXFP8BlockScaling())
    expected = cast(dequantize(stacked), breccia.MXFP8BlockScaling())
    oracles.assert_same_bits(dequantize(again), dequantize(expected))


@pytest.mark.parametrize("lead", [(), (2,)])
def test_one_scale_per_row_without_its_axis(lead):
    x = cases.normal((*lead, 5, 48))
    scaled = cast(x, breccia.INT8Scaling())
    flat = from_buffer(scaled.data, scaled.scale[..., 0], scaled.recipe, PerChannel())
    oracles.assert_same_bits(dequantize(flat), dequantize(scaled))
    oracles.assert_same_bits(dequantize(flat.mT), dequantize(scaled.mT))
    check(cases.normal((3, 48), seed=1), flat.mT)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_scales_of_another_width(dtype):
    scaled = cast(cases.normal((4, 256)), breccia.INT4Scaling())
    widened = from_buffer(scaled.data, scaled.scale.astype(dtype), scaled.recipe, scaled.layout)
    oracles.assert_same_bits(dequantize(widened), dequantize(scaled))


def test_zero_points_of_other_types():
    scaled = cast(cases.normal((4, 256)), breccia.INT4Scaling(symmetric=False, signed=False))
    for dtype in (np.int8, np.float32, np.float16):
        again = from_buffer(scaled.data, scaled.scale, scaled.recipe, scaled.layout, scaled.zero_point.astype(dtype))
        oracles.assert_same_bits(dequantize(again), dequantize(scaled))


def test_a_fractional_zero_point():
    """As tinygemm's and some exporters' zero points in the floating point domain."""
    codes = np.arange(16, dtype=np.uint8).reshape(1, 16)
    recipe = breccia.INT4Scaling(group_size=16, symmetric=False, signed=False)
    zero = np.array([[7.5]], np.float32)
    scaled = from_buffer(codes, np.full((1, 1), 0.5, np.float32), recipe, recipe.layout, zero, shape=(1, 16))
    np.testing.assert_array_equal(dequantize(scaled), (np.arange(16, dtype=np.float32)[None] - 7.5) * 0.5)


@cases.some("block mxfp4 nvfp4 int4 int8")
def test_requantize_of_batches_and_loose_codes(recipe):
    x = cases.normal((2, 3, *cases.shape_for(recipe, at_least=128)))
    scaled = cast(x, recipe)
    target = breccia.Float8CurrentScaling(granularity="row")

    def requantized(data, pick):
        parts = [None if part is None else part[pick] for part in (data, scaled.scale, scaled.zero_point)]
        level = scaled.global_scale
        return requantize(from_buffer(*parts[:2], recipe, scaled.layout, parts[2], global_scale=level), target)

    expected, one = requantize(scaled, target), requantized(scaled.data, (1, 2))
    np.testing.assert_array_equal(expected.data[1, 2], one.data)
    np.testing.assert_array_equal(expected.scale[1, 2], one.scale)
    loose = requantized(oracles.codes_of(scaled), ...)
    np.testing.assert_array_equal(loose.data, expected.data)


@pytest.mark.parametrize("block", [1 << 31, 1 << 48, (1 << 62) + 1, (1 << 63) - 1])
def test_blocks_larger_than_any_tensor(block):
    with pytest.raises(ValueError, match="divisible"):
        cast(np.ones((4, 128), np.float32), breccia.Float8BlockScaling(block_k=block))
    x = cases.normal((4, 128))  # a ragged tile larger than the tensor is the tensor
    scaled = cast(x, breccia.Float8BlockScaling(block_k=block, block_m=block))
    assert scaled.scale.shape == (1, 1)
    np.testing.assert_array_equal(scaled.data, cast(x, FP8).data)
    np.testing.assert_array_equal(dequantize(scaled), dequantize(cast(x, FP8)))


def test_tensors_larger_than_memory():
    x = np.broadcast_to(np.float32(1), (1 << 30, 1 << 30))
    for recipe in (FP8, breccia.Float8BlockScaling(), breccia.NVFP4BlockScaling()):
        with pytest.raises(ValueError, match=r"^shape \(1073741824, 1073741824\) must have fewer than 2\^63 bytes$"):
            cast(x, recipe)
    huge = from_buffer(np.broadcast_to(np.uint8(0), (1 << 30, 1 << 30)), np.float32(1), FP8, PerTensor())
    with pytest.raises(MemoryError, match=r"^Unable to allocate 4.00 EiB"):
        dequantize(huge)
    with pytest.raises(MemoryError, match=r"^Unable to allocate 4.00 EiB"):
        matmul(huge, np.broadcast_to(np.float32(1), (1 << 30, 1 << 30)))
