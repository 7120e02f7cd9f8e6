# SPDX-License-Identifier: Apache-2.0
"""Throughput of `breccia convert`, FP8 tiles to bfloat16, against copying the same bytes and against
compressed-tensors' converter on the same files:

    python benchmarks/compare_convert.py [--gib 1] [--dir /tmp]
    python benchmarks/compare_convert.py --json FILE    # what benchmarks/make_docs.py makes a table from
    python benchmarks/compare_convert.py --jobs --json FILE    # the command's long jobs, by one and by two threads

A copy moves as many bytes as the conversion reads and writes, halved: the source read once and a file of
the result's size written once. Best of three, page cache warm for all. Jobs are processes of their own on a mixture of
experts in bfloat16 of random weights, best of two, beside `cp` and safetensors.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import breccia
import numpy as np
from breccia.bridges import deepseek
from breccia.bridges import parts as _parts
from breccia.checkpoint import SafetensorsFile, SafetensorsWriter, convert, save_arrays
from compare_cpu import cpu_model


def make(path: Path, gib: float) -> int:
    """A sharded checkpoint in DeepSeek-V3's layout; the bytes of its weights."""
    path.mkdir()
    rng = np.random.default_rng(0)
    base = breccia.cast(rng.normal(0, 0.02, (2048, 7168)).astype(np.float32), breccia.Float8BlockScaling(block_m=128))
    parts = _parts.materialize(deepseek.lay_out(base))
    count = max(round(gib * 2**30 / base.nbytes), 2)
    weights: dict[str, str] = {}
    for shard in range(2):
        names = range(shard * count // 2, (shard + 1) * count // 2)
        arrays = {f"model.layers.{i}.mlp.up_proj.{role}": a for i in names for role, a in parts.items()}
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_arrays(arrays, path / file, {"format": "pt"})
        weights |= dict.fromkeys(arrays, file)
    index = {"metadata": {"total_size": count * base.nbytes}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps({"model_type": "test", "quantization_config": said}))
    return count * base.nbytes


def best(run: Callable[[Path], Any], out: Path, times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        shutil.rmtree(out, ignore_errors=True)
        begin = time.perf_counter()
        run(out)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def copy(source: Path, out: Path) -> None:
    """Read the source once, write twice its bytes once: what conversion to bfloat16 must move."""
    out.mkdir()
    buffer = memoryview(bytearray(8 << 20))
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb", buffering=0) as read, (out / file.name).open("wb", buffering=0) as write:
            os.posix_fallocate(write.fileno(), 0, 2 * file.stat().st_size)
            while count := read.readinto(buffer):
                write.write(buffer[:count])
                write.write(buffer[:count])
            os.fsync(write.fileno())


def theirs(source: Path) -> Callable[[Path], Any] | None:
    try:
        from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint
    except ImportError as error:
        print(f"compressed-tensors is left out: {error}")
        return None
    return lambda out: convert_checkpoint(source, out, FP8BlockDequantizer.from_pretrained(source))


SHARDS, EXPERTS, HIDDEN, INNER = 4, 64, 1024, 512  # a layer to a shard
LOAD_AND_SAVE = """
import sys, pathlib
from safetensors.torch import load_file, save_file
source, out = map(pathlib.Path, sys.argv[1:])
out.mkdir()
for path in source.glob("*.safetensors"): save_file(load_file(path), out / path.name)
"""


def make_experts(path: Path) -> int:
    """A Qwen3-MoE checkpoint in bfloat16; how many tensors it has."""
    path.mkdir()
    pool = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32).view(np.uint32) >> 16
    pool = pool.astype(np.uint16)
    weights: dict[str, str] = {}
    for layer in range(SHARDS):
        start, file = f"model.layers.{layer}.", f"model-{layer + 1:05}-of-{SHARDS:05}.safetensors"
        shapes = {f"{start}self_attn.{one}_proj.weight": (HIDDEN, HIDDEN) for one in "qkvo"}
        for expert in range(EXPERTS):
            named = f"{start}mlp.experts.{expert}."
            shapes |= {f"{named}{one}_proj.weight": (INNER, HIDDEN) for one in ("gate", "up")}
            shapes[f"{named}down_proj.weight"] = (HIDDEN, INNER)
        writer = SafetensorsWriter(path / file, {name: ("BF16", shape) for name, shape in shapes.items()})
        for number, (name, (rows, columns)) in enumerate(shapes.items()):
            at = 4099 * number % (len(pool) - rows * columns)
            writer.write(name, pool[at : at + rows * columns])
        writer.commit()
        writer.close()
        weights |= dict.fromkeys(shapes, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN}
    config |= {"num_hidden_layers": SHARDS, "num_experts": EXPERTS, "moe_intermediate_size": INNER, "head_dim": 128}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts_per_tok": 8, "vocab_size": 1024}
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": INNER, "rms_norm_eps": 1e-6}))
    return len(weights)


def jobs(work: Path) -> dict[str, list[list[str]]]:
    """Each job's commands, which run one after the other; {threads} is how many it has."""
    source, quantized, out = str(work / "in"), str(work / "nvfp4"), str(work / "out")
    breccia_ = [sys.executable, "-m", "breccia"]

    def converts(start: str, to: str, *more: str, end: str = out) -> list[str]:
        return [*breccia_, "convert", start, end, "--to", to, "--quiet", "--threads", "{threads}", *more]

    return {
        "`cp -r`": [["cp", "-r", source, out]],
        "safetensors: load and save": [[sys.executable, "-c", LOAD_AND_SAVE, source, out]],
        "bf16 → NVFP4": [converts(source, "nvfp4")],
        "bf16 → NVFP4 in 8 parts, one after the other": [
            *(converts(source, "nvfp4", "--part", f"{i}/8") for i in range(1, 9)),
            converts(source, "nvfp4", "--finish"),
        ],
        "bf16 → MXFP8": [converts(source, "mxfp8")],
        "bf16 → GGUF Q8_0": [converts(source, "gguf:q8_0", end=f"{out}.gguf")],
        "NVFP4 → compressed-tensors": [converts(quantized, "compressed-tensors")],
        "NVFP4 → GGUF": [converts(quantized, "gguf:nvfp4", end=f"{out}.gguf")],
        "`verify` of NVFP4": [[*breccia_, "verify", source, quantized, "--quiet", "--json"]],
        "`verify --complete` of NVFP4": [[*breccia_, "verify", quantized, "--complete", "--quiet", "--json"]],
    }


# A small process starts the job: what the one that forks has in memory counts for its child.
START = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
_, status, used = os.wait4(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), time.perf_counter() - begin, used.ru_maxrss / 1024]))
"""


def run(command: list[str], threads: int) -> tuple[float, float]:
    """Seconds and MiB at its peak of one process."""
    words = [word.replace("{threads}", str(threads)) for word in command]
    variables = {"OMP_NUM_THREADS": str(threads), "BRECCIA_NUM_THREADS": str(threads)}
    start = [sys.executable, "-S", "-c", START, *words]
    said = subprocess.run(start, stdout=subprocess.PIPE, env={**os.environ, **variables}, check=True).stdout
    code, seconds, peak = json.loads(said)
    if code:
        raise SystemExit(f"{' '.join(words)} ended with {code}")
    return seconds, peak


def measured_jobs(work: Path) -> dict[str, Any]:
    tensors = make_experts(work / "in")
    convert(work / "in", work / "nvfp4", "nvfp4")
    rows = []
    for name, commands in jobs(work).items():
        row: dict[str, Any] = {"job": name, "seconds": {}, "mib": 0}
        for threads in (1, 2):
            seconds = []
            for _ in range(2):
                for left in work.glob("out*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                took = [run(command, threads) for command in commands]
                seconds.append(sum(one for one, _ in took))
                row["mib"] = max(row["mib"], round(max(peak for _, peak in took)))
            row["seconds"][str(threads)] = round(min(seconds), 2)
        print(row, flush=True)
        rows.append(row)
    nbytes = sum(file.stat().st_size for file in (work / "in").glob("*.safetensors"))
    return {"gib": round(nbytes / 2**30, 2), "tensors": tensors, "cores": os.cpu_count(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--jobs", action="store_true", help="measure the command's jobs instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        if args.jobs:
            report: dict[str, Any] = {"cpu": cpu_model(), **measured_jobs(work)}
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
            return
        source = work / "in"
        nbytes = make(source, args.gib)
        for file in source.glob("*.safetensors"):
            file.read_bytes()
        report = {"weights_gib": round(nbytes / 2**30, 3), "cpu": cpu_model()}
        report["cores"] = len(os.sched_getaffinity(0))
        seconds = {"copy": best(lambda out: copy(source, out), work / "copy")}
        seconds["breccia"] = best(lambda out: convert(source, out, "bf16"), work / "breccia")
        peer = theirs(source)
        if peer is not None:
            seconds["compressed-tensors"] = best(peer, work / "peer", times=2)
            a = {n: f for p in (work / "breccia").glob("*.safetensors") for n, f in SafetensorsFile(p).items()}
            b = {n: f for p in (work / "peer").glob("*.safetensors") for n, f in SafetensorsFile(p).items()}
            report["equal_bytes"] = a.keys() == b.keys() and all(a[n].tobytes() == b[n].tobytes() for n in a)
            report["peer"] = version("compressed-tensors")
            report["times_faster"] = round(seconds["compressed-tensors"] / seconds["breccia"], 2)
        report["seconds"] = {name: round(value, 3) for name, value in seconds.items()}
        report["share_of_copy_speed"] = round(seconds["copy"] / seconds["breccia"], 3)
        report["gb_per_s_written"] = {name: round(2 * nbytes / value / 1e9, 2) for name, value in seconds.items()}
        print(json.dumps(report, indent=2))
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
