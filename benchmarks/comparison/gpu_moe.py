# SPDX-License-Identifier: Apache-2.0
"""A layer of experts, forward and backward: `breccia.nn.ScaledExperts` against the same layer of bfloat16 products by
`torch._grouped_mm`, whose SwiGLU is compiled. Eager, as training calls them; milliseconds, and bytes of activations
that wait for the backward pass. Weights are quantized in every call, and their gradients made.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from breccia.nn import ScaledExperts

from .gpu_timing import error, note

SHAPES = [(16, 2), (16, 8), (32, 8), (64, 8)]  # experts, choices of a token
TOKENS, HIDDEN, INTERMEDIATE = 8192, 4096, 2048


@torch.compile
def swiglu(x: Any, weights: Any) -> Any:
    gate, up = x.float().chunk(2, -1)
    return (weights[:, None] * torch.nn.functional.silu(gate) * up).to(x.dtype)


def bf16_layer(x: Any, index: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """The same, rows in the order of their experts."""
    experts, choices = gate_up.shape[0], index.shape[1]
    flat = index.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0).int()
    token = order // choices
    inner = torch._grouped_mm(x[token], gate_up.transpose(1, 2), offs=ends)
    h = swiglu(inner, weights.reshape(-1)[order])
    y = torch._grouped_mm(h, down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=x.device)
    return y[place].unflatten(0, index.shape).sum(1)


def saved(call: Any) -> int:
    """Bytes of what a forward pass keeps, each memory once, but for weights and their codes, which have three axes."""
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        if tensor.ndim < 3:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(kept.values())


def milliseconds(call: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def moe(shapes: list[tuple[int, int]] = SHAPES, repeats: int = 5, rounds: int = 3) -> None:
    for experts, choices in shapes:
        torch.manual_seed(0)
        compare(experts, choices, repeats, rounds)
        torch.cuda.empty_cache()


def compare(experts: int, choices: int, repeats: int, rounds: int) -> None:
    layer, x, index, weights, grad = drawn(experts, choices)
    leaves = [x, weights, *layer.parameters()]
    calls = (lambda: layer(x, index, weights), lambda: bf16_layer(x, index, weights, *layer.parameters()))

    def both_ways(call: Any) -> Any:
        return torch.autograd.grad(call(), leaves, grad)

    found = [[call().detach(), *both_ways(call)] for call in calls]
    errors = [error(a, b.float()) for a, b in zip(*found, strict=True)]
    del found
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for i, call in enumerate(calls):
            both_ways(call)
            times[i].append(milliseconds(lambda call=call: both_ways(call), repeats))
    forward = [milliseconds(call, repeats) for call in calls]
    ms, bf16 = (statistics.median(of) for of in times)
    kept = [saved(call) for call in calls]
    note("moe", f"{experts} experts, {choices} of a token", ms=ms, bf16_ms=bf16, ratio=bf16 / ms,
         forward_ms=forward[0], forward_bf16_ms=forward[1], saved_mb=kept[0] / 1e6, saved_bf16_mb=kept[1] / 1e6,
         saved_ratio=kept[0] / kept[1], from_bf16=max(errors))  # fmt: skip


def drawn(experts: int, choices: int) -> tuple[Any, ...]:
    """A layer, and what it takes: tokens, choices, what these count, and a gradient."""
    layer = ScaledExperts(experts, HIDDEN, INTERMEDIATE, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    score, index = torch.rand(TOKENS, experts, device="cuda").topk(choices)
    return layer, x, index, score.softmax(-1).requires_grad_(), torch.randn_like(x)


def profile(experts: int = 16, choices: int = 8) -> None:
    """Where the time goes, kernel by kernel."""
    layer, x, index, weights, grad = drawn(experts, choices)
    for call in (layer, lambda *given: bf16_layer(*given, *layer.parameters())):
        call(x, index, weights).backward(grad)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            call(x, index, weights).backward(grad)
            torch.cuda.synchronize()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=60))
