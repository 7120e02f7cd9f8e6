# SPDX-License-Identifier: Apache-2.0
"""A step of LoRA over a base in four bits on a GPU, beside bitsandbytes' QLoRA and a base of bfloat16.

    python benchmarks/lora_gpu.py                # prints the table of docs/training.md
    python benchmarks/lora_gpu.py --json FILE    # what benchmarks/make_docs.py makes it from

Four square linear layers with GELU between them and LoRA of rank 16 on each, computed in bfloat16 as PEFT does it: one
forward and backward pass and a step of AdamW, eagerly and compiled by torch. bitsandbytes is version 0.50.2, of its
wheel. Contestants take turns, so that a slow spell of the machine falls on all; a time is the median of a contestant's
turns, each of several steps, after some that are not counted. Memory is what torch's allocator held at most during a
step above what it held before. The error is that of the base's output, without adapters, against bfloat16's.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import breccia
import torch
from documents.training import lora_gpu_table

LAYERS, RANK, STEPS = 4, 16, 8


class Lora(torch.nn.Module):
    """A layer and its adapter, whose B begins at zero."""

    def __init__(self, base, side):
        super().__init__()
        self.base = base.requires_grad_(False)
        own = {"dtype": torch.bfloat16, "device": next(base.buffers(), next(base.parameters(), None)).device}
        self.a = torch.nn.Parameter(torch.randn(RANK, side, **own) / side**0.5)
        self.b = torch.nn.Parameter(torch.zeros(side, RANK, **own))

    def forward(self, x):
        return self.base(x) + (x @ self.a.T) @ self.b.T


def floats(side, device):
    torch.manual_seed(0)
    return [torch.nn.Linear(side, side, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]


def of_breccia(side, device, recipe):
    return list(breccia.quantize_(torch.nn.Sequential(*floats(side, device)), recipe))


def of_bitsandbytes(side, device):
    import bitsandbytes

    made = []
    for layer in floats(side, device):
        one = bitsandbytes.nn.Linear4bit(side, side, compute_dtype=torch.bfloat16, quant_type="nf4")
        one.weight = bitsandbytes.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
        one.bias = layer.bias
        made.append(one.to(device))
    return made


BASES = {
    "breccia, NVFP4": lambda side, device: of_breccia(side, device, "nvfp4"),
    "breccia, MXFP4": lambda side, device: of_breccia(side, device, "mxfp4"),
    "breccia, INT4 in groups of 32": lambda side, device: of_breccia(side, device, "int4:32"),
    "bitsandbytes, NF4": of_bitsandbytes,
    "bfloat16": floats,
}


def base_bytes(layer):
    """Of a weight and what belongs to its codes."""
    state = getattr(layer.weight, "quant_state", None)
    return layer.weight.nbytes + (0 if state is None else state.absmax.nbytes)


class Contestant:
    """One base with adapters, eager or compiled."""

    def __init__(self, name, side, tokens, device, compiled):
        layers = BASES[name](side, device)
        self.bits = 8 * sum(map(base_bytes, layers)) / (LAYERS * side * side)
        inner = [one for layer in layers for one in (Lora(layer, side), torch.nn.GELU())]
        model = torch.nn.Sequential(*inner)
        self.model = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
        torch.manual_seed(1)
        self.x = torch.randn(tokens, side, dtype=torch.bfloat16, device=device)
        with torch.no_grad():
            self.output = model(self.x).float()

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()

    def turn(self, sync):
        """Milliseconds of a step."""
        sync()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        sync()
        return 1e3 * (time.perf_counter() - start) / STEPS

    def peak(self):
        """Bytes above those before a step."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(rounds, side, tokens, device):
    on_gpu = device != "cpu"
    sync = torch.cuda.synchronize if on_gpu else lambda: None
    rows = []
    for how in ("eager", "compiled"):
        made = {name: Contestant(name, side, tokens, device, how == "compiled") for name in BASES}
        times = {name: [] for name in made}
        for turn in range(rounds + 2):
            for name, one in made.items():
                took = one.turn(sync)
                if turn > 1:
                    times[name].append(took)
        exact = made["bfloat16"].output
        for name, one in made.items():
            error = float((one.output - exact).norm() / exact.norm())
            row = {"name": name, "run": how, "ms": statistics.median(times[name]), "bits": one.bits}
            rows.append({**row, "peak": one.peak() if on_gpu else 0, "error": error})
            print(rows[-1], flush=True)
        del made, one
    about = {"torch": torch.__version__, "breccia": breccia.__version__}
    return {"machine": about, "side": side, "tokens": tokens, "layers": LAYERS, "rank": RANK, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.side, arguments.tokens, arguments.device)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(lora_gpu_table(results))


if __name__ == "__main__":
    main()
