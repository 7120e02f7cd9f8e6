# SPDX-License-Identifier: Apache-2.0
"""What is given beside a tensor is looked at as `breccia.cast` looks at its tensor, in every framework."""

import breccia
import cases
import numpy as np
import pytest

W = cases.normal((64, 128))
H = (W.T @ W).astype(np.float32)
Q = breccia.cast(W, "mxfp8")


def numpy_array(x):
    return x


def torch_tensor(x):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x)


def jax_array(x):
    jax = pytest.importorskip("jax")
    if x.dtype.itemsize >= 8 and x.dtype.kind in "fc":
        with jax.enable_x64(True):
            return jax.numpy.asarray(x)
    return jax.numpy.asarray(x)


def mlx_array(x):
    mx = pytest.importorskip("mlx.core")
    if x.dtype == np.float64:
        pytest.skip("MLX has no such type on every device")
    return mx.array(x)


MAKERS = [numpy_array, torch_tensor, jax_array, mlx_array]
# Each argument: its shape, and a call with the weight (an array or codes) and the argument, in one framework.
ARGUMENTS = {
    "importance": ((128,), lambda make, given: breccia.cast(make(W), "nvfp4", importance=given)),
    "amax": ((), lambda make, given: breccia.cast(make(W), "fp8", amax=given)),
    "amax of rows": ((64, 1), lambda make, given: breccia.cast(make(W), "fp8-row", amax=given)),
    "bias": ((64,), lambda make, given: breccia.linear(make(W), _codes(make), given)),
    "bias in training": ((64,), lambda make, given: breccia.autograd.linear(make(W), make(W), given)),
    "moments": ((128, 128), lambda make, given: breccia.gptq(make(W), given, "nvfp4")),
    "moments, diagonal": ((128,), lambda make, given: breccia.gptq(make(W), given, "nvfp4")),
    "w of gptq": ((64, 128), lambda make, given: breccia.gptq(given, H, "nvfp4")),
    "importance of lora_init": ((128,), lambda make, given: breccia.lora_init(make(W), "nvfp4", 4, given)),
}
BAD = {
    "complex": lambda shape: np.full(shape, 5j, np.complex64),
    "beyond float32": lambda shape: np.full(shape, 1e300),
}
ALONE = {  # of NumPy and Python
    "text": lambda shape: np.full(shape, "3"),
    "objects": lambda shape: np.full(shape, None),
    "masked": lambda shape: np.ma.array(np.ones(shape, np.float32), mask=True),
}


def _codes(make):
    name = make.__name__.partition("_")[0]
    return Q if name == "numpy" else Q.to(name)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arrays_of_every_framework(argument, bad, make):
    shape, call = ARGUMENTS[argument]
    given = make(BAD[bad](shape))
    with pytest.raises((TypeError, ValueError), match=rf"\b{argument.partition(' ')[0].strip(',')}\b"):
        call(make, given)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("bad", ALONE)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arrays_of_numpy(argument, bad, make):
    """Beside a tensor of any framework."""
    shape, call = ARGUMENTS[argument]
    if (argument, make) == ("bias in training", mlx_array):
        return  # which has no such products
    with pytest.raises((TypeError, ValueError), match=rf"\b{argument.partition(' ')[0].strip(',')}\b"):
        call(make, ALONE[bad](shape))


@pytest.mark.parametrize("bad", [*BAD, *ALONE])
def test_amax_beside_a_traced_array(bad):
    jax = pytest.importorskip("jax")
    given = (BAD | ALONE)[bad]((64, 1))
    with pytest.raises((TypeError, ValueError), match=r"^amax must "):
        jax.jit(lambda x: breccia.cast(x, "fp8-row", amax=given).data)(W)


@pytest.mark.parametrize("argument", [name for name in ARGUMENTS if not name.startswith(("bias", "w"))])
def test_infinities(argument):
    shape, call = ARGUMENTS[argument]
    if argument == "importance":  # what is not finite is the mean of its column
        assert call(numpy_array, np.full(shape, np.inf, np.float32)) == call(numpy_array, np.ones(shape, np.float32))
        return
    with pytest.raises(ValueError, match="finite"):
        call(numpy_array, np.full(shape, np.inf, np.float32))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_good_ones_are_taken(argument, dtype, make):
    shape, call = ARGUMENTS[argument]
    given = np.eye(128) * 3 if argument == "moments" else np.full(shape, 3)
    if argument in ("w of gptq", "moments", "moments, diagonal") and dtype == "int32":
        return  # which are floats
    if (argument, make) == ("bias in training", mlx_array):
        return  # which has no such products
    call(make, make(given.astype(dtype)))
