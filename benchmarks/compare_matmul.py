# SPDX-License-Identifier: Apache-2.0
"""matmul on the CPU against torch and NumPy, in one run on one machine:

    python benchmarks/compare_matmul.py [--rows 1,4,16,128,512] [--threads 1] [--recipes fp8,nvfp4] [--json FILE]

x (M, 4096) by weights (4096, 4096). Times are the best of many rounds in which every contestant takes its turn, so that
a slow spell of the machine falls on all. "memory" columns take weights in turn, more than the last-level cache holds.
Limits are measured too: read bandwidth of a torch sum over int64, and what the fastest torch bf16 and fp32 products
reach. torch's int8 and int4 operators take bf16 activations, as breccia does; all of breccia's products are exact or
those of float32.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import breccia
import ml_dtypes
import numpy as np
import torch

K = N = 4096
CACHE = 256 << 20
RECIPES = {
    "fp8": breccia.Float8BlockScaling(),
    "fp8-128x128": breccia.Float8BlockScaling(block_m=128),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "mxfp4": breccia.MXFP4BlockScaling(),
    "nvfp4": breccia.NVFP4BlockScaling(),
    "int4": breccia.INT4Scaling(),
    "int4-zero-point": breccia.INT4Scaling(symmetric=False, signed=False),
    "int8": breccia.INT8Scaling(),
}


def best_times(contestants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    times = dict.fromkeys(contestants, float("inf"))
    for run in contestants.values():
        run()
    end = time.perf_counter() + seconds * len(contestants)
    rounds = 0
    while time.perf_counter() < end or rounds < 3:
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            times[name] = min(times[name], (time.perf_counter() - begin) * 1e3)
        rounds += 1
    return times


def in_turn(run: Callable[[Any], Any], operands: list[Any]) -> Callable[[], Any]:
    count = 0

    def once() -> Any:
        nonlocal count
        count += 1
        return run(operands[count % len(operands)])

    return once


def read_bandwidth(size: int, seconds: float) -> float:
    """GB/s of reading `size` bytes, summed as integers."""
    x = torch.ones(size // 8, dtype=torch.int64)
    return size / best_times({"read": x.sum}, seconds)["read"] / 1e6


def torch_peers(w: np.ndarray[Any, Any], x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    full = torch.from_numpy(w)
    half, x_half = full.bfloat16(), x.bfloat16()
    peers = {
        "torch bf16": lambda: torch.nn.functional.linear(x_half, half),
        "torch fp32": lambda: torch.nn.functional.linear(x, full),
    }
    try:
        scale = (full.abs().amax(1) / 127).bfloat16()
        int8 = (full / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8)
        torch._weight_int8pack_mm(x_half, int8, scale)
        peers["torch int8"] = lambda: torch._weight_int8pack_mm(x_half, int8, scale)
    except (RuntimeError, AttributeError) as error:
        print("torch int8:", str(error).splitlines()[0])
    try:
        codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
        packed = torch._convert_weight_to_int4pack_for_cpu(codes, 2)
        scales = torch.full((K // 128, N, 2), 0.01, dtype=torch.bfloat16)
        run = lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x_half, packed, 128, scales)  # noqa: E731
        run()
        peers["torch int4 g128"] = run
    except (RuntimeError, AttributeError) as error:
        print("torch int4:", str(error).splitlines()[0])
    return peers


def compare(rows: int, names: list[str], seconds: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(rows)
    w = rng.normal(0, 0.02, (N, K)).astype(np.float32)
    x = rng.standard_normal((rows, K)).astype(np.float32)
    x_half, x_codes = x.astype(ml_dtypes.bfloat16), breccia.cast(x, breccia.Float8BlockScaling())
    runs = torch_peers(w, torch.from_numpy(x))
    runs["numpy fp32"] = lambda: x @ w.T
    bytes_of = {}
    for name in names:
        q = breccia.cast(w, RECIPES[name])
        prepared = breccia.prepare(q)
        bytes_of[name] = q.nbytes
        runs[f"{name} bf16"] = lambda q=q: breccia.linear(x_half, q)
        runs[f"{name} bf16 prepared"] = lambda q=prepared: breccia.linear(x_half, q)
        runs[f"{name} fp32"] = lambda q=q: breccia.linear(x, q)
        if rows > 8:
            runs[f"{name} fp8"] = lambda q=q: breccia.linear(x_codes, q)
        if rows <= 4:
            many = [breccia.cast(w, RECIPES[name]) for _ in range(CACHE // q.nbytes + 1)]
            runs[f"{name} bf16 memory"] = in_turn(lambda q: breccia.linear(x_half, q), many)
    times = best_times(runs, seconds)
    results = []
    for name, ms in times.items():
        recipe = name.split()[0]
        result = {"rows": rows, "name": name, "ms": ms, "gflops": 2 * rows * N * K / ms / 1e6}
        result["torch_bf16"] = times["torch bf16"] / ms
        result["torch_fp32"] = times["torch fp32"] / ms
        if recipe in bytes_of:
            result["gb_per_s"] = bytes_of[recipe] / ms / 1e6
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,4,16,128,512")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per contestant and number of rows")
    parser.add_argument("--json")
    args = parser.parse_args()
    breccia.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    limits = {
        "read cache GB/s": read_bandwidth(8 << 20, args.seconds),
        "read memory GB/s": read_bandwidth(CACHE, args.seconds),
    }
    print(breccia.cpu_info(), {key: round(value, 1) for key, value in limits.items()})
    results = []
    for rows in map(int, args.rows.split(",")):
        found = compare(rows, args.recipes.split(","), args.seconds)
        results += found
        print(f"\nM = {rows}\n{'':32}{'ms':>9}{'GFLOP/s':>9}{'GB/s':>7}{'/bf16':>7}{'/fp32':>7}")
        for r in found:
            print(
                f"{r['name']:32}{r['ms']:9.3f}{r['gflops']:9.0f}{r.get('gb_per_s', 0):7.1f}"
                f"{r['torch_bf16']:7.2f}{r['torch_fp32']:7.2f}"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"cpu": breccia.cpu_info(), "limits": limits, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
