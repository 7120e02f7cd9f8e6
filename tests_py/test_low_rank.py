# SPDX-License-Identifier: Apache-2.0
"""`breccia.lora_init`: the best product of a rank for what quantizing loses, in every recipe and framework."""

import breccia
import cases
import numpy as np
import peers
import pytest

N, K, RANK = 64, 256, 8


def weight(seed=0):
    return cases.normal((N, K), seed, 0.05)


def lost(w, codes):
    return w.astype(np.float64) - breccia.dequantize(codes).astype(np.float64)


@peers.ALL
@cases.ALL
def test_nearest_of_its_rank(peer, recipe):
    """What is left is exactly what the other singular values hold (Eckart and Young)."""
    w = weight()
    error = lost(w, breccia.cast(w, recipe))
    a, b = breccia.lora_init(peer.array(w), recipe, RANK)
    assert peer.is_one(a)
    assert peer.is_one(b)
    a, b = peer.host(a), peer.host(b)
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((RANK, K), (N, RANK), np.float32, np.float32)
    left = np.linalg.norm(error - b.astype(np.float64) @ a)
    values = np.linalg.svd(error, compute_uv=False)
    np.testing.assert_allclose(left, np.sqrt((values[RANK:] ** 2).sum()), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0), rtol=1e-3, atol=1e-6)


@peers.ALL
def test_importance(peer):
    """Columns that count more are nearer; the weighted error is the least there is."""
    w, h = weight(), np.exp(cases.normal((K,), 5, 2.0))
    h[3] = 0
    codes = breccia.cast(w, "nvfp4")
    error = lost(w, codes)
    a, b = (peer.host(x).astype(np.float64) for x in breccia.lora_init(peer.array(w), "nvfp4", RANK, peer.array(h)))
    used = np.where(h == 0, h[h > 0].min(), h)
    root = np.sqrt(used.astype(np.float64))
    values = np.linalg.svd(error * root, compute_uv=False)
    np.testing.assert_allclose(np.linalg.norm((error - b @ a) * root), np.sqrt((values[RANK:] ** 2).sum()), rtol=1e-3)
    plain = [peer.host(x) for x in breccia.lora_init(peer.array(w), "nvfp4", RANK)]
    assert np.linalg.norm((error - b @ a) * root) < np.linalg.norm((error - plain[1] @ plain[0]) * root)
    ones = [peer.host(x) for x in breccia.lora_init(peer.array(w), "nvfp4", RANK, np.full(K, 2.0))]
    np.testing.assert_allclose(ones[1] @ ones[0], plain[1] @ plain[0], atol=1e-6)


def test_the_whole_rank_leaves_nothing():
    w = weight()
    codes = breccia.cast(w, "int4:32")
    a, b = breccia.lora_init(w, codes, N)
    np.testing.assert_allclose(breccia.dequantize(codes) + b @ a, w, atol=1e-6)


def test_dtypes():
    torch = pytest.importorskip("torch")
    w = torch.from_numpy(weight())
    a, b = breccia.lora_init(w.bfloat16(), "mxfp8", RANK)
    assert a.dtype == b.dtype == torch.float32
    assert not torch.nn.Parameter(w).grad_fn
    assert not breccia.lora_init(torch.nn.Parameter(w), "mxfp8", RANK)[0].requires_grad


NAN = np.full((N, K), np.nan, np.float32)
WRONG = {
    "codes": (lambda: breccia.lora_init(breccia.cast(weight(), "fp8"), "fp8", 4), "before it is quantized, an array"),
    "rank": (lambda: breccia.lora_init(weight(), "fp8", 4.0), "rank must be an integer, got 4.0"),
    "large": (
        lambda: breccia.lora_init(weight(), "fp8", 65),
        r"rank must be 1 to 64 for w of shape \(64, 256\), got 65",
    ),
    "vector": (lambda: breccia.lora_init(weight()[0], "fp8", 4), r"w must be a matrix \(N, K\), got shape \(256,\)"),
    "other codes": (
        lambda: breccia.lora_init(weight()[:32], breccia.cast(weight(), "fp8"), 4),
        r"recipe must be codes of w's shape \(32, 256\), got \(64, 256\)",
    ),
    "NaN": (lambda: breccia.lora_init(NAN, "fp8", 4), "w must be finite and have a finite error"),
    "few": (
        lambda: breccia.lora_init(weight(), "fp8", 4, np.ones(3)),
        r"shape \(256,\) for w of 256 columns, got \(3,\)",
    ),
    "negative": (
        lambda: breccia.lora_init(weight(), "fp8", 4, np.full(K, -1.0)),
        r"importance must be of finite numbers of 0 or more, got -1.0 in it",
    ),
    "name": (lambda: breccia.lora_init(weight(), "nvfp5", 4), "did you mean nvfp4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
