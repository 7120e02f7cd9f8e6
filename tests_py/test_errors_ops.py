# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments to dequantize, requantize, matmul and linear."""

import breccia
import cases
import numpy as np
import pytest
from breccia import PerBlockK, cast, dequantize, from_buffer, linear, matmul, requantize

FP8 = breccia.Float8CurrentScaling()
BLOCK = breccia.Float8BlockScaling()


def u8(*shape):
    return np.zeros(shape, np.uint8)


def f32(*shape):
    return np.ones(shape, np.float32)


# --- dequantize(out=) ---------------------------------------------------------------------------------------


@pytest.fixture
def scaled():
    return cast(cases.normal((4, 128)), BLOCK)


def read_only():
    out = f32(4, 128)
    out.flags.writeable = False
    return out


BAD_OUT = {
    "read-only": (ValueError, "read-only|writ", read_only),
    "another shape": (ValueError, "shape", lambda: f32(4, 127)),
    "another rank": (ValueError, "shape", lambda: f32(512)),
    "a list": (TypeError, "out", lambda: [[0.0] * 128] * 4),
    "integers": (TypeError, "out|dtype", lambda: np.zeros((4, 128), np.int32)),
    "objects": (TypeError, "out|dtype", lambda: np.zeros((4, 128), object)),
    "complex": (TypeError, "out|dtype", lambda: np.zeros((4, 128), np.complex64)),
    "one element many times": (
        ValueError,
        "overlap|writ|read-only",
        lambda: np.broadcast_to(np.zeros((), np.float32), (4, 128)),
    ),
}


@pytest.mark.parametrize(("error", "sentence", "make"), BAD_OUT.values(), ids=BAD_OUT.keys())
def test_out_is_checked(scaled, error, sentence, make):
    with pytest.raises(error, match=sentence):
        dequantize(scaled, out=make())


def test_out_may_not_overlap_the_operand():
    memory = np.zeros(4 * 128 * 4 + 64, np.uint8)
    data = memory[7 : 7 + 512].reshape(4, 128)
    aliased = from_buffer(data, f32(4, 1), BLOCK, PerBlockK(128))
    with pytest.raises(ValueError, match="overlap"):
        dequantize(aliased, out=memory[:2048].view(np.float32).reshape(4, 128))
    scale = f32(4, 128)
    aliased = from_buffer(u8(4, 128), scale[:, :1], BLOCK, PerBlockK(128))
    with pytest.raises(ValueError, match="overlap"):
        dequantize(aliased, out=scale)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn", "nonsense", "", 5, object])
def test_dequantize_dtype(scaled, dtype):
    with pytest.raises((TypeError, ValueError), match=r"dtype|int32|complex|float8|nonsense|data type"):
        dequantize(scaled, dtype=dtype)


@pytest.mark.parametrize("call", [dequantize, lambda s: requantize(s, FP8)])
@pytest.mark.parametrize("x", [None, np.ones((2, 2), np.float32), "x", 1.0])
def test_verbs_need_a_scaled_tensor(call, x):
    with pytest.raises(TypeError, match="ScaledTensor"):
        call(x)


# --- matmul -------------------------------------------------------------------------------------------------

W = (3, 128)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 127), (128, 3)),
        ((2, 128), (127, 3)),
        ((2, 2, 128), (3, 128, 4)),
        ((128, 2), (3, 128)),
        ((2, 0), (1, 3)),
    ],
    ids=str,
)
def test_matmul_shapes(a, b):
    for left in (f32(*a), cast(f32(*a), FP8)):
        for right in (f32(*b), cast(f32(*b), FP8)):
            with pytest.raises(ValueError, match=r"matmul|shape|broadcast"):
                matmul(left, right)


def test_linear_shapes():
    w = cast(f32(3, 128), FP8)
    with pytest.raises(ValueError, match="128"):
        linear(f32(2, 64), w)


@pytest.mark.parametrize(
    "bad", [np.full((2, 2), None), np.ones((2, 2), complex), np.full((2, 2), "1"), "x", None], ids=str
)
def test_matmul_refuses_what_is_not_numbers(bad):
    floats = (
        r"must be a float32, float64, float16 or bfloat16 array \(or integers\), got dtype (object|complex128|<U1)$"
    )
    with pytest.raises(TypeError, match=f"^a {floats}"):
        matmul(bad, f32(2, 2))
    with pytest.raises(TypeError, match=f"^b {floats}"):
        matmul(cast(f32(2, 2), FP8), bad)


@pytest.mark.parametrize("dtype", ["int8", "complex64", "nonsense", object])
def test_matmul_out_dtype(dtype):
    with pytest.raises(TypeError, match=r"^out_dtype must be float32, float64, float16 or bfloat16, got ['<]"):
        matmul(cast(f32(2, 2), FP8), f32(2, 2), out_dtype=dtype)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_matmul_operands_are_matrices(shape):
    with pytest.raises(ValueError, match=r"2-D|matri|dim"):
        matmul(cast(f32(3, 3), FP8), f32(*shape))
