# SPDX-License-Identifier: Apache-2.0
"""What comparing a tensor with its reference takes, as `breccia verify` does it: bytes of both a second, against the
rate at which as many threads read memory. Needs breccia_benchmarks, which measures that rate.

python benchmarks/verify_speed.py [--threads 1,2] [--seconds 0.5]
python benchmarks/verify_speed.py --json benchmarks/results/verify_speed.json
"""

import argparse
import json
import os
import sys
from pathlib import Path

import breccia
import ml_dtypes
import numpy as np
from breccia.comparison import compare
from compare_cpu import cpu_model
from comparison.limits import MEMORY_READ, best, find_program, measure
from comparison.timing import best_times

RECIPES = ("fp8", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8", "int4")
SIDE = 8192


def rates(threads, seconds):
    """Recipe, dtype of the reference and GB/s of each comparison."""
    breccia.set_num_threads(threads)
    floats = np.random.default_rng(0).standard_normal((SIDE, SIDE), dtype=np.float32)
    references = {"float32": floats, "bfloat16": floats.astype(ml_dtypes.bfloat16)}
    for recipe in RECIPES:
        tensor = breccia.cast(floats, recipe)
        runs = {name: lambda x=x: compare(x, tensor) for name, x in references.items()}
        for name, took in best_times(runs, seconds).items():
            yield recipe, name, (references[name].nbytes + tensor.nbytes) / took / 1e9


def rows(program, threads, seconds):
    before = measure(program, threads, seconds)
    found = list(rates(threads, seconds))
    reading = best(before, measure(program, threads, seconds))[MEMORY_READ]
    print(f"{threads} thread(s) read {reading:.1f} GB/s")
    for recipe, name, rate in found:
        print(f"{recipe:<10} {name:<9} {rate:5.1f} GB/s {rate / reading:5.0%}", flush=True)
        row = {"threads": threads, "recipe": recipe, "reference": name}
        yield row | {"GB/s": rate, "reading, GB/s": reading, "of reading": rate / reading}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", help="numbers of threads, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each comparison, at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    program = find_program() or parser.error("breccia_benchmarks is not built: cmake --workflow --preset release")
    counts = map(int, options.threads.split(","))
    measured = [row for threads in counts for row in rows(program, threads, options.seconds)]
    if options.json:
        result = {
            "machine": {"cpu": cpu_model(), "breccia": breccia.__version__},
            "command": " ".join(["python", *sys.argv]),
            "rows": measured,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
