# SPDX-License-Identifier: Apache-2.0
"""Bytes that must not change from one version to the next, nor from one backend to another; and what must hold of
every recipe whatever the numbers: powers of two, rows in another order, padding, and K in parts."""

import json

import breccia
import cases
import golden
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from breccia import cast, dequantize, matmul
from test_ops import bound

FROZEN = json.loads(golden.FILE.read_text())
SUPPORTED = breccia.cpu_info()["supported"]
SOME = hypothesis.settings(max_examples=12)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.always
@pytest.mark.parametrize("backend", SUPPORTED)
@pytest.mark.parametrize("key", cases.RECIPES)
def test_bytes_are_the_frozen_ones(key, backend):
    """Where a change of bytes is meant, say so in the changelog and run golden.py."""
    before = breccia.cpu_info()["backend"]
    try:
        breccia.set_backend(backend)
        made = golden.digests(cases.RECIPES[key])
    finally:
        breccia.set_backend(before)
    assert made == FROZEN[key]


def test_every_recipe_is_frozen():
    assert FROZEN.keys() == cases.RECIPES.keys()
    assert all(tuple(frozen) == golden.CLASSES for frozen in FROZEN.values())


def test_inputs_are_the_same_everywhere():
    x = golden.tensor("ordinary", (2, 3)).view(np.uint32)
    assert " ".join(f"{n:08x}" for n in x.flat) == "bce73f67 bca7d1da be81aaab 3d8b34a0 bfc4dc62 3e9b80c5"


def numbers(recipe, seed, groups=2):
    """Rows by tiles, columns by blocks; sizes for which every scale is a normal number of its format."""
    tile = getattr(recipe, "block_m", 1)
    width = cases.block_width(recipe)
    shape = (tile * 3, width * groups) if width > 1 else (3, 32 * groups)
    return golden.floats(golden.bits(shape[0] * shape[1], str(seed)).reshape(shape), 127, 130)


def same(a, b):
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@cases.ALL
@SOME
@hypothesis.given(seed=SEEDS, k=st.integers(-4, 4))
def test_a_power_of_two_passes_through(recipe, seed, k):
    x, power = numbers(recipe, seed), np.float32(2.0**k)
    a, b = cast(x, recipe), cast(x * power, recipe)
    np.testing.assert_array_equal(a.data, b.data)
    same(dequantize(a) * power, dequantize(b))


@cases.ALL
@SOME
@hypothesis.given(seed=SEEDS)
def test_rows_in_another_order(recipe, seed):
    """Of tiles, whole rows of tiles."""
    x, tile = numbers(recipe, seed), getattr(recipe, "block_m", 1)
    order = np.random.default_rng(seed).permutation(len(x) // tile)
    order = (order[:, None] * tile + np.arange(tile)).reshape(-1)
    same(dequantize(cast(x[order], recipe)), dequantize(cast(x, recipe))[order])


@cases.ALL
@SOME
@hypothesis.given(seed=SEEDS, rows=st.integers(0, 2), columns=st.integers(0, 2))
def test_padding_with_zeros_changes_nothing(recipe, seed, rows, columns):
    x, tile = numbers(recipe, seed), getattr(recipe, "block_m", 1)
    width = x.shape[1] // 2
    padded = dequantize(cast(np.pad(x, [(0, rows * tile), (0, columns * width)]), recipe))
    same(np.ascontiguousarray(padded[: x.shape[0], : x.shape[1]]), dequantize(cast(x, recipe)))
    assert not padded[x.shape[0] :].any()
    assert not padded[:, x.shape[1] :].any()


@cases.ALL
@SOME
@hypothesis.given(seed=SEEDS, at=st.integers(1, 3))
def test_k_in_parts(recipe, seed, at):
    """Blocks know nothing of each other, and a product is the sum of its parts'."""
    x = numbers(recipe, seed, groups=4)
    cut = at * x.shape[1] // 4
    parts = x[:, :cut], x[:, cut:]
    whole = cast(x, recipe)
    if cases.is_block(recipe) and not getattr(recipe, "two_level", False):
        left, right = (dequantize(cast(np.ascontiguousarray(part), recipe)) for part in parts)
        same(np.concatenate([left, right], axis=1), dequantize(whole))
    activations = golden.floats(golden.bits(2 * x.shape[1], f"a{seed}").reshape(2, -1), 124, 130)
    w = dequantize(whole)
    halves = [
        matmul(np.ascontiguousarray(activations[:, begin:end]), np.ascontiguousarray(w[:, begin:end].T))
        for begin, end in ((0, cut), (cut, x.shape[1]))
    ]
    product = matmul(activations, whole.T)
    a, b = activations.astype(np.float64), w.astype(np.float64).T
    assert (np.abs(product - (halves[0].astype(np.float64) + halves[1])) <= 3 * bound(a, b)).all()
    assert (np.abs(product - a @ b) <= bound(a, b)).all()


@cases.ALL
@SOME
@hypothesis.given(seed=SEEDS, k=st.integers(-20, 20), rows=st.sampled_from([1, 3, 17]))
def test_a_power_of_two_passes_through_a_product(recipe, seed, k, rows):
    w = cast(numbers(recipe, seed), recipe)
    x = golden.floats(golden.bits(rows * w.shape[1], f"x{seed}").reshape(rows, -1), 120, 130)
    power = np.float32(2.0**k)
    same(matmul(x, w.T) * power, matmul(x * power, w.T))
