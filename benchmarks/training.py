# SPDX-License-Identifier: Apache-2.0
"""Losses of the two tasks of examples/02_recipe_portable_train.py with every recipe: the tables of docs/training.md.

    python benchmarks/training.py                # prints them
    python benchmarks/training.py --json FILE    # what benchmarks/make_docs.py makes them from

Runs of one task and seed see the same images in the same order, so that their differences are those of the recipes.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import breccia
import torch
from compare_cpu import cpu_model
from documents import training

EXAMPLE = Path(__file__).parents[1] / "examples/02_recipe_portable_train.py"
TASKS = {"draw": {"steps": 150, "batch": 16}, "classify": {"steps": 60, "batch": 128}}


def example():
    spec = importlib.util.spec_from_file_location("example_02", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(seeds, steps=None):
    """Every recipe, and NVFP4 with the last of the two blocks in fp32."""
    train = example()
    torch.set_num_threads(1)
    breccia.set_num_threads(1)
    rows = []
    for task, sizes in TASKS.items():
        sizes = sizes | ({"steps": steps} if steps else {})
        for name, exact in [*((name, 0) for name in train.RECIPES), ("nvfp4", 1)]:
            runs = [train.train(name, task, seed=seed, exact_blocks=exact, **sizes) for seed in range(seeds)]
            figures = {key: [run[key] for run in runs] for key in runs[0]}
            rows.append({"task": task, "recipe": name, "exact_blocks": exact, **sizes, **figures})
            print(f"{task:9} {name:12} {exact} exact: {figures}", flush=True)
    about = {"cpu": cpu_model(), "torch": torch.__version__, "breccia": breccia.__version__}
    return {"machine": about, "seeds": seeds, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="fewer, to try the script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.seeds, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for task in TASKS:
        print(f"\n{task}\n\n{training.losses(results, task)}")


if __name__ == "__main__":
    main()
