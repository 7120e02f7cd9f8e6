# SPDX-License-Identifier: Apache-2.0
"""What the first calls of a process take: import, first cast, first linear, each in fresh processes.

    python benchmarks/first_call.py --device cuda     # prints it
    python benchmarks/first_call.py --device cuda --json benchmarks/results/first_call.json

One process runs before those that count, so that Triton's disk cache has the kernels and the system has read the files.
Torch's import, its first tensor on the device (which makes the CUDA context) and a bf16 product are outside the times.
A time ends when the device is done.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import breccia
import torch
from compare_cpu import cpu_model
from documents.speed import first_calls_table

STEPS = ("import breccia", "first cast", "first linear", "second cast", "second linear")
CODE = """
import json, sys, time
import torch

device, recipe = sys.argv[1:]
done = torch.cuda.synchronize if device == "cuda" else lambda: None
w = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
x = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
torch.nn.functional.linear(x, w)
done()
times = [time.perf_counter()]

def step(call):
    made = call()
    done()
    times.append(time.perf_counter())
    return made

breccia = step(lambda: __import__("breccia"))
q = step(lambda: breccia.cast(w, recipe))
step(lambda: breccia.linear(x, q))
step(lambda: breccia.cast(w, recipe))
step(lambda: breccia.linear(x, q))
print(json.dumps([1e3 * (end - begin) for begin, end in zip(times, times[1:])]))
"""


def once(device: str, recipe: str) -> list[float]:
    """Milliseconds of each of STEPS, in a process of its own."""
    command = [sys.executable, "-c", CODE, device, recipe]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(run.stdout)


def measure(device: str, recipes: list[str], rounds: int) -> dict:
    rows = []
    for recipe in recipes:
        once(device, recipe)
        found = zip(*(once(device, recipe) for _ in range(rounds)), strict=True)
        rows.append({"recipe": recipe, "ms": dict(zip(STEPS, map(statistics.median, found), strict=True))})
    # The name of a GPU is read by another process: this one holds no context beside those that are measured.
    name = "import torch; print(torch.cuda.get_device_name())"
    on = subprocess.check_output([sys.executable, "-c", name], text=True).strip() if device == "cuda" else cpu_model()
    machine = {"device": on, "torch": torch.__version__, "breccia": breccia.__version__}
    return {"machine": machine, "command": " ".join(["python", *sys.argv]), "rounds": rounds, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recipes", nargs="+", default=["fp8-block", "mxfp8", "nvfp4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no GPU: it must be cpu here")
    result = measure(options.device, options.recipes, options.rounds)
    print(first_calls_table([result]))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
