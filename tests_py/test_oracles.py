# SPDX-License-Identifier: Apache-2.0
"""The same bytes as torchao and TransformerEngine, and the same numbers back.

Where breccia departs on purpose, the departure has its own test, here or in test_specials.py.
"""

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import cast, dequantize

ml_dtypes = pytest.importorskip("ml_dtypes")

SHAPE = (256, 384)
DATA = pytest.mark.parametrize("kind", cases.DATA)


def assert_equal_bytes(scaled, data, scale, what):
    oracles.assert_same_bits(np.asarray(scaled.scale), scale, f"{what} scale")
    oracles.assert_same_bits(np.asarray(scaled.data), data, f"{what} data")


def nonzero_blocks(x, rows, cols):
    """x with its all-zero blocks filled: torchao divides by zero there."""
    x = x.copy()
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)
    blocks[:, 0, :, 0][~blocks.any(axis=(1, 3))] = 0.5
    return x


# --- FP8 with float32 scales --------------------------------------------------------------------------------

GRAINS = {
    "tensor": breccia.Float8CurrentScaling,
    "row": lambda f: breccia.Float8CurrentScaling(f, granularity="row"),
    (1, 128): breccia.Float8BlockScaling,
    (128, 128): lambda f: breccia.Float8BlockScaling(f, block_m=128),
    (1, 32): lambda f: breccia.Float8BlockScaling(f, block_k=32),
    (64, 96): lambda f: breccia.Float8BlockScaling(f, block_k=96, block_m=64),
}


@DATA
@pytest.mark.parametrize("fp8", ["E4M3", "E5M2"])
@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_float8_equals_torchao(grain, fp8, kind):
    x = cases.heavy_tailed(kind, SHAPE)
    if not isinstance(grain, str):
        x = nonzero_blocks(x, *grain)
    data, scale, back = oracles.torchao_float8(x, grain, {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}[fp8])
    scaled = cast(x, GRAINS[grain](fp8))
    assert_equal_bytes(scaled, data, scale.reshape(scaled.scale.shape), "Float8Tensor")
    oracles.assert_same_bits(dequantize(scaled), back, "dequantize")


def test_delayed_scaling_of_one_tensor_is_current_scaling():
    x = cases.normal(SHAPE)
    delayed, current = cast(x, breccia.DelayedScaling()), cast(x, breccia.Float8CurrentScaling())
    assert_equal_bytes(delayed, current.data, current.scale, "DelayedScaling")


def test_margin_leaves_room():
    x = cases.normal(SHAPE)
    plain, roomy = cast(x, breccia.DelayedScaling()), cast(x, breccia.DelayedScaling(margin=3))
    assert roomy.scale == plain.scale * 8
    assert np.abs(oracles.table("float8_e4m3fn")[roomy.data]).max() == 448 / 8


# --- MX -----------------------------------------------------------------------------------------------------


def mx_recipe(name, rounding):
    kind, letters = name[5:6], name.split("_")[1][:4].upper()
    make = {"8": breccia.MXFP8BlockScaling, "6": breccia.MXFP6BlockScaling, "4": breccia.MXFP4BlockScaling}[kind]
    return make(letters, scale_rounding=rounding)


def off_the_edge(x, name):
    """x with the few blocks moved whose amax / max lies within 32 ulps above a power of two: torchao's eager
    RCEIL rounds those down (see test_mx_rceil_rounds_up_exactly)."""
    blocks = x.reshape(x.shape[0], -1, 32)
    ratio = np.abs(blocks).max(-1) / np.float32(oracles.max_finite(name))
    above = ratio.view(np.uint32) & 0x7FFFFF
    edge = (above > 0) & (above <= 32)
    assert edge.mean() < 0.01
    return np.where(edge[..., None], blocks * np.float32(1.01), blocks).reshape(x.shape)


@DATA
@pytest.mark.parametrize("rounding", cases.ROUNDINGS)
@pytest.mark.parametrize("name", oracles.MX_ELEMENTS)
def test_mx_equals_torchao(name, rounding, kind):
    x = off_the_edge(cases.heavy_tailed(kind, SHAPE), name)
    data, scale, back = oracles.torchao_mx(x, name, rounding)
    scaled = cast(x, mx_recipe(name, rounding))
    assert_equal_bytes(scaled, data, scale, "MXTensor")
    oracles.assert_same_bits(dequantize(scaled), back, "dequantize")


@pytest.mark.parametrize("rounding", cases.ROUNDINGS)
@pytest.mark.parametrize("name", oracles.MX_ELEMENTS)
def test_mx_scale_at_every_exponent(name, rounding):
    """One block per float32 exponent, subnormals included, and per mantissa at and below the places where a
    rule turns (just above them torchao's RCEIL errs: next test)."""
    mantissas = np.array(
        [
            0,
            1 << 22,
            (1 << 22) + (1 << 21),
            (1 << 23) - 1,
            0x600000,
            0x5FFFFF,
            0x700000,
            0x6FFFFF,
            0x780000,
            0x77FFFF,
        ]
    )
    amax = (np.arange(255)[:, None] << 23 | mantissas).astype(np.uint32).view(np.float32).reshape(-1, 1)
    x = amax * np.linspace(-1, 1, 32, dtype=np.float32)
    data, scale, back = oracles.torchao_mx(x, name, rounding)
    scaled = cast(x, mx_recipe(name, rounding))
    assert_equal_bytes(scaled, data, scale, "MXTensor")
    oracles.assert_same_bits(dequantize(scaled), back, "dequantize")


@pytest.mark.parametrize("name", oracles.MX_ELEMENTS)
@pytest.mark.parametrize("exponent", [-100, -20, 0, 20, 60])
def test_mx_rceil_rounds_up_exactly(name, exponent):
    """Departure: torchao's eager RCEIL takes ceil(log2(.)) in float32, which rounds down a ratio that is a
    few ulps above a power of two. breccia reads the exponent, as the hardware's cvt.rp does, so that nothing
    saturates."""
    exact = np.float32(np.ldexp(oracles.max_finite(name), exponent))
    x = np.zeros((2, 32), np.float32)
    x[0, 0], x[1, 0] = exact, np.nextafter(exact, np.float32(np.inf))
    assert cast(x, mx_recipe(name, "rceil")).scale.tolist() == [[127 + exponent], [128 + exponent]]


# --- NVFP4 --------------------------------------------------------------------------------------------------


@DATA
def test_nvfp4_equals_transformer_engine(kind):
    x = cases.heavy_tailed(kind, SHAPE)
    data, scale = oracles.te_nvfp4(x)
    scaled = cast(x, breccia.NVFP4BlockScaling())
    assert_equal_bytes(scaled, data, scale, "NVFP4QuantizerRef")


@DATA
def test_nvfp4_torchao_rule_equals_torchao(kind):
    x = cases.heavy_tailed(kind, SHAPE)
    data, scale, back, level = oracles.torchao_nvfp4(x, two_level=True)
    scaled = cast(x, breccia.NVFP4BlockScaling(scale_rule="torchao"))
    assert_equal_bytes(scaled, data, scale, "NVFP4Tensor")
    assert scaled.global_scale.dtype == np.float32
    assert scaled.global_scale == level
    oracles.assert_same_bits(dequantize(scaled), back, "dequantize")


@pytest.mark.parametrize("amax", [7.8e-36, 1e-37])
def test_nvfp4_below_the_range_of_torchao(amax):
    """Where 2688 / amax overflows, torchao multiplies by an infinite 1 / g: zeros become -1.5 times their scale. Here
    they stay zero, and the largest keep their size."""
    x = (np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(amax)).reshape(1, 64)
    x[0, 3] = 0
    back = dequantize(cast(x, breccia.NVFP4BlockScaling(scale_rule="torchao")))
    assert back[0, 3] == 0
    assert back[0, -1] == pytest.approx(amax, rel=0.04)
    *_, theirs, _ = oracles.torchao_nvfp4(x, two_level=True)
    assert theirs[0, 3] < 0
    edge = (np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(8e-36)).reshape(1, 64)
    data, scale, _, level = oracles.torchao_nvfp4(edge, two_level=True)
    scaled = cast(edge, breccia.NVFP4BlockScaling(scale_rule="torchao"))
    assert_equal_bytes(scaled, data, scale, "NVFP4Tensor")
    assert scaled.global_scale == level


@DATA
def test_nvfp4_one_level_equals_torchao(kind):
    x = cases.heavy_tailed(kind, SHAPE)
    data, scale, back, _ = oracles.torchao_nvfp4(x, two_level=False)
    scaled = cast(x, breccia.NVFP4BlockScaling(two_level=False, scale_rule="torchao"))
    assert scaled.global_scale is None
    assert_equal_bytes(scaled, data, scale, "NVFP4Tensor")
    oracles.assert_same_bits(dequantize(scaled), back, "dequantize")


@pytest.mark.parametrize("kind", ["normal", "student", "bf16"])
def test_nvfp4_rules_agree_on_ordinary_data(kind):
    """They round a scale that lies on a tie differently, which takes data on a coarse grid ("ties" above)."""
    x = cases.heavy_tailed(kind, SHAPE)
    te, torchao = (
        cast(x, breccia.NVFP4BlockScaling()),
        cast(x, breccia.NVFP4BlockScaling(scale_rule="torchao")),
    )
    assert_equal_bytes(te, torchao.data, torchao.scale, "scale_rule")


def test_nvfp4_keeps_blocks_that_torchao_clamps():
    """Where the rules part: a block below 2^-6 of the largest keeps its E4M3 subnormal scale, and so its
    values."""
    x = cases.normal((4, 64))
    x[1] *= 2e-5
    scaled, clamped = (
        cast(x, breccia.NVFP4BlockScaling()),
        cast(x, breccia.NVFP4BlockScaling(scale_rule="torchao")),
    )
    assert (np.asarray(clamped.scale)[1] == 0x08).all()
    assert (np.asarray(scaled.scale)[1] < 0x08).all()
    error = [np.linalg.norm(dequantize(s)[1] - x[1]) for s in (scaled, clamped)]
    assert error[0] < error[1]


def squared_error(x, data, scale, level):
    pairs = oracles.table("float4_e2m1fn")[np.stack([data & 15, data >> 4], -1).reshape(x.shape)]
    values = pairs.astype(np.float64) * np.repeat(
        level.astype(np.float64) * oracles.table("float8_e4m3fn")[scale], 16, axis=-1
    )
    return ((values - x) ** 2).reshape(*scale.shape, 16).sum(-1)


@pytest.mark.parametrize("kind", ["normal", "student", "lognormal", "sparse", "ties"])
def test_nvfp4_mse_is_at_least_as_good_as_four_over_six(kind):
    x = cases.heavy_tailed(kind, SHAPE)
    data, scale = oracles.te_nvfp4(x, four_over_six=True)
    scaled = cast(x, breccia.NVFP4BlockScaling(scale_search="mse"))
    ours = squared_error(x, scaled.data, scaled.scale, scaled.global_scale)
    theirs = squared_error(x, data, scale, scaled.global_scale)
    assert (ours <= theirs * (1 + 1e-5)).all()
    if kind == "normal":
        assert ours.sum() < 0.999 * theirs.sum()


# --- integers -----------------------------------------------------------------------------------------------

STORAGE = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def stored(scale, dtype):
    """A scale as it is stored: finite, never zero."""
    info = ml_dtypes.finfo(STORAGE[dtype])
    return np.clip(scale, np.float32(info.smallest_subnormal), np.float32(info.max)).astype(STORAGE[dtype])


@DATA
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("width", "signed"), [(4, True), (4, False), (8, True)])
def test_symmetric_integers(width, signed, dtype, kind):
    """scale = amax / largest code, rounded to its storage type first; codes = x / that scale, half to
    even."""
    x = cases.heavy_tailed(kind, SHAPE)
    group = 128 if width == 4 else 96
    if width == 4:
        recipe = breccia.INT4Scaling(group_size=group, signed=signed, scale_dtype=dtype)
    else:
        recipe = breccia.INT8Scaling(group_size=group, scale_dtype=dtype)
    lowest, highest = oracles.INTEGERS[oracles.element_format(recipe)]
    blocks = x.reshape(SHAPE[0], -1, group)
    amax = np.abs(blocks).max(-1)
    scale = np.where(amax == 0, 1, stored(amax / np.float32(highest), dtype)).astype(STORAGE[dtype])
    codes = np.clip(np.rint(blocks / scale.astype(np.float32)[..., None]), lowest, highest)
    scaled = cast(x, recipe)
    oracles.assert_same_bits(np.asarray(scaled.scale), scale, "scale")
    np.testing.assert_array_equal(
        oracles.table(oracles.element_format(recipe))[oracles.codes_of(scaled)], codes.reshape(SHAPE)
    )


@DATA
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("width", [4, 8])
def test_asymmetric_integers(width, dtype, kind):
    """The range, widened to hold zero, is spread over all codes; the zero point is the code of zero, so zero
    stays exact."""
    x = cases.heavy_tailed(kind, SHAPE)
    if kind != "ties":
        x += np.abs(x).mean(-1, keepdims=True)
    group = 128 if width == 4 else 96
    if width == 4:
        recipe = breccia.INT4Scaling(group_size=group, signed=False, symmetric=False, scale_dtype=dtype)
    else:
        recipe = breccia.INT8Scaling(group_size=group, symmetric=False, scale_dtype=dtype)
    lowest, highest = oracles.INTEGERS[oracles.element_format(recipe)]
    blocks = x.reshape(SHAPE[0], -1, group)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    levels = np.float32(highest - lowest)
    scale = np.where(high == low, 1, stored((high - low) / levels, dtype)).astype(STORAGE[dtype])
    step = scale.astype(np.float32)
    zero = np.rint(np.clip(lowest - low / step, lowest, highest))
    codes = np.clip(np.rint(blocks / step[..., None]) + zero[..., None], lowest, highest)
    scaled = cast(x, recipe)
    oracles.assert_same_bits(np.asarray(scaled.scale), scale, "scale")
    np.testing.assert_array_equal(np.asarray(scaled.zero_point).astype(np.float32), zero)
    np.testing.assert_array_equal(
        oracles.table(oracles.element_format(recipe))[oracles.codes_of(scaled)], codes.reshape(SHAPE)
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_beyond_the_range_of_a_half_scale(dtype):
    """A scale that its type cannot hold is the nearest one it can: values saturate or vanish, none turns into
    NaN."""
    x = np.array([[3e9], [3e-9]], np.float32) * cases.normal((2, 128))
    back = dequantize(cast(x, breccia.INT4Scaling(scale_dtype=dtype)))
    assert np.isfinite(back).all()
    assert (back * x >= 0).all()
    assert (np.abs(back[1]) <= 1e-7).all()


# --- dequantize ---------------------------------------------------------------------------------------------


@cases.ALL
@pytest.mark.parametrize("kind", ["normal", "lognormal", "sparse"])
def test_dequantize_is_codes_times_scales(recipe, kind):
    rows, cols = cases.shape_for(recipe)
    x = cases.heavy_tailed(kind, (rows, max(cols, 192) if not cases.is_block(recipe) else cols))
    scaled = cast(x, recipe)
    oracles.assert_same_bits(dequantize(scaled), oracles.dequantized(scaled), "dequantize")
