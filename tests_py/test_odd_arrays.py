# SPDX-License-Identifier: Apache-2.0
"""What looks like an array and cannot be used as one: a sentence each, from every function that takes arrays."""

import contextlib
import re

import breccia
import numpy as np
import pytest

try:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    REAL = torch.ones(4, 64)
except ImportError:
    torch = None
from breccia import autograd, bridges, checkpoint, comparison, delayed, formats

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
Q = breccia.cast(X, "nvfp4")
STATE = delayed.init(breccia.DelayedScaling(), X)


def ends(q):
    return torch.tensor([0, 4]) if type(q.data).__module__ == "torch" else np.array([0, 4])


# What takes an array of numbers, with ScaledTensors of its framework.
VERBS = {
    "cast": lambda x, q: breccia.cast(x, "nvfp4"),
    "cast with options": lambda x, q: breccia.cast(x, "nvfp4", rounding="stochastic", seed=1),
    "cast_ste": lambda x, q: breccia.cast_ste(x, "nvfp4"),
    "cast_ste_clipped": lambda x, q: breccia.cast_ste_clipped(x, "mxfp4"),
    "matmul, left": lambda x, q: breccia.matmul(x, q.T),
    "matmul, right": lambda x, q: breccia.matmul(q.T, x),
    "linear": breccia.linear,
    "grouped_matmul": lambda x, q: breccia.grouped_matmul(x, breccia.stack([q]), ends(q)),
    "autograd.linear": lambda x, q: autograd.linear(x, q.dequantize()),
}
NUMPY = {
    **VERBS,
    "out": lambda x, q: breccia.dequantize(q, out=x),
    "data": lambda x, q: breccia.from_buffer(x.astype(np.uint8), q.scale, q.recipe, q.layout),
    "scale": lambda x, q: breccia.from_buffer(q.data, x[:, :4], breccia.Float8BlockScaling(), q.layout),
    "encode": lambda x, q: formats.encode(x, "float8_e4m3fn"),
    "decode": lambda x, q: formats.decode(x.astype(np.uint8), "float8_e4m3fn"),
    "pack": lambda x, q: formats.pack(x.astype(np.uint8)),
    "compare": lambda x, q: comparison.compare(x, X),
    "record": lambda x, q: delayed.record(STATE, x),
    "save": lambda x, q: breccia.save({"w": x}, "never"),
    "save_arrays": lambda x, q: checkpoint.save_arrays({"w": x}, "never"),
    "from_deepseek_v3": lambda x, q: bridges.from_deepseek_v3(x.astype(np.uint8), np.ones((1, 1), np.float32)),
}


@pytest.mark.parametrize("verb", NUMPY)
@pytest.mark.parametrize("mask", [np.eye(4, 64), np.ma.nomask], ids=["some", "none"])
def test_masks_are_not_lost(verb, mask):
    with pytest.raises(TypeError, match=r"must be an array without a mask, got a MaskedArray: fill it first"):
        NUMPY[verb](np.ma.masked_array(X.copy(), mask=mask), Q)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_finite_numbers_beyond_float32(verb, framework):
    """They would be infinities; those that are stay so."""
    big = X.astype(np.float64)
    big[1, 2] = -1e300
    q = Q
    if framework == "torch":
        pytest.importorskip("torch")
        big, q = torch.from_numpy(big), Q.to("torch")
    if framework == "jax":
        jax = pytest.importorskip("jax")
        q = Q.to("jax")
        jax.config.update("jax_enable_x64", True)
        try:
            big = jax.numpy.asarray(big)
            assert big.dtype == np.float64
            with pytest.raises(ValueError, match=re.escape("up to 3.4028e+38, got -1e+300 at (1, 2)")):
                VERBS[verb](big, q)
        finally:
            jax.config.update("jax_enable_x64", False)
        return
    with pytest.raises(ValueError, match=re.escape("up to 3.4028e+38, got -1e+300 at (1, 2)")):
        VERBS[verb](big, q)
    big[1, 2] = -np.inf
    VERBS[verb](big, q)
    big[1, 2] = np.nan
    VERBS[verb](big, q)
    big[1, 2] = float(np.finfo(np.float32).max) * (1 + 2**-26)  # rounds to the largest
    VERBS[verb](big, q)


@pytest.mark.parametrize("verb", VERBS)
def test_jax_descriptions_of_arrays(verb):
    jax = pytest.importorskip("jax")
    described = jax.ShapeDtypeStruct((4, 64), np.float32)
    with pytest.raises(TypeError, match=r"must be a JAX array, got ShapeDtypeStruct: jax\.eval_shape calls"):
        VERBS[verb](described, Q.to("jax"))
    jax.eval_shape(lambda x: VERBS[verb](x, Q.to("jax")), described)


@pytest.mark.parametrize("verb", VERBS)
def test_jax_keys(verb):
    jax = pytest.importorskip("jax")
    keys = jax.random.split(jax.random.key(0), (4, 64))
    with pytest.raises(TypeError, match=r"(float32|real numbers).*got dtype key<fry>"):
        VERBS[verb](keys, Q.to("jax"))


@pytest.mark.parametrize("verb", VERBS)
def test_deleted_jax_arrays(verb):
    jax = pytest.importorskip("jax")
    x = jax.numpy.array(X)
    x.delete()
    with pytest.raises(ValueError, match=r"must be an array that has its memory, got one of shape \(4, 64\)"):
        VERBS[verb](x, Q.to("jax"))


OF_SCALED = {
    "dequantize": breccia.dequantize,
    "requantize": lambda q: breccia.requantize(q, "mxfp8"),
    "matmul": lambda q: breccia.matmul(q, q.T),
    "linear": lambda q: breccia.linear(q, q),
}


@pytest.mark.parametrize("verb", OF_SCALED)
def test_deleted_parts(verb):
    jax = pytest.importorskip("jax")
    q = Q.to("jax").map(lambda part: jax.numpy.array(np.asarray(part)))
    q.scale.delete()
    with pytest.raises(ValueError, match=r"must be an array that has its memory, got one of shape \(4, 4\)"):
        OF_SCALED[verb](q)


def fake(mode):
    with mode:
        return torch.ones(4, 64)


BY_REAL_WEIGHTS = {
    "linear": lambda x, q, turned: breccia.linear(x, q),
    "matmul, left": lambda x, q, turned: breccia.matmul(x, turned),
    "matmul, right": lambda x, q, turned: breccia.matmul(turned, x),
    "a layer": lambda x, q, turned: breccia.nn.QuantizedLinear(q)(x),
    "dequantize": lambda x, q, turned: breccia.dequantize(q),
    "requantize": lambda x, q, turned: breccia.requantize(q, "mxfp8"),
    "cast": lambda x, q, turned: breccia.cast(REAL, "fp8"),
}


@pytest.mark.parametrize("inside", [True, False], ids=["in the mode", "outside of it"])
@pytest.mark.parametrize("verb", BY_REAL_WEIGHTS)
def test_fake_tensors_by_real_weights(verb, inside):
    pytest.importorskip("torch")
    mode = FakeTensorMode()
    x, q = fake(mode), Q.to("torch")
    turned = q.T
    if not inside and verb in ("dequantize", "requantize", "cast"):
        BY_REAL_WEIGHTS[verb](x, q, turned)  # nothing is fake
        return
    sentence = r"^(w|x|scaled|a|b) must be of fake tensors as the rest is, got real ones: make it under the same"
    with mode if inside else contextlib.nullcontext(), pytest.raises(TypeError, match=sentence):
        BY_REAL_WEIGHTS[verb](x, q, turned)


def test_fake_tensors_alone():
    """Layers made in the mode, or in one that takes real tensors, work as torch's own do."""
    pytest.importorskip("torch")
    with FakeTensorMode():
        layer = breccia.nn.QuantizedLinear(breccia.cast(torch.ones(32, 64), "nvfp4"), torch.ones(32))
        assert layer(torch.ones(4, 64)).shape == (4, 32)
    layer = breccia.nn.QuantizedLinear(breccia.cast(torch.ones(32, 64), "nvfp4"))
    assert layer(fake(FakeTensorMode(allow_non_fake_inputs=True))).shape == (4, 32)
    mode = FakeTensorMode()
    with pytest.raises(TypeError, match="must be of fake tensors"):
        layer(mode.from_tensor(torch.ones(4, 64)))


@pytest.mark.parametrize("given", [True, "lm_head", 5, [1], {"lm_head": True}])
def test_ignored_modules_are_a_list_of_names(given):
    pytest.importorskip("torch")
    from breccia._serving.models import BrecciaConfig
    from breccia._serving.modules import Modules

    said = {"recipe": breccia.NVFP4BlockScaling().to_dict(), "ignore": given}
    sentence = rf"must be a list of names, got {re.escape(repr(given))}$"
    with pytest.raises(TypeError, match=f"ignore of quantization_config {sentence}"):
        Modules.from_config(said)
    with pytest.raises(TypeError, match=f"^ignore {sentence}"):
        BrecciaConfig(ignore=given)
    with pytest.raises(TypeError, match=f"^modules_to_not_convert {sentence}"):
        BrecciaConfig(modules_to_not_convert=given)
    with pytest.raises(ValueError, match=r"modules of quantization_config must be an object of recipes, got \[1\]"):
        Modules.from_config({"recipe": said["recipe"], "modules": [1]})
