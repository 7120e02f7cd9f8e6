# SPDX-License-Identifier: Apache-2.0
"""One decode step of a random Llama through transformers on a CPU: bfloat16 against breccia's layers, and the memory
that loading takes: a table of docs/serving.md.

    python benchmarks/decode_step.py [--size 1b] [--layers 16] [--rounds 8] [recipe …]
    python benchmarks/decode_step.py --json FILE    # what benchmarks/make_docs.py makes it from

Each model is loaded by from_pretrained in a process of its own, from a directory made for the run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

RECIPES = ["nvfp4", "int4", "mxfp8"]
SIZES = {"0.1b": 512, "0.3b": 1024, "1b": 2048}  # parameters → width, of 16 layers


def make(path, hidden, layers):
    """A Llama with the proportions of those of about a billion parameters."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        vocab_size=32000,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name else parameter.normal_(0, 0.02)
    model.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def peak():
    """Megabytes at the peak, of this program alone: getrusage would go on with those of the one that started it."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def measure(path, rounds):
    """Milliseconds of a decode step, best of many, and megabytes at the peak and of the files."""
    import breccia.transformers  # noqa: F401 (registers)
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    before = peak()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    times = []
    with torch.no_grad():
        state = model(torch.arange(3, 35)[None], use_cache=True).past_key_values
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            state = model(torch.tensor([[7]]), past_key_values=state, use_cache=True).past_key_values
            times.append(1e3 * (time.perf_counter() - begin))
    grown = peak() - before
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) / 2**20
    return {"ms": round(min(times[1:]), 1), "peak_mb": round(grown), "stored_mb": round(stored)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.measure:
        print(json.dumps(measure(options.measure, options.rounds)))
        return
    import breccia
    from breccia.checkpoint import convert
    from compare_cpu import cpu_model

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        count = make(f"{folder}/bf16", SIZES[options.size], options.layers)
        print(f"{count / 1e6:.0f} million parameters, {len(os.sched_getaffinity(0))} cores", flush=True)
        first = None
        for name in ["bf16", *options.recipes]:
            if name != "bf16":
                convert(f"{folder}/bf16", f"{folder}/{name}", name)
            command = [sys.executable, __file__, "--rounds", str(options.rounds), "--measure", f"{folder}/{name}"]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(run.stdout.strip().splitlines()[-1])
            first = first or found["ms"]
            rows.append({"weights": name, "times_bf16": first / found["ms"], **found})
            speed, memory = f"{found['ms']:7.1f} ms ({first / found['ms']:.2f}x)", found["peak_mb"] / found["stored_mb"]
            print(f"{name:8} {speed}  {found['stored_mb']} MB on disk, peak {memory:.2f} times that", flush=True)
    if options.json:
        about = {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0)), "breccia": breccia.__version__}
        results = {"machine": about, "parameters": count, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
