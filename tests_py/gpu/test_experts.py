# SPDX-License-Identifier: Apache-2.0
"""What a layer of experts does between its products, by kernels, against its whole-array forms."""

from __future__ import annotations

from typing import Any

import breccia
import pytest
import torch
from breccia.frameworks.torch import launches
from breccia.kernels.triton import experts as kernels
from breccia.kernels.triton.products import experts_gradient as gradients
from breccia.nn import ScaledExperts, expert_products

ROWS = expert_products.ROWS
INTERPRETED = pytest.mark.interpreted


def codes(rows: int, columns: int, seed: int = 0) -> breccia.ScaledTensor:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(-torch.randint(0, 9, (rows, 1), generator=draw))
    return breccia.cast(torch.randn(rows, columns, generator=draw) * sizes, ROWS)


def as_bytes(q: breccia.ScaledTensor, device: str) -> list[torch.Tensor]:
    return [part.view(torch.uint8).to(device) for part in (q.data, q.scale)]


def same(made: list[torch.Tensor], q: breccia.ScaledTensor) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(made, as_bytes(q, "cpu"), strict=True))


@INTERPRETED
def test_permute(device: str) -> None:
    q = codes(50, 1280)
    source = torch.randint(-1, 50, (128,), dtype=torch.int32)
    made = kernels.permute(*as_bytes(q, device), source.to(device))
    assert same(made, expert_products.permute(q, source))
    assert made[1].stride() == (1, 128)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_swiglu_and_its_gradient(dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(37, n, generator=draw).to(dtype) for n in (768, 384))
    weights = torch.rand(37, generator=draw)
    weights[3] = 0
    x[5] = 0
    moved = [part.to(device) for part in (x, weights, grad)]
    h = expert_products.swiglu(x, weights)
    made = kernels.swiglu(*moved[:2], ROWS)
    of_x, again, of_weights = expert_products.swiglu_gradient(x, weights, grad)
    parts = kernels.swiglu_gradient(*moved, ROWS)
    d_made, again_made, d_weights = parts[:2], parts[2:4], parts[4].sum(0)
    assert same(again_made, again) or device != "cpu"
    for parts, q in ((made, h), (again_made, h), (d_made, of_x)):
        values = [breccia.dequantize(expert_products._tensor_of([p.cpu() for p in parts], "float32"))]
        values.append(breccia.dequantize(q))
        # exp may differ in its last bit: a code may, and a scale where an amax is at the edge of two.
        assert torch.isclose(values[0], values[1], rtol=0.07, atol=1e-30).all()
        assert (values[0] == values[1]).float().mean() > 0.999
    assert all(torch.equal(a, b) for a, b in zip(made, again_made, strict=True))
    torch.testing.assert_close(d_weights.cpu(), of_weights, rtol=1e-4, atol=1e-4)


@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("choices", [1, 3])
def test_combine(dtype: torch.dtype, choices: int, device: str) -> None:
    y = torch.randn(64, 1100).to(dtype)
    place = torch.randint(-1, 64, (9, choices), dtype=torch.int32)
    made = kernels.combine(y.to(device), place.to(device))
    torch.testing.assert_close(made.cpu(), expert_products.combine(y, place))


@INTERPRETED
def test_turn_stack(device: str) -> None:
    x = torch.randint(0, 255, (3, 130, 260), dtype=torch.uint8)
    assert torch.equal(kernels.turn_stack(x.to(device)).cpu(), x.transpose(1, 2))


@INTERPRETED
def test_gradient_of_weights(device: str) -> None:
    """Experts with rows and without, and columns beside the last tile."""
    offsets = torch.tensor([0, 128, 128, 384], dtype=torch.int32)
    squares = expert_products.SQUARES
    a, b = (breccia.cast(torch.randn(n, 512), squares) for n in (256, 128))
    made = gradients.experts_gradient(
        *(as_bytes(q, device)[0] for q in (a, b)),
        *(as_bytes(q, device)[1] for q in (a, b)),
        offsets.to(device),
        torch.float32,
    )
    left, right = breccia.dequantize(a).double(), breccia.dequantize(b).double()
    for e in range(3):
        rows = slice(int(offsets[e]), int(offsets[e + 1]))
        exact = left[:, rows] @ right[:, rows].T
        assert (made[e].cpu() - exact).norm() <= 1.5e-3 * exact.norm()


def test_powers_of_two_multiply_as_floats_do(device: str) -> None:
    """E8M0 scales and the floats they stand for take one path, to the same bytes."""
    x, w = torch.randn(300, 512, device=device), torch.randn(3, 256, 512, device=device)
    offsets = torch.tensor([0, 100, 130, 290], dtype=torch.int32, device=device)
    coded = [breccia.cast(x, ROWS), breccia.cast(w, expert_products.SQUARES)]
    floats = [
        breccia.from_buffer(q.data, q.scale.float(), recipe, recipe.layout)
        for q, recipe in zip(
            coded, (breccia.Float8BlockScaling(), breccia.Float8BlockScaling(block_m=128)), strict=True
        )
    ]
    made = [breccia.grouped_matmul(*pair, offsets, torch.bfloat16) for pair in (coded, floats)]
    assert torch.equal(*made)


def layer(dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    made = ScaledExperts(8, 512, 384, dtype=dtype)
    index = torch.stack([torch.randperm(9)[:3] for _ in range(700)])
    return made, [torch.randn(700, 512, dtype=dtype), index, torch.rand(700, 3), torch.randn(700, 512, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_layer_is_that_of_a_cpu(dtype: torch.dtype, device: str) -> None:
    """Codes of the two differ where SwiGLU's exp does; products within their bounds."""
    made, (x, index, weights, grad) = layer(dtype)
    results = []
    for where in ("cpu", device):
        here = made.to(where)
        here.zero_grad()
        given = [t.detach().to(where).requires_grad_(t.is_floating_point()) for t in (x, index, weights)]
        y = here(*given)
        y.backward(grad.to(where))
        found = [y, given[0].grad, given[2].grad, here.gate_up_proj.grad, here.down_proj.grad]
        results.append([t.detach().double().cpu() for t in found])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_it_does_not_synchronize(device: str) -> None:
    made, (x, index, weights, grad) = layer(torch.bfloat16)
    made = made.to(device)
    x, index, weights, grad = (t.to(device) for t in (x, index, weights, grad))
    x.requires_grad_()
    made(x, index, weights).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made(x, index, weights).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(made: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients."""
    x, index, weights, grad = given
    x, weights = (t.detach().requires_grad_() for t in (x, weights))
    made.zero_grad()
    y = made(x, index, weights)
    y.backward(grad)
    return [y.detach(), x.grad, weights.grad, *(p.grad.clone() for p in made.parameters())]


@INTERPRETED
def test_a_step_launches_each_kernel_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a CPU's tensors stand for a GPU's, and calls run in full."""
    torch.manual_seed(0)
    made = ScaledExperts(2, 128, 128, device=device)
    index = torch.tensor([[0, 1], [1, 2], [0, -1], [1, 0]], device=device)
    given = [torch.randn(4, 128), index, torch.rand(4, 2), torch.randn(4, 128)]
    given = [t.to(device) for t in given]
    asked, plain = [], launches.repeated
    wanted = step(made, given)

    def repeated(what: Any, operands: Any, call: Any) -> Any:
        asked.append(what[0])
        return call() if device == "cpu" else plain(what, operands, call)

    monkeypatch.setattr(launches, "repeated", repeated)
    if device == "cpu":
        monkeypatch.setattr(
            expert_products, "_repeated", lambda what, operands, call: repeated((what,), operands, call)
        )
        monkeypatch.setattr(expert_products, "_kernels", lambda x: kernels)
    found = step(made, given)
    forward = ["permute", "swiglu", "combine"]
    backward = ["permute", "turn stack", "swiglu gradient", "turn stack", "combine", *["turn rows"] * 4]
    assert asked == [*forward, *backward]
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_steps_have_plans(device: str) -> None:
    """Steps after the first two give what a step in full gives, to the byte."""
    made, given = layer(torch.bfloat16)
    made, given = made.to(device), [t.to(device) for t in given]
    launches._plans.clear()
    launches.refusals.clear()
    for seed in range(4):
        torch.manual_seed(seed)
        given[0].normal_()
        given[3].normal_()
        found = step(made, given)
        run, again = launches._run, launches.grouped_again
        launches._run, launches.grouped_again = lambda key, operands, call: call(), lambda *operands: None
        try:
            wanted = step(made, given)
        finally:
            launches._run, launches.grouped_again = run, again
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    names = {"permute", "swiglu", "swiglu gradient", "combine", "turn stack", "turn rows"}
    planned = {key[1] for key, plan in launches._plans.items() if key[0] == "operator" and not isinstance(plan, int)}
    assert names <= planned, launches.refusals
