# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint, from headers alone."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

from breccia._command_errors import one_line
from breccia.checkpoint.source import Checkpoint, without_collection

__all__ = ["inspect", "render"]


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Per tensor and in total: format, shape, bits per weight, scales' layout, findings. JSON types only.

    Raises:
        ValueError: the checkpoint is not valid.
    """
    checkpoint = Checkpoint(path)
    with without_collection():
        return _report(checkpoint)


def _report(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors: list[dict[str, Any]] = []
    for found in checkpoint.found:
        nbytes, count = checkpoint.nbytes(found), math.prod(found.shape)
        scales = None
        if found.layout is not None:
            scales = {"layout": repr(found.layout), "shape": list(found.layout.scale_shape(found.shape))}
        tensors.append(
            {
                "name": found.name,
                "format": found.format,
                "kind": found.kind,
                "shape": list(found.shape),
                "nbytes": nbytes,
                "bits_per_weight": round(8 * nbytes / count, 3) if count else 0.0,
                "recipe": None if found.recipe is None else found.recipe.to_dict(),
                "scales": scales,
                "parts": found.parts,
                "findings": list(found.findings),
            }
        )
    weights = sum(math.prod(f.shape) for f in checkpoint.found)
    nbytes = sum(t["nbytes"] for t in tensors)
    kinds = Counter(f"{t['format']} {t['kind']}" for t in tensors)
    report = {
        "path": str(checkpoint.path),
        "files": len(checkpoint.files),
        "tensors": tensors,
        "total": {
            "tensors": len(tensors),
            "weights": weights,
            "nbytes": nbytes,
            "bits_per_weight": round(8 * nbytes / weights, 3) if weights else 0.0,
            "formats": dict(kinds.most_common()),
        },
        "quantization_config": checkpoint.quantization,
        "findings": [f"{t['name']}: {text}" for t in tensors for text in t["findings"]],
    }
    checkpoint.close()
    return report


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = []
    width = min(max((len(t["name"]) for t in report["tensors"]), default=4), 72)
    for t in report["tensors"]:
        name = one_line(t["name"])
        shape = "×".join(map(str, t["shape"])) or "scalar"
        what = t["kind"] if t["format"] == "plain" else f"{t['format']} {t['kind']}"
        scales = "" if t["scales"] is None else t["scales"]["layout"]
        lines.append(f"{name:<{width}}  {shape:>16}  {t['bits_per_weight']:>7.3f}  {what:<28} {scales}".rstrip())
    total = report["total"]
    lines.append("")
    lines.append(
        f"{total['tensors']} tensors in {report['files']} file(s), {total['weights']:,} weights, "
        f"{total['nbytes']:,} bytes, {total['bits_per_weight']} bits per weight"
    )
    lines += [f"  {count:>6} × {kind}" for kind, count in total["formats"].items()]
    lines += [f"! {one_line(text)}" for text in report["findings"]]
    return "\n".join(lines)
