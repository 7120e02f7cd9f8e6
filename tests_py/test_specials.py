# SPDX-License-Identifier: Apache-2.0
"""Zeros, subnormals, outliers, infinities, NaN, -0.0 and empty tensors: one defined result each, and no harm
to neighbours."""

import breccia
import cases
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import oracles
import pytest
from breccia import cast, dequantize, matmul

FP8_OR_INTEGER = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "INT4Scaling",
    "INT8Scaling",
)


def fields(scaled):
    """Everything a cast decides, as comparable arrays."""
    parts = [oracles.codes_of(scaled), scaled.scale, scaled.zero_point, scaled.global_scale]
    return [None if part is None else oracles.bits(np.asarray(part)) for part in parts]


def has_nan(recipe):
    return bool(np.isnan(oracles.table(oracles.element_format(recipe))).any())


def block_mask(scaled, at):
    """True for every element that shares a scale with one of the elements `at`."""
    ids = np.arange(np.asarray(scaled.scale).size).reshape(np.asarray(scaled.scale).shape)
    grid = oracles.spread(ids, scaled)
    return np.isin(grid, grid[at])


def largest(recipe, negative):
    values = oracles.table(oracles.element_format(recipe))
    values = values[np.isfinite(values)]
    return values.min() if negative else values.max()


@cases.ALL
def test_zeros(recipe):
    x = np.zeros(cases.shape_for(recipe), np.float32)
    scaled = cast(x, recipe)
    oracles.assert_same_bits(dequantize(scaled), x, "dequantize")
    assert not np.isnan(oracles.scale_values(scaled)).any()
    if type(recipe).__name__ in FP8_OR_INTEGER and scaled.scale.dtype != np.uint8:
        assert (oracles.scale_values(scaled) == 1).all()
    elif type(recipe).__name__.startswith("MX"):
        assert (np.asarray(scaled.scale) == 0).all()
    elif type(recipe).__name__ == "NVFP4BlockScaling":
        assert (np.asarray(scaled.scale) == (0x08 if recipe.scale_rule == "torchao" else 0x00)).all()
        if recipe.two_level:
            assert np.isfinite(scaled.global_scale)


@cases.ALL
def test_a_zero_block_among_others(recipe):
    shape = cases.shape_for(recipe, rows=4, blocks=3)
    x = cases.normal(shape)
    zero = np.zeros(shape, bool)
    zero[: max(1, getattr(recipe, "block_m", 1)), : shape[1] // 3] = True
    x[zero] = 0
    back = dequantize(cast(x, recipe))
    assert (back[zero] == 0).all()
    assert np.isfinite(back).all()
    assert (back[~zero] != 0).mean() > 0.3  # unsigned codes lose the negative half


@cases.those(lambda recipe: not oracles.has_one_zero(recipe))
def test_negative_zero_keeps_its_sign(recipe):
    x = cases.normal(cases.shape_for(recipe))
    x[:, ::3] = -0.0
    x[:, 1::3] = 0.0
    back = dequantize(cast(x, recipe))
    assert (back[:, ::3] == 0).all()
    assert np.signbit(back[:, ::3]).all()
    assert not np.signbit(back[:, 1::3]).any()


def calm_fields(x, recipe, at):
    """The fields of a cast of x, except that the blocks of `at` do without the search for a scale: no error
    is smaller than another next to an infinite one."""
    calm, plain = cast(x, recipe), cast(x, cases.amax_twin(recipe))
    hit = block_mask(calm, at)
    ids = oracles.spread(np.arange(np.asarray(calm.scale).size).reshape(np.asarray(calm.scale).shape), calm)
    hit_scales = np.isin(np.arange(np.asarray(calm.scale).size), ids[at]).reshape(np.asarray(calm.scale).shape)
    merged = []
    for searched, unsearched in zip(fields(calm), fields(plain), strict=True):
        if searched is None or searched.shape not in (x.shape, hit_scales.shape):
            merged.append(searched)
        else:
            merged.append(np.where(hit if searched.shape == x.shape else hit_scales, unsearched, searched))
    return merged


@cases.those(lambda recipe: not breccia.recipes.choices(recipe).expanded)  # one such number takes the exponent away
@pytest.mark.parametrize("sign", [1, -1])
def test_infinity_saturates_and_its_block_does_not_notice(recipe, sign):
    x = cases.normal(cases.shape_for(recipe, blocks=3))
    at = (np.array([2, 3]), np.array([1, x.shape[1] - 2]))
    x[at] = 0.0
    expected = calm_fields(x, recipe, at)
    x[at] = sign * np.inf
    scaled = cast(x, recipe)
    actual = fields(scaled)
    values = oracles.table(oracles.element_format(recipe))[actual[0]]
    assert (values[at] == largest(recipe, sign < 0)).all()
    actual[0][at] = expected[0][at]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@cases.those(lambda recipe: not breccia.recipes.choices(recipe).expanded)  # one such number takes the exponent away
def test_nan_in_its_place(recipe):
    x = cases.normal(cases.shape_for(recipe, blocks=3))
    at = (np.array([2, 3]), np.array([1, x.shape[1] - 2]))
    x[at] = 0.0
    expected = calm_fields(x, recipe, at)
    x[at] = np.nan
    scaled = cast(x, recipe)
    actual = fields(scaled)
    if has_nan(recipe):  # the element alone
        hit = np.zeros(x.shape, bool)
        hit[at] = True
        np.testing.assert_array_equal(actual[1], expected[1])
    else:  # the block, through its scale; no code may pretend to be a number
        hit = block_mask(scaled, at)
        assert (actual[0][hit] == 0).all()
        assert np.isnan(oracles.spread(oracles.scale_values(scaled), scaled)[hit]).all()
        other = ~np.isnan(oracles.scale_values(scaled))
        np.testing.assert_array_equal(actual[1][other], expected[1][other])
    assert np.isnan(dequantize(scaled)[hit]).all()
    np.testing.assert_array_equal(actual[0][~hit], expected[0][~hit])


@cases.ALL
def test_a_block_of_nothing_but_infinities_or_nans(recipe):
    shape = cases.shape_for(recipe)
    back = dequantize(cast(np.full(shape, np.nan, np.float32), recipe))
    assert np.isnan(back).all()
    x = np.where(np.arange(shape[1]) % 2, np.float32(np.inf), np.float32(-np.inf)) * np.ones(shape, np.float32)
    back = dequantize(cast(x, recipe))
    assert not np.isnan(back).any()
    nonzero = back != 0
    assert (np.sign(back[nonzero]) == np.sign(x[nonzero])).all()


def test_scale_bytes_of_a_nan_block():
    x = np.full((2, 128), 1, np.float32)
    x[0, 0] = np.nan
    for recipe in (breccia.MXFP4BlockScaling(), breccia.MXFP6BlockScaling()):
        assert cast(x, recipe).scale[0, 0] == 0xFF
    assert cast(x, breccia.NVFP4BlockScaling()).scale[0, 0] == 0x7F
    assert np.isnan(cast(x, breccia.INT4Scaling()).scale[0, 0])


@cases.ALL
def test_one_huge_outlier(recipe):
    """The outlier survives; what shares its scale is rounded to that scale's step, and is never anything
    else."""
    x = cases.normal(cases.shape_for(recipe, blocks=3))
    big = 6e4 if oracles.element_format(recipe) in oracles.INTEGERS else 1e30
    if isinstance(recipe, breccia.NVFP4BlockScaling) and not recipe.two_level:
        big = 2000.0  # E4M3 scales end at 448: one level reaches 448 * 6
    x[1, 3] = big
    scaled = cast(x, recipe)
    back = dequantize(scaled)
    assert np.isfinite(back).all()
    assert abs(back[1, 3] - big) <= 0.26 * big
    sharing = block_mask(scaled, (np.array([1]), np.array([3])))
    sharing[1, 3] = False
    assert (np.abs(back[sharing]) <= np.abs(x[sharing]) + big / 4).all()
    if scaled.global_scale is None:
        rest = ~sharing
        rest[1, 3] = False
        x[1, 3] = 1.0
        oracles.assert_same_bits(back[rest], dequantize(cast(x, recipe))[rest], "other blocks")


@cases.ALL
def test_subnormal_blocks(recipe):
    x = np.full(cases.shape_for(recipe), 0, np.float32)
    x[:, ::2] = np.array([1, 2, 3, 0x7FFFFF], np.uint32).view(np.float32)[np.arange(x.shape[1] // 2) % 4]
    back = dequantize(cast(x, recipe))
    assert np.isfinite(back).all()
    assert (back[:, 1::2] == 0).all()
    assert (np.abs(back) <= 2.0**-120).all()


# Blocks of the largest floats: rounding up to the next code may pass the largest float32 by definition, so
# stop short of it.
finite = st.floats(-(2.0**120), 2.0**120, width=32)
any_float = st.floats(width=32, allow_nan=True, allow_infinity=True)


def matrices(recipe, elements, blocks=2):
    rows, cols = cases.shape_for(recipe, rows=2, blocks=blocks, at_least=8)
    return hnp.arrays(np.float32, (rows, cols), elements=elements, fill=st.sampled_from([0.0, 1.0, -0.5]))


@cases.ALL
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_finite_stays_finite_and_keeps_its_sign(recipe, data):
    x = data.draw(matrices(recipe, finite))
    scaled = cast(x, recipe)
    back = dequantize(scaled)
    assert np.isfinite(back).all()
    if scaled.zero_point is None and oracles.element_format(recipe) != "uint4":
        assert (back * np.sign(x) >= 0).all()
        assert (back[x == 0] == 0).all()


@cases.those(lambda recipe: cases.is_block(recipe) and not getattr(recipe, "two_level", False))
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_blocks_do_not_see_each_other(recipe, data):
    """Whatever sits in the second half of every row, the codes and scales of the first half stay."""
    x = data.draw(matrices(recipe, finite, blocks=1))
    other = data.draw(matrices(recipe, any_float, blocks=1))
    alone, beside = cast(x, recipe), cast(np.concatenate([x, other], axis=1), recipe)
    width = alone.scale.shape[-1]
    np.testing.assert_array_equal(oracles.codes_of(beside)[:, : x.shape[1]], oracles.codes_of(alone))
    oracles.assert_same_bits(np.asarray(beside.scale)[:, :width], np.asarray(alone.scale), "scale")


@cases.ALL
def test_empty_rows(recipe):
    _, cols = cases.shape_for(recipe)
    for lead in [(0,), (3, 0), (0, 4), (0, 0)]:
        x = np.zeros((*lead, cols), np.float32)
        scaled = cast(x, recipe)
        assert scaled.shape == x.shape
        back = dequantize(scaled)
        assert (back.shape, back.dtype) == (x.shape, np.float32)
        assert x.ndim != 2 or scaled.T.shape == x.T.shape


@cases.ALL
def test_empty_last_axis(recipe):
    scaled = cast(np.zeros((4, 0), np.float32), recipe)
    assert scaled.shape == (4, 0)
    assert dequantize(scaled).shape == (4, 0)
    assert (oracles.scale_values(scaled) == 1).all()  # no element, but a row or a tensor has a scale
    product = matmul(scaled, np.zeros((0, 3), np.float32))
    np.testing.assert_array_equal(product, np.zeros((4, 3), np.float32))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", [breccia.INT8Scaling, breccia.INT4Scaling])
def test_integer_scales_that_underflow(kind, symmetric, dtype):
    """They stop at the smallest subnormal of their type; 1 is the scale of a block of zeros alone."""
    smallest = np.float32({"fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}[dtype])
    unsigned = {} if symmetric or kind is breccia.INT8Scaling else {"signed": False}
    recipe = kind(group_size=64, symmetric=symmetric, scale_dtype=dtype, **unsigned)
    levels = 7 if kind is breccia.INT4Scaling else 63
    x = (np.arange(64, dtype=np.float32) % levels - levels // 2) * np.float32(2.0**-149)
    scaled = cast(np.stack([x, np.zeros_like(x)]), recipe)
    assert (oracles.scale_values(scaled).ravel() == [smallest, 1]).all()
    if dtype == "fp32":
        np.testing.assert_array_equal(dequantize(scaled), [x, np.zeros_like(x)])
