# SPDX-License-Identifier: Apache-2.0
"""MLX's quantize and dequantize on the CPU, both ways."""

from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import OutsideTensor, from_mlx
from breccia.bridges import mlx as bridge
from breccia.bridges import parts as _parts
from breccia.bridges.written import Written

ml_dtypes = pytest.importorskip("ml_dtypes")

mx = pytest.importorskip("mlx.core")


def weight() -> Any:
    return np.random.default_rng(5).normal(0, 0.02, (64, 512)).astype(np.float32)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_values_are_theirs(mode: str) -> None:
    packed = mx.quantize(mx.array(weight()), mode=mode)
    parts = {"weight": np.array(packed[0]), "scales": np.array(packed[1])}
    scaled = from_mlx(parts)
    wanted = np.array(mx.dequantize(packed[0], packed[1], mode=mode, dtype=mx.float32))
    np.testing.assert_array_equal(breccia.dequantize(scaled), wanted)
    back = _parts.materialize(bridge.lay_out(scaled))
    for role, array in parts.items():
        np.testing.assert_array_equal(back[role], array)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_affine_values_are_theirs(bits: int, size: int, dtype: str) -> None:
    """Product and sum rounded to the scales' dtype each, as MLX does."""
    w, scales, biases = mx.quantize(mx.array(weight()).astype(getattr(mx, dtype)), group_size=size, bits=bits)
    parts = {"weight": np.array(w), "scales": host(scales), "biases": host(biases)}
    outside = from_mlx(parts, bits=bits)
    assert isinstance(outside, OutsideTensor)
    wanted = mx.dequantize(w, scales, biases, group_size=size, bits=bits)
    assert wanted.dtype == getattr(mx, dtype)
    np.testing.assert_array_equal(outside.dequantize(), np.array(wanted.astype(mx.float32)))
    back = _parts.materialize(bridge.lay_out(outside))
    if bits in (4, 8):  # other codes are stored in the next wider ones
        for role, array in parts.items():
            np.testing.assert_array_equal(back[role], array)
    again = from_mlx(back, bits=4 if bits <= 4 else 8)
    np.testing.assert_array_equal(again.dequantize(), outside.dequantize())


def host(array: Any) -> Any:
    """NumPy's, bfloat16 being ml_dtypes'."""
    if array.dtype != mx.bfloat16:
        return np.array(array)
    return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "recipe",
    [
        breccia.INT4Scaling(group_size=64),
        breccia.INT8Scaling(group_size=128, symmetric=False, scale_dtype="bf16"),
        breccia.INT8Scaling(group_size=64, scale_dtype="fp16"),
        breccia.INT4Scaling(group_size=32, signed=False, symmetric=False, scale_dtype="bf16"),
        breccia.MXFP4BlockScaling(),
        breccia.MXFP8BlockScaling(),
        breccia.NVFP4BlockScaling(two_level=False),
    ],
)
def test_they_decode_ours(recipe: Any) -> None:
    scaled = breccia.cast(weight(), recipe)
    parts = {k: mx.array(v) for k, v in _parts.materialize(bridge.lay_out(scaled)).items()}
    said = bridge.config(Written({"a": recipe}))["quantization"]
    got = mx.dequantize(
        parts["weight"],
        parts["scales"],
        parts.get("biases"),
        group_size=said["group_size"],
        bits=said["bits"],
        mode=said["mode"],
        dtype=mx.float32,
    )
    np.testing.assert_array_equal(np.array(got), breccia.dequantize(scaled))


def test_two_levels_are_theirs() -> None:
    w = mx.array(weight())
    amax = mx.abs(w).max()
    packed, scales = mx.quantize(w, mode="nvfp4", global_scale=amax)
    parts = {"weight": np.array(packed), "scales": np.array(scales), "global_scale": np.array(amax)}
    scaled = from_mlx(parts)
    wanted = mx.dequantize(packed, scales, mode="nvfp4", global_scale=amax, dtype=mx.float32)
    np.testing.assert_array_equal(breccia.dequantize(scaled), np.array(wanted))
    back = _parts.materialize(bridge.lay_out(scaled))
    for role, array in parts.items():
        np.testing.assert_array_equal(back[role], array)
