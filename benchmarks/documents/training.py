# SPDX-License-Identifier: Apache-2.0
"""Tables of what a recipe costs in training."""

from __future__ import annotations

import math
import statistics
from typing import Any

from documents.markdown import load, measured, table

NAMES = {
    ("fp32", 0): "fp32",
    ("fp8-current", 0): "FP8, current scaling",
    ("fp8-delayed", 0): "FP8, delayed scaling",
    ("mxfp8", 0): "MXFP8",
    ("nvfp4", 0): "NVFP4, stochastic rounding, Hadamard, square weights",
    ("nvfp4", 1): "the same, the last of the two blocks in fp32",
}
LOSSES = {"draw": ("held_out_loss", "loss held out"), "classify": ("mean_loss", "mean loss of all steps")}


def draw() -> str:
    return losses(load("training"), "draw")


def classify() -> str:
    return losses(load("training"), "classify")


def losses(results: dict[str, Any], task: str) -> str:
    key, title = LOSSES[task]
    found = {(row["recipe"], row["exact_blocks"]): row for row in results["rows"] if row["task"] == task}
    reference = found["fp32", 0][key]
    accuracy = task == "classify"
    rows = []
    for which, name in NAMES.items():
        row = found[which]
        cells = [name, f"{statistics.mean(row[key]):.4f}", difference(row[key], reference)]
        rows.append([*cells, f"{statistics.mean(row['accuracy']):.3f}"] if accuracy else cells)
    head = ["", title, "against fp32", *(["accuracy held out"] if accuracy else [])]
    return table(head, rows, "lrrr"[: len(head)])


def difference(values: list[float], reference: list[float]) -> str:
    """The mean difference to the runs of the same seeds, in percent of their mean, and its standard error."""
    if values == reference:
        return ""
    share = [100 * (a - b) / statistics.mean(reference) for a, b in zip(values, reference, strict=True)]
    error = f" ± {statistics.stdev(share) / math.sqrt(len(share)):.2f}" if len(share) > 1 else ""
    return f"{statistics.mean(share):+.2f}{error} %".replace("-", "−")


def lora_step() -> str:
    return lora_table(load("lora_step"))


def lora_table(results: dict[str, Any]) -> str:
    """Times beside bitsandbytes' of the same dtype."""
    theirs = {row["dtype"]: row["ms"] for row in results["rows"] if row["name"].startswith("bitsandbytes")}
    rows = [
        [
            row["name"],
            row["dtype"],
            f"{row['bits']:.2f}",
            f"{row['ms']:.0f} ms",
            f"{theirs[row['dtype']] / row['ms']:.2f}",
            f"{row['peak'] / 2**20:.0f} MiB",
        ]
        for row in results["rows"]
    ]
    head = ["base", "computed in", "bits of a weight", "a step", "times bitsandbytes' speed", "memory above the rest"]
    return table(head, rows, "llrrrr")


def lora_gpu() -> str:
    return lora_gpu_table(load("lora_gpu")) + measured("lora_gpu")


def lora_gpu_table(results: dict[str, Any]) -> str:
    """Times on a GPU beside bitsandbytes' of the same way to run."""
    theirs = {row["run"]: row["ms"] for row in results["rows"] if row["name"].startswith("bitsandbytes")}
    rows = [
        [
            row["name"],
            row["run"],
            f"{row['bits'] / 8:.2f}",
            f"{row['ms']:.2f} ms",
            f"{theirs[row['run']] / row['ms']:.2f}",
            f"{row['peak'] / 2**20:.0f} MiB",
            f"{100 * row['error']:.1f} %",
        ]
        for row in results["rows"]
    ]
    head = ["base", "run", "bytes of a weight", "a step", "times bitsandbytes' speed", "memory above the rest"]
    return table([*head, "error of the output"], rows, "llrrrrr")


def lora_merge() -> str:
    return merge_table(load("lora_merge"))


def merge_table(results: dict[str, Any]) -> str:
    """The share of the adapter's effect that is left."""
    base, tuned = (row["loss"] for row in results["rows"][:2])
    rows = []
    for row in results["rows"]:
        merged = "kept" in row
        effect = f"{(base - row['loss']) / (base - tuned):.1%}" if merged else ""
        name = f"merged, rounding {row['name']}" if merged else row["name"]
        rows.append([name, f"{row['loss']:.3f}", effect, f"{row['kept']:.1%}" if merged else ""])
    head = ["", "loss held out", "of the adapter's effect", "of its change kept"]
    return table(head, rows, "lrrr")
