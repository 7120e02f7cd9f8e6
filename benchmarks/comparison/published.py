# SPDX-License-Identifier: Apache-2.0
"""Times of the breccia an environment has installed, as JSON: compare_cpu.py runs this file with that
environment's Python, so it needs nothing but breccia and NumPy and uses only what 0.1 has.

    /path/to/python published.py EXTENT MATMUL_EXTENT
"""

import json
import sys
import time

import breccia
import numpy as np


def best(run):
    """Seconds; the first call warms up unless it takes long."""
    begin = time.perf_counter()
    run()
    first = time.perf_counter() - begin
    if first > 0.5:
        return first
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def main():
    extent, matmul_extent = int(sys.argv[1]), int(sys.argv[2])
    recipes = {
        "FP8 1×128": breccia.Float8BlockScaling(),
        "MXFP8": breccia.MXFP8BlockScaling(),
        "NVFP4": breccia.NVFP4BlockScaling(),
        "INT4 g128": breccia.INT4Scaling(),
    }
    rng = np.random.default_rng(0)
    x = rng.normal(0, 0.02, (extent, extent)).astype(np.float32)
    # K, N: the only order 0.1 multiplies by, scaled along N.
    w = rng.normal(0, 0.02, (matmul_extent, matmul_extent)).astype(np.float32)
    found = {}
    for name, recipe in recipes.items():
        scaled = breccia.cast(x, recipe)
        found[f"cast {name}"] = {"seconds": best(lambda: breccia.cast(x, recipe)), "elements": x.size}
        found[f"dequantize {name}"] = {"seconds": best(lambda: breccia.dequantize(scaled)), "elements": x.size}
        weight = breccia.cast(w, recipe)
        for rows in (1, 16, 512):
            a = rng.standard_normal((rows, matmul_extent)).astype(np.float32)
            elements = rows * matmul_extent**2
            run = {"seconds": best(lambda: breccia.matmul(a, weight)), "elements": elements}
            found[f"matmul M={rows} {name}"] = run
    json.dump({"version": getattr(breccia, "__version__", "0.1"), "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
