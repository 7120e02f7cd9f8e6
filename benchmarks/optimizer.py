# SPDX-License-Identifier: Apache-2.0
"""AdamW with states of one byte a number, beside its peers: a step of 2048 x 2048 on one thread of the CPU, bytes of
state, and the loss that the network of examples/13_coat_optimizer.py reaches. On a GPU a step of 8192 x 8192.

    python benchmarks/optimizer.py                  # prints a table of docs/optimizer-states.md
    python benchmarks/optimizer.py --device cuda    # the other one
    python benchmarks/optimizer.py --json FILE      # what benchmarks/make_docs.py makes it from

Contestants take turns, so that a slow spell of the machine falls on all. A time is the best of its contestant, after
two steps: torchao's compile on the first. Peers that are not installed are left out on a GPU.
"""

import argparse
import importlib.util
import json
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import breccia
import torch
from breccia.optim import AdamW
from compare_cpu import cpu_model
from documents.speed import optimizer_table

EXAMPLE = Path(__file__).parents[1] / "examples/13_coat_optimizer.py"
SIDE = {"cpu": 2048, "cuda": 8192}
PEERS = ("torchao", "bitsandbytes")
SHARED = ("qmap1", "qmap2", "step")  # of bitsandbytes: tables of 256 numbers that all parameters have in common


def contestants(device):
    made = {
        "torch, fused": partial(torch.optim.AdamW, fused=True),
        "breccia, fp8": partial(AdamW, states="fp8"),
        "breccia, int8": partial(AdamW, states="int8"),
        "breccia, mxfp8": partial(AdamW, states="mxfp8"),
    }
    here = [name for name in PEERS if device == "cpu" or importlib.util.find_spec(name)]
    if "torchao" in here:
        import torchao.optim

        made |= {"torchao AdamWFp8": torchao.optim.AdamWFp8, "torchao AdamW8bit": torchao.optim.AdamW8bit}
    if "bitsandbytes" in here:
        import bitsandbytes

        made["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    return made, here


def stored(value):
    """Bytes of a state, whatever class it is of."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(stored(getattr(value, name)) for name in value.__tensor_flatten__()[0] if name != "codebook")
    return getattr(value, "nbytes", 0)


def bytes_each(optimizer, p):
    return sum(stored(value) for name, value in optimizer.state[p].items() if name not in SHARED) / p.numel()


def example():
    spec = importlib.util.spec_from_file_location("example_13", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def best_times(made, device, rounds):
    """Seconds of a step of each, the best of some."""
    best = dict.fromkeys(made, float("inf"))
    for turn in range(rounds + 2):
        for name, (_, optimizer) in made.items():
            wait(device)
            start = time.perf_counter()
            optimizer.step()
            wait(device)
            if turn > 1:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure(rounds, device, side):
    torch.set_num_threads(1)
    breccia.set_num_threads(1)
    draw = torch.Generator(device).manual_seed(0)
    makers, peers = contestants(device)
    made = {}
    for name, make in makers.items():
        p = torch.nn.Parameter(torch.randn(side, side, generator=draw, device=device))
        p.grad = 0.01 * torch.randn(side, side, generator=draw, device=device)
        made[name] = p, make([p])
    best = best_times(made, device, rounds)
    train = example().train
    rows = []
    for name, (p, optimizer) in made.items():
        row = {"name": name, "bytes": bytes_each(optimizer, p), "ms": 1e3 * best[name]}
        if device == "cpu":
            row["loss"] = train(lambda parameters, make=makers[name]: make(parameters, lr=1e-3))[0]
        rows.append(row)
        print(row, flush=True)
    where = {"cpu": cpu_model(), "backend": breccia.cpu_info()["backend"]}
    about = where if device == "cpu" else {"gpu": torch.cuda.get_device_name()}
    about |= {"breccia": breccia.__version__, "torch": torch.__version__, **{name: version(name) for name in peers}}
    return {"machine": about, "side": side, "rounds": rounds, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", choices=SIDE, default="cpu")
    parser.add_argument("--side", type=int, help="smaller, to try the script")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.device, arguments.side or SIDE[arguments.device])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(optimizer_table(results))


if __name__ == "__main__":
    main()
