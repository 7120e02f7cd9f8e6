# SPDX-License-Identifier: Apache-2.0
"""MLX: memory, and the same bytes as its own quantization."""

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import cast, dequantize, matmul

mx = pytest.importorskip("mlx.core")
from breccia.frameworks import mlx as framework  # noqa: E402

PEER = peers.Mlx()


def test_the_core_reads_mlx_memory():
    x = mx.array(cases.normal((4, 256)))
    assert framework.to_core(x, "x").ctypes.data == np.asarray(x).ctypes.data


@pytest.mark.parametrize(
    ("mode", "recipe"),
    [
        ("mxfp8", breccia.MXFP8BlockScaling()),
        ("mxfp4", breccia.MXFP4BlockScaling()),
        ("nvfp4", breccia.NVFP4BlockScaling(two_level=False)),
    ],
)
def test_quantized_matmul_takes_the_tensor(mode, recipe):
    w = mx.array(cases.normal((64, 256)))
    scaled = cast(w, recipe)
    codes, scales, arguments = framework.to_quantized(scaled)
    assert arguments["mode"] == mode
    values = mx.dequantize(codes, scales, **arguments)
    np.testing.assert_array_equal(np.array(values.astype(mx.float32)), np.array(dequantize(scaled)))
    x = mx.array(cases.normal((3, 256), seed=1))
    product = mx.quantized_matmul(x, codes, scales, transpose=True, **arguments)
    np.testing.assert_allclose(np.array(product), np.array(matmul(x, scaled.T)), rtol=1e-3, atol=1e-3)
    back = framework.from_quantized(codes, scales, mode)
    peers.same_parts(PEER, back, scaled.to("numpy"))


@pytest.mark.parametrize("mode", ["mxfp8", "mxfp4", "nvfp4"])
def test_tensors_of_mlx(mode):
    w = mx.array(cases.normal((64, 256)))
    codes, scales = mx.quantize(w, mode=mode)
    scaled = framework.from_quantized(codes, scales, mode)
    values = mx.dequantize(codes, scales, mode=mode)
    np.testing.assert_array_equal(np.array(dequantize(scaled)), np.array(values.astype(mx.float32)))
    mine = cast(w, scaled.recipe)
    same = (np.array(mine.scale) == np.array(scales)).mean(), (np.array(mine.data) == np.array(scaled.data)).mean()
    assert same[0] > 0.99
    assert same[1] > (0.99 if mode == "mxfp8" else 0.85)  # MLX rounds ties of E2M1 its own way


def test_clear_errors():
    x = mx.array(cases.normal((4, 256)))
    with pytest.raises(ValueError, match="MXFP4, MXFP8"):
        framework.to_quantized(cast(x, breccia.INT4Scaling()))
    with pytest.raises(ValueError, match="mode must be"):
        framework.from_quantized(x, x, "affine")
    with pytest.raises(TypeError, match="out must be None"):
        dequantize(cast(x, breccia.MXFP8BlockScaling()), out=x)
    with pytest.raises(ValueError, match="unified memory"):
        cast(x, breccia.MXFP8BlockScaling()).to("gpu")
