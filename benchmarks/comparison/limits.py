# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at most, on one thread or several.

Copying is measured in turn with what it is compared with. Reading and arithmetic come from breccia_benchmarks
(benchmarks/cpp/bench_limits.cpp), a C++ program; without it reading is a torch sum and arithmetic is unknown.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from comparison.timing import Run, best_times

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = "benchmarks/cpp/breccia_benchmarks"
READS = (8, 16, 256)  # MiB; the last is more than caches hold


def last_level_cache() -> int:
    """Bytes; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(sizes)


def find_program() -> Path | None:
    found = [path for build in ROOT.glob("build/*") if (path := build / PROGRAM).exists()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def copier(size: int, threads: int, rotate: int = 1) -> Run:
    """memcpy of `size` bytes, in as many parts as there are threads; between `rotate` pairs of buffers in turn."""
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(rotate)]
    part = -(-size // threads)
    pool = ThreadPoolExecutor(threads) if threads > 1 else None
    count = 0

    def copy_part(begin: int) -> None:
        source, target = pairs[count % rotate]
        ctypes.memmove(target.ctypes.data + begin, source.ctypes.data + begin, min(part, size - begin))

    def copy() -> None:
        nonlocal count
        count += 1
        starts = range(0, size, part)
        if pool is None:
            copy_part(0)
        else:
            list(pool.map(copy_part, starts))

    return copy


def measure(program: Path | None, threads: int, seconds: float) -> dict[str, Any]:
    """GB/s and GFLOP/s by name, and where they come from."""
    if program is None:
        return {"source": "torch sum; arithmetic not measured: breccia_benchmarks is not built"} | _torch_reads(seconds)
    command = [str(program), "--benchmark_filter=^limit/", "--benchmark_format=json"]
    done = subprocess.run([*command, f"--benchmark_min_time={seconds}"], capture_output=True, text=True, check=True)
    found: dict[str, Any] = {"source": "breccia_benchmarks"}
    flops: dict[str, float] = {}
    for row in json.loads(done.stdout)["benchmarks"]:
        if row["threads"] != threads:
            continue
        kind, what = row["name"].split("/")[1:3]
        if kind == "flops":
            flops[what] = row["FLOP/s"] / 1e9
        else:
            found[f"{kind} {what} MiB"] = row["bytes_per_second"] / 1e9
    if not flops:
        raise RuntimeError(f"{program} has no limits for {threads} threads")
    found |= flops
    found["fp32 FLOP"] = max(rate for name, rate in flops.items() if name.startswith("fp32"))
    found["bf16 FLOP"] = max(flops.values())
    return found


def best(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The higher of two measurements, of before and after the works: a limit is never too high."""
    return {name: max(value, second[name]) if isinstance(value, float) else value for name, value in first.items()}


def read_limit(size: int) -> str:
    """The name of the limit of reading as many bytes again and again."""
    return f"read {next((mib for mib in READS if size <= 1.25 * (mib << 20)), READS[-1])} MiB"


MEMORY_READ = f"read {READS[-1]} MiB"


def _torch_reads(seconds: float) -> dict[str, float]:
    try:
        import torch
    except ImportError:
        return {}
    rates = {}
    for mib in READS:
        x = torch.ones(mib << 17, dtype=torch.int64)
        name = f"read {mib} MiB"
        rates[name] = x.nbytes / best_times({name: x.sum}, seconds)[name] / 1e9
    return rates
