# SPDX-License-Identifier: Apache-2.0
"""`linear` without a transposed view of the weight gives the bytes of `matmul` by one, and refuses what it refuses."""

import itertools
import os
import subprocess
import sys

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
    elif framework == "jax":
        jnp = pytest.importorskip("jax.numpy")
        w, xs = jnp.asarray(w), [jnp.asarray(x) for x in xs]
    return breccia.cast(w, recipe), xs


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
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


@cases.ALL
def test_compiled_code_gives_the_same_bytes_in_jax(recipe):
    jax = pytest.importorskip("jax")
    w, xs = make("jax", recipe)
    for x in xs:
        assert np.array_equal(jax.jit(breccia.linear)(x, w), breccia.linear(x, w), equal_nan=True), x.shape


def test_constants_of_traced_code_in_jax():
    jax = pytest.importorskip("jax")
    w, (x, *_) = make("jax", breccia.MXFP8BlockScaling())
    assert np.array_equal(jax.jit(lambda: breccia.linear(x, w))(), breccia.linear(x, w))


def test_a_weight_without_memory_is_refused_in_jax():
    w, (x, *_) = make("jax", breccia.MXFP8BlockScaling())
    breccia.linear(x, w)
    w.scale.delete()
    with pytest.raises(ValueError, match="deleted or donated"):
        breccia.linear(x, w)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
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


def test_jax_refuses_what_it_refuses_in_other_products():
    """Arrays on two devices, descriptions of arrays, parts that are none of JAX."""
    pytest.importorskip("jax")
    code = """
import breccia, jax, numpy as np, pytest
import jax.numpy as jnp
here, there = jax.devices("cpu")[:2]
x = jax.device_put(jnp.ones((4, 64)), there)
w = breccia.cast(jax.device_put(jnp.ones((32, 64)), here), "mxfp8")
def said(x, w):
    with pytest.raises(TypeError) as error:
        breccia.linear(x, w)
    return str(error.value)
assert "one device" in said(x, w)
odd = breccia.ScaledTensor(w.data, w.scale, w.recipe, w.layout)
object.__setattr__(odd, "scale", jax.device_put(w.scale, there))
assert "scale must be on the device of data" in said(jax.device_put(x, here), odd)
described = jax.eval_shape(lambda x: breccia.cast(x, "mxfp8"), jnp.ones((32, 64)))
assert "must be a JAX array, got ShapeDtypeStruct" in said(jax.device_put(x, here), described)
object.__setattr__(odd, "scale", None)
assert "scale must be a JAX array, got NoneType" in said(jax.device_put(x, here), odd)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env = {**os.environ, **flags}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr
