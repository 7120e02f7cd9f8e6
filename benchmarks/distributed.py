# SPDX-License-Identifier: Apache-2.0
"""Quantize and gather against a gather of bf16, on the GPUs of one host:

    torchrun --nproc-per-node 2 benchmarks/distributed.py --out benchmarks/results/distributed.json

Each rank holds a part of a weight and wants the whole. "bf16" gathers it as it is; "bytes" gathers as many bytes as the
quantized part has, which is the limit; "gather" gathers a quantized part; "cast + gather" quantizes the part first, the
work of one step. "bf16 of four" and "four" do the same for four weights one after the other with ``async_op=True``, as
a model's layers are gathered: a weight travels while the next one is quantized; times are those of one weight. Eager
calls of the public functions, which take turns; a time is the median, of the slowest rank.
Without GPUs, `--quick` runs it over gloo.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import breccia
import torch
import torch.distributed as dist
from comparison import ranks

RECIPES = {
    "FP8 per tensor": "fp8",
    "FP8 1x128": breccia.Float8BlockScaling(),
    "FP8 128x128": breccia.Float8BlockScaling(block_m=128),
    "MXFP8": "mxfp8",
    "NVFP4, two levels": "nvfp4",
    "NVFP4, one level": breccia.NVFP4BlockScaling(two_level=False),
    "MXFP4": "mxfp4",
}
COLUMNS = 4096
CALLS, ROUNDS = 10, 11
WEIGHTS = 4
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of torch 2.13, and before


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds a call, of the slowest rank."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    spent = torch.tensor((time.perf_counter() - start) / CALLS * 1e6, device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def measure(name: str, recipe: Any, rows: int, device: torch.device) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x = torch.randn(rows, COLUMNS, device=device).to(torch.bfloat16)
    dealt = breccia.distributed.plan((rows * world, COLUMNS), recipe, world)
    part = breccia.distributed.cast(x, recipe, plan=dealt)
    whole = breccia.distributed.all_gather(part, plan=dealt)
    everyone = x.new_empty(rows * world, COLUMNS)
    gather(everyone, x)
    same = bool(whole == breccia.cast(everyone, recipe))
    size = -(-part.nbytes // 16) * 16  # NCCL is slower where addresses are not multiples of 16
    sent = torch.empty(size, dtype=torch.uint8, device=device)
    received = torch.empty(size * world, dtype=torch.uint8, device=device)

    def both() -> None:
        breccia.distributed.all_gather(breccia.distributed.cast(x, recipe, plan=dealt), plan=dealt)

    wholes = [torch.empty_like(everyone) for _ in range(WEIGHTS)]

    def floats_of_four() -> None:
        for work in [gather(into, x, async_op=True) for into in wholes]:
            work.wait()

    def four() -> None:
        handles = []
        for _ in range(WEIGHTS):
            scaled = breccia.distributed.cast(x, recipe, plan=dealt)
            handles.append(breccia.distributed.all_gather(scaled, plan=dealt, async_op=True))
        for handle in handles:
            handle.wait()

    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: gather(everyone, x),
        "bytes": lambda: gather(received, sent),
        "cast": lambda: breccia.distributed.cast(x, recipe, plan=dealt),
        "gather": lambda: breccia.distributed.all_gather(part, plan=dealt),
        "cast + gather": both,
        "bf16 of four": floats_of_four,
        "four": four,
    }
    times: dict[str, list[float]] = {key: [] for key in calls}
    for _ in range(ROUNDS):
        for key, call in calls.items():
            times[key].append(timed(call, device))
    weights = {"bf16 of four": WEIGHTS, "four": WEIGHTS}
    us = {key: round(statistics.median(found) / weights.get(key, 1), 1) for key, found in times.items()}
    return {
        "recipe": name,
        "mib_a_rank": x.nbytes / 2**20,
        "us": us,
        "of_bf16": round(us["cast + gather"] / us["bf16"], 3),
        "four_of_bf16": round(us["four"] / us["bf16 of four"], 3),
        "over_bytes": round(us["cast + gather"] / us["bytes"], 3),
        "same_bytes_as_one_process": same,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="small tensors: does it run at all?")
    parser.add_argument("--mib", type=int, nargs="*", default=[64, 256], help="MiB of bf16 a rank")
    options = parser.parse_args()
    device = ranks.begin(options.quick)
    rows = [256] if options.quick else [mib * 2**20 // (2 * COLUMNS) for mib in options.mib]
    results = []
    for count in rows:
        for name, recipe in RECIPES.items():
            results.append(measure(name, recipe, count, device))
            ranks.show(results[-1])
    ranks.end(options.out, device, results)


if __name__ == "__main__":
    main()
