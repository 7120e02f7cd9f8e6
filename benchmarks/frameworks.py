# SPDX-License-Identifier: Apache-2.0
"""What the frameworks add to the core, and what options of a cast cost: 1024 x 1024 float32, one thread, best of many
rounds in which the candidates take turns.

    python benchmarks/frameworks.py [--rounds 40]
"""

import argparse
import time

import breccia
import jax
import numpy as np
import torch
from breccia.cast_options import CastOptions
from breccia.frameworks import _jax_ffi
from breccia.frameworks import jax as on_jax
from breccia.kernels import whole_array
from breccia.kernels.whole_array.namespace import NumPy

RECIPES = (breccia.Float8CurrentScaling(), breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling())
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


def report(what, calls, rounds):
    found = best(calls, rounds)
    first = next(iter(found.values()))
    print(f"{what:22}", "  ".join(f"{name} {ms:.3f} ms ({ms / first:.2f})" for name, ms in found.items()), flush=True)


def compiled(method, recipe):
    """A jitted cast that reaches the core in that way; traced at once, while it is chosen."""
    on_jax.compiled = _jax_ffi.chosen(method)
    jax.clear_caches()
    return jax.jit(lambda x: breccia.cast(x, recipe)).lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    breccia.set_num_threads(1)
    on_torch, x = torch.from_numpy(X), jax.numpy.asarray(X)
    for recipe in RECIPES:
        calls = {
            "NumPy": lambda: breccia.cast(X, recipe).data,
            "torch": lambda: breccia.cast(on_torch, recipe).shape,
        }
        report(recipe.name, {**calls, "JAX": lambda: breccia.cast(x, recipe)}, rounds)
    methods = ("ffi", "callback") if _jax_ffi.register() else ("callback",)
    for recipe in RECIPES:
        ways = {method: compiled(method, recipe) for method in methods}
        report(f"{recipe.name} in jit", {method: lambda way=way: way(x) for method, way in ways.items()}, rounds)
    for recipe in RECIPES:
        options = {"rounding": "stochastic", "seed": 1}
        calls = {
            "nearest": lambda: breccia.cast(X, recipe).data,
            "stochastic": lambda: breccia.cast(X, recipe, **options).data,
            "and Hadamard": lambda: breccia.cast(X, recipe, hadamard=breccia.Hadamard(16), **options).data,
            "whole-array stochastic": lambda: whole_array.cast(NumPy(), X, recipe, CastOptions(**options)).data,
        }
        report(recipe.name, calls, max(3, rounds // 8))


if __name__ == "__main__":
    main()
