# SPDX-License-Identifier: Apache-2.0
"""grouped_matmul equals one product per expert, in every framework."""

import itertools

import breccia
import cases
import numpy as np
import peers
import pytest

OFFSETS = np.array([0, 3, 3, 20, 37], np.int32)
ROW = breccia.Float8BlockScaling()


@cases.ALL
@pytest.mark.parametrize("quantized", [False, True])
@peers.ALL
@pytest.mark.in_turn
def test_one_product_per_expert(peer, recipe, quantized):
    x, stack = cases.normal((40, 256)), cases.normal((4, 24, 256), 1)
    w = breccia.cast(peer.array(stack), recipe)
    given = breccia.cast(peer.array(x), ROW) if quantized else peer.array(x)
    y = breccia.grouped_matmul(given, w, peer.array(OFFSETS))
    assert peer.is_one(y)
    y = peer.host(y)
    values = breccia.dequantize(breccia.cast(x, ROW)) if quantized else x
    weights = breccia.dequantize(breccia.cast(stack, recipe)).astype(np.float64)
    assert y.shape == (40, 24)
    for e, (a, b) in enumerate(itertools.pairwise(OFFSETS)):
        np.testing.assert_allclose(y[a:b], values[a:b] @ weights[e].T, rtol=1e-4, atol=1e-3)
    assert (y[37:] == 0).all()


def test_two_levels():
    stack = cases.normal((4, 24, 256), 1)
    w = breccia.cast(stack, breccia.NVFP4BlockScaling())
    per_matrix = breccia.from_buffer(
        w.data,
        w.scale,
        w.recipe,
        w.layout,
        global_scale=np.array([1, 2, 3, 4], np.float32).reshape(4, 1, 1) * w.global_scale,
    )
    x = cases.normal((37, 256))
    one, many = (breccia.grouped_matmul(x, t, OFFSETS) for t in (w, per_matrix))
    factors = np.repeat([1, 2, 3, 4], np.diff(OFFSETS))[:, None]
    np.testing.assert_allclose(many, one * factors, rtol=1e-5, atol=1e-4)


def test_errors():
    w = breccia.cast(cases.normal((4, 24, 256), 1), ROW)
    x = cases.normal((40, 256))
    with pytest.raises(TypeError, match="w_stack must be a ScaledTensor"):
        breccia.grouped_matmul(x, x, OFFSETS)
    with pytest.raises(ValueError, match=r"w_stack must be \(E, N, K\)"):
        breccia.grouped_matmul(x, breccia.cast(x, ROW), OFFSETS)
    with pytest.raises(ValueError, match=r"x must be \(T, 256\)"):
        breccia.grouped_matmul(x[:, :128], w, OFFSETS)
    with pytest.raises(ValueError, match=r"offsets must have shape \(5,\)"):
        breccia.grouped_matmul(x, w, OFFSETS[1:])
    with pytest.raises(TypeError, match="offsets must be integers"):
        breccia.grouped_matmul(x, w, OFFSETS.astype(np.float32))
    for bad in ([1, 3, 3, 20, 37], [0, 5, 3, 20, 37], [0, 3, 3, 20, 41]):
        with pytest.raises(ValueError, match="offsets must rise from 0 to at most 40"):
            breccia.grouped_matmul(x, w, np.array(bad))
    tile = breccia.cast(x, breccia.Float8BlockScaling(block_m=128))
    with pytest.raises(ValueError, match="x must be scaled along its rows"):
        breccia.grouped_matmul(tile, w, OFFSETS)


def test_gpu_info():
    info = breccia.gpu_info()
    assert set(info) == {"available", "device", "capability", "torch", "triton", "kernels"}
    assert info["available"] == bool(info["device"]) == bool(info["kernels"])
