# SPDX-License-Identifier: Apache-2.0
"""Saved activations as codes."""

import contextlib
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import breccia  # noqa: E402
from breccia.verbs import saved_activations  # noqa: E402


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 256)
    )


def gradients(net, x, *around):
    net.zero_grad()
    with contextlib.ExitStack() as stack:
        for context in around:
            stack.enter_context(context)
        loss = net(x).square().mean()
    loss.backward()
    return loss.item(), [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("recipe", ["fp8-row-block", "mxfp8", "fp8", "nvfp4"])
def test_gradients_are_those_of_the_values_that_codes_stand_for(recipe):
    net, x = torch.nn.Linear(256, 64), torch.randn(32, 256)
    with breccia.checkpoint_activations(recipe):
        net(x).sum().backward()
    assert torch.equal(net.weight.grad, torch.ones(32, 64).t() @ breccia.dequantize(breccia.cast(x, recipe)))


def test_the_loss_is_the_same_and_gradients_are_near():
    net, x = model(), torch.randn(64, 256)
    loss, wanted = gradients(net, x)
    found_loss, found = gradients(net, x, breccia.checkpoint_activations())
    assert found_loss == loss
    for a, b in zip(found, wanted, strict=True):
        assert 0 <= float((a - b).norm() / b.norm()) < 0.05
    assert not all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_is_kept_is_smaller_and_parameters_are_left_alone(monkeypatch):
    packed = []
    pack = saved_activations._Packed

    class Seen(pack):
        def __init__(self, x, recipe):
            packed.append(tuple(x.shape))
            super().__init__(x, recipe)

    monkeypatch.setattr(saved_activations, "_Packed", Seen)
    net = model()
    heads = [torch.nn.Linear(256, 256, bias=False) for _ in range(3)]
    x = torch.randn(64, 256)
    mask = torch.rand(64, 256) > 0.5
    with breccia.checkpoint_activations():
        y = net(sum(head(x) for head in heads)) * mask
    assert packed.count((64, 256)) == 2  # x once for three layers, what goes into the model; no weight, no mask
    assert set(packed) <= {(64, 256), (64, 512)}
    y.sum().backward()
    with breccia.checkpoint_activations(smallest=10**6):
        before = len(packed)
        net(x).sum().backward()
    assert len(packed) == before


def test_a_tensor_that_changed_or_has_gone_is_quantized_again():
    hooks = breccia.checkpoint_activations("mxfp8", smallest=1)
    x = torch.randn(4, 64)
    first = hooks.pack_hook(x)
    assert hooks.pack_hook(x) is first
    x.mul_(2)
    second = hooks.pack_hook(x)
    assert second is not first and torch.equal(hooks.unpack_hook(second), 2 * hooks.unpack_hook(first))
    for _ in range(20):  # memory of one that has gone is given out again
        x = torch.full((4, 64), float(torch.rand(())))
        kept = hooks.pack_hook(x)
        assert torch.allclose(hooks.unpack_hook(kept), x, rtol=0.07)
        del x
        gc.collect()


def test_dtypes_and_shapes_come_back():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 3, 40, 96).to(dtype).transpose(1, 2)
        hooks = breccia.checkpoint_activations("fp8", smallest=1)
        found = hooks.unpack_hook(hooks.pack_hook(x))
        assert found.dtype == dtype and found.shape == x.shape
        assert torch.allclose(found.float(), x.float(), rtol=0.07, atol=0.02)
    for recipe in ("mxfp8", "fp8-row-block", "nvfp4", "fp8-block"):  # rows that are no multiple of a block
        hooks = breccia.checkpoint_activations(recipe, smallest=1)
        x = torch.randn(5, 3, 33)
        found = hooks.unpack_hook(hooks.pack_hook(x))
        assert found.shape == x.shape and float((found - x).norm() / x.norm()) < 0.15
    integers = torch.arange(5000).reshape(50, 100)
    assert hooks.pack_hook(integers) is integers


def test_views_of_one_memory_in_two_dtypes_are_two_tensors():
    x = torch.randn(64, 128).half()
    views = x, x.view(torch.bfloat16)
    hooks = breccia.checkpoint_activations("mxfp8", smallest=1)
    kept = [hooks.pack_hook(view) for view in views]
    for view, one in zip(views, kept, strict=True):
        found = hooks.unpack_hook(one)
        assert found.dtype == view.dtype and torch.equal(found, breccia.cast(view, "mxfp8").dequantize(view.dtype))


def test_a_view_of_a_conjugate_has_the_other_sign():
    z = torch.complex(torch.randn(32, 64), torch.randn(32, 64))
    hooks = breccia.checkpoint_activations("mxfp8", smallest=1)
    first, second = (hooks.pack_hook(view) for view in (z.imag, z.conj().imag))
    assert torch.equal(hooks.unpack_hook(second), -hooks.unpack_hook(first))


@pytest.mark.parametrize("shape", [(2, 0), (0, 64), (3, 0, 5)])
def test_tensors_without_elements_are_kept_as_they_are(shape):
    x = torch.zeros(shape)
    hooks = breccia.checkpoint_activations("mxfp8", smallest=0)
    assert hooks.pack_hook(x) is x


def test_arguments_must_be_what_they_are_for():
    with pytest.raises(ValueError, match="recipe"):
        breccia.checkpoint_activations("fp9")
    for wrong in ("4k", 4096.0, True):
        with pytest.raises(TypeError, match=f"smallest must be an integer, got {wrong!r}"):
            breccia.checkpoint_activations(smallest=wrong)
    breccia.checkpoint_activations(smallest=np.int64(4096))
