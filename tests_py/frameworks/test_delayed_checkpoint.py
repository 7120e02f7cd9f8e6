# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling beside torch.utils.checkpoint: what is computed again is no step."""

import breccia
import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402


def trained(way):
    torch.manual_seed(0)
    layer = breccia.nn.ScaledLinear(64, 32, recipes=breccia.autograd.LinearRecipes.delayed(4))
    for step in range(6):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)) * (1 + 30 * (step == 4))
        x.requires_grad_()
        y = layer(x) if way is None else checkpoint(layer, x, use_reentrant=way)
        layer.zero_grad()
        y.square().mean().backward()
    return [x.grad, layer.weight.grad, *layer.buffers()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_and_histories_are_those_without_it(reentrant):
    for wanted, found in zip(trained(None), trained(reentrant), strict=True):
        assert torch.equal(wanted, found)


def test_weights_loaded_into_a_warm_layer_have_a_history_of_their_own():
    layer = breccia.nn.ScaledLinear(64, 32, bias=False, recipes=breccia.autograd.LinearRecipes.delayed(4))
    for _ in range(3):
        layer(torch.randn(8, 64)).sum().backward()
    layer.load_state_dict({"weight": 1000 * torch.randn(32, 64)}, strict=False)
    x = torch.randn(8, 64)
    y, wanted = layer(x), torch.nn.functional.linear(x, layer.weight)
    assert (y - wanted).norm() / wanted.norm() < 0.1
