# SPDX-License-Identifier: Apache-2.0
"""The ``breccia demo`` command: what every recipe costs and keeps on real weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import breccia
from breccia.cli.arguments import count
from breccia.cli.printing import Shown
from breccia.comparison import Comparison, compare
from breccia.recipes import ScalingRecipe

__all__ = ["RECIPES", "add_arguments", "run"]

Matrix = NDArray[np.float32]

RECIPES: dict[str, ScalingRecipe] = {
    "FP8 per tensor": breccia.Float8CurrentScaling(),
    "FP8 per row": breccia.Float8CurrentScaling(granularity="row"),
    "FP8 1x128": breccia.Float8BlockScaling(),
    "FP8 128x128": breccia.Float8BlockScaling(block_m=128),
    "FP8 expanded": breccia.Float8ExpandedScaling(),
    "MXFP8": breccia.MXFP8BlockScaling(),
    "MXFP6": breccia.MXFP6BlockScaling(),
    "MXFP4": breccia.MXFP4BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "NVFP4 mse": breccia.NVFP4BlockScaling(scale_search="mse"),
    "INT8 per row": breccia.INT8Scaling(),
    "INT8 expanded": breccia.INT8ExpandedScaling(),
    "INT4 g128": breccia.INT4Scaling(),
    "INT4 g128 mse": breccia.INT4Scaling(scale_search="mse"),
    "INT4 g128 asym": breccia.INT4Scaling(signed=False, symmetric=False),
}

# Rows of the activation matrix every weight is multiplied by.
_ROWS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options, but ``--json``, which every command has."""
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="PATH",
        help="checkpoint (file or directory) whose 2-D weights to use (default: made up)",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="use only the N largest weights")


def run(args: argparse.Namespace) -> Shown:
    """Print the table; the check is that no product misses its error bound."""
    weights = list(_read(args.weights) if args.weights else _made_up())
    weights.sort(key=lambda item: -item[1].size)
    weights = weights[: args.limit]
    if not weights:
        raise ValueError(f"--weights must name a checkpoint with 2-D float tensors, got {args.weights}")
    report: dict[str, Any] = {
        "weights": str(args.weights) if args.weights else "made up",
        "tensors": len(weights),
        "values": sum(w.size for _, w in weights),
        "cpu": breccia.cpu_info(),
    }
    if not args.json:
        print(_head(report))
    rows = []
    for name, recipe in RECIPES.items():
        rows.append(_measure(name, recipe, weights))
        if not args.json:
            print(_line(rows[-1], report["tensors"]), flush=True)
    return {**report, "recipes": rows}, [], all(row["matmul_ok"] for row in rows)


def _measure(name: str, recipe: ScalingRecipe, weights: list[tuple[str, Matrix]]) -> dict[str, Any]:
    """Totals of one recipe over all weights its blocks divide."""
    bytes_kept = bytes_full = 0
    seconds = dict.fromkeys(("cast", "dequantize", "matmul", "numpy_matmul"), 0.0)
    worst, compared = 0.0, list[Comparison]()
    random = np.random.default_rng(0)
    for _, w in weights:
        try:
            scaled, t = _time(lambda w=w: breccia.cast(w, recipe))  # type: ignore[misc]
        except ValueError:
            continue  # the row is not a whole number of blocks
        seconds["cast"] += t
        d, t = _time(lambda s=scaled: breccia.dequantize(s))  # type: ignore[misc]
        seconds["dequantize"] += t
        x = random.standard_normal((_ROWS, w.shape[1]), dtype=np.float32)
        y, t = _time(lambda x=x, s=scaled: breccia.linear(x, s))  # type: ignore[misc]
        seconds["matmul"] += t
        seconds["numpy_matmul"] += _time(lambda x=x, w=w: x @ w.T)[1]  # type: ignore[misc]
        exact = x.astype(np.float64) @ d.T.astype(np.float64)
        bound = (w.shape[1] / 256 + 24) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(d.T).astype(np.float64))
        worst = max(worst, float((np.abs(y - exact) / np.maximum(bound, 1e-300)).max()))
        compared.append(compare(w, d))
        bytes_kept += scaled.nbytes
        bytes_full += 4 * w.size
    signal, other, dot, noise = (
        sum(getattr(one, of) for one in compared) for of in ("signal", "other", "dot", "noise")
    )
    return {
        "recipe": name,
        "tensors": len(compared),
        "bytes": bytes_kept,
        "ratio": bytes_kept / max(bytes_full, 1),
        "cosine": dot / max(np.sqrt(signal * other), 1e-300),
        "sqnr_db": 10 * float(np.log10(signal / noise)) if noise else float("inf"),
        "max_error": max((one.max_error for one in compared), default=0.0),
        **{f"{what}_ms": 1e3 * spent for what, spent in seconds.items()},
        "matmul_error_over_bound": worst,
        "matmul_ok": worst <= 1,
    }


def _time(call: Callable[[], Any]) -> tuple[Any, float]:
    """A call's result and the better of two durations, the first of which warms up."""
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return result, best


def _read(path: Path) -> Iterator[tuple[str, Matrix]]:
    from breccia.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    for found in checkpoint.found:
        if found.format == "plain" and len(found.shape) == 2 and found.dtype in ("F32", "F16", "BF16", "F64"):
            yield found.name, np.ascontiguousarray(checkpoint.load(found), dtype=np.float32)
    checkpoint.close()


def _made_up() -> Iterator[tuple[str, Matrix]]:
    """Weights with the spread of trained ones: heavy tails, rows and columns of different size."""
    random = np.random.default_rng(2026)
    for i, shape in enumerate([(1536, 384), (384, 1536), (2048, 2048), (576, 1024)]):
        w = random.standard_t(6, shape) * 0.03
        w *= np.exp(random.normal(0, 0.4, (shape[0], 1))) * np.exp(random.normal(0, 0.2, (1, shape[1])))
        yield f"layer{i}.weight", w.astype(np.float32)


def _head(report: dict[str, Any]) -> str:
    cpu = report["cpu"]
    source = report["weights"] if len(report["weights"]) <= 40 else "…" + report["weights"][-39:]
    weights = f"{report['tensors']} weight" + ("s" if report["tensors"] != 1 else "")
    threads = f"{cpu['threads']} thread" + ("s" if cpu["threads"] != 1 else "")
    return (
        f"{weights}, {report['values']:,} values ({source})\n"
        f"kernels: {cpu['backend']}, {threads}. Times are totals in ms; a product has {_ROWS} rows,\n"
        "'NumPy' is its product in float32, 'error' the product's, in parts of its bound.\n\n"
        f"{'recipe':<14}{'bytes':>12}{'x FP32':>7}{'SQNR dB':>8}{'cast':>7}{'dequant':>8}{'product':>8}{'NumPy':>7}"
        f"{'error':>6}"
    )


def _line(row: dict[str, Any], tensors: int) -> str:
    line = (
        f"{row['recipe']:<14}{row['bytes']:>12,}{row['ratio']:>7.3f}{row['sqnr_db']:>8.2f}{row['cast_ms']:>7.1f}"
        f"{row['dequantize_ms']:>8.1f}{row['matmul_ms']:>8.1f}{row['numpy_matmul_ms']:>7.1f}"
        f"{row['matmul_error_over_bound']:>6.2f}"
    )
    if not row["matmul_ok"]:
        line += f"\n! {row['recipe']}: the product missed its bound"
    if row["tensors"] < tensors:
        line += f"\n  ({tensors - row['tensors']} weights left out: their rows are not whole blocks)"
    return line
