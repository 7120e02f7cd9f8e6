# SPDX-License-Identifier: Apache-2.0
"""Arrays on their way in and out: types, strides, byte order, `out`."""

import re

import breccia
import cases
import hypothesis
import hypothesis.strategies as st
import numpy as np
import oracles
import pytest
from breccia import PerTensor, cast, dequantize, matmul
from test_scaled_tensor import assert_same_value

ml_dtypes = pytest.importorskip("ml_dtypes")


@pytest.fixture(params=cases.RECIPES.values(), ids=cases.RECIPES.keys())
def scaled(request):
    return cast(cases.normal(cases.shape_for(request.param)), request.param)


# --- arrays in ----------------------------------------------------------------------------------------------


@cases.ALL
@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.dtype(">f4"), np.dtype(">f8")], ids=str
)
def test_every_float_type_is_cast_through_float32(recipe, dtype):
    x = cases.normal(cases.shape_for(recipe)).astype(dtype)
    scaled, expected = cast(x, recipe), cast(x.astype(np.float32), recipe)
    assert_same_value(scaled, expected)


@st.composite
def odd_views(draw, recipe):
    """An array of any strides whose logical shape suits the recipe."""
    width = cases.block_width(recipe) if cases.is_block(recipe) else draw(st.integers(1, 20))
    batch = draw(st.lists(st.integers(1, 2), max_size=2))
    shape = (*batch, draw(st.integers(1, 5)), width * draw(st.integers(1, 2)))
    steps = [draw(st.sampled_from([1, 2, -1, -2])) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    base = cases.normal([shape[i] * abs(steps[i]) for i in order], seed=draw(st.integers(0, 9)))
    view = base.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    assert view.shape == shape
    if draw(st.booleans()):
        view = np.broadcast_to(view[..., :1, :], view.shape)
    return view


@cases.ALL
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=st.data())
def test_strides_do_not_matter(recipe, data):
    view = data.draw(odd_views(recipe))
    scaled, expected = cast(view, recipe), cast(np.ascontiguousarray(view), recipe)
    assert_same_value(scaled, expected)
    oracles.assert_same_bits(dequantize(scaled), oracles.dequantized(expected))


@cases.ALL
def test_leading_axes_are_independent_matrices(recipe):
    rows, cols = cases.shape_for(recipe)
    x = cases.normal((2, 3, rows, cols))
    scaled = cast(x, recipe)
    assert scaled.shape == x.shape
    if isinstance(scaled.layout, PerTensor) or scaled.global_scale is not None:
        assert dequantize(scaled).shape == x.shape
        return
    one = cast(x[1, 2], recipe)
    np.testing.assert_array_equal(np.asarray(scaled.data)[1, 2], one.data)
    oracles.assert_same_bits(np.asarray(scaled.scale)[1, 2], np.asarray(one.scale))


def test_input_is_not_changed(scaled):
    x = cases.normal(cases.shape_for(scaled.recipe))
    before = x.copy()
    x.flags.writeable = False
    assert_same_value(cast(x, scaled.recipe), scaled)
    np.testing.assert_array_equal(x, before)


# --- arrays out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.float32], ids=lambda t: np.dtype(t).name
)
def test_dequantize_rounds_once_from_float32(scaled, dtype):
    expected = dequantize(scaled).astype(dtype)
    for spelling in (dtype, np.dtype(dtype), np.dtype(dtype).name):
        oracles.assert_same_bits(dequantize(scaled, out_dtype=spelling), expected)


def test_out(scaled):
    expected = dequantize(scaled)
    for out in (
        np.empty(scaled.shape, np.float32),
        np.empty(scaled.shape[::-1], np.float32).T,
        np.empty((scaled.shape[0] * 2, scaled.shape[1] * 3), np.float32)[::-2, ::3],
        np.empty(scaled.shape, np.float64),
        np.empty(scaled.shape, np.float16),
        np.empty(scaled.shape, ml_dtypes.bfloat16),
    ):
        out[...] = 7
        assert dequantize(scaled, out=out) is out
        oracles.assert_same_bits(out, expected.astype(out.dtype))


def test_out_leaves_the_gaps_alone(scaled):
    frame = np.full((scaled.shape[0], scaled.shape[1] * 2), 7, np.float32)
    dequantize(scaled, out=frame[:, ::2])
    assert (frame[:, 1::2] == 7).all()


def test_dequantize_to_numpy_scalars_of_one_row():
    x = cases.normal(64)
    scaled = cast(x, breccia.Float8CurrentScaling())
    assert scaled.shape == (64,)
    assert scaled.T.shape == (64,)
    oracles.assert_same_bits(dequantize(scaled), oracles.dequantized(scaled))


def test_reference_kernels_are_the_portable_backend(scaled):
    from breccia.kernels import reference

    x = cases.normal(cases.shape_for(scaled.recipe))
    assert_same_value(reference.cast(x, scaled.recipe), scaled)
    oracles.assert_same_bits(reference.dequantize(scaled), dequantize(scaled))
    assert_same_value(
        reference.requantize(scaled, breccia.Float8CurrentScaling()),
        breccia.requantize(scaled, breccia.Float8CurrentScaling()),
    )
    np.testing.assert_allclose(reference.matmul(x, scaled.T), matmul(x, scaled.T), rtol=1e-4, atol=1e-4)


def test_the_reference_takes_no_tensor_from_elsewhere():
    torch = pytest.importorskip("torch")
    from breccia.kernels import reference

    x = torch.empty((2, 32), device="meta")
    with pytest.raises(TypeError, match=r"^x must be on a CPU, where the reference runs, got one on meta$"):
        reference.cast(x, "mxfp8")
    with pytest.raises(TypeError, match=r"^b must be on a CPU"):
        reference.matmul(torch.zeros(2, 32), x.T)


def test_version_and_names():
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", breccia.__version__)
    for name in (
        "cast",
        "dequantize",
        "matmul",
        "linear",
        "requantize",
        "from_buffer",
        "ScaledTensor",
        "formats",
        "recipes",
        "layouts",
        "cpu_info",
    ):
        assert hasattr(breccia, name), name
        assert name in breccia.__all__, name
