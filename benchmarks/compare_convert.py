# SPDX-License-Identifier: Apache-2.0
"""Throughput of `breccia convert`, FP8 tiles to bfloat16, against copying the same bytes and against
compressed-tensors' converter on the same files:

    python benchmarks/compare_convert.py [--gib 1] [--dir /tmp]
    python benchmarks/compare_convert.py --json FILE    # what benchmarks/make_docs.py makes a table from

A copy moves as many bytes as the conversion reads and writes, halved: the source read once and a file of
the result's size written once. Best of three, page cache warm for all.
"""

import argparse
import json
import os
import shutil
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
from breccia.checkpoint import SafetensorsFile, convert, save_arrays
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        source = work / "in"
        nbytes = make(source, args.gib)
        for file in source.glob("*.safetensors"):
            file.read_bytes()
        report: dict[str, Any] = {"weights_gib": round(nbytes / 2**30, 3), "cpu": cpu_model()}
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
