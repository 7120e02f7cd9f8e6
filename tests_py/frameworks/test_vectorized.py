# SPDX-License-Identifier: Apache-2.0
"""The vectorized kernels on NumPy arrays: byte for byte what the core makes."""

import breccia
import cases
import numpy as np
import pytest
import test_requantize as exact_values
from breccia import cast, dequantize, requantize
from breccia.kernels import whole_array
from breccia.kernels.whole_array.namespace import NumPy
from breccia.verbs.cast_options import CastOptions

XP = NumPy()
SPECIAL = ("nan", "infinity", "zero", "subnormal", "smallest", "batch", "empty")


def tensor(kind):
    x = cases.normal((6, 256))
    if kind in cases.DATA:
        return cases.heavy_tailed(kind, (6, 256))
    if kind == "nan":
        x[1, 3], x[2], x[3, 7] = np.nan, np.nan, -np.nan
    elif kind == "infinity":
        x[1, 3], x[2, 200], x[4] = np.inf, -np.inf, np.inf
    elif kind == "zero":
        x = np.zeros((6, 256), np.float32)
        x[3:] = -0.0
    elif kind == "subnormal":
        x = (x * 1e-40).astype(np.float32)
    elif kind == "smallest":  # whole multiples of the smallest subnormal: scales underflow
        x = (np.rint(cases.heavy_tailed("student", (6, 256)) * 9) * np.float32(2.0**-149)).astype(np.float32)
    elif kind == "batch":
        x = cases.normal((2, 3, 5, 256))
    elif kind == "empty":
        x = np.zeros((0, 256), np.float32)
    return x


def raw(array):
    return array.view(np.uint8) if array.dtype.itemsize == 1 else array


def same(parts, scaled, what):
    for name in ("data", "scale", "zero_point", "global_scale"):
        a, b = getattr(parts, name), getattr(scaled, name)
        assert (a is None) == (b is None), f"{what} {name}"
        if a is None:
            continue
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        assert a.shape == b.shape, f"{what} {name}"
        np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), f"{what} {name}")


@cases.ALL
def test_cast_and_dequantize(recipe):
    with np.errstate(all="ignore"):
        for kind in (*cases.DATA, *SPECIAL):
            x = tensor(kind)
            scaled = cast(x, recipe)
            same(whole_array.cast(XP, x, recipe, CastOptions()), scaled, kind)
            for view in (scaled, scaled.mT):
                values = np.broadcast_to(whole_array.dequantize(XP, view, raw), view.shape)
                expected = dequantize(view)
                np.testing.assert_array_equal(values.view(np.int32), np.asarray(expected).view(np.int32), kind)


@cases.ALL
@pytest.mark.in_turn
def test_requantize(recipe):
    sources = ("current", "current-row", "block", "block-128x128", "mxfp8", "mxfp4", "nvfp4", "int4", "int8-32")
    with np.errstate(all="ignore"):
        for name in (*sources, "block-tile-bf16", "int4-asymmetric"):
            for kind in ("student", "sparse", "powers", "nan"):
                x = tensor(kind)[:, :] if name != "block-128x128" else cases.heavy_tailed("student", (256, 256))
                scaled = cast(x, cases.RECIPES[name])
                for view in (scaled, scaled.T) if x.shape == (256, 256) else (scaled,):
                    expected = requantize(view, recipe)
                    if expected is not view:
                        same(whole_array.requantize(XP, view, recipe, raw), expected, f"{name} {kind}")


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (130, 300), (3, 130, 140)])
@pytest.mark.parametrize("tile", [(128, 128), (16, 48), (64, 1)])
def test_ragged_tiles(shape, tile):
    recipe = breccia.Float8BlockScaling(block_k=tile[1], block_m=tile[0], scale_search="mse")
    x = cases.normal(shape)
    scaled = cast(x, recipe)
    same(whole_array.cast(XP, x, recipe, CastOptions()), scaled, "cast")
    values = whole_array.dequantize(XP, scaled, raw)
    np.testing.assert_array_equal(values, dequantize(scaled))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 48, 100])
def test_odd_groups(group):
    for recipe in (
        breccia.INT4Scaling(group_size=group, scale_search="mse"),
        breccia.INT8Scaling(group_size=group),
        breccia.Float8BlockScaling(block_k=group),
    ):
        x = cases.normal((5, 3 * group))
        scaled = cast(x, recipe)
        same(whole_array.cast(XP, x, recipe, CastOptions()), scaled, "cast")
        np.testing.assert_array_equal(whole_array.dequantize(XP, scaled, raw), dequantize(scaled))
        other = cast(x, breccia.INT4Scaling(group_size=3 * group))
        if other.recipe != recipe:
            with np.errstate(all="ignore"):
                same(whole_array.requantize(XP, other, recipe, raw), requantize(other, recipe), "requantize")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if i % 4 else []) for i, kind in enumerate(exact_values.DATA)]
)
@pytest.mark.in_turn
def test_requantize_of_values_that_many_recipes_hold(kind):
    """Every recipe to every other one."""
    for name, source in cases.RECIPES.items():
        scaled = cast(exact_values.DATA[kind], source)
        for goal, recipe in cases.RECIPES.items():
            if scaled.recipe != recipe:
                with np.errstate(all="ignore"):
                    made = whole_array.requantize(XP, scaled, recipe, raw)
                same(made, requantize(scaled, recipe), f"{name} to {goal}")


# --- options of a cast ------------------------------------------------------------------------------------------------

OPTIONS = {
    "stochastic": {"rounding": "stochastic", "seed": 7},
    "long seeds": {"rounding": "stochastic", "seed": 2**40 + 1, "hadamard": breccia.Hadamard(16, 2**33 + 5)},
    "negative seeds": {"rounding": "stochastic", "seed": -3, "hadamard": breccia.Hadamard(4, -5)},
    "hadamard": {"hadamard": breccia.Hadamard(64)},
    "square": {"square_blocks": True},
    "square stochastic": {"square_blocks": True, "rounding": "stochastic", "seed": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@cases.ALL
@pytest.mark.in_turn
def test_options_make_the_cores_bytes(recipe, options):
    if "square_blocks" in options and (not lies_along_rows(recipe) or breccia.recipes.choices(recipe).expanded):
        with pytest.raises(ValueError, match="square_blocks needs"):
            cast(tensor("student"), recipe, **options)
        with pytest.raises(ValueError, match="square_blocks needs"):
            whole_array.cast(XP, tensor("student"), recipe, CastOptions(**options))
        return
    with np.errstate(all="ignore"):
        for kind in (*cases.DATA, *SPECIAL):
            x = tensor(kind)
            same(whole_array.cast(XP, x, recipe, CastOptions(**options)), cast(x, recipe, **options), kind)


def lies_along_rows(recipe):
    return cases.is_block(recipe) and getattr(recipe, "block_m", 1) == 1


@cases.some("block mxfp8 mxfp4 nvfp4 int4-32 int8-32")
def test_square_blocks_are_the_same_of_the_transpose(recipe):
    if not lies_along_rows(recipe):
        pytest.skip("its blocks are rectangles")
    x = cases.heavy_tailed("student", (256, 128))
    square = cast(x, recipe, square_blocks=True)
    assert square.layout == recipe.layout  # and so goes wherever the recipe goes
    np.testing.assert_array_equal(dequantize(square), dequantize(cast(x.T, recipe, square_blocks=True)).T)
    n = cases.block_width(recipe)
    scales = np.asarray(square.scale).reshape(256 // n, n, 128 // n)
    assert (scales == scales[:, :1]).all()


def test_numbers_of_any_integer_type_are_seeds():
    x = cases.normal((4, 64))
    reference = cast(x, breccia.MXFP8BlockScaling(), rounding="stochastic", seed=-2)
    for seed in (np.int64(-2), np.int8(-2), 2**64 - 2):
        again = cast(x, breccia.MXFP8BlockScaling(), rounding="stochastic", seed=seed)
        np.testing.assert_array_equal(again.data, reference.data)


@cases.some("current mxfp8 mxfp6-e2m3 mxfp4 nvfp4 int4 int8 block")
def test_stochastic_rounding_is_unbiased(recipe):
    """Each value is one of two neighbours; their mean over seeds approaches it, and the means err to no side."""
    if "mse" in str(recipe) or getattr(recipe, "scale_rounding", "rceil") != "rceil":
        pytest.skip("saturates, which is a bias")
    x = cases.normal((4, 256)) * 0.05
    seeds = 64
    draws = np.stack([dequantize(cast(x, recipe, rounding="stochastic", seed=s)) for s in range(seeds)])
    low, high = draws.min(0), draws.max(0)
    assert ((draws == low) | (draws == high)).all()
    between = high > low
    assert between.mean() > 0.3
    error = ((draws.mean(0) - x) / np.where(between, high - low, 1))[between]  # in steps
    assert np.abs(error).max() < 6 * 0.5 / np.sqrt(seeds)
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(seeds * between.sum())


def test_stochastic_rounding_is_reproducible_and_exact_where_it_can_be():
    recipe = breccia.MXFP8BlockScaling()
    x = cases.normal((8, 64))
    one, two = (cast(x, recipe, rounding="stochastic", seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.data, two.data)
    assert (one.data != cast(x, recipe, rounding="stochastic", seed=6).data).mean() > 0.1
    on_grid = dequantize(cast(x, recipe))
    for seed in (0, -1, 2**40 + 1):
        again = cast(on_grid, recipe, rounding="stochastic", seed=seed)
        np.testing.assert_array_equal(dequantize(again), on_grid)


@pytest.mark.parametrize("block", [4, 16, 128])
def test_hadamard_is_orthogonal_and_spreads_outliers(block):
    x = cases.normal((4, 256))
    y = whole_array.hadamard(XP, x, block, 3)
    np.testing.assert_allclose(whole_array.hadamard(XP, y, block, 3, inverse=True), x, atol=1e-5)
    w = cases.normal((5, 256), seed=1)
    np.testing.assert_allclose(y @ whole_array.hadamard(XP, w, block, 3).T, x @ w.T, rtol=1e-3, atol=1e-3)
    spike = np.zeros((1, 256), np.float32)
    spike[0, 7] = 1
    assert np.isclose(np.abs(whole_array.hadamard(XP, spike, block, 3)).max(), block**-0.5)
    assert (whole_array.hadamard(XP, x, block, 4) != y).any()


def test_options_are_checked():
    x = cases.normal((4, 64))
    recipe = breccia.MXFP8BlockScaling()
    with pytest.raises(ValueError, match="seed is required"):
        cast(x, recipe, rounding="stochastic")
    with pytest.raises(ValueError, match="rounding must be"):
        cast(x, recipe, rounding="up")
    with pytest.raises(ValueError, match="seed must be None"):
        cast(x, recipe, seed=1)
    with pytest.raises(TypeError, match="seed must be an integer"):
        cast(x, recipe, rounding="stochastic", seed=1.5)
    with pytest.raises(TypeError, match="square_blocks must be"):
        cast(x, recipe, square_blocks=16)
    with pytest.raises(TypeError, match="hadamard must be"):
        cast(x, recipe, hadamard=16)
    with pytest.raises(ValueError, match="block must be a power of two"):
        breccia.Hadamard(12)
    with pytest.raises(ValueError, match="divisible by 128"):
        cast(x, recipe, hadamard=breccia.Hadamard(128))
