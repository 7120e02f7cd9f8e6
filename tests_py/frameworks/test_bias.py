# SPDX-License-Identifier: Apache-2.0
"""A bias is added once, before the sum is rounded: 16-bit results are the numbers nearest to the wide sum with it."""

import breccia
import cases
import numpy as np
import pytest
from breccia.autograd import LinearRecipes

ml_dtypes = pytest.importorskip("ml_dtypes")

X, BIAS = cases.normal((32, 256)), cases.normal((64,), seed=2, scale=30.0)
WEIGHT = cases.normal((64, 256), seed=1)
KINDS = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def numpy_of(kind):
    return lambda x: x.astype(KINDS[kind]), np.asarray


def torch_of(kind):
    torch = pytest.importorskip("torch")
    return lambda x: torch.from_numpy(x).to(getattr(torch, kind)), lambda y: y.detach().float().numpy()


def jax_of(kind):
    jnp = pytest.importorskip("jax.numpy")
    return lambda x: jnp.asarray(x).astype(kind), lambda y: np.asarray(y, np.float32)


def mlx_of(kind):
    mx = pytest.importorskip("mlx.core")
    return lambda x: mx.array(x).astype(getattr(mx, kind)), lambda y: np.asarray(y.astype(mx.float32))


FRAMEWORKS = {"numpy": numpy_of, "torch": torch_of, "jax": jax_of, "mlx": mlx_of}


def nearest(total, kind):
    return total.astype(np.float32).astype(KINDS[kind]).astype(np.float32)


@cases.ALL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_linear(framework, kind, recipe):
    make, read = FRAMEWORKS[framework](kind)
    x, bias = make(X), make(BIAS)
    w = breccia.cast(WEIGHT, recipe)
    w = w if framework == "numpy" else w.to(framework)
    total = read(breccia.linear(x, w, out_dtype="float32")).astype(np.float64) + read(bias).astype(np.float64)
    y = breccia.linear(x, w, bias, out_dtype=kind)
    assert str(y.dtype).endswith(kind)
    assert np.array_equal(read(y).astype(np.float32), nearest(total, kind))


@cases.ALL
@pytest.mark.parametrize("activations", [None, "fp8-row"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_layers(recipe, activations, needs_grad):
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(256, 64)
    linear.weight.data, linear.bias.data = torch.from_numpy(WEIGHT), torch.from_numpy(BIAS)
    layer = breccia.quantize_layer(linear.bfloat16(), recipe, activations=activations)
    x = torch.from_numpy(X).bfloat16().requires_grad_(needs_grad)
    given = x.detach() if activations is None else breccia.cast(x.detach(), activations)
    total = breccia.linear(given, layer.weight, out_dtype=torch.float32).double() + layer.bias.double()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.detach(), total.float().bfloat16())
    if needs_grad:
        y.backward(torch.ones_like(y))
        assert x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("recipes", [LinearRecipes.fp8(), LinearRecipes.mxfp8()], ids=["fp8", "mxfp8"])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_products_that_train(recipes, framework):
    make, read = FRAMEWORKS[framework]("bfloat16")
    x, w, bias = make(X), make(WEIGHT), make(BIAS)
    casts = breccia.cast(x, recipes.x), breccia.cast(w, recipes.w)
    total = read(breccia.linear(*casts, out_dtype="float32")).astype(np.float64) + read(bias).astype(np.float64)
    y = breccia.autograd.linear(x, w, bias, recipes, seed=0)
    assert np.array_equal(read(y).astype(np.float32), nearest(total, "bfloat16"))
