# SPDX-License-Identifier: Apache-2.0
"""`linear` without a transposed view of the weight gives the bytes of `matmul` by one, and refuses what it refuses."""

import itertools

import breccia
import cases
import numpy as np
import pytest

SHAPES = [(1, 128), (3, 128), (2, 2, 128)]


def make(framework, recipe):
    rng = np.random.default_rng(0)
    w, xs = rng.standard_normal((64, 128), np.float32), [rng.standard_normal(s, np.float32) for s in SHAPES]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        w, xs = torch.from_numpy(w), [torch.from_numpy(x) for x in xs]
    return breccia.cast(w, recipe), xs


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@cases.ALL
def test_the_bytes_are_those_of_matmul(framework, recipe):
    tensor, xs = make(framework, recipe)
    for w, x, out_dtype, precision in itertools.product(
        (tensor, breccia.prepare(tensor)), xs, ("float32", "float16", None), ("exact", "fast")
    ):
        made = breccia.linear(x, w, out_dtype=out_dtype, precision=precision)
        wanted = breccia.matmul(x, w.mT, out_dtype, precision=precision)
        assert type(made) is type(wanted)
        assert made.dtype == wanted.dtype
        assert np.array_equal(np.asarray(made), np.asarray(wanted), equal_nan=True), (x.shape, out_dtype, precision)


@pytest.mark.parametrize("name", ["data", "scale"])
def test_arrays_that_torch_moves_are_found_again(name):
    """As a module's `to` and FSDP do: the tensor stays, its memory is another."""
    torch = pytest.importorskip("torch")
    w, (x, *_) = make("torch", breccia.MXFP8BlockScaling())
    before = breccia.linear(x, w)
    getattr(w, name).set_(torch.zeros(getattr(w, name).shape, dtype=torch.uint8).view(getattr(w, name).dtype))
    other = breccia.ScaledTensor(w.data, w.scale, w.recipe, w.layout)
    assert torch.equal(breccia.linear(x, w), breccia.linear(x, other))
    assert not torch.equal(breccia.linear(x, w), before)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_what_does_not_fit_is_refused_in_words_of_linear(framework):
    w, (x, *_) = make(framework, breccia.MXFP8BlockScaling())
    with pytest.raises(
        ValueError, match=r"^x must be \(\.\.\., 128\) for w of shape \(64, 128\), got shape \(1, 64\)$"
    ):
        breccia.linear(x[:, :64], w)
    assert breccia.linear(x[0], w).shape == (64,)


def test_a_gradient_is_kept():
    torch = pytest.importorskip("torch")
    w, (x, *_) = make("torch", breccia.MXFP8BlockScaling())
    x.requires_grad_()
    y = breccia.linear(x, w)
    assert y.requires_grad
    with torch.no_grad():
        assert torch.equal(breccia.linear(x, w), y)
