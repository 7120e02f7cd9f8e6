# SPDX-License-Identifier: Apache-2.0
"""Every wrong input gets a TypeError or a ValueError with a sentence that helps; nothing crashes and nothing
is guessed."""

import breccia
import cases
import numpy as np
import pytest
from breccia import (
    PerBlockK,
    PerBlockMN,
    PerTensor,
    ScaledTensor,
    cast,
    dequantize,
    from_buffer,
    matmul,
    requantize,
)

FP8 = breccia.Float8CurrentScaling()
BLOCK = breccia.Float8BlockScaling()
ONE = np.float32(1)


def u8(*shape):
    return np.zeros(shape, np.uint8)


def f32(*shape):
    return np.ones(shape, np.float32)


# --- building a ScaledTensor ------------------------------------------------------------------------------

INVARIANTS = {
    "data is a list": (
        TypeError,
        "data must be array-like",
        lambda: ScaledTensor([[1, 2]], ONE, FP8, PerTensor()),
    ),
    "data is None": (TypeError, "data must be array-like", lambda: ScaledTensor(None, ONE, FP8, PerTensor())),
    "scale is a float": (
        TypeError,
        "scale must be array-like",
        lambda: ScaledTensor(u8(4, 8), 1.0, FP8, PerTensor()),
    ),
    "data is 0-D": (
        ValueError,
        "data must be at least 1-D",
        lambda: ScaledTensor(u8(), ONE, FP8, PerTensor()),
    ),
    "E8M0 codes stored as float32, MXFP8": (
        TypeError,
        "^scale must be uint8 or float8_e8m0fnu codes for MXFP8BlockScaling, got dtype float32",
        lambda: ScaledTensor(u8(4, 64), f32(4, 2), breccia.MXFP8BlockScaling(), PerBlockMN(1, 32)),
    ),
    "E8M0 codes stored as float32, FP8 blocks": (
        TypeError,
        "^scale must be uint8 or float8_e8m0fnu codes for Float8BlockScaling, got dtype float32",
        lambda: ScaledTensor(u8(4, 128), f32(4, 1), breccia.Float8BlockScaling(scale_format="e8m0"), PerBlockK(128)),
    ),
    "no recipe": (ValueError, "recipe is required", lambda: ScaledTensor(u8(4, 8), ONE, None, PerTensor())),
    "no layout": (ValueError, "layout is required", lambda: ScaledTensor(u8(4, 8), ONE, FP8, None)),
    "zero_point is a list": (
        TypeError,
        "zero_point must be array-like",
        lambda: ScaledTensor(
            u8(4, 64),
            f32(4, 1),
            breccia.INT4Scaling(symmetric=False, signed=False),
            PerBlockK(128),
            [[0]] * 4,
        ),
    ),
    "zero_point of another shape": (
        ValueError,
        r"zero_point\.shape",
        lambda: ScaledTensor(
            u8(4, 64), f32(4, 1), breccia.INT4Scaling(symmetric=False, signed=False), PerBlockK(128), u8(4, 2)
        ),
    ),
    "zero_point for floats": (
        ValueError,
        "zero_point",
        lambda: ScaledTensor(u8(4, 128), f32(4, 1), BLOCK, PerBlockK(128), u8(4, 1)),
    ),
    "zero_point missing": (
        ValueError,
        "zero_point is required",
        lambda: ScaledTensor(u8(4, 64), f32(4, 1), breccia.INT4Scaling(symmetric=False, signed=False), PerBlockK(128)),
    ),
    "global_scale missing": (
        ValueError,
        r"^global_scale is required for NVFP4BlockScaling\(two_level=True\)$",
        lambda: breccia.from_buffer(u8(4, 32), u8(4, 4), breccia.NVFP4BlockScaling(), PerBlockMN(1, 16)),
    ),
    "recipe is a class": (
        TypeError,
        "recipe",
        lambda: ScaledTensor(u8(4, 8), ONE, breccia.Float8CurrentScaling, PerTensor()),
    ),
    "layout is a class": (TypeError, "layout", lambda: ScaledTensor(u8(4, 8), ONE, FP8, PerTensor)),
    "recipe is no recipe's name": (
        ValueError,
        "recipe must be the name of a recipe, got 'E4M3'",
        lambda: ScaledTensor(u8(4, 8), ONE, "E4M3", PerTensor()),
    ),
    "data of floats": (
        TypeError,
        "data must hold float8_e4m3fn codes",
        lambda: ScaledTensor(f32(4, 8), ONE, FP8, PerTensor()),
    ),
    "data of int16": (
        TypeError,
        "data must",
        lambda: ScaledTensor(np.zeros((4, 8), np.int16), ONE, FP8, PerTensor()),
    ),
    "data of objects": (
        TypeError,
        "data",
        lambda: ScaledTensor(np.full((4, 8), None), ONE, FP8, PerTensor()),
    ),
    "scale of integers": (
        TypeError,
        "scale must be",
        lambda: ScaledTensor(u8(4, 128), np.ones((4, 1), np.int64), BLOCK, PerBlockK()),
    ),
    "scale of objects": (
        TypeError,
        "scale",
        lambda: ScaledTensor(u8(4, 128), np.full((4, 1), None), BLOCK, PerBlockK()),
    ),
    "complex scale": (
        TypeError,
        "scale",
        lambda: ScaledTensor(u8(4, 128), np.ones((4, 1), complex), BLOCK, PerBlockK()),
    ),
    "MX scale of floats": (
        TypeError,
        "scale must be",
        lambda: ScaledTensor(u8(4, 16), f32(4, 1), breccia.MXFP4BlockScaling(), PerBlockMN(1, 32)),
    ),
    "global_scale of doubles": (
        TypeError,
        "global_scale",
        lambda: from_buffer(
            u8(4, 8), u8(4, 1), breccia.NVFP4BlockScaling(), PerBlockMN(1, 16), global_scale=np.float64(1)
        ),
    ),
    "global_scale of another shape": (
        ValueError,
        r"global_scale\.shape",
        lambda: from_buffer(u8(4, 8), u8(4, 1), breccia.NVFP4BlockScaling(), PerBlockMN(1, 16), global_scale=f32(3)),
    ),
    "shape that the data cannot have": (
        ValueError,
        "shape",
        lambda: from_buffer(u8(4, 8), u8(4, 1), breccia.NVFP4BlockScaling(), PerBlockMN(1, 16), shape=(4, 32)),
    ),
    "negative shape": (
        ValueError,
        "shape",
        lambda: from_buffer(u8(4, 8), u8(4, 1), breccia.NVFP4BlockScaling(), PerBlockMN(1, 16), shape=(4, -16)),
    ),
    "shape beyond 63 bits": (
        ValueError,
        "shape",
        lambda: from_buffer(u8(4, 8), ONE, FP8, PerTensor(), shape=(1 << 40, 1 << 40)),
    ),
    "packed rows that double beyond 63 bits": (
        ValueError,
        "shape",
        lambda: from_buffer(
            np.broadcast_to(np.uint8(0), (1, 1 << 62)),
            u8(1, 1),
            breccia.NVFP4BlockScaling(),
            PerBlockMN(1, 16),
        ),
    ),
}


@pytest.mark.parametrize(("error", "sentence", "build"), INVARIANTS.values(), ids=INVARIANTS.keys())
def test_scaled_tensor_invariants(error, sentence, build):
    with pytest.raises(error, match=sentence):
        build()


# --- cast and requantize ------------------------------------------------------------------------------------

NOT_NUMBERS = {
    "objects": np.full((4, 128), None),
    "objects that are floats": np.full((4, 128), 1.0, object),
    "complex": np.ones((4, 128), np.complex64),
    "strings": np.full((4, 128), "1"),
    "dates": np.zeros((4, 128), "datetime64[s]"),
    "records": np.zeros((4, 128), [("a", "f4")]),
    "a number": 1.0,
    "None": None,
    "a dictionary": {},
}


@pytest.mark.parametrize("x", NOT_NUMBERS.values(), ids=NOT_NUMBERS.keys())
def test_cast_refuses_what_is_not_an_array_of_real_numbers(x):
    with pytest.raises((TypeError, ValueError), match=r"\bx\b|array|dtype|at least 1-D"):
        cast(x, BLOCK)


@pytest.mark.parametrize("recipe", [None, breccia.Float8BlockScaling, PerTensor(), 8])
def test_cast_needs_a_recipe(recipe):
    with pytest.raises(TypeError, match="recipe"):
        cast(f32(4, 128), recipe)
    with pytest.raises(TypeError, match="recipe"):
        requantize(cast(f32(4, 128), FP8), recipe)


def test_cast_of_a_scalar():
    with pytest.raises(ValueError, match=r"x\.ndim >= 1, got 0"):
        cast(np.float32(1), FP8)


@cases.ALL
def test_wrong_k_names_the_block_size(recipe):
    if not cases.is_block(recipe) or cases.may_be_ragged(recipe):
        pytest.skip("any K will do")
    width = cases.block_width(recipe)
    scaled = cast(f32(4, width + 1), FP8)
    for call in (lambda: cast(f32(4, width + 1), recipe), lambda: requantize(scaled, recipe)):
        with pytest.raises(ValueError, match=rf"divisible by {width}, got .*{width + 1}"):
            call()
    with pytest.raises(ValueError, match="2"):
        cast(f32(width), recipe)


@pytest.mark.parametrize("block", [1 << 31, 1 << 48, (1 << 62) + 1, (1 << 63) - 1])
def test_blocks_larger_than_any_tensor(block):
    with pytest.raises(ValueError, match="divisible"):
        cast(f32(4, 128), breccia.Float8BlockScaling(block_k=block))
    x = cases.normal((4, 128))  # a ragged tile larger than the tensor is the tensor
    scaled = cast(x, breccia.Float8BlockScaling(block_k=block, block_m=block))
    assert scaled.scale.shape == (1, 1)
    np.testing.assert_array_equal(scaled.data, cast(x, FP8).data)
    np.testing.assert_array_equal(dequantize(scaled), dequantize(cast(x, FP8)))


def test_tensors_larger_than_memory():
    x = np.broadcast_to(np.float32(1), (1 << 30, 1 << 30))
    for recipe in (FP8, BLOCK, breccia.NVFP4BlockScaling()):
        with pytest.raises(ValueError, match=r"^shape \(1073741824, 1073741824\) must have fewer than 2\^63 bytes$"):
            cast(x, recipe)
    huge = from_buffer(np.broadcast_to(np.uint8(0), (1 << 30, 1 << 30)), ONE, FP8, PerTensor())
    with pytest.raises(MemoryError, match=r"^Unable to allocate 4.00 EiB"):
        dequantize(huge)
    with pytest.raises(MemoryError, match=r"^Unable to allocate 4.00 EiB"):
        matmul(huge, np.broadcast_to(ONE, (1 << 30, 1 << 30)))
