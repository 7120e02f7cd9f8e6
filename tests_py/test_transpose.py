# SPDX-License-Identifier: Apache-2.0
"""The transpose of codes, blocks along the other axis, against the definition in floats."""

import breccia
import numpy as np
import pytest
from breccia import formats

RECIPES = [
    breccia.Float8BlockScaling(scale_format="e8m0"),
    breccia.Float8BlockScaling("E5M2", block_k=32, scale_format="e8m0"),
    breccia.MXFP8BlockScaling(),
    breccia.MXFP8BlockScaling("E5M2"),
    breccia.MXFP6BlockScaling("E2M3"),
    breccia.MXFP6BlockScaling("E3M2"),
]
NAMES = [f"{recipe.name} {recipe.element}" for recipe in RECIPES]


def group_of(recipe):
    return getattr(recipe, "block_k", None) or recipe.block_size


def values_of(recipe, spread, rows=2, columns=3):
    """Rows whose sizes are 2^0 to 2^-spread of each other."""
    group = group_of(recipe)
    draw = np.random.default_rng(0)
    sizes = np.exp2(-np.floor(draw.uniform(0, spread + 1, (rows * group, 1))))
    return (draw.standard_normal((rows * group, columns * group)) * sizes).astype(np.float32)


def expected(q):
    """In floats: each tile at its largest scale, values rounded by the codec."""
    group = group_of(q.recipe)
    values, exponents = breccia.dequantize(q), q.scale.view(np.uint8).astype(int) - 127
    found = np.empty(values.T.shape, np.float32)
    for row in range(0, values.shape[0], group):
        for block in range(exponents.shape[1]):
            largest = exponents[row : row + group, block].max()
            tile = np.s_[row : row + group], np.s_[block * group : (block + 1) * group]
            codes = formats.encode(np.ldexp(values[tile], -largest), q.recipe.element)
            found[tile[1], tile[0]] = np.ldexp(formats.decode(codes, q.recipe.element), largest).T
    return found


@pytest.mark.parametrize("spread", [0, 3, 40])
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_codes_move_as_their_values_do(recipe, spread):
    q = breccia.cast(values_of(recipe, spread), recipe)
    turned, rounded, lost = breccia.transpose(q)
    assert turned.shape == q.shape[::-1]
    assert turned.recipe == recipe and turned.layout == q.layout
    found, before = breccia.dequantize(turned), breccia.dequantize(q).T
    np.testing.assert_array_equal(found, expected(q))
    assert rounded == np.count_nonzero(found != before)
    assert lost == np.count_nonzero((found == 0) & (before != 0))
    if spread == 40:
        assert lost > 0 or recipe.element == "float8_e5m2"


def every_code_by_every_shift(recipe):
    """A matrix whose tiles have each code at each difference of exponents, as codes and scales."""
    group, bits = group_of(recipe), formats.finfo(recipe.element).bits
    shifts = np.array([0, *range(1, 41), 60, 127, 200, 254])
    codes = np.arange(1 << bits, dtype=np.uint8).repeat(-(-group // (1 << bits)))
    columns = -(-len(codes) // group) * group
    data = np.zeros((group * len(shifts), columns), np.uint8)
    scale = np.full((len(data), columns // group), 254, np.uint8)
    data[0::group, : len(codes)] = codes
    scale[0::group] = (254 - shifts)[:, None]
    return data, scale


def wrapped(recipe, data, scale):
    like = breccia.cast(np.ones((group_of(recipe), group_of(recipe)), np.float32), recipe)
    return breccia.from_buffer(data.view(like.data.dtype), scale.view(like.scale.dtype), recipe, like.layout)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_every_code_by_every_shift(recipe):
    """The table is that of the codec: values times a power of two, to the nearest code, ties to even."""
    data, scale = every_code_by_every_shift(recipe)
    turned, rounded, lost = breccia.transpose(wrapped(recipe, data, scale))
    values = formats.decode(data[:: group_of(recipe)], recipe.element).astype(np.float64)
    exact = np.ldexp(values, scale[:: group_of(recipe), :1].astype(int) - 254)
    codes = formats.encode(exact.astype(np.float32), recipe.element)
    codes = np.where(np.isfinite(values), codes, data[:: group_of(recipe)])
    np.testing.assert_array_equal(turned.data.view(np.uint8).T[:: group_of(recipe)], codes)
    found = formats.decode(codes, recipe.element)
    other = np.isfinite(values) & (found != exact)
    assert (rounded, lost) == (other.sum(), (other & (found == 0)).sum())
    assert 0 < lost < rounded


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_strides_and_threads(recipe):
    """Rows that lie apart, columns that lie apart, and tiles dealt out to threads."""
    group = group_of(recipe)
    q = breccia.cast(values_of(recipe, 9, 8, 24), recipe)
    wanted, (data, scale) = breccia.transpose(q), (np.asarray(part).view(np.uint8) for part in (q.data, q.scale))
    wide = np.zeros((2 * len(data), 3 * data.shape[1]), np.uint8)
    for view in (wide[::2, : data.shape[1]], wide[::2, ::3], np.zeros(data.shape, np.uint8, order="F")):
        view[:] = data
        found = breccia.transpose(wrapped(recipe, view, np.asfortranarray(scale)))
        assert found.value == wanted.value and found[1:] == wanted[1:]
    before = breccia.num_threads()
    try:
        for threads in (1, 2, 5):
            breccia.set_num_threads(threads)
            found = breccia.transpose(q)
            assert found.value == wanted.value and found[1:] == wanted[1:]
    finally:
        breccia.set_num_threads(before)
    assert breccia.transpose(breccia.cast(np.zeros((0, group), np.float32), recipe)).value.shape == (group, 0)


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_nothing_changes_where_rows_have_one_scale(recipe):
    group = group_of(recipe)
    x = np.random.default_rng(0).standard_normal((group, 2 * group)).astype(np.float32)
    x[:, ::group] = 4.0  # the largest of each block
    q = breccia.cast(x, recipe)
    turned, rounded, lost = breccia.transpose(q)
    assert (rounded, lost) == (0, 0)
    np.testing.assert_array_equal(breccia.dequantize(turned), breccia.dequantize(q).T)
    again = breccia.transpose(breccia.transpose(turned).value).value
    np.testing.assert_array_equal(breccia.dequantize(again), breccia.dequantize(turned))


def test_it_is_nearer_than_to_quantize_twice():
    """FP8-Flow-MoE's reason: scales that are no powers of two, along each axis, round every value again."""
    x = values_of(RECIPES[0], 3)
    exact = breccia.cast(x, RECIPES[0])
    turned = breccia.transpose(exact).value
    naive = breccia.Float8BlockScaling()
    once = breccia.dequantize(breccia.cast(x, naive))
    twice = breccia.dequantize(breccia.cast(np.ascontiguousarray(once.T), naive))
    kept = breccia.dequantize(exact).T
    assert np.count_nonzero(breccia.dequantize(turned) != kept) * 20 < np.count_nonzero(twice != once.T)


@pytest.mark.parametrize("name", ["torch", "jax", "mlx"])
def test_frameworks(name):
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name))
    q = breccia.cast(values_of(RECIPES[2], 12), RECIPES[2])
    wanted = breccia.transpose(q)
    found = breccia.transpose(q.to(name))
    assert found[1:] == wanted[1:]
    assert type(found.value.data) is type(q.to(name).data)
    assert found.value.to("numpy") == wanted.value


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
@pytest.mark.parametrize("spread", [0, 6])
def test_requantize_keeps_more_than_codes_that_move(recipe, spread):
    """A scale for each block, where `transpose` has one for each tile: docs/design/0002."""
    q = breccia.cast(values_of(recipe, spread), recipe)
    wanted = breccia.dequantize(q).T.astype(np.float64)
    moved, made = breccia.transpose(q).value, breccia.requantize(q.T, recipe)
    assert made.layout == moved.layout and made.shape == moved.shape
    lost = [np.sqrt(np.mean((breccia.dequantize(one) - wanted) ** 2)) for one in (made, moved)]
    print(recipe, spread, lost)
    assert lost[0] <= lost[1]


def test_special_values():
    """NaN and infinity stay where they are; a scale that is NaN is a NaN in each of its values."""
    recipe = breccia.MXFP8BlockScaling("E5M2")
    q = breccia.cast(np.ones((32, 64), np.float32), recipe)
    data, scale = np.array(q.data).view(np.uint8), np.array(q.scale).view(np.uint8)
    data[0, 0], data[1, 0], data[2, 0] = 0x7C, 0xFE, 0x80
    scale[5, 1] = 255
    q = breccia.from_buffer(data.view(q.data.dtype), scale.view(q.scale.dtype), recipe, q.layout)
    turned = breccia.transpose(q).value
    np.testing.assert_array_equal(breccia.dequantize(turned), breccia.dequantize(q).T)
    assert np.signbit(breccia.dequantize(turned)[0, 2])
    scale[:] = 255
    nothing = breccia.from_buffer(data.view(q.data.dtype), scale.view(q.scale.dtype), recipe, q.layout)
    assert np.isnan(breccia.dequantize(breccia.transpose(nothing).value)).all()
    six = breccia.cast(np.ones((32, 32), np.float32), "mxfp6")
    scale = np.full_like(np.array(six.scale).view(np.uint8), 255)
    with pytest.raises(ValueError, match="scaled must have scales that are numbers, as float6_e2m3fn has no code"):
        breccia.transpose(breccia.from_buffer(six.data, scale.view(six.scale.dtype), six.recipe, six.layout))


def test_what_has_no_such_transpose():
    x = np.ones((128, 128), np.float32)
    for recipe in ("fp8", "fp8-block", "fp8-row-block", "nvfp4", "mxfp4", "int8"):
        with pytest.raises(TypeError, match="scaled must be a matrix of MXFP8BlockScaling, MXFP6BlockScaling or"):
            breccia.transpose(breccia.cast(x, recipe))
    with pytest.raises(TypeError, match="scaled must be a ScaledTensor, got ndarray"):
        breccia.transpose(x)
    with pytest.raises(ValueError, match="scaled must have a multiple of 32 rows, as its blocks are to run along them"):
        breccia.transpose(breccia.cast(x[:31], "mxfp8"))
