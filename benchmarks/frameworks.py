# SPDX-License-Identifier: Apache-2.0
"""What the frameworks add to the core: the table "Overhead" of docs/frameworks.md.

    python benchmarks/frameworks.py                # prints it
    python benchmarks/frameworks.py --json FILE    # what benchmarks/make_docs.py makes it from

1024 x 1024 float32, one thread, best of many rounds in which the candidates take turns.
"""

import argparse
import json
import time
from pathlib import Path

import breccia
import jax
import numpy as np
import torch
from breccia.frameworks import jax as on_jax
from breccia.frameworks.jax import ffi
from compare_cpu import cpu_model
from documents.speed import frameworks_table

RECIPES = {"FP8 per tensor": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
X = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)


def best(calls, rounds):
    """Milliseconds of each call."""
    times = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: min(found[1:]) for name, found in times.items()}


def compiled(method, recipe):
    """A jitted cast that reaches the core in that way; traced at once, while it is chosen."""
    on_jax.compiled = ffi.chosen(method)
    jax.clear_caches()
    return jax.jit(lambda x: breccia.cast(x, recipe)).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()


def measure(rounds):
    breccia.set_num_threads(1)
    torch.set_num_threads(1)
    on_torch, x = torch.from_numpy(X), jax.numpy.asarray(X)
    methods = ("ffi", "callback") if ffi.register() else ("callback",)
    rows = []
    for name, recipe in RECIPES.items():
        ways = {f"jit, {method}": compiled(method, recipe) for method in methods}
        calls = {
            "NumPy": lambda recipe=recipe: breccia.cast(X, recipe).data,
            "torch": lambda recipe=recipe: breccia.cast(on_torch, recipe).shape,
            "JAX": lambda recipe=recipe: breccia.cast(x, recipe),
            **{way: lambda call=call: call(x) for way, call in ways.items()},
        }
        rows.append({"recipe": name, "ms": best(calls, rounds)})
    about = {"cpu": cpu_model(), "backend": breccia.cpu_info()["backend"], "breccia": breccia.__version__}
    versions = {"torch": torch.__version__, "jax": jax.__version__}
    return {"machine": about | versions, "rounds": rounds, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(frameworks_table(results))


if __name__ == "__main__":
    main()
