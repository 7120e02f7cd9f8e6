# SPDX-License-Identifier: Apache-2.0
"""What a call costs beyond the work on its elements: the table "Small tensors" of docs/benchmarks.md.

    python benchmarks/call_cost.py                # prints it
    python benchmarks/call_cost.py --json FILE    # what benchmarks/make_docs.py makes it from

The cost is 2 t(128 x 128) - t(256 x 128): twice the elements take twice the work, and one call. Both sizes take turns,
on one thread; a time is the least of its turns.
"""

import argparse
import json
import time
from pathlib import Path

import breccia
import numpy as np
import torch
from compare_cpu import cpu_model
from documents.speed import calls_table

VERBS = {
    "cast": lambda x, q: breccia.cast(x, q.recipe),
    "dequantize": lambda x, q: breccia.dequantize(q),
    "linear": lambda x, q: breccia.linear(x[:1], q),
}
PEERS = {"NumPy": lambda x, _: x[:1] @ x.T, "torch": lambda x, _: torch.nn.functional.linear(x[:1], x)}
RECIPES = {"FP8 per tensor": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "INT4": "int4"}


def cost(verb, arrays, recipe, turns):
    """Microseconds."""
    operands = [(x, breccia.cast(x, recipe)) for x in arrays]
    best = [float("inf")] * len(operands)
    for _ in range(turns):
        for i, (x, q) in enumerate(operands):
            start = time.perf_counter()
            verb(x, q)
            best[i] = min(best[i], time.perf_counter() - start)
    small, large = best
    return 1e6 * (2 * small - large)


def measure(turns):
    breccia.set_num_threads(1)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    plain = [rng.standard_normal((rows, 128), dtype=np.float32) for rows in (128, 256)]
    kinds = {"NumPy": plain, "torch": [torch.from_numpy(x) for x in plain]}
    rows = [
        {"recipe": name, "verb": word, "us": {kind: cost(verb, x, recipe, turns) for kind, x in kinds.items()}}
        for name, recipe in RECIPES.items()
        for word, verb in VERBS.items()
    ]
    plain = {kind: cost(peer, kinds[kind], "fp8", turns) for kind, peer in PEERS.items()}
    rows.append({"recipe": "none: `x @ w.T`, `F.linear`", "verb": "linear", "us": plain})
    about = {"cpu": cpu_model(), "backend": breccia.cpu_info()["backend"], "torch": torch.__version__}
    return {"machine": about | {"breccia": breccia.__version__}, "turns": turns, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=20000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.turns)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(calls_table(results))


if __name__ == "__main__":
    main()
