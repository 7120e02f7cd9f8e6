# SPDX-License-Identifier: Apache-2.0
"""What a conversion of many small tensors takes: processor time and memory of each, of the whole and in parts.

    python benchmarks/small_tensors.py                # prints it
    python benchmarks/small_tensors.py --json benchmarks/results/small_tensors.json

The checkpoints are mixtures of experts with matrices of 64 × 64 in bfloat16. Every row is the best of some rounds, in
processes of their own on one thread. Memory of a tensor is that between a checkpoint of few tensors and of many.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from large_header import cost

EXPERTS, SIDE, SHARDS, PARTS = 128, 64, 8, 8


def make(path: Path, layers: int, experts: int = EXPERTS) -> int:
    """A sharded checkpoint; its tensors."""
    import numpy as np
    from breccia.checkpoint import save_arrays

    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(layers)
        for expert in range(experts)
        for part in ("gate", "up", "down")
    ]
    path.mkdir()
    rng, weights = np.random.default_rng(0), {}
    for shard in range(SHARDS):
        some = names[shard::SHARDS]
        bits = rng.normal(0, 0.02, (len(some), SIDE, SIDE)).astype(np.float32).view(np.uint32) >> 16
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        arrays = dict(zip(some, bits.astype(np.uint16), strict=True))
        save_arrays(arrays, path / file, {"format": "pt"}, dict.fromkeys(some, "BF16"))
        weights |= dict.fromkeys(some, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    model = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": layers}
    (path / "config.json").write_text(json.dumps(model))
    return len(names)


def made(path: Path, layers: int, experts: int = EXPERTS) -> int:
    """`make` in a process of its own: one that measures others stays small, for they begin with its peak of memory."""
    code = f"import small_tensors as s; print(s.make(s.Path({str(path)!r}), {layers}, {experts}))"
    return int(subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).parent))


def best(folder: Path, source: Path, rounds: int, *options: str) -> dict[str, float]:
    """The least that converting takes."""
    found = []
    command = "import sys; from breccia.cli import main; sys.argv[0] = 'breccia'; sys.exit(main())"
    for _ in range(rounds):
        if "--part" not in options and "--finish" not in options:
            shutil.rmtree(folder / "out", ignore_errors=True)
        words = ["convert", str(source), str(folder / "out"), "--to", "nvfp4", "--quiet", *options]
        found.append(cost(["-c", command, *words]))
    return min(found, key=lambda one: one["seconds"])


def measure(rounds: int, layers: tuple[int, int]) -> dict[str, Any]:
    os.environ |= {"OMP_NUM_THREADS": "1", "BRECCIA_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = made(folder / "few", 1, 4)
        start = best(folder, folder / "few", rounds, "--threads", "1")
        rows = []
        for count in layers:
            source = folder / str(count)
            tensors = made(source, count)
            whole = best(folder, source, rounds, "--threads", "1")
            plan = best(folder, source, rounds, "--dry-run")
            steps = [*(("--part", f"{part}/{PARTS}") for part in range(1, PARTS + 1)), ("--finish",)]
            *parts, finish = [best(folder, source, 1, *step) for step in steps]
            rows.append(
                {
                    "tensors": tensors,
                    "seconds": whole["seconds"],
                    "microseconds_a_tensor": 1e6 * (whole["seconds"] - start["seconds"]) / (tensors - few),
                    "bytes_a_tensor": (whole["bytes"] - start["bytes"]) / (tensors - few),
                    "plan_seconds": plan["seconds"],
                    "parts": PARTS,
                    "part_seconds": sum(part["seconds"] for part in parts) / PARTS,
                    "parts_over_whole": sum(part["seconds"] for part in parts) / whole["seconds"],
                    "finish_seconds": finish["seconds"],
                }
            )
            shutil.rmtree(source)
    command = " ".join(["python", *sys.argv])
    code = "import compare_cpu; print(compare_cpu.cpu_model())"
    cpu = subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).parent, text=True).strip()
    return {"cpu": cpu, "command": command, "start_seconds": start["seconds"], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs=2, default=(26, 130), help="of 384 tensors each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.rounds, tuple(options.layers))
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
