# SPDX-License-Identifier: Apache-2.0
"""breccia.nn.functional on a CPU: the bytes of a cast of torch's values, on any device, traced or not."""

import re

import breccia
import cases
import pytest

torch = pytest.importorskip("torch")
from breccia.nn import QuantizedLinear, functional  # noqa: E402

F = torch.nn.functional


def same(made, expected):
    for name in ("data", "scale", "zero_point", "global_scale"):
        ours, theirs = getattr(made, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))


@cases.ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_those_of_a_cast(recipe, dtype):
    width = 2 * max(32, cases.block_width(recipe))
    x, r = (torch.from_numpy(cases.normal((3, 4, width), seed)).to(dtype) for seed in (1, 2))
    weight = torch.from_numpy(cases.normal((width,), 3)).to(dtype)
    same(functional.silu_mul(x, r, recipe), breccia.cast(F.silu(x) * r, recipe))
    same(functional.rms_norm(x, weight, recipe, 1e-5), breccia.cast(F.rms_norm(x, (width,), weight, 1e-5), recipe))
    scaled, total = functional.rms_norm(x, weight, recipe, residual=r)
    assert torch.equal(total, x + r)
    same(scaled, breccia.cast(F.rms_norm(x + r, (width,), weight, 1e-6), recipe))


def test_one_cast_serves_several_layers_and_compiles():
    torch._dynamo.reset()
    x = torch.from_numpy(cases.normal((5, 128)))
    weight = torch.ones(128)
    layers = [QuantizedLinear(breccia.cast(torch.from_numpy(cases.normal((n, 128), n)), "mxfp8"),
                              torch.ones(n)) for n in (64, 32)]  # fmt: skip

    def block(x):
        q = functional.rms_norm(x, weight, "mxfp8")
        return [layer(q) for layer in layers]

    q = breccia.cast(F.rms_norm(x, (128,), weight, 1e-6), "mxfp8")
    for made, layer in zip(block(x), layers, strict=True):
        assert torch.equal(made, breccia.linear(q, layer.weight, layer.bias, torch.float32))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    for made, again in zip(block(x), compiled, strict=True):
        assert torch.equal(made, again)


def test_a_layer_gives_the_dtype_of_what_was_quantized():
    layer = QuantizedLinear(breccia.cast(torch.ones(8, 32), "mxfp8"))
    q = breccia.cast(torch.ones(2, 32, dtype=torch.bfloat16), "mxfp8")
    assert layer(q).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=re.escape("x must be (..., 32) for w of shape (8, 32), got shape (2, 64)")):
        layer(breccia.cast(torch.ones(2, 64), "mxfp8"))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: functional.silu_mul([1.0], x, "fp8"), TypeError,
         "gate must be a float32, float64, float16 or bfloat16 tensor, got list"),
        (lambda x: functional.silu_mul(x.int(), x, "fp8"), TypeError,
         "gate must be a float32, float64, float16 or bfloat16 tensor, got torch.int32"),
        (lambda x: functional.silu_mul(x, x.half(), "fp8"), TypeError,
         "up must have the dtype of gate, torch.float32, got torch.float16"),
        (lambda x: functional.silu_mul(x, x[:1], "fp8"), ValueError,
         "up must have the shape of gate, (2, 32), got (1, 32)"),
        (lambda x: functional.silu_mul(x, x, breccia.Float8BlockScaling()), ValueError, "128"),
        (lambda x: functional.rms_norm(x, x[0, :31], "fp8"), ValueError,
         "weight must be (32,) for x of shape (2, 32), got shape (31,)"),
        (lambda x: functional.rms_norm(x, x[0].half(), "fp8"), TypeError,
         "weight must have the dtype of x, torch.float32, got torch.float16"),
        (lambda x: functional.rms_norm(x, x[0], "fp8", residual=x[0]), ValueError,
         "residual must have the shape of x, (2, 32), got (32,)"),
        (lambda x: functional.rms_norm(x, x[0], "fpp8"), ValueError, "fpp8"),
        (lambda x: functional.silu_mul(x, x.to("meta"), "fp8"), ValueError,
         "up must be on the device of gate, cpu, got meta"),
        (lambda x: functional.rms_norm(x, x[0].to("meta"), "fp8"), ValueError,
         "weight must be on the device of x, cpu, got meta"),
    ],
)  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(torch.ones(2, 32))
