# SPDX-License-Identifier: Apache-2.0
"""What comparing a tensor with its reference takes, as `breccia verify` does it: bytes of both a second, against the
rate at which as many threads read memory.

python benchmarks/verify_speed.py [--rounds 9] [--side 8192]
python benchmarks/verify_speed.py --json benchmarks/results/verify_speed.json
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import breccia
import ml_dtypes
import numpy as np
from breccia import comparison
from compare_cpu import cpu_model

RECIPES = ("fp8", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8", "int4")


def best(work, rounds):
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def read_rate(values, threads, rounds):
    """Bytes a second of NumPy's maximum over parts of the tensor, one on each thread."""
    parts = np.array_split(values.reshape(-1).view(np.uint64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return values.nbytes / best(lambda: list(pool.map(np.max, parts)), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    breccia.set_num_threads(threads)
    floats = np.random.default_rng(0).standard_normal((options.side, options.side), dtype=np.float32)
    references = {"float32": floats, "bfloat16": floats.astype(ml_dtypes.bfloat16)}
    reading = read_rate(floats, threads, options.rounds)
    print(f"{threads} threads read {reading / 1e9:.1f} GB/s")
    rows = []
    for recipe in RECIPES:
        tensor = breccia.cast(floats, recipe)
        for dtype, reference in references.items():
            seconds = best(lambda: comparison.compare(reference, tensor), options.rounds)
            rate = (reference.nbytes + tensor.nbytes) / seconds
            rows.append({"recipe": recipe, "reference": dtype, "bytes_per_second": rate, "of_reading": rate / reading})
            print(f"{recipe:<10} {dtype:<9} {rate / 1e9:5.1f} GB/s {rate / reading:5.0%}")
    if options.json:
        result = {
            "machine": {"cpu": cpu_model(), "threads": threads, "breccia": breccia.__version__},
            "command": " ".join(["python", *sys.argv]),
            "read_bytes_per_second": reading,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
