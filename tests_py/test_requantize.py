# SPDX-License-Identifier: Apache-2.0
"""requantize keeps every value wherever some tensor of the target can hold them all, which a search decides here: one
whose products of codes and scales are exact, for by luck others may round to the values as well."""

import functools

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import dequantize, formats, requantize

ml_dtypes = pytest.importorskip("ml_dtypes")

SHAPE = (4, 256)
# In float64: before NumPy 2 an array of float32 times a float64 number was rounded to float32.
_E4M3 = formats.decode(np.arange(1, 127, dtype=np.uint8), "float8_e4m3fn").astype(np.float64)


@functools.cache
def magnitudes(recipe):
    """What a code may stand for, without its sign."""
    if not getattr(recipe, "symmetric", True):
        return np.arange(1, 2 ** formats.finfo(recipe.element).bits, dtype=np.float32)
    codes = np.arange(2 ** formats.finfo(recipe.element).bits, dtype=np.uint8)
    values = np.abs(formats.decode(codes, recipe.element))
    return np.unique(values[np.isfinite(values) & (values > 0)])


def holds(recipe, block, scale):
    """Whether every value of a block is a code of the recipe times a scale."""
    if recipe.element.lstrip("u").startswith("int"):
        codes = np.rint(block / scale)
        if not getattr(recipe, "symmetric", True):
            low, high = min(codes.min(), 0), max(codes.max(), 0)
            fits = high - low < 2 ** formats.finfo(recipe.element).bits
        else:
            fits = codes.min() >= formats.finfo(recipe.element).min and codes.max() <= formats.finfo(recipe.element).max
        return bool(fits and np.array_equal(codes.astype(np.float64) * scale, block))
    quotients = (block / scale).astype(np.float32)
    codes = formats.encode(quotients, recipe.element)
    return np.array_equal(formats.decode(codes, recipe.element).astype(np.float64) * scale, block)


def is_stored(recipe, scale):
    kind = breccia.recipes.choices(recipe).scale
    if kind == "float32":
        return scale != 0
    if kind == "float8_e8m0fnu":
        return scale > 0 and float(np.frexp(scale)[0]) == 0.5
    return scale != 0 and np.float32(scale.astype(getattr(ml_dtypes, kind, kind))) == scale


def scales_of(recipe, block):
    """Every float32 number under which a block's values are codes; any will do where there is no value."""
    amax = np.abs(block).max()
    found = set()
    for magnitude in magnitudes(recipe):
        nearest = (amax / magnitude).view(np.int32)
        for scale in (nearest + np.arange(-1, 2, dtype=np.int32)).view(np.float32):
            if np.float64(scale) * magnitude != amax:
                continue
            for signed in (scale, -scale) if recipe.element.endswith(("int4", "int8")) else (scale,):
                if holds(recipe, block, signed):
                    found.add(signed)
    return found


def blocks_of(recipe, values):
    layout = recipe.layout
    if layout.name == "per_tensor":
        return [values.reshape(-1)]
    if layout.name == "per_channel":
        return list(values)
    rows, cols = getattr(layout, "block_m", 1), getattr(layout, "block_n", getattr(layout, "block_size", 0))
    return [
        values[i : i + rows, j : j + cols].reshape(-1)
        for i in range(0, values.shape[0], rows)
        for j in range(0, values.shape[1], cols)
    ]


def some_tensor_holds(recipe, values):
    found = []
    for block in {np.unique(block).tobytes() for block in blocks_of(recipe, values) if block.any()}:
        scales = scales_of(recipe, np.frombuffer(block, np.float32))
        if not getattr(recipe, "two_level", False):
            scales = {scale for scale in scales if is_stored(recipe, scale)}
        if not scales:
            return False
        found.append(scales)
    if not found or not getattr(recipe, "two_level", False):
        return True
    divides = recipe.global_scale_form == "divisor"
    found.sort(key=len)
    for scale in sorted(found[0]):
        for level in (_E4M3 / scale if divides else scale / _E4M3).astype(np.float32):
            exact = np.float64(level)
            made = set(_E4M3 / exact if divides else _E4M3 * exact)
            if all(scales & made for scales in found):
                return True
    return False


def tensors():
    """Small tensors of few values, many of which several recipes can hold."""
    rng = np.random.default_rng(5)
    grids = {"powers": [1, 2, 4], "fp4": [0.5, 1, 1.5, 2, 3, 4, 6], "threes": [3, 6, 1.5], "integers": [1, 2, 3, 5, 7]}
    for name, grid in grids.items():
        x = rng.choice(grid, SHAPE) * rng.choice([-1, 1], SHAPE) * rng.choice([0, 1, 1], SHAPE)
        yield name, x
        yield f"{name}, blocks apart", x * np.exp2(np.repeat(rng.integers(-6, 3, (4, 16)), 16, axis=1))
        yield f"{name}, rows apart", x * np.exp2(rng.integers(-12, 3, (4, 1)))
    one = np.zeros(SHAPE)
    one[np.arange(4)[:, None], np.arange(0, 256, 16)] = rng.integers(-100, 101, (4, 16)) / 64
    yield "one value per block", one
    yield "positive", np.abs(one) + (one == 0)
    yield "negative codes", -8.0 * (rng.random(SHAPE) < 0.5) + 7 * (rng.random(SHAPE) < 0.2)
    yield "one size", np.full(SHAPE, 1.375) * rng.choice([-1, 0, 1], SHAPE)
    yield "gaussian", rng.standard_normal(SHAPE)


DATA = {name: x.astype(np.float32) for name, x in tensors()}


@cases.ALL
@pytest.mark.in_turn
def test_nothing_is_lost_where_the_target_can_hold_it(recipe):
    answers, kept = {}, 0
    for kind, x in DATA.items():
        for name, source in cases.RECIPES.items():
            scaled = breccia.cast(x, source)
            values = dequantize(scaled)
            again = dequantize(requantize(scaled, recipe))
            one_zero = oracles.has_one_zero(recipe)
            same = (
                np.array_equal(again, values) if one_zero else not (oracles.bits(again) != oracles.bits(values)).any()
            )
            key = values.tobytes()
            if not same and key not in answers:
                answers[key] = some_tensor_holds(recipe, values)
            assert same or not answers.get(key), f"{kind}: {name}"
            kept += same
    assert kept >= 20


@pytest.mark.parametrize("spread", [1, 9, 17])
@pytest.mark.parametrize("form", ["multiplier", "divisor"])
def test_mxfp4_becomes_nvfp4_with_its_nibbles(spread, form):
    rng = np.random.default_rng(spread)
    codes = rng.integers(0, 256, (8, 64), dtype=np.uint8)
    exponents = rng.integers(100, 100 + spread + 1, (8, 4), dtype=np.uint8)
    exponents[0, :2] = 100, 100 + spread
    recipe = breccia.MXFP4BlockScaling()
    scaled = breccia.from_buffer(codes, exponents, recipe, recipe.layout)
    again = requantize(scaled, breccia.NVFP4BlockScaling(global_scale_form=form))
    np.testing.assert_array_equal(again.data, codes)
    level = 2.0 ** (100 + spread - 127 - 8)
    assert again.global_scale == (level if form == "multiplier" else 1 / level)
    oracles.assert_same_bits(dequantize(again), dequantize(scaled))


def test_rounded_products_are_kept_where_their_largest_is_a_power_of_two():
    """Multiples of fl(1/13), of which the largest, 13 of them, is 1: no power of two is their scale, 1/416 is one."""
    scales = np.array([1 / 13, 0.5 / 13], np.float32)  # of two blocks, which become one row
    codes = np.concatenate([np.resize([13, 7, 5, 3, 1, 0, 11], 128), np.resize([13, 9, 5, 2, 8], 128)])
    data = formats.encode(codes.astype(np.float32), "float8_e4m3fn")[None].view(ml_dtypes.float8_e4m3fn)
    source = breccia.ScaledTensor(data, scales[None], breccia.Float8BlockScaling(), breccia.PerBlockK(128))
    assert dequantize(source)[0, 0] == 1
    kept = requantize(source, breccia.Float8CurrentScaling(granularity="row"))
    np.testing.assert_array_equal(dequantize(kept), dequantize(source))


def test_tiles_of_small_values_are_cast():
    """A tile whose smallest values no scale keeps is quantized by the recipe's rule, as its values are."""
    x = cases.heavy_tailed("normal", (256, 256), 3)
    x[::7] *= 2.0**-12
    source = breccia.cast(x, "mxfp8")
    tiles = breccia.Float8BlockScaling(block_m=128)
    assert requantize(source, tiles) == breccia.cast(dequantize(source), tiles)
