# SPDX-License-Identifier: Apache-2.0
"""What the options of a cast cost: 1024 x 1024 float32 on one thread of the CPU.

    python benchmarks/cast_options.py                # prints the table of docs/training.md
    python benchmarks/cast_options.py --json FILE    # what benchmarks/make_docs.py makes it from

Contestants take turns, so that a slow spell of the machine falls on all. A time is the best of its contestant.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import breccia
import numpy as np
from breccia.kernels import whole_array
from breccia.kernels.whole_array.namespace import NumPy
from breccia.verbs.cast_options import CastOptions
from compare_cpu import cpu_model
from documents.speed import options_table

RECIPES = {
    "FP8 per tensor": breccia.Float8CurrentScaling(),
    "MXFP8": breccia.MXFP8BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
}
COLUMNS = ("to nearest", "stochastic", "stochastic and Hadamard(16)", "stochastic by whole-array operations")


def contestants(x, recipe):
    """Name of a column -> the call that is timed."""
    drawn = {"rounding": "stochastic", "seed": 7}
    calls = (
        partial(breccia.cast, x, recipe),
        partial(breccia.cast, x, recipe, **drawn),
        partial(breccia.cast, x, recipe, hadamard=breccia.Hadamard(16), **drawn),
        partial(whole_array.cast, NumPy(), x, recipe, CastOptions(**drawn)),
    )
    return dict(zip(COLUMNS, calls, strict=True))


def measure(rounds):
    breccia.set_num_threads(1)
    x = np.random.default_rng(0).standard_normal((1024, 1024), dtype=np.float32)
    calls = {
        (name, column): call for name, recipe in RECIPES.items() for column, call in contestants(x, recipe).items()
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            best[key] = min(best[key], time.perf_counter() - start)
    rows = [{"recipe": name, "ms": [1e3 * best[name, column] for column in COLUMNS]} for name in RECIPES]
    about = {"cpu": cpu_model(), "backend": breccia.cpu_info()["backend"], "breccia": breccia.__version__}
    return {"machine": about, "rounds": rounds, "columns": list(COLUMNS), "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = measure(options.rounds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(options_table(results))


if __name__ == "__main__":
    main()
