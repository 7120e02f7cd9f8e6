# SPDX-License-Identifier: Apache-2.0
"""MLX's quantize and dequantize on the CPU, both ways."""

from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import _common, _parts, from_mlx
from breccia.bridges import mlx as bridge

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


@pytest.mark.parametrize("size", [32, 64, 128])
def test_affine_biases_are_kept(size: int) -> None:
    w, scales, biases = mx.quantize(mx.array(weight()), group_size=size, bits=4)
    parts = {"weight": np.array(w), "scales": np.array(scales), "biases": np.array(biases)}
    outside = from_mlx(parts)
    assert isinstance(outside, _common.OutsideTensor)
    wanted = np.array(mx.dequantize(w, scales, biases, group_size=size, bits=4))
    np.testing.assert_allclose(outside.dequantize(), wanted, rtol=1e-6, atol=1e-9)  # theirs may fuse the sum
    back = _parts.materialize(bridge.lay_out(outside))
    for role, array in parts.items():
        np.testing.assert_array_equal(back[role], array)


@pytest.mark.parametrize(
    "recipe",
    [
        breccia.INT4Scaling(group_size=64),
        breccia.INT4Scaling(group_size=32, signed=False, symmetric=False, scale_dtype="bf16"),
        breccia.MXFP4BlockScaling(),
        breccia.MXFP8BlockScaling(),
        breccia.NVFP4BlockScaling(two_level=False),
    ],
)
def test_they_decode_ours(recipe: Any) -> None:
    scaled = breccia.cast(weight(), recipe)
    parts = {k: mx.array(v) for k, v in _parts.materialize(bridge.lay_out(scaled)).items()}
    said = bridge.config(recipe, [], {})["quantization"]
    got = mx.dequantize(
        parts["weight"],
        parts["scales"],
        parts.get("biases"),
        group_size=said["group_size"],
        bits=said["bits"],
        mode=said["mode"],
        dtype=mx.float32,
    )
    if said["mode"] == "affine":
        np.testing.assert_allclose(np.array(got), breccia.dequantize(scaled), rtol=1e-6, atol=1e-9)
    else:
        np.testing.assert_array_equal(np.array(got), breccia.dequantize(scaled))
