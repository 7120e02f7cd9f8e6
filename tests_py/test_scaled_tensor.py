# SPDX-License-Identifier: Apache-2.0
"""ScaledTensor as a value, and how arrays get in and out of it."""

import copy
import dataclasses
import json
import pickle

import breccia
import cases
import numpy as np
import oracles
import pytest
from breccia import (
    PerBlockK,
    PerBlockMN,
    PerChannel,
    PerTensor,
    ScaledTensor,
    cast,
    dequantize,
    from_buffer,
)
from breccia.value.form import PARTS, cast_form
from test_ops import check

ml_dtypes = pytest.importorskip("ml_dtypes")


def assert_same_value(a, b):
    for part in PARTS:
        ours, theirs = getattr(a, part), getattr(b, part)
        assert (ours is None) == (theirs is None), part
        if ours is not None:
            oracles.assert_same_bits(np.asarray(ours), np.asarray(theirs), part)
    assert (a.recipe, a.layout, a.shape, a.ndim, a.nbytes) == (b.recipe, b.layout, b.shape, b.ndim, b.nbytes)


@pytest.fixture(params=cases.RECIPES.values(), ids=cases.RECIPES.keys())
def scaled(request):
    return cast(cases.normal(cases.shape_for(request.param)), request.param)


def test_attributes(scaled):
    rows, cols = cases.shape_for(scaled.recipe)
    assert scaled.shape == (rows, cols)
    assert scaled.ndim == 2
    packed = oracles.width(oracles.element_format(scaled.recipe)) == 4
    assert scaled.data.shape == (rows, cols // 2 if packed else cols)
    assert scaled.data.dtype == scaled.data_dtype == np.uint8
    assert scaled.scale.dtype == scaled.scale_dtype
    scaled.layout.validate(np.empty(scaled.shape, np.uint8), scaled.scale)


def test_layout_and_scale_shape_follow_from_the_recipe():
    x = cases.normal((6, 256))
    for recipe, layout, shape, dtype in [
        (breccia.DelayedScaling(), PerTensor(), (), np.float32),
        (breccia.Float8CurrentScaling(), PerTensor(), (), np.float32),
        (breccia.Float8CurrentScaling(granularity="row"), PerChannel(), (6, 1), np.float32),
        (breccia.Float8BlockScaling(), PerBlockK(128), (6, 2), np.float32),
        (breccia.Float8BlockScaling(block_m=4, block_k=100), PerBlockMN(4, 100), (2, 3), np.float32),
        (breccia.Float8BlockScaling(scale_format="bf16"), PerBlockK(128), (6, 2), ml_dtypes.bfloat16),
        (breccia.Float8BlockScaling(scale_format="e8m0"), PerBlockK(128), (6, 2), np.uint8),
        (breccia.MXFP8BlockScaling(), PerBlockMN(1, 32), (6, 8), np.uint8),
        (breccia.NVFP4BlockScaling(), PerBlockMN(1, 16), (6, 16), np.uint8),
        (breccia.INT4Scaling(), PerBlockK(128), (6, 2), np.float16),
        (breccia.INT8Scaling(), PerChannel(), (6, 1), np.float32),
    ]:
        scaled = cast(x, recipe)
        assert (scaled.layout, scaled.scale.shape, scaled.scale.dtype) == (layout, shape, np.dtype(dtype)), recipe


def test_repr():
    text = repr(cast(cases.normal((4, 64)), breccia.NVFP4BlockScaling()))
    assert text == (
        "breccia.ScaledTensor(shape=(4, 64), data_dtype=uint8, scale_shape=(4, 4), "
        "recipe=NVFP4BlockScaling, layout=PerBlockMN)"
    )


def test_is_frozen(scaled):
    for part in (*PARTS, "recipe", "layout", "shape", "novel"):
        with pytest.raises(AttributeError):
            setattr(scaled, part, None)
    with pytest.raises(AttributeError):
        del scaled.data


def test_recipes_and_layouts_are_frozen_and_hashable(scaled):
    for value in (scaled.recipe, scaled.layout):
        assert dataclasses.is_dataclass(value)
        assert hash(value) == hash(copy.deepcopy(value))
        assert value == pickle.loads(pickle.dumps(value))
        assert eval(repr(value), vars(breccia)) == value
        field = dataclasses.fields(value)
        if field:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field[0].name, None)


def test_pickle(scaled):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert_same_value(pickle.loads(pickle.dumps(scaled, protocol)), scaled)
        assert_same_value(pickle.loads(pickle.dumps(scaled.T, protocol)), scaled.T)


def test_copies(scaled):
    shallow, deep = copy.copy(scaled), copy.deepcopy(scaled)
    assert_same_value(shallow, scaled)
    assert_same_value(deep, scaled)
    assert np.shares_memory(shallow.data, scaled.data)
    assert not np.shares_memory(deep.data, scaled.data)


@cases.ALL
def test_replace_keeps_what_is_not_replaced(recipe):
    for dtype in ("float16", "bfloat16", "float32"):
        scaled = cast(cases.normal(cases.shape_for(recipe)).astype(dtype), recipe)
        replaced = dataclasses.replace(scaled, scale=scaled.scale.copy())
        assert_same_value(replaced, scaled)
        assert replaced.original_dtype == scaled.original_dtype == dtype
        assert dataclasses.replace(scaled, original_dtype="float64").original_dtype == "float64"


def test_replace_keeps_an_odd_shape():
    codes, scale = np.zeros((3, 3), np.uint8), np.ones((3, 1), np.float32)
    recipe = breccia.INT4Scaling(group_size=64, scale_dtype="fp32")
    scaled = ScaledTensor(codes, scale, recipe, PerBlockMN(1, 64), shape=(3, 5))
    assert dataclasses.replace(scaled, scale=2 * scale).shape == (3, 5)
    assert dataclasses.replace(scaled, shape=(3, 6)).shape == (3, 6)


def test_transposed_views(scaled):
    for view in (scaled.T, scaled.mT):
        assert view.shape == scaled.shape[::-1]
        assert np.shares_memory(view.data, scaled.data)
        np.testing.assert_array_equal(dequantize(view), dequantize(scaled).T)
        assert_same_value(view.T, scaled)
    assert scaled.T.nbytes == scaled.nbytes


def test_transposing_batches():
    scaled = cast(cases.normal((2, 3, 32)), breccia.MXFP4BlockScaling())
    assert scaled.mT.shape == (2, 32, 3)
    np.testing.assert_array_equal(dequantize(scaled.mT), dequantize(scaled).swapaxes(-1, -2))


# --- buffers ------------------------------------------------------------------------------------------------


def rebuilt(scaled, **changes):
    parts = {
        name: getattr(scaled, name) for name in ("data", "scale", "recipe", "layout", "zero_point", "global_scale")
    } | changes
    return from_buffer(
        parts["data"],
        parts["scale"],
        parts["recipe"],
        parts["layout"],
        parts["zero_point"],
        global_scale=parts["global_scale"],
    )


def test_from_buffer_copies_nothing(scaled):
    again = rebuilt(scaled)
    assert_same_value(again, scaled)
    for part in PARTS:
        if getattr(scaled, part) is not None:
            assert np.shares_memory(getattr(again, part), getattr(scaled, part)), part
    oracles.assert_same_bits(dequantize(again), dequantize(scaled))


def test_one_code_per_byte_is_accepted(scaled):
    """As breccia up to 0.1.3 stored 4-bit codes."""
    loose = rebuilt(scaled, data=oracles.codes_of(scaled))
    assert loose.shape == scaled.shape
    oracles.assert_same_bits(dequantize(loose), dequantize(scaled))
    check(cases.normal((3, scaled.shape[1])), loose.T)


def test_ml_dtypes_buffers_are_taken_as_they_are(scaled):
    name = oracles.element_format(scaled.recipe)
    codes = oracles.codes_of(scaled)
    typed = codes.view(np.int8 if name == "int8" else getattr(ml_dtypes, name))
    scale = np.asarray(scaled.scale)
    if scale.dtype == np.uint8:
        scale = scale.view(
            ml_dtypes.float8_e4m3fn if "NVFP4" in type(scaled.recipe).__name__ else ml_dtypes.float8_e8m0fnu
        )
    elif scale.dtype == np.uint16:
        scale = scale.view(ml_dtypes.bfloat16)
    again = rebuilt(scaled, data=typed, scale=scale)
    assert again.shape == scaled.shape
    assert np.shares_memory(again.data, typed)
    assert np.shares_memory(again.scale, scale)
    oracles.assert_same_bits(dequantize(again), dequantize(scaled))


def test_strided_buffers(scaled):
    def holed(array):
        array = np.asarray(array)
        wide = np.zeros((*array.shape, 3), array.dtype)
        wide[..., 1] = array
        return wide[..., 1]

    again = rebuilt(scaled, data=holed(scaled.data), scale=holed(scaled.scale))
    assert np.shares_memory(again.data, again.data.base)
    oracles.assert_same_bits(dequantize(again), dequantize(scaled))
    check(cases.normal((3, scaled.shape[1])), again.T)


def test_memory_outlives_its_array():
    data = np.arange(64, dtype=np.uint8).reshape(2, 32)
    scaled = from_buffer(data, np.float32(1), breccia.Float8CurrentScaling(), PerTensor())
    expected = dequantize(scaled)
    view = scaled.T
    del scaled, data
    junk = [np.full(64, i % 256, np.uint8) for i in range(1000)]
    oracles.assert_same_bits(dequantize(view), expected.T)
    assert len(junk) == 1000


def test_construction_by_position_and_by_name():
    data, scale = np.zeros((4, 64), np.uint8), np.ones((4, 1), np.float16)
    recipe = breccia.INT4Scaling(symmetric=False, signed=False)
    zero = np.full((4, 1), 8, np.uint8)
    a = ScaledTensor(data, scale, recipe, PerBlockK(128), zero)
    b = ScaledTensor(data=data, scale=scale, recipe=recipe, layout=PerBlockK(128), zero_point=zero)
    assert_same_value(a, b)
    assert (dequantize(a) == -8).all()


@cases.ALL
def test_from_buffer_needs_every_part_that_cast_makes(recipe):
    q = breccia.cast(cases.normal((4, 256)), recipe)
    parts = {"zero_point": q.zero_point, "global_scale": q.global_scale}
    same = breccia.from_buffer(q.data, q.scale, q.recipe, q.layout, **parts)
    np.testing.assert_array_equal(breccia.dequantize(same), breccia.dequantize(q))
    for name, part in parts.items():
        if part is not None:
            with pytest.raises(ValueError, match=f"^{name} is required for {type(recipe).__name__}"):
                breccia.from_buffer(q.data, q.scale, q.recipe, q.layout, **{**parts, name: None})


def test_files_and_pickles_with_a_scale_of_one_element_load(tmp_path):
    """Version 0.2 took and wrote such scales for one scale per tensor."""
    q = cast(cases.normal((4, 8)), breccia.Float8CurrentScaling())
    breccia.save({"w": q}, tmp_path / "now.safetensors")
    raw = (tmp_path / "now.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["w.scale"]["shape"] = [1]
    text = json.dumps(header).encode()
    (tmp_path / "then.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    loaded = breccia.load(tmp_path / "then.safetensors")["w"]
    function, (data, scale, *rest) = q.__reduce__()
    for again in (loaded, function(data, (scale[0].reshape(1), scale[1]), *rest)):
        assert again.scale.shape == ()
        assert again == q


# --- forms --------------------------------------------------------------------------------------------------


def _there(scaled):
    return tuple(part for part in PARTS if getattr(scaled, part) is not None)


@cases.ALL
def test_a_form_says_which_arrays_there_are(recipe):
    scaled = breccia.cast(cases.normal(cases.shape_for(recipe)), recipe)
    form = cast_form(recipe, scaled.shape, "float32")
    assert form == scaled._form
    assert form.parts == _there(scaled)
    arrays = [getattr(scaled, part) for part in form.parts]
    assert all(a is b for a, b in zip(form.place(arrays), [getattr(scaled, part) for part in PARTS], strict=True))
    assert ScaledTensor._of(form, *form.place(arrays)) == scaled


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("global_scale", [False, True])
def test_a_form_names_parts_that_its_recipe_does_not_ask_for(zero_point, global_scale):
    recipe = breccia.INT8Scaling(group_size=32) if zero_point else breccia.NVFP4BlockScaling(two_level=False)
    scaled = breccia.cast(cases.normal((4, 64)), recipe)
    made = breccia.from_buffer(
        scaled.data,
        scaled.scale,
        recipe,
        scaled.layout,
        np.zeros(scaled.scale.shape, np.int8) if zero_point else None,
        global_scale=np.ones((), np.float32) if global_scale else None,
    )
    assert made._form.parts == _there(made)
    assert ("zero_point" in made._form.parts, "global_scale" in made._form.parts) == (zero_point, global_scale)
