# SPDX-License-Identifier: Apache-2.0
"""How many weights a second become K-quants, on one core.

    python benchmarks/gguf_speed.py --json benchmarks/results/gguf_speed.json

A Gaussian matrix of 1024 x 1024; the best of some rounds, each over all kinds in turn.
"""

import argparse
import json
import os
import time
from pathlib import Path

SIDE = 1024
KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def measure(rounds: int) -> dict:
    import breccia
    import numpy as np
    from breccia.bridges import quantize_gguf

    breccia.set_num_threads(1)
    x = np.random.default_rng(0).standard_normal((SIDE, SIDE), dtype=np.float32) / 50
    best = dict.fromkeys(KINDS, float("inf"))
    for _ in range(rounds):
        for kind in KINDS:
            begin = time.perf_counter()
            quantize_gguf(x, kind)
            best[kind] = min(best[kind], time.perf_counter() - begin)
    return {"rounds": rounds, "rows": [{"kind": kind, "weights_per_s": x.size / took} for kind, took in best.items()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    result = measure(options.rounds)
    for row in result["rows"]:
        print(f"{row['kind']}: {row['weights_per_s'] / 1e6:.1f} million weights a second")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
