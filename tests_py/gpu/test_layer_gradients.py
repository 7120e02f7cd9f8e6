# SPDX-License-Identifier: Apache-2.0
"""Gradients of layers of codes: a backward pass decodes a weight once, by a plan, and torch multiplies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import breccia
import cases
import pytest
import torch
from breccia.frameworks.torch import direct, launches
from breccia.kernels import triton
from breccia.nn import QuantizedLinear
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
N, K, ROWS = 128, 256, 48
# A product of two sums in bf16 or float32, after W is rounded once and before the result is.
CLOSE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of plans but for casts, by their verbs. In the interpreter a CPU's tensors stand for a GPU's, and
    each call runs in full."""
    verbs: list[str] = []
    run = launches._run

    def noted(key: Any, operands: Any, call: Any) -> Any:
        if key[0] != "cast":
            verbs.append(key[0])
        return call() if INTERPRETED else run(key, operands, call)

    def product(x: Any, w: Any, kind: Any, precision: str) -> Any:
        return launches._run(("linear",), [], lambda: [triton.matmul(x, w.mT, kind).contiguous()])[0]

    monkeypatch.setattr(launches, "_run", noted)
    if INTERPRETED:
        monkeypatch.setattr(launches, "quiet", lambda tensor: type(tensor) in direct.EXACT_TYPES)
        monkeypatch.setattr(direct, "is_plain", lambda *tensors: False)
        monkeypatch.setattr(direct, "may_differentiate", lambda x, w: True)
        monkeypatch.setattr(direct, "linear", product)
        monkeypatch.setattr(direct, "by_weight", launches.by_weight)
    return verbs


def weight(recipe: Any, device: str) -> Any:
    return breccia.cast(torch.from_numpy(cases.normal((N, K), 1, 0.05)).to(device), recipe)


def inputs(*shape: int, dtype: Any, device: str, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(cases.normal(shape, seed)).to(device, dtype)


def gradient(layer: Any, x: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x), x, sent)[0]


def wanted(layer: Any, sent: torch.Tensor) -> torch.Tensor:
    return sent.double() @ breccia.dequantize(layer.weight, torch.float32).double()


def check(found: torch.Tensor, exact: torch.Tensor, dtype: Any) -> None:
    assert found.dtype == dtype
    assert float((found.double() - exact).norm() / exact.norm()) < CLOSE[dtype]


@pytest.mark.interpreted
@cases.ALL
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_gradient_is_that_of_the_values(recipe: Any, dtype: Any, device: str, ran: list[str]) -> None:
    layer = QuantizedLinear(weight(recipe, device))
    for lead in ((ROWS,), (2, 3)):
        x, sent = (inputs(*lead, side, dtype=dtype, device=device) for side in (K, N))
        check(gradient(layer, x, sent), wanted(layer, sent), dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "int4:32", "fp8", "mxfp8"])
def test_a_pass_is_one_product_and_one_decode(recipe: str, device: str, ran: list[str]) -> None:
    layer = QuantizedLinear(weight(recipe, device), gradients="bf16")
    x, sent = (inputs(ROWS, side, dtype=BF16, device=device) for side in (K, N))
    y = layer(x.requires_grad_())
    assert ran == ["linear"]
    found = torch.autograd.grad(y, x, sent)[0]
    assert ran == ["linear", "dequantize"]
    check(found, wanted(layer, sent), BF16)


@pytest.mark.interpreted
def test_gradients_that_torch_does_not_multiply(device: str, ran: list[str]) -> None:
    """float32 keeps the weight's values as they are, and codes multiply codes."""
    layer = QuantizedLinear(weight("nvfp4", device))
    x, sent = (inputs(ROWS, side, dtype=torch.float32, device=device) for side in (K, N))
    found = gradient(layer, x, sent)
    assert ran[-1] == "by weight"
    check(found, wanted(layer, sent), torch.float32)
    layer = QuantizedLinear(weight("fp8", device), None, "fp8", gradients="fp8:e5m2")
    x, sent = (inputs(ROWS, side, dtype=BF16, device=device) for side in (K, N))
    rounded = breccia.dequantize(breccia.cast(sent, "fp8:e5m2"), torch.float32)
    found = gradient(layer, x, sent)
    assert ran[-1] == "by weight"
    check(found, wanted(layer, rounded), BF16)


@pytest.mark.interpreted
def test_gradients_come_with_any_strides(device: str, ran: list[str]) -> None:
    layer = QuantizedLinear(weight("nvfp4", device))
    x = inputs(ROWS, K, dtype=BF16, device=device)
    whole = inputs(N, ROWS, dtype=BF16, device=device)
    one = torch.ones((), dtype=BF16, device=device)
    for sent in (whole.T, one.expand(ROWS, N)):
        check(gradient(layer, x, sent), wanted(layer, sent), BF16)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_an_output_of_any_shape_is_written_into(dtype: Any, device: str, ran: list[str]) -> None:
    """Also where the product was made of rows, and its shape is a view."""
    layer = QuantizedLinear(weight("nvfp4", device))
    x, sent = (inputs(2, 3, side, dtype=dtype, device=device) for side in (K, N))
    check(gradient(lambda v: layer(v).mul_(2), x, sent), 2 * wanted(layer, sent), dtype)


@pytest.mark.interpreted
def test_autocast_leaves_a_product_its_dtype(device: str, ran: list[str]) -> None:
    w, sent = weight("nvfp4", device), inputs(ROWS, N, dtype=BF16, device=device)
    with torch.autocast(torch.device(device).type, torch.float16):
        made = launches.by_values(sent, w, BF16)
    assert made is not None
    assert made.dtype == BF16


@pytest.mark.interpreted
def test_forms_met_at_once_have_numbers_of_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in threads of two passes: a number that two forms share would give one the other's plans."""
    one, other = weight("nvfp4", device), weight("mxfp8", device)

    class Shared(dict[Any, int]):
        def setdefault(self, key: Any, number: int) -> int:  # type: ignore[override]
            if not self and "_torch_form" not in other.__dict__:
                other.__dict__["_torch_form"] = None
                launches.form_number(other)
            return super().setdefault(key, number)

    monkeypatch.setattr(launches, "_forms", Shared())
    assert launches.form_number(one) != other.__dict__["_torch_form"]


# --- on a GPU alone -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_plans() -> Iterator[None]:
    for known in (launches._plans, launches.refusals):
        known.clear()
    yield
    launches._plans.clear()


@pytest.mark.parametrize("rows", [16, 2048])
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "int4:32"])
def test_passes_have_plans(recipe: str, rows: int, no_plans: None) -> None:
    """And repeat them with other values, as a step after the first does."""
    layer = QuantizedLinear(weight(recipe, "cuda"))
    for seed in range(4):
        x, sent = (inputs(rows, side, dtype=BF16, device="cuda", seed=seed) for side in (K, N))
        check(gradient(layer, x, sent), wanted(layer, sent), BF16)
    kinds = {key[0]: plan for key, plan in launches._plans.items()}
    assert not isinstance(kinds["linear"], int), launches.refusals
    assert not isinstance(kinds["dequantize"], int), launches.refusals


@pytest.mark.parametrize("options", [{}, {"gradients": "bf16"}, {"activations": "fp8-row", "gradients": "fp8:e5m2"}])
def test_compiled_passes_are_the_eager_ones(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = QuantizedLinear(weight("fp8-row" if "activations" in options else "nvfp4", "cuda"), **options)
    compiled = torch.compile(layer, fullgraph=True)
    for seed in range(3):
        x, sent = (inputs(ROWS, side, dtype=BF16, device="cuda", seed=seed) for side in (K, N))
        torch.testing.assert_close(gradient(compiled, x, sent), gradient(layer, x, sent), rtol=0, atol=0)


def test_streams_checkpoints_and_autocast() -> None:
    layer = QuantizedLinear(weight("nvfp4", "cuda"))
    x, sent = (inputs(ROWS, side, dtype=BF16, device="cuda") for side in (K, N))
    first = gradient(layer, x, sent)
    for reentrant in (False, True):
        leaf = x.clone().requires_grad_()
        checkpoint(layer, leaf, use_reentrant=reentrant).backward(sent)
        assert torch.equal(leaf.grad, first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = gradient(layer, x, sent)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(other, first)
    with torch.autocast("cuda", BF16):
        wide = x.float().requires_grad_()
        y = layer(wide)
    (found,) = torch.autograd.grad(y, wide, sent)
    assert torch.equal(found, first.float())


def test_a_step_can_be_a_graph() -> None:
    """Values of weights lie in the graph's pool for as long as a product takes."""
    layer = QuantizedLinear(weight("nvfp4", "cuda"))
    x, sent = (inputs(ROWS, side, dtype=BF16, device="cuda") for side in (K, N))
    x.requires_grad_()
    for _ in range(3):
        torch.autograd.grad(layer(x), x, sent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = torch.autograd.grad(layer(x), x, sent)
    for seed in range(2):
        with torch.no_grad():
            sent.copy_(inputs(ROWS, N, dtype=BF16, device="cuda", seed=seed))
        graph.replay()
        check(found, wanted(layer, sent), BF16)
