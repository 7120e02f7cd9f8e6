# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint, from headers alone."""

from __future__ import annotations

import math
import os
import re
import textwrap
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


def render(report: dict[str, Any], *, summary: bool = False, every: bool = False) -> str:
    """The report as a table of at most 80 columns.

    Args:
        report: what `inspect` returns.
        summary: totals and findings only.
        every: one line per tensor; else layers that differ by a number alone share a line.
    """
    lines = [] if summary else _table(report["tensors"], every)
    total = report["total"]
    files = f"{report['files']} file" + ("s" if report["files"] != 1 else "")
    lines += [
        f"{total['tensors']:,} tensors in {files}: {total['weights']:,} weights,",
        f"{total['nbytes']:,} bytes, {total['bits_per_weight']:.3f} bits per weight",
    ]
    lines += [f"{count:>8,} × {kind}" for kind, count in total["formats"].items()]
    for text in report["findings"]:
        lines += textwrap.wrap(f"! {one_line(text)}", 80, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines)


def _table(tensors: list[dict[str, Any]], every: bool) -> list[str]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for t in tensors:
        full = one_line(t["name"])
        name = full if every else re.sub(r"(?<=\.)\d+(?=\.)", "*", full)
        shape = "×".join(map(str, t["shape"])) or "scalar"
        kind = t["kind"] if t["format"] == "plain" else f"{t['format']} {t['kind']}"
        groups.setdefault((name, shape, f"{t['bits_per_weight']:.3f}", kind), []).append(full)
    lines = [f"{'count':>5}  {'shape':<14} {'bits':>6}  {'format':<22} name"]
    for (name, shape, bits, kind), members in groups.items():
        shown = name if len(members) > 1 else members[0]
        line = f"{len(members):>5}  {shape:<14} {bits:>6}  {kind:<22} "
        # A long name stands on a line of its own: it is what people copy.
        lines += [line + shown] if len(line + shown) <= 80 else [line.rstrip(), f"       {shown}"]
    return [*lines, ""]
