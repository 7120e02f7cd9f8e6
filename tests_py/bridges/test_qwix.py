# SPDX-License-Identifier: Apache-2.0
"""Qwix's QArray against Qwix's own quantize, dequantize and dot_general."""

from __future__ import annotations

from typing import Any

import breccia
import numpy as np
import oracles
import pytest
from breccia.bridges import from_qwix, to_qwix
from breccia.bridges import qwix as bridge

jax = pytest.importorskip("jax")
qwix = pytest.importorskip("qwix")
jnp = jax.numpy

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3", "float8_e4m3b11fnuz")
QTYPES = ("int8", "int4", *FP8, "float8_e3m4")
# What shares a scale of a matrix, as Qwix is told it, and its block here: along rows, and along columns as kernels are.
TILES = {
    "tensor": ({}, (0, 0)),
    "rows": ({"channelwise_axes": [0]}, (1, 0)),
    "columns": ({"channelwise_axes": [1]}, (0, 1)),
    "blocks of rows": ({"channelwise_axes": [0], "tiled_axes": {1: 32}}, (1, 32)),
    "blocks of columns": ({"channelwise_axes": [1], "tiled_axes": {0: 32}}, (32, 1)),
    "tiles": ({"tiled_axes": {0: 16, 1: 32}}, (16, 32)),
}


def weight(shape: tuple[int, ...] = (64, 96), dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def as_qwix_rounds(ours: Any, theirs: Any) -> Any:
    """Values in the dtype of the scales, which Qwix multiplies in."""
    return np.asarray(breccia.dequantize(ours)).astype(theirs.scale.dtype)


def same(left: Any, right: Any) -> None:
    """Every part, bit by bit."""
    assert left.qtype == right.qtype
    for role in ("qvalue", "scale", "zero_point"):
        a, b = getattr(left, role), getattr(right, role)
        assert (a is None) == (b is None), role
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), role
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), role


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("qtype", QTYPES)
def test_values_are_qwixs_both_ways(qtype: str, tiles: str) -> None:
    options, block = TILES[tiles]
    theirs = qwix.quantize(weight(), jnp.dtype(qtype), **options)
    ours = from_qwix(theirs)
    assert ours.shape == theirs.shape and ours.layout.block == block
    oracles.assert_same_bits(np.asarray(breccia.dequantize(ours)), np.asarray(qwix.dequantize(theirs)))
    same(to_qwix(ours), theirs)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_zero_points(qtype: str, tiles: str) -> None:
    options, _ = TILES[tiles]
    theirs = qwix.quantize(weight() + 1, jnp.dtype(qtype), calibration_method="minmax", **options)
    ours = from_qwix(theirs)
    assert ours.zero_point is not None
    np.testing.assert_array_equal(breccia.dequantize(ours), qwix.dequantize(theirs))
    same(to_qwix(ours), theirs)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("qtype", ["mxfp8", "mxfp4", "nvfp4"])
def test_blocks_whose_scales_are_codes(qtype: str, axis: int) -> None:
    size = 16 if qtype == "nvfp4" else 32
    theirs = qwix.quantize(weight(), qtype, channelwise_axes=[1 - axis], tiled_axes={axis: size})
    ours = from_qwix(theirs)
    assert ours.recipe == bridge.RECIPES[qtype] and ours.scale.dtype.itemsize == 1
    np.testing.assert_array_equal(breccia.dequantize(ours), qwix.dequantize(theirs))
    same(to_qwix(ours), theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_scales_of_16_bits(qtype: str, dtype: str) -> None:
    theirs = qwix.quantize(weight(dtype=dtype), jnp.dtype(qtype), channelwise_axes=[0], tiled_axes={1: 32})
    same(to_qwix(from_qwix(theirs)), theirs)


def test_experts() -> None:
    theirs = qwix.quantize(weight((3, 64, 96)), jnp.int8, channelwise_axes=[0, 2], tiled_axes={1: 32})
    ours = from_qwix(theirs)
    np.testing.assert_array_equal(breccia.dequantize(ours), qwix.dequantize(theirs))
    same(to_qwix(ours), theirs)


@pytest.mark.parametrize("key", bridge.RECIPES)
@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_what_breccia_made_is_read_by_qwix(key: str, framework: str) -> None:
    ours = breccia.cast(np.asarray(weight((64, 256))), bridge.RECIPES[key]).to(framework)
    theirs = to_qwix(ours)
    np.testing.assert_array_equal(qwix.dequantize(theirs), as_qwix_rounds(ours, theirs))
    back = from_qwix(theirs)
    np.testing.assert_array_equal(breccia.dequantize(back), breccia.dequantize(ours))
    assert back.recipe.element == ours.recipe.element and back.layout.block == ours.layout.block


def test_unsigned_codes_of_4_bits() -> None:
    ours = breccia.cast(np.asarray(weight((64, 128))), breccia.INT4Scaling(signed=False, symmetric=False))
    theirs = to_qwix(ours)
    assert theirs.qvalue.dtype == theirs.zero_point.dtype == jnp.int4
    np.testing.assert_array_equal(qwix.dequantize(theirs), as_qwix_rounds(ours, theirs))


@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn"])
def test_products_are_those_of_qwixs_dot(qtype: str) -> None:
    x, w = weight((8, 64)), weight((64, 96))
    a = qwix.quantize(x, jnp.dtype(qtype), channelwise_axes=[0])
    b = qwix.quantize(w, jnp.dtype(qtype), channelwise_axes=[1])
    theirs = qwix.dot_general(a, b, (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(breccia.matmul(from_qwix(a), from_qwix(b)), theirs, rtol=1e-5, atol=1e-5)


def test_what_has_no_place_is_told() -> None:
    with pytest.raises(TypeError, match="which is of a codebook"):
        from_qwix(qwix.quantize(weight(), "nf4", channelwise_axes=[0]))
    with pytest.raises(TypeError, match="array must be a QArray with arrays, got ndarray without qvalue"):
        from_qwix(np.ones(3))
    with pytest.raises(ValueError, match="must have tiles of the last two axes of a matrix or a batch"):
        from_qwix(qwix.quantize(weight((3, 64, 96)), jnp.int8, channelwise_axes=[1]))
    uneven = qwix.quantize(weight(), "mxfp8", channelwise_axes=[0], tiled_axes={1: 32})
    with pytest.raises(ValueError, match="must have numbers of float8_e8m0fnu for mxfp8, some are others"):
        from_qwix(qwix.QArray(uneven.qvalue, uneven.scale * 1.5, None, "mxfp8"))
    for recipe in (breccia.MXFP6BlockScaling(), breccia.NVFP4BlockScaling()):
        with pytest.raises(ValueError, match="scaled must have a recipe that qwix can hold"):
            to_qwix(breccia.cast(np.ones((4, 64), np.float32), recipe))
    ragged = breccia.cast(np.ones((20, 70), np.float32), breccia.Float8BlockScaling(block_m=16, block_k=32))
    with pytest.raises(ValueError, match="scaled must be of whole blocks"):
        to_qwix(ragged)
