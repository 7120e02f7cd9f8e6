# SPDX-License-Identifier: Apache-2.0
"""breccia on the CPU against everything a user would pick instead, in one run on one machine:

    python benchmarks/compare_cpu.py --json benchmarks/results/cpu.json --markdown cpu.md --picture docs/cpu.svg

Each number of threads is measured in a process of its own, whose libraries are all told that number. Contestants of one
piece of work take turns, so that a slow spell of the machine falls on all; a time is the best of its contestant.
"of" columns say which fraction of the machine's limit was reached: memcpy's byte rate, measured in turn with the rest;
the read rate over the packed bytes; or the peak of the fastest instruction for the operands. "From memory" takes
operands in turn, together four times the last-level cache.

Peers are what is installed: NumPy with ml_dtypes, torch (eager, compiled, its int8 and int4 products), ggml (a wheel of
pywhispercpp, or --ggml with a folder of libraries), and the published breccia (--published-python).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import breccia
import numpy as np
from comparison import converting, ggml, limits, products, report, timing

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BRECCIA_NUM_THREADS")
PUBLISHED = Path(__file__).parent / "comparison/published.py"
CONVERTED, MULTIPLIED, SQUARE = 2048, 4096, 2048
PUBLISHED_EXTENTS = (512, 1024)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", help="numbers of threads, separated by commas")
    parser.add_argument("--rows", default="1,16,512", help="M of the products")
    parser.add_argument("--activations", default=",".join(products.SOURCES), help="of the products")
    parser.add_argument("--only", default="cast,dequantize,search,requantize,matmul", help="groups to measure")
    parser.add_argument("--seconds", type=float, default=0.15, help="per contestant of a piece of work")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, nothing compiled: does it run at all?")
    parser.add_argument("--program", type=Path, default=limits.find_program(), help="breccia_benchmarks, for limits")
    parser.add_argument("--ggml", type=Path, default=ggml.find(), help="folder of ggml's shared libraries")
    parser.add_argument("--published-python", type=Path, help="Python of an environment with the published breccia")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--picture", type=Path, help="SVG, of the first number of threads")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # in the process of one number of threads
    return parser.parse_args()


def rounds(args: argparse.Namespace, threads: int, peer: ggml.Ggml | None) -> Iterator[list[timing.Work]]:
    groups = args.only.split(",")
    cache = 1 << 16 if args.quick else limits.last_level_cache()
    extents = (256, 256, 256) if args.quick else (CONVERTED, MULTIPLIED, SQUARE)
    for work in converting.works(extents[0], threads, cache, groups, quick=args.quick):
        yield [work]
    if "matmul" in groups:
        sources = args.activations.split(",")
        yield from products.rounds([int(m) for m in args.rows.split(",")], extents[1], cache, peer, sources)
        yield from products.square(extents[2], sources)


def measure(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The rows and limits of one number of threads."""
    breccia.set_num_threads(threads)
    peer = None
    skipped = {}
    try:
        peer = ggml.Ggml(args.ggml, threads) if args.ggml else None
    except (OSError, AttributeError) as error:
        skipped["ggml"] = str(error)
    if args.ggml is None:
        skipped["ggml"] = "pywhispercpp is not installed and --ggml names no folder"
    versions = [f"{name} {version}" for name in ("numpy", "ml_dtypes", "torch") if (version := _version(name))]
    if peer is not None:
        versions.append(peer.describe())
    seconds = 0.001 if args.quick else args.seconds
    measured = []
    limit_seconds = 0.01 if args.quick else 0.1
    before = limits.measure(args.program, threads, limit_seconds)
    for works in rounds(args, threads, peer):
        for work, times in zip(works, timing.measure(works, seconds), strict=True):
            measured.append((replace(work, runs={}, memory={}), *times))  # their operands are given back
        print(works[0].group, works[0].name, file=sys.stderr, flush=True)
    found = limits.best(before, limits.measure(args.program, threads, limit_seconds))
    rows = [report.row(work, times, memory, found, threads) for work, times, memory in measured]
    return {"limits": found, "rows": rows, "skipped": skipped, "versions": versions, "overhead_us": overhead()}


def overhead() -> dict[str, float]:
    """Microseconds that a call costs beyond its kernel: twice the time of 128 × 128 less that of 256 × 128."""
    found = {}
    recipe = breccia.Float8BlockScaling()
    frameworks: dict[str, Any] = {"NumPy": lambda x: x}
    if converting.torch_convert.torch is not None:
        frameworks["torch"] = converting.torch_convert.torch.from_numpy
    for name, convert in frameworks.items():
        small, large = (convert(np.ones((rows, 128), np.float32)) for rows in (128, 256))
        runs = {"small": lambda a=small: breccia.cast(a, recipe), "large": lambda a=large: breccia.cast(a, recipe)}
        times = timing.best_times(runs, 0.1)
        found[name] = (2 * times["small"] - times["large"]) * 1e6
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def in_process(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """`measure` in a process whose libraries start with that number of threads."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(threads), "--json", str(out)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(out.read_text())


def published(args: argparse.Namespace) -> dict[str, Any]:
    """On one thread: it has no other."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, "1")
    extents = [128, 128] if args.quick else PUBLISHED_EXTENTS
    command = [str(args.published_python), str(PUBLISHED), *map(str, extents)]
    environment.pop("PYTHONPATH", None)
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    args = arguments()
    if args.measure:
        args.json.write_text(json.dumps(measure(args, args.measure)))
        return
    parts = {threads: in_process(args, threads) for threads in dict.fromkeys(map(int, args.threads.split(",")))}
    first = next(iter(parts.values()))
    results: dict[str, Any] = {
        "cpu": {"model": cpu_model(), **breccia.cpu_info()},
        "versions": [f"breccia {_version('breccia') or breccia.__version__}", *first["versions"]],
        "skipped": first["skipped"],
        "limits": {str(threads): part["limits"] for threads, part in parts.items()},
        "overhead_us": first["overhead_us"],
        "rows": [row for part in parts.values() for row in part["rows"]],
    }
    if args.published_python is None:
        results["skipped"]["published breccia"] = "--published-python is not given"
    elif 1 in parts:
        old = published(args)
        elements = {"cast": CONVERTED**2, "dequantize": CONVERTED**2}
        elements |= {f"matmul M={m}": int(m) * MULTIPLIED**2 for m in args.rows.split(",")}
        report.add_published(parts[1]["rows"], old, elements)
        results["versions"].append(f"breccia {old['version']} (sizes {PUBLISHED_EXTENTS}, scaled)")
    table = report.markdown(results)
    print(table)
    print("Beyond the kernel, cast of 128 × 128:", {k: f"{v:.1f} µs" for k, v in results["overhead_us"].items()})
    print("Left out:", results["skipped"] or "nothing")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if args.markdown:
        args.markdown.write_text(table)
    if args.picture:
        args.picture.write_text(report.svg(results, next(iter(parts))))


if __name__ == "__main__":
    main()
