# SPDX-License-Identifier: Apache-2.0
"""Groups with exponents: COAT's dynamic range expansion (arXiv:2410.19313, section 4) as recipes."""

import dataclasses
import pickle

import breccia
import numpy as np
import pytest
from breccia import formats
from breccia.kernels import whole_array
from breccia.kernels.whole_array.namespace import NumPy
from breccia.verbs.cast_options import CastOptions

RECIPES = (
    breccia.Float8ExpandedScaling(),
    breccia.Float8ExpandedScaling("E5M2", 64),
    breccia.Float8ExpandedScaling("float8_e4m3fnuz", 20),
    breccia.INT8ExpandedScaling(),
    breccia.INT8ExpandedScaling(48),
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.element}-{r.group_size}")


def numbers(recipe, rows=6, groups=5, seed=0):
    draw = np.random.default_rng(seed)
    return (draw.standard_normal((rows, groups * recipe.group_size)) ** 3 * 1e-5).astype(np.float32)


def odd(recipe):
    """Zeros, equal numbers, infinities, NaNs and subnormal numbers, a group each."""
    x = numbers(recipe, 1, 8)
    for group, values in enumerate(
        ([0.0], [-3.0], [np.inf, 1], [np.nan, -1], [-np.nan, 2, -0.0], [3e38, 1e-45, -1e-38], [1e-44, -1e-40])
    ):
        part = x[0, group * recipe.group_size : (group + 1) * recipe.group_size]
        part[: len(values)] = values
        if group < 2:
            part[:] = values[0]
    return x


def published(x, recipe):
    """Exponents, scales and real-valued codes in float64 by the paper's formula: k = log(R of the format) / log(R of
    the group), codes |x|^k over the scale max |x|^k / max of the format. The exponents are rounded to float16, as COAT
    stores them, before they are used."""
    about = formats.finfo(recipe.element)
    groups = x.astype(np.float64).reshape(len(x), -1, recipe.group_size)
    size = np.abs(groups)
    top, least = size.max(-1, keepdims=True), np.where(size > 0, size, np.inf).min(-1, keepdims=True)
    k = np.log(about.max / about.smallest) / np.log(top / least)
    rounded = k.astype(np.float16).astype(np.float64)
    # x^k beside the scale of the group, both over top^k: neither overflows
    codes = np.sign(groups) * (size / top) ** rounded / (1 / about.max)
    return k.squeeze(-1), top.squeeze(-1) / about.max, codes.reshape(x.shape)


def decoded(q):
    return formats.decode(np.asarray(q.data).view(np.uint8), q.recipe.element).astype(np.float64)


def same_bytes(a, b):
    return np.array_equal(*(np.ascontiguousarray(np.asarray(x)).view(np.uint8) for x in (a, b)))


@each_recipe
def test_codes_are_those_of_the_published_formula(recipe):
    x = numbers(recipe)
    q = breccia.cast(x, recipe)
    k, scale, wanted = published(x, recipe)
    assert q.exponents.dtype == np.float16 and q.exponents.shape == q.scale.shape == k.shape
    assert np.allclose(q.exponents, k, rtol=2e-3)
    assert np.allclose(q.scale, scale, rtol=1e-6)
    about, found, size = formats.finfo(recipe.element), decoded(q), np.abs(wanted)
    step = 1.0
    if not recipe.element.startswith("int"):
        floor = about.smallest * 2.0**about.mantissa_bits
        step = np.exp2(np.floor(np.log2(np.maximum(size, floor))) - about.mantissa_bits)
    assert (np.abs(found - wanted) <= 0.5 * step + 2e-5 * size).all()
    # the group fills the format: its ends have the format's largest and least codes
    sizes = np.abs(found).reshape(*k.shape, -1)
    assert (sizes.max(-1) == about.max).all()
    assert (np.where(sizes > 0, sizes, np.inf).min(-1) == about.smallest).all()


@each_recipe
def test_values_are_the_roots_of_codes(recipe):
    q = breccia.cast(numbers(recipe), recipe)
    about, code = formats.finfo(recipe.element), decoded(q)
    k, scale = (np.repeat(np.asarray(p, np.float64), recipe.group_size, 1) for p in (q.exponents, q.scale))
    wanted = np.sign(code) * scale * about.max * (np.abs(code) / about.max) ** (1 / k)
    assert (np.abs(breccia.dequantize(q) - wanted) <= (1e-6 + 3e-6 / k) * np.abs(wanted)).all()
    assert_dtypes_agree(q, "float16", "float64")


def assert_dtypes_agree(q, *dtypes):
    plain = breccia.dequantize(q).astype(np.float64)
    for dtype in dtypes:
        assert np.allclose(np.asarray(breccia.dequantize(q, dtype), np.float64), plain, rtol=2.0**-8, atol=2.0**-24)


@each_recipe
def test_values_in_bfloat16(recipe):
    pytest.importorskip("ml_dtypes")
    assert_dtypes_agree(breccia.cast(numbers(recipe), recipe), "bfloat16")


@each_recipe
def test_groups_that_have_no_range(recipe):
    x = odd(recipe)
    q = breccia.cast(x, recipe)
    assert q.exponents[0, :5].tolist() == [1, 256, 1, 1, 1] and (q.exponents[0, 5:] < 256).all()
    found = np.split(breccia.dequantize(q)[0], 8)
    assert not found[0].any() and np.allclose(found[1], -3, rtol=1e-6)
    like = {"element": recipe.element, "group": recipe.group_size}
    plain = (
        breccia.INT8Scaling(group_size=like["group"])
        if like["element"] == "int8"
        else breccia.Float8BlockScaling(recipe.fp8_format, block_k=like["group"])
    )
    wanted = np.split(breccia.dequantize(breccia.cast(x, plain))[0], 8)
    for group in (2, 3, 4):
        assert np.array_equal(found[group], wanted[group], equal_nan=True)
    assert not np.isfinite(found[3][0]) and (found[5][:3] != 0).all()  # what is small is not zero


@each_recipe
def test_every_backend_and_the_whole_array_kernels_have_the_same_bytes(recipe):
    before = breccia.cpu_info()["backend"]
    try:
        for x in (numbers(recipe, 7), odd(recipe)):
            made = {}
            for backend in breccia.cpu_info()["supported"]:
                breccia.set_backend(backend)
                q = breccia.cast(x, recipe)
                made[backend] = (q.data, q.scale, q.exponents, breccia.dequantize(q))
            with np.errstate(all="ignore"):
                parts = whole_array.cast(NumPy(), x, recipe, CastOptions())
                values = whole_array.dequantize(NumPy(), q, lambda a: a.view(np.uint8))
            nan = np.isnan(values)
            assert np.array_equal(nan, np.isnan(made["portable"][3]))
            made["whole arrays"] = (*parts[:3], np.where(nan, made["portable"][3], values))
            for name, found in made.items():
                for part, wanted in zip(found, made["portable"], strict=True):
                    assert same_bytes(part, wanted), (name, recipe)
    finally:
        breccia.set_backend(before)


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=lambda r: f"{r.element}-{r.group_size}")
def test_the_second_moment_loses_at_most_half_of_what_a_plain_cast_loses(recipe):
    """Of running averages of squares, as an optimizer has them: neighbours differ by few powers of two."""
    draw = np.random.default_rng(4)
    rows = np.exp2(draw.normal(0, 1, (64, 4 * recipe.group_size)) - 30).astype(np.float32)
    plain = breccia.Float8BlockScaling(recipe.fp8_format, block_k=recipe.group_size)
    errors = [
        np.sqrt(np.mean(((breccia.dequantize(breccia.cast(rows, r)) - rows) / rows) ** 2)) for r in (recipe, plain)
    ]
    print(recipe, errors)
    assert errors[0] <= errors[1] / 2


@each_recipe
def test_parts_travel_with_the_value(recipe, tmp_path):
    x = numbers(recipe)
    q, size = breccia.cast(x, recipe), recipe.group_size
    values = breccia.dequantize(q)
    assert pickle.loads(pickle.dumps(q)) == q and q != breccia.cast(2 * x, recipe)
    breccia.save({"v": q}, tmp_path / "v.safetensors")
    again = breccia.load(tmp_path / "v.safetensors")["v"]
    assert again == q and again.recipe == recipe and same_bytes(again.exponents, q.exponents)
    assert np.array_equal(breccia.dequantize(q[2:4, size : 3 * size]), values[2:4, size : 3 * size])
    assert np.array_equal(breccia.dequantize(q.T), values.T)
    assert np.array_equal(breccia.dequantize(q.reshape(3, 2, -1)), values.reshape(3, 2, -1))
    assert breccia.concatenate([q[:2], q[2:]]) == q
    assert q.nbytes == x.size + 6 * q.scale.size
    assert "ExpandedScaling" in repr(q) and "ExpandedScaling" in q._repr_html_()
    assert breccia.recipes.from_dict(recipe.to_dict()) == recipe
    assert breccia.cast(x[:, :size], breccia.MXFP8BlockScaling() if size % 32 == 0 else recipe).exponents is None or (
        size % 32
    )


@each_recipe
def test_a_product_is_that_of_the_values(recipe):
    w = breccia.cast(numbers(recipe, 33, 3), recipe)
    x = np.random.default_rng(1).standard_normal((5, w.shape[1])).astype(np.float32)
    values = breccia.dequantize(w).astype(np.float64)
    for found in (breccia.linear(x, w), breccia.matmul(x, w.T), x @ breccia.prepare(w).T):
        assert np.allclose(found, x @ values.T, rtol=1e-4, atol=1e-9)
    other = breccia.cast(x, breccia.Float8BlockScaling(block_k=recipe.group_size))
    assert np.allclose(breccia.linear(other, w), breccia.dequantize(other) @ values.T, rtol=1e-4, atol=1e-8)


@each_recipe
def test_requantize_is_a_cast_of_the_values(recipe):
    q = breccia.cast(numbers(recipe, 4, 96), recipe)
    values = breccia.dequantize(q)
    for target in (breccia.NVFP4BlockScaling(), breccia.INT8Scaling(), breccia.Float8BlockScaling(block_k=32)):
        assert breccia.requantize(q, target) == breccia.cast(values, target), target
    assert breccia.requantize(q, recipe) == q
    finer = dataclasses.replace(recipe, group_size=recipe.group_size // 2)
    assert breccia.requantize(q, finer) == breccia.cast(values, finer)


@each_recipe
def test_requantize_keeps_what_a_scale_can_hold(recipe):
    """With exponents of 1; whole-array kernels do the same."""
    source = breccia.cast(numbers(recipe, 4, 4), breccia.INT4Scaling(recipe.group_size))
    made = breccia.requantize(source, recipe)
    assert np.array_equal(breccia.dequantize(made), breccia.dequantize(source))
    assert (made.exponents == 1).all()
    with np.errstate(all="ignore"):
        parts = whole_array.requantize(NumPy(), source, recipe, lambda a: np.asarray(a).view(np.uint8))
    for part, wanted in zip(parts[:3], (made.data, made.scale, made.exponents), strict=True):
        assert same_bytes(part, wanted)


@each_recipe
def test_stochastic_rounding_is_right_on_average(recipe):
    x = numbers(recipe, 1, 1)
    total = np.zeros(x.shape)
    for seed in range(400):
        total += decoded(breccia.cast(x, recipe, rounding="stochastic", seed=seed))
    _, _, wanted = published(x, recipe)
    step = np.maximum(np.abs(wanted) * 2.0**-2, 1e-3 if recipe.element != "int8" else 1.0)
    assert (np.abs(total / 400 - wanted) < 0.25 * step).all()


@pytest.mark.parametrize("name", ["torch", "jax", "mlx"])
def test_frameworks_have_the_bytes_of_numpy(name):
    pytest.importorskip({"mlx": "mlx.core"}.get(name, name))
    for recipe in RECIPES[:1] + RECIPES[3:4]:
        x = numbers(recipe)
        wanted = breccia.cast(x, recipe)
        plain = breccia.cast(x, breccia.MXFP8BlockScaling()).to(name)
        here = breccia.cast(breccia.dequantize(plain), recipe)
        there = breccia.cast(breccia.dequantize(plain.to("numpy")), recipe)
        for part in ("data", "scale", "zero_point"):
            assert same_bytes(getattr(here.to("numpy"), part), getattr(there, part)), part
        moved = wanted.to(name)
        assert same_bytes(moved.to("numpy").exponents, wanted.exponents)
        assert same_bytes(np.asarray(moved.dequantize()), breccia.dequantize(wanted))


def test_traced_casts_have_the_same_bytes():
    jax = pytest.importorskip("jax")
    recipe = RECIPES[0]
    x = numbers(recipe)
    wanted = breccia.cast(x, recipe)
    made = jax.jit(lambda x: breccia.cast(x, recipe))(x)
    for part in ("data", "scale", "zero_point"):
        assert same_bytes(getattr(made.to("numpy"), part), getattr(wanted, part)), part
    assert same_bytes(jax.jit(breccia.dequantize)(made), breccia.dequantize(wanted))


def test_torch_compiles_them():
    torch = pytest.importorskip("torch")
    recipe = RECIPES[0]
    x = torch.from_numpy(numbers(recipe))
    wanted = breccia.cast(x, recipe)  # the first verb of torch's arrays registers the operators
    made = torch.ops.breccia.cast(x, recipe._key)
    found = [part.view(torch.uint8) for part in made]
    assert len(found) == 3
    for part, other in zip(found, (wanted.data, wanted.scale, wanted.zero_point), strict=True):
        assert torch.equal(part, other.view(torch.uint8))
    fake = torch.ops.breccia.cast(x.to("meta"), recipe._key)
    assert [(p.shape, p.dtype) for p in fake] == [(p.shape, p.dtype) for p in made]


def test_what_is_refused():
    x = np.ones((4, 128), np.float32)
    recipe = breccia.Float8ExpandedScaling()
    q = breccia.cast(x, recipe)
    for message, call in (
        ("importance needs a recipe without exponents", lambda: breccia.cast(x, recipe, importance=np.ones(128))),
        ("square_blocks needs a recipe without exponents", lambda: breccia.cast(x, recipe, square_blocks=True)),
        ("recipe must have two levels, or one symmetric scale", lambda: breccia.cast(x, recipe, amax=1.0)),
        ("divisible by 128", lambda: breccia.cast(x[:, :100], recipe)),
        ("group_size must be > 0, got 0", lambda: breccia.Float8ExpandedScaling(group_size=0)),
        ("zero_point is required", lambda: breccia.from_buffer(q.data, q.scale, recipe, recipe.layout)),
        (
            r"zero_point.shape \(\(4, 2\)\) must match scale.shape \(\(4, 1\)\)",
            lambda: breccia.from_buffer(q.data, q.scale, recipe, recipe.layout, np.ones((4, 2), np.float16)),
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="zero_point must be a float16 array of exponents"):
        breccia.from_buffer(q.data, q.scale, recipe, recipe.layout, np.ones((4, 1), np.uint8))


@each_recipe
def test_subnormal_scales_put_values_off_by_their_own_rounding(recipe):
    largest = 127.0 if recipe.element == "int8" else float(breccia.formats.finfo(recipe.element).max)
    x = np.random.default_rng(0).uniform(0.5, 1, (40, recipe.group_size)) * np.geomspace(1e-44, 1e-35, 40)[:, None]
    x = x.astype(np.float32)
    errors = np.abs(breccia.dequantize(breccia.cast(x, recipe)).astype(np.float64) - x)
    far = breccia.dequantize(breccia.cast(x * 2.0**60, recipe)).astype(np.float64) * 2.0**-60
    near = np.abs(far - x)  # of the same numbers far from the end
    assert (errors <= near + 1e-5 * x + largest * 2.0**-149 + 2.0**-149).all()


@each_recipe
def test_the_largest_float32_itself_comes_back(recipe):
    """INT8's scale of it is rounded up: 127 times as much is beyond float32."""
    x = np.ones((3, recipe.group_size), np.float32)
    x[:, 3] = 0
    x[0, 0] = np.finfo(np.float32).max
    x[1, 0] = np.nextafter(x[0, 0], np.float32(0))
    x[2, :2] = -x[0, 0], -1
    q = breccia.cast(x, recipe)
    # a scale that no cast makes has its own largest value
    beyond = breccia.from_buffer(q.data, np.nextafter(q.scale, np.float32(np.inf)), recipe, recipe.layout, q.exponents)
    before = breccia.cpu_info()["backend"]
    try:
        for backend in (*breccia.cpu_info()["supported"], "whole arrays"):
            if backend != "whole arrays":
                breccia.set_backend(backend)
            with np.errstate(all="ignore"):
                values, other = (
                    whole_array.dequantize(NumPy(), of, lambda a: np.asarray(a).view(np.uint8))
                    if backend == "whole arrays"
                    else breccia.dequantize(of)
                    for of in (q, beyond)
                )
            assert np.isfinite(values).all() and not values[:, 3].any(), backend
            np.testing.assert_allclose(values[:, 0], x[:, 0], rtol=1e-6)
            assert (np.sign(values) == np.sign(x)).all()
            assert np.isinf(other[0, 0]) and np.isinf(other[2, 0])
    finally:
        breccia.set_backend(before)


def test_the_largest_float32_is_infinite_where_the_exponent_is_1():
    """Of a group as wide as INT8 itself, which has the values of INT8Scaling, as docs/recipes.md says."""
    x = np.full((1, 16), np.finfo(np.float32).max / np.float32(127), np.float32)
    x[0, 0] = np.finfo(np.float32).max
    q = breccia.cast(x, breccia.INT8ExpandedScaling(group_size=16))
    assert q.exponents.item() == 1
    with np.errstate(all="ignore"):
        assert np.isinf(breccia.dequantize(q)[0, 0])
        assert np.isinf(breccia.dequantize(breccia.cast(x, "int8"))[0, 0])


@pytest.mark.parametrize("exponent", [0.0, -1.0, np.inf, np.nan])
def test_a_group_whose_exponent_is_no_number_above_zero_has_no_values(exponent):
    recipe = breccia.Float8ExpandedScaling()
    q = breccia.cast(numbers(recipe), recipe)
    exponents = q.exponents.copy()
    exponents[1, 1] = exponent
    bad = breccia.from_buffer(q.data, q.scale, recipe, recipe.layout, exponents)
    with np.errstate(all="ignore"):
        for found in (
            breccia.dequantize(bad),
            whole_array.dequantize(NumPy(), bad, lambda a: a.view(np.uint8)),
        ):
            assert np.isnan(found[1, 128:256]).all() and np.isnan(found).sum() == 128


def test_codes_that_are_not_finite_stay_so():
    recipe = breccia.Float8ExpandedScaling("E5M2")
    q = breccia.cast(numbers(recipe), recipe)
    data = q.data.copy()
    data[0, 0], data[0, 1], data[0, 2] = 0x7C, 0xFC, 0x7E
    bad = breccia.from_buffer(data, q.scale, recipe, recipe.layout, q.exponents)
    with np.errstate(all="ignore"):
        for found in (breccia.dequantize(bad), whole_array.dequantize(NumPy(), bad, lambda a: a.view(np.uint8))):
            assert found[0, 0] == np.inf and found[0, 1] == -np.inf and np.isnan(found[0, 2])
            assert np.isfinite(found[1:]).all()


@pytest.mark.parametrize("exponent", [2.0**-20, 0.5, 2.0])
def test_scales_and_codes_that_no_cast_makes(exponent):
    """Negative scales turn every sign; INT8's -128 is beyond the largest value."""
    recipe = breccia.INT8ExpandedScaling(2)
    codes, scale = np.array([[-128, 127], [-128, 127]], np.int8), np.array([[1.0], [-1.0]], np.float32)
    made = breccia.ScaledTensor(codes, scale, recipe, recipe.layout, zero_point=np.full((2, 1), exponent, np.float16))
    with np.errstate(over="ignore"):
        size = (np.abs(codes.astype(np.float64)) / 127) ** (1 / exponent)
        wanted = (127 * np.sign(codes) * scale * size).astype(np.float32)
        for found in (breccia.dequantize(made), whole_array.dequantize(NumPy(), made, lambda a: a.view(np.uint8))):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
