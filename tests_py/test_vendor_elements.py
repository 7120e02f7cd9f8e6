# SPDX-License-Identifier: Apache-2.0
"""Recipes of the FP8 elements that one vendor's hardware has: bytes and values against ml_dtypes, torch and JAX."""

import pickle

import breccia
import numpy as np
import oracles
import pytest
from breccia import bridges, formats
from breccia.bridges import contract
from breccia.recipes import from_dict

ml_dtypes = pytest.importorskip("ml_dtypes")

ELEMENTS = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz")
FP8 = ("E4M3", "E5M2", *ELEMENTS)
of_elements = pytest.mark.parametrize("element", ELEMENTS)

RECIPES = {
    "tensor": breccia.Float8CurrentScaling,
    "row": lambda fmt: breccia.Float8CurrentScaling(fmt, granularity="row"),
    "delayed": breccia.DelayedScaling,
    "blocks": lambda fmt: breccia.Float8BlockScaling(fmt, block_k=64),
    "tiles": lambda fmt: breccia.Float8BlockScaling(fmt, block_k=64, block_m=32),
}
BLOCKS = {"tensor": (96, 256), "row": (1, 256), "delayed": (96, 256), "blocks": (1, 64), "tiles": (32, 64)}
of_recipes = pytest.mark.parametrize("kind", RECIPES)


def dtype_of(recipe):
    return np.dtype(getattr(ml_dtypes, recipe.element))


def values(seed=0):
    """Rows of very different size, zeros of both signs, and what becomes zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((96, 256)) * np.exp(rng.uniform(-8, 2, (96, 1)))
    x[rng.random(x.shape) < 0.05] = 0.0
    x[rng.random(x.shape) < 0.05] = -0.0
    return x.astype(np.float32)


@of_elements
@of_recipes
def test_a_cast_is_that_of_ml_dtypes(kind, element):
    x, recipe, (rows, cols) = values(), RECIPES[kind](element), BLOCKS[kind]
    blocks = x.reshape(96 // rows, rows, 256 // cols, cols)
    largest = np.float32(ml_dtypes.finfo(dtype_of(recipe)).max)
    scale = np.abs(blocks).max((1, 3), keepdims=True) / largest
    codes = np.clip(blocks / scale, -largest, largest).astype(dtype_of(recipe))
    made = breccia.cast(x, recipe)
    np.testing.assert_array_equal(made.scale.reshape(-1), scale.reshape(-1))
    np.testing.assert_array_equal(made.data, codes.reshape(x.shape).view(np.uint8))
    oracles.assert_same_bits(breccia.dequantize(made), (codes.astype(np.float32) * scale).reshape(x.shape))


@of_elements
def test_every_code_is_what_ml_dtypes_has_it(element):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    made = breccia.ScaledTensor(codes, np.float32(0.5), breccia.Float8CurrentScaling(element), breccia.PerTensor())
    expected = codes.view(getattr(ml_dtypes, element)).astype(np.float32) * np.float32(0.5)
    oracles.assert_same_bits(breccia.dequantize(made), expected)
    typed = codes.view(getattr(ml_dtypes, element))
    assert breccia.ScaledTensor(typed, made.scale, made.recipe, made.layout) == made


@of_elements
def test_nan_stays_and_infinity_saturates(element):
    x = np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32)
    made = breccia.dequantize(breccia.cast(x, breccia.Float8CurrentScaling(element)))
    assert np.isnan(made[0, 0])
    np.testing.assert_array_equal(made[0, 1:], [1.0, -1.0, 1.0])


@of_elements
@of_recipes
def test_products(kind, element):
    x, w = values(1), values(2)
    a, b = breccia.cast(x, "fp8-row"), breccia.cast(w, RECIPES[kind](element))
    exact = breccia.dequantize(a).astype(np.float64) @ breccia.dequantize(b).astype(np.float64).T
    size = np.abs(breccia.dequantize(a)).astype(np.float64) @ np.abs(breccia.dequantize(b)).astype(np.float64).T
    for made in (breccia.linear(a, b), breccia.matmul(a, b.T)):
        assert np.abs(made - exact).max() <= (256 + 32 + 8) * 2.0**-24 * size.max()
    floats = breccia.linear(x, b)
    np.testing.assert_allclose(floats, x.astype(np.float64) @ breccia.dequantize(b).astype(np.float64).T, atol=1e-2)


@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize("source", FP8)
def test_requantize_keeps_what_a_scale_allows(source, target):
    """What is a code of the other format times a power of two stays, under whatever scale; but for a zero's sign."""
    one, other = (formats.finfo(breccia.Float8CurrentScaling(fmt).element) for fmt in (source, target))
    magnitudes, codes_there = (formats.decode(np.arange(128, dtype=np.uint8), info.name) for info in (one, other))
    power = 2.0 ** np.ceil(np.log2(one.max / other.max))
    kept = magnitudes[np.isin(magnitudes / power, codes_there[np.isfinite(codes_there)])]
    assert len(kept) >= 32
    x = np.resize(np.concatenate([kept, -kept]), (4, 128)).astype(np.float32)
    codes = formats.encode(x, one.name)
    scaled = breccia.ScaledTensor(codes, np.float32(0.37), breccia.Float8CurrentScaling(source), breccia.PerTensor())
    made = breccia.requantize(scaled, breccia.Float8CurrentScaling(target))
    np.testing.assert_array_equal(breccia.dequantize(made), breccia.dequantize(scaled))


def test_e4m3_becomes_fnuz_by_its_codes_and_back():
    made = breccia.cast(values(3), breccia.Float8CurrentScaling())
    fnuz = breccia.requantize(made, breccia.Float8CurrentScaling("float8_e4m3fnuz"))
    assert fnuz.scale == 2 * made.scale
    np.testing.assert_array_equal(fnuz.data, np.where(made.data == 0x80, 0, made.data))
    codes, scale = bridges.to_fnuz(made)
    np.testing.assert_array_equal(fnuz.data, codes.view(np.uint8))
    assert scale == fnuz.scale
    np.testing.assert_array_equal(breccia.dequantize(breccia.requantize(fnuz, "fp8")), breccia.dequantize(made))


@of_elements
@of_recipes
def test_saved_loaded_pickled(kind, element, tmp_path):
    recipe = RECIPES[kind](element)
    made = breccia.cast(values(), recipe)
    breccia.save({"w": made}, tmp_path / "w.safetensors")
    assert breccia.load(tmp_path / "w.safetensors")["w"] == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert (
        pickle.loads(pickle.dumps(recipe)) == recipe == from_dict(recipe.to_dict()) == eval(repr(recipe), vars(breccia))
    )


@of_elements
def test_files_are_those_that_safetensors_reads(element, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    made = breccia.cast(values(), breccia.Float8CurrentScaling(element))
    breccia.save({"w": made}, tmp_path / "w.safetensors")
    with safetensors.safe_open(tmp_path / "w.safetensors", "pt") as file:
        stored = file.get_tensor("w.data")
    torch = pytest.importorskip("torch")
    assert stored.dtype == getattr(torch, element, torch.uint8)
    np.testing.assert_array_equal(stored.view(torch.uint8).numpy(), made.data)


@of_elements
@of_recipes
def test_in_torch(kind, element):
    torch = pytest.importorskip("torch")
    recipe, x = RECIPES[kind](element), values()
    here, there = breccia.cast(x, recipe), breccia.cast(torch.from_numpy(x), recipe)
    assert there.data.dtype == getattr(torch, element, torch.uint8)
    assert there.to("numpy") == here
    assert here.to("torch") == there
    np.testing.assert_array_equal(there.dequantize().numpy(), here.dequantize())
    if there.data.dtype != torch.uint8:
        scale = torch.broadcast_to(there.scale, (96, 1)) if kind in ("tensor", "row", "delayed") else None
        if scale is not None:
            assert torch.equal(there.dequantize(), there.data.float() * scale)


@of_elements
def test_by_a_factor_in_torch(element):
    torch = pytest.importorskip("torch")
    recipe, x = breccia.DelayedScaling(element), values()
    for options in ({}, {"rounding": "stochastic", "seed": 3}):
        here = breccia.cast(x, recipe, amax=np.abs(x).max(), **options)
        there = breccia.cast(torch.from_numpy(x), recipe, amax=torch.from_numpy(x).abs().max(), **options)
        assert there.to("numpy") == here


@of_elements
@of_recipes
def test_in_jax(kind, element):
    jax = pytest.importorskip("jax")
    recipe, x = RECIPES[kind](element), values()
    here = breccia.cast(x, recipe)
    for cast in (lambda a: breccia.cast(a, recipe), jax.jit(lambda a: breccia.cast(a, recipe))):
        there = cast(jax.numpy.asarray(x))
        assert there.data.dtype == dtype_of(recipe)
        assert there.to("numpy") == here
    back = jax.jit(lambda a: breccia.dequantize(breccia.cast(a, recipe)))(x)
    np.testing.assert_array_equal(back, breccia.dequantize(here))


@of_elements
@of_recipes
def test_no_format_of_others_takes_them_for_e4m3(kind, element):
    """Each would store the bits of other numbers."""
    recipe = RECIPES[kind](element)
    for name, bridge in bridges.registry().items():
        if bridge.vendors_elements:
            assert bridge.carries(recipe), name
            continue
        assert not bridge.carries(recipe), name
        if bridge.writes:
            with pytest.raises((ValueError, TypeError), match=r".+"):
                stored, _ = bridge.stored("w.weight", breccia.cast(values(), recipe), contract.Place())
                for part in stored.values():
                    part.make()


def test_what_is_no_element_is_told():
    with pytest.raises(ValueError, match=r"must be 'E4M3' or 'E5M2', or 'float8_e4m3fnuz', .* got 'E3M4'"):
        breccia.Float8CurrentScaling("E3M4")
    assert breccia.Float8CurrentScaling("FLOAT8_E3M4").fp8_format == "float8_e3m4"
    with pytest.raises(ValueError, match=r"^fp8_format must be 'E4M3' or 'E5M2', got 'float8_e3m4'"):
        breccia.MXFP8BlockScaling("float8_e3m4")
