# SPDX-License-Identifier: Apache-2.0
"""How good a cast is, and what it costs: the floors and sizes the project promises."""

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import cast, dequantize

SIDE = 1024

# recipe -> lowest acceptable cosine similarity on Gaussian data, mean of 8 seeds
FLOORS = {
    "FP8 per tensor": (breccia.Float8CurrentScaling(), 0.9996),
    "FP8 per row": (breccia.Float8CurrentScaling(granularity="row"), 0.9996),
    "FP8 1x128": (breccia.Float8BlockScaling(), 0.9996),
    "FP8 128x128": (breccia.Float8BlockScaling(block_m=128), 0.9996),
    "FP8 delayed": (breccia.DelayedScaling(), 0.9996),
    "MXFP8": (breccia.MXFP8BlockScaling(), 0.9996),
    "NVFP4": (breccia.NVFP4BlockScaling(), 0.9954),
    "NVFP4 mse": (breccia.NVFP4BlockScaling(scale_search="mse"), 0.9966),
    "INT4": (breccia.INT4Scaling(), 0.9931),
    "INT4 mse": (breccia.INT4Scaling(scale_search="mse"), 0.9952),
    "INT4 asymmetric": (breccia.INT4Scaling(symmetric=False, signed=False), 0.9949),
}


@pytest.fixture(scope="module")
def gaussians():
    return [cases.normal((SIDE, SIDE), seed) for seed in range(8)]


def cosine(a, b):
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return (a @ b) / np.sqrt((a @ a) * (b @ b))


@pytest.mark.parametrize(("recipe", "floor"), FLOORS.values(), ids=FLOORS.keys())
def test_cosine_similarity_floor(gaussians, recipe, floor):
    mean = np.mean([cosine(x, dequantize(cast(x, recipe))) for x in gaussians])
    assert mean >= floor


# recipe -> bytes for 1024 x 1024: codes, scales, zero points, global scale
N = SIDE * SIDE
SIZES = {
    "FP8 per tensor": (breccia.Float8CurrentScaling(), N + 4, 0.250),
    "FP8 1x128": (breccia.Float8BlockScaling(), N + 4 * N // 128, 0.258),
    "FP8 128x128": (breccia.Float8BlockScaling(block_m=128), N + 4 * 64, 0.250),
    "MXFP8": (breccia.MXFP8BlockScaling(), N + N // 32, 0.258),
    "MXFP4": (breccia.MXFP4BlockScaling(), N // 2 + N // 32, 0.133),
    "NVFP4": (breccia.NVFP4BlockScaling(), N // 2 + N // 16 + 4, 0.141),
    "NVFP4 one level": (breccia.NVFP4BlockScaling(two_level=False), N // 2 + N // 16, 0.141),
    "INT4": (breccia.INT4Scaling(), N // 2 + 2 * N // 128, 0.129),
    "INT8": (breccia.INT8Scaling(), N + 4 * SIDE, 0.251),
}


@pytest.mark.parametrize(("recipe", "size", "ratio"), SIZES.values(), ids=SIZES.keys())
def test_memory(gaussians, recipe, size, ratio):
    scaled = cast(gaussians[0], recipe)
    assert scaled.nbytes == size
    assert round(scaled.nbytes / gaussians[0].nbytes, 3) == ratio
    parts = [scaled.data, scaled.scale, scaled.zero_point, scaled.global_scale]
    assert scaled.nbytes == sum(np.asarray(part).nbytes for part in parts if part is not None)


@cases.those(lambda recipe: not breccia.recipes.choices(recipe).expanded)  # whose codes are of powers: test_expanded.py
def test_every_code_is_the_nearest_under_its_scale(recipe):
    """Whatever the scale, no other code may be closer to the element, unless the rule of the recipe
    multiplies by a rounded reciprocal: then it may be off by that rounding."""
    x = cases.normal(cases.shape_for(recipe, rows=16, blocks=4), seed=3)
    scaled = cast(x, recipe)
    scale = oracles.scale_values(scaled).astype(np.float64)
    if scaled.global_scale is not None:
        level = np.float64(scaled.global_scale)
        scale = scale / level if breccia.recipes.global_divides(recipe) else scale * level
    scale = oracles.spread(scale, scaled)
    values = np.unique(oracles.table(oracles.element_format(recipe)))
    values = values[np.isfinite(values)].astype(np.float64)
    target = x / scale
    if scaled.zero_point is not None:
        target = target + oracles.spread(np.asarray(scaled.zero_point).astype(np.float64), scaled)
    chosen = oracles.table(oracles.element_format(recipe))[oracles.codes_of(scaled)]
    best = np.abs(values - target[..., None]).min(-1)
    assert (np.abs(chosen - target) <= best + 1e-6 * np.abs(target) + 1e-6 * values[values > 0].min()).all()


SEARCHED = {name: recipe for name, recipe in cases.RECIPES.items() if getattr(recipe, "scale_search", None) == "mse"}


def block_errors(x, scaled, width):
    return ((dequantize(scaled).astype(np.float64) - x) ** 2).reshape(x.shape[0], -1, width).sum(-1)


@pytest.mark.parametrize("kind", ["normal", "student", "lognormal", "sparse", "ties", "constant", "outlier"])
@pytest.mark.parametrize("recipe", SEARCHED.values(), ids=SEARCHED.keys())
def test_mse_search_never_loses_to_amax(recipe, kind):
    """Block by block; the search includes amax's own scale, so it can only win."""
    width = cases.block_width(recipe)
    x = cases.heavy_tailed(kind, (32, 8 * width))
    searched, plain = cast(x, recipe), cast(x, cases.amax_twin(recipe))
    ours, theirs = block_errors(x, searched, width), block_errors(x, plain, width)
    assert (ours <= theirs * (1 + 1e-5)).all()
    if kind == "normal" and "MXFP8" not in type(recipe).__name__:  # E4M3's grid is as fine in the next binade
        assert ours.sum() < theirs.sum()


def test_searched_recipes_exist():
    assert len(SEARCHED) >= 5
