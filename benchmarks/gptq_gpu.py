# SPDX-License-Identifier: Apache-2.0
"""GPTQ of a square layer on a GPU: its time, and what its codes lose, beside the CPU's of the same machine.

    python benchmarks/gptq_gpu.py                # prints a line for each recipe
    python benchmarks/gptq_gpu.py --json FILE

The weight is random, the moments are those of 16,384 inputs whose columns go together and are of different size; both
are on the GPU, given. A time is the best of three, after one.
"""

import argparse
import json
import time
from pathlib import Path

import breccia
import torch
from breccia import _core

RECIPES = ("nvfp4", "mxfp4", "int4", "int4:128:asym", "fp8", "mxfp8")


def layer(side, device):
    """A weight, and the moments of its inputs."""
    torch.manual_seed(0)
    mixed = torch.randn(4 * side, side // 4, device=device) @ torch.randn(side // 4, side, device=device)
    x = (mixed / 32 + torch.randn(4 * side, side, device=device)) * torch.exp(0.7 * torch.randn(side, device=device))
    moments = x.T @ x
    return 0.02 * torch.randn(side, side, device=device), (moments + moments.T) / 2


def lost(w, q, moments):
    error = (w - breccia.dequantize(q)).double()
    return float(((error @ moments.double()) * error).sum())


def timed(run, sync):
    best = float("inf")
    for turn in range(4):
        sync()
        start = time.perf_counter()
        made = run()
        sync()
        best = best if turn == 0 else min(best, time.perf_counter() - start)
    return best, made


def measure(side, device):
    w, moments = layer(side, device)
    sync = torch.cuda.synchronize if device != "cpu" else lambda: None
    host = w.cpu(), moments.cpu()
    rows = []
    for name in RECIPES:
        nearest = breccia.cast(w, name, importance=moments.diagonal().cpu())
        here, made = timed(lambda name=name: breccia.gptq(w, moments, name), sync)
        start = time.perf_counter()
        core = breccia.gptq(*host, name)
        on_cpu = time.perf_counter() - start
        core = core.to(device)
        gpu, cpu, without = (lost(w, q, moments) for q in (made, core, nearest))
        same = float((made.data.view(torch.uint8) == core.data.view(torch.uint8)).double().mean())
        row = {"recipe": name, "gpu_seconds": here, "cpu_seconds": on_cpu}
        rows.append({**row, "error_of_cpu": gpu / cpu, "error_of_nearest": gpu / without, "same_bytes": same})
        print(rows[-1], flush=True)
    about = {"torch": torch.__version__, "breccia": breccia.__version__, "threads": breccia.num_threads()}
    return {"machine": about, "side": side, "damp": _core.GPTQ_DAMP, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.side, arguments.device)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
