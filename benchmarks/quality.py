# SPDX-License-Identifier: Apache-2.0
"""What 4 bits lose, by format and by how a weight is rounded: ours, and other programs given the same data.

    python benchmarks/quality.py --json benchmarks/results/quality.json
    python benchmarks/quality.py --models minilm --formats NVFP4 INT4 --no-peers   # seconds

Weights of two real models are rounded layer by layer; moments of layers' inputs are of the text to calibrate with. On
the text to judge with are measured: the error of layers' outputs; of MiniLM sentences' vectors; of SmolLM2 perplexity,
KLD and the likeliest token, as `breccia evaluate` has them. Rows of other runs stay in the file; --models, --formats,
--methods and --peers say which are measured anew. Needs what `.ci/requirements-peers.txt` lists; for llm-compressor and
ggml the wheels of llmcompressor and pywhispercpp.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from comparison import quality_methods as methods  # noqa: E402
from comparison.quality_models import MODELS, Model  # noqa: E402
from comparison.quality_peers import peers  # noqa: E402

Made = tuple[dict[str, np.ndarray], float]
Row = tuple[str, str, str, Callable[[], Made]]  # program, method, format, its weights and their bits


def ours(model: Model) -> Iterator[Row]:
    """Every format by every way to round, and what does not help."""
    for name, recipe in methods.recipes(model.group).items():
        others = {m: f for m, (f, formats) in methods.OTHERS.items() if name.startswith(formats)}
        for way, method in {**methods.METHODS, **others}.items():

            def made(recipe: Any = recipe, method: methods.Method = method) -> Made:
                rounded = {n: method(w, model.moments[n], recipe) for n, w in model.weights.items()}
                return rounded, methods.bits(recipe)

            yield "breccia", way, name, made
    if model.mixed_bits:
        yield "breccia", "GPTQ", "NVFP4 and FP8", lambda: methods.mixed(model.weights, model.moments, model.mixed_bits)
        for way, by_gptq in (("nearest, importance", False), ("GPTQ", True)):

            def mixed(by_gptq: bool = by_gptq) -> Made:
                return methods.q4_k_m(model.weights, model.moments, by_gptq)

            yield "breccia", way, "GGUF Q4_K_M", mixed


def theirs(model: Model) -> Iterator[Row]:
    """Of other programs."""
    names = list(methods.recipes(model.group))
    for program, peer in peers(model.name):
        kind, _, sign = peer.format.partition(", ")
        found = next((n for n in names if n.startswith(kind) and n.endswith(sign)), peer.format)
        ggml = program.startswith("ggml")

        def made(peer: Any = peer) -> Made:
            each = {n: peer.round(n, w, model.moments[n], model.group) for n, w in model.weights.items()}
            size = sum(w.size for w in model.weights.values())
            bits = sum(bits * model.weights[n].size for n, (_, bits) in each.items()) / size
            return {n: values for n, (values, _) in each.items()}, bits

        yield program, peer.method, f"GGUF {peer.format}" if ggml else found, made


def measured(model: Model, row: Row) -> dict[str, Any]:
    program, method, kind, make = row
    start = time.perf_counter()
    rounded, bits = make()
    seconds = time.perf_counter() - start
    about = {"model": model.name, "format": kind, "method": method, "program": program, "bits": round(bits, 4)}
    found = {**model.output_errors(rounded), **model.judged(rounded)}
    return {**about, **_rounded(found), "seconds": round(seconds, 1)}


def _rounded(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return float(f"{x:.5g}") if isinstance(x, float) else x


def key(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row the same as one of an earlier run: the version of a program does not."""
    return row["model"], row["format"], row["method"], row["program"].split()[0]


def run(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None], models: dict[str, Any]) -> None:
    options.cache.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        model = MODELS[name](options.cache)
        models[model.name] = _rounded(model.about)
        rows = [] if options.no_own else list(ours(model))
        rows += [] if options.no_peers else list(theirs(model))
        for row in rows:
            program, method, kind = row[:3]
            wanted = not options.formats or any(kind.removeprefix("GGUF ").startswith(f) for f in options.formats)
            if not wanted or (options.methods and not re.fullmatch("|".join(options.methods), method)):
                continue
            if options.peers and program.split()[0] not in options.peers:
                continue
            try:
                keep(measured(model, row))
            except Exception as error:
                if program == "breccia":
                    raise
                print(f"{program}, {kind}, {method}: {type(error).__name__}: {error}"[:300], file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    made.add_argument("--formats", nargs="+", default=[], metavar="F", help="formats whose names begin so")
    made.add_argument("--methods", nargs="+", default=[], metavar="M", help="patterns of methods")
    made.add_argument("--peers", nargs="+", default=[], metavar="P", help="programs")
    made.add_argument("--no-peers", action="store_true")
    made.add_argument("--no-own", action="store_true")
    made.add_argument("--cache", type=Path, default=ROOT / "build/quality", help="for models and moments")
    made.add_argument("--json", type=Path, help="keep rows there, beside those of other runs")
    return made


def main() -> None:
    options = parser().parse_args()
    report: dict[str, Any] = {"rows": []}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text())
    report["torch"] = importlib.metadata.version("torch")
    torch.set_grad_enabled(False)

    def keep(row: dict[str, Any]) -> None:
        report["rows"] = [old for old in report["rows"] if key(old) != key(row)] + [row]
        shown = f"{row['kld']['mean']['value']:.4f}" if "kld" in row else f"{1e3 * row['cosine_loss']:.2f}e-3"
        names = f"{row['program']:22} {row['format']:26} {row['method']:26}"
        print(f"{names} {row['bits']:.3f} {row['output_error']:.2%} {shown} {row['seconds']:.0f} s", flush=True)
        save()

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    run(options, keep, report.setdefault("models", {}))
    save()


if __name__ == "__main__":
    main()
