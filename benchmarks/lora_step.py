# SPDX-License-Identifier: Apache-2.0
"""A step of LoRA over a base in four bits on one thread of the CPU, beside bitsandbytes' QLoRA and bases of floats: its
time, the bytes of the base, and what memory a step takes at its peak.

    python benchmarks/lora_step.py                # prints the table of docs/training.md
    python benchmarks/lora_step.py --json FILE    # what benchmarks/make_docs.py makes it from

Four square linear layers with GELU between them, PEFT's LoRA of rank 16 on each, one forward and backward pass and a
step of AdamW. Contestants take turns, so that a slow spell of the machine falls on all. A time is the best of its
contestant, after one step. Memory is what Linux says that the process held at most (VmHWM) above what it held before.
"""

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path

# Packages that PEFT imports where they are found, and that are installed here in part.
sys.modules.update(dict.fromkeys(("transformer_engine", "gptqmodel", "awq")))

import bitsandbytes  # noqa: E402
import breccia  # noqa: E402
import breccia.peft  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
from compare_cpu import cpu_model  # noqa: E402
from documents.training import lora_table  # noqa: E402

LAYERS, RANK = 4, 16
_MMAP_THRESHOLD = -3  # of glibc's mallopt


def floats(side, dtype):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(side, side) for _ in range(LAYERS)]
    inner = [one for layer in layers for one in (layer, torch.nn.GELU())]
    return torch.nn.Sequential(*inner).to(dtype)


def of_breccia(side, recipe, dtype):
    return breccia.quantize_(floats(side, dtype), recipe)


def of_bitsandbytes(side, dtype):
    made = torch.nn.Sequential()
    for layer in floats(side, dtype):
        if isinstance(layer, torch.nn.Linear):
            one = bitsandbytes.nn.Linear4bit(side, side, compute_dtype=dtype, quant_type="nf4")
            one.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            one.bias = layer.bias
            layer = one.to("cpu")
        made.append(layer)
    return made


CONTESTANTS = {
    "breccia, NVFP4": lambda side, dtype: of_breccia(side, "nvfp4", dtype),
    "breccia, INT4 in groups of 32": lambda side, dtype: of_breccia(side, "int4:32", dtype),
    "bitsandbytes, NF4": of_bitsandbytes,
    "floats": floats,
}


def base_bytes(model):
    """Of the weights and what belongs to their codes."""
    total = 0
    for module in model.modules():
        if isinstance(module, breccia.nn.QuantizedLinear):
            total += module.weight.nbytes
        elif isinstance(module, bitsandbytes.nn.Linear4bit):
            state = module.weight.quant_state
            total += module.weight.nbytes + state.absmax.nbytes
        elif type(module) is torch.nn.Linear:
            total += module.weight.nbytes
    return total


def held(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def peak_of(step):
    """Bytes that the process held at most during a step, above those before it; what is freed goes back at once."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 16)
    step()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak there was
    before = held("VmRSS")
    step()
    return max(held("VmHWM") - before, 0)


def contestant(name, side, dtype, tokens):
    model = CONTESTANTS[name](side, dtype)
    nbytes = base_bytes(model)
    targets = [str(i) for i in range(0, 2 * LAYERS, 2)]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=targets), autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW((p for p in tuned.parameters() if p.requires_grad), lr=1e-4)
    x = torch.randn(tokens, side, generator=torch.Generator().manual_seed(1)).to(dtype)

    def step():
        optimizer.zero_grad()
        tuned(x).float().square().mean().backward()
        optimizer.step()

    return step, nbytes


def measure(rounds, side, tokens):
    torch.set_num_threads(1)
    breccia.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        made = {name: contestant(name, side, dtype, tokens) for name in CONTESTANTS}
        best = dict.fromkeys(made, float("inf"))
        for turn in range(rounds + 1):
            for name, (step, _) in made.items():
                start = time.perf_counter()
                step()
                if turn:
                    best[name] = min(best[name], time.perf_counter() - start)
        for name, (_, nbytes) in made.items():
            bits = 8 * nbytes / (LAYERS * side * side)
            row = {"name": name, "dtype": str(dtype).removeprefix("torch."), "ms": 1e3 * best[name], "bits": bits}
            rows.append(row)
        made.clear()
    for row in rows:  # in the end: memory that goes back at once takes time
        row["peak"] = peak_of(contestant(row["name"], side, getattr(torch, row["dtype"]), tokens)[0])
        print(row, flush=True)
    about = {"cpu": cpu_model(), "backend": breccia.cpu_info()["backend"], "breccia": breccia.__version__}
    about |= {"torch": torch.__version__, "peft": peft.__version__, "bitsandbytes": bitsandbytes.__version__}
    sizes = {"side": side, "tokens": tokens, "layers": LAYERS, "rank": RANK}
    return {"machine": about, **sizes, "rounds": rounds, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.rounds, arguments.side, arguments.tokens)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(lora_table(results))


if __name__ == "__main__":
    main()
