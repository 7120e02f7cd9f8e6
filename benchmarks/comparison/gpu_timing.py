# SPDX-License-Identifier: Apache-2.0
"""Timing on a GPU, errors, and the rows that compare_gpu.py collects."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

Fn = Callable[[], Any]
FP8 = torch.float8_e4m3fn
ROWS: list[dict[str, Any]] = []


def replay_time(functions: list[Fn], calls: int, repeats: int = 7) -> float:
    """Median microseconds per call, over replays of a graph of `calls` calls that take the functions in turn."""
    for f in functions:
        f()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        functions[0]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                functions[i % len(functions)]()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def call_time(f: Fn) -> float:
    """Median microseconds of a call that a CUDA graph cannot hold."""
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def in_turn(contestants: list[list[Fn]], calls: int, rounds: int = 3) -> list[list[float]]:
    """Microseconds of each contestant, a list for every round: a slow spell of the machine meets all."""
    return [[replay_time(functions, calls, 3) for functions in contestants] for _ in range(rounds)]


def alternate(ours: list[Fn], peer: list[Fn], calls: int, rounds: int = 3) -> tuple[float, float, float]:
    """(ours, peer, ratio): medians over alternating measurements."""
    pairs = in_turn([peer, ours], calls, rounds)
    return (
        statistics.median(o for _, o in pairs),
        statistics.median(p for p, _ in pairs),
        statistics.median(p / o for p, o in pairs),
    )


def error(y: torch.Tensor, ref: torch.Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def note(group: str, name: str, **values: Any) -> None:
    row = {
        "group": group,
        "name": name,
        **{k: (float(f"{v:.4g}") if isinstance(v, float) else v) for k, v in values.items()},
    }
    ROWS.append(row)
    print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
