# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint, from headers alone."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from breccia._command_errors import one_line
from breccia._terminal import fitted, wrapped
from breccia.bridges._parts import Found
from breccia.checkpoint.source import Checkpoint, without_collection

__all__ = ["describe", "inspect", "render"]

_ALIKE = 4096  # sizes of tensors whose bits per weight are kept
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Per tensor and in total: format, shape, bits per weight, scales' layout, findings. JSON types only.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.

    Returns:
        ``tensors``, a list with an entry each, and totals.

    Raises:
        ValueError: the checkpoint is not valid.
    """
    with without_collection():
        return {key: list(value) if key == "tensors" else value for key, value in describe(path)}


def describe(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """The same in pairs of key and value, one after the other: "tensors" is an iterator, to be used up before the
    next pair is asked for. Memory is that of the checkpoint's headers.

    Raises:
        ValueError: the checkpoint is not valid.
    """
    checkpoint = Checkpoint(path)
    totals = _Totals()
    yield "path", str(checkpoint.path)
    yield "files", len(checkpoint.files)
    yield "tensors", _tensors(checkpoint, totals)
    yield "total", totals.report()
    yield "quantization_config", checkpoint.quantization
    yield "findings", totals.findings
    checkpoint.close()


class _Totals:
    def __init__(self) -> None:
        self.tensors = self.weights = self.nbytes = 0
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.findings: list[str] = []

    def add(self, tensor: dict[str, Any], count: int) -> None:
        self.tensors += 1
        self.weights += count
        self.nbytes += tensor["nbytes"]
        self.kinds[tensor["format"], tensor["kind"]] += 1
        if tensor["findings"]:
            self.findings += [f"{tensor['name']}: {text}" for text in tensor["findings"]]

    def report(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "weights": self.weights,
            "nbytes": self.nbytes,
            "bits_per_weight": round(8 * self.nbytes / self.weights, 3) if self.weights else 0.0,
            "formats": {f"{bridge} {kind}": count for (bridge, kind), count in self.kinds.most_common()},
        }


def _tensors(checkpoint: Checkpoint, totals: _Totals) -> Iterator[dict[str, Any]]:
    entries = checkpoint.entries
    bits: dict[tuple[int, int], float] = {}  # per weight, by bytes and weights: most tensors are alike
    for said, stored in checkpoint.found.said():
        found = said if isinstance(said, Found) else None
        nbytes = checkpoint.nbytes(found) if found else entries[stored].nbytes
        count, scales = math.prod(said.shape), None
        size = (nbytes, count)
        per_weight = bits.get(size)
        if per_weight is None:
            per_weight = round(8 * nbytes / count, 3) if count else 0.0
            if len(bits) < _ALIKE:
                bits[size] = per_weight
        if found and found.layout is not None:
            scales = {"layout": repr(found.layout), "shape": list(found.layout.scale_shape(found.shape))}
        tensor = {
            "name": said.name,
            "format": found.format if found else "plain",
            "kind": said.kind,
            "shape": list(said.shape),
            "nbytes": nbytes,
            "bits_per_weight": per_weight,
            "recipe": None if found is None or found.recipe is None else found.recipe.to_dict(),
            "scales": scales,
            "parts": found.parts if found else {"weight": stored},
            "findings": list(said.findings),
        }
        totals.add(tensor, count)
        yield tensor


def render(report: Mapping[str, Any] | Iterable[tuple[str, Any]], *, summary: bool = False, every: bool = False) -> str:
    """The report as a table of at most 80 columns.

    Args:
        report: what `inspect` returns, or `describe` yields.
        summary: totals and findings only.
        every: one line per tensor; else layers that differ by a number alone share a line.
    """
    pairs = report.items() if isinstance(report, Mapping) else report
    lines: list[str] = []
    said: dict[str, Any] = {}
    for key, value in pairs:
        if key != "tensors":
            said[key] = value
        elif summary:
            deque(value, 0)
        else:
            lines += _table(value, every)
    total = said["total"]
    files = f"{said['files']} file" + ("s" if said["files"] != 1 else "")
    lines += [
        f"{total['tensors']:,} tensors in {files}: {total['weights']:,} weights,",
        f"{total['nbytes']:,} bytes, {total['bits_per_weight']:.3f} bits per weight",
    ]
    lines += [f"{count:>8,} × {kind}" for kind, count in total["formats"].items()]
    for text in said["findings"]:
        lines += wrapped(f"! {text}")
    return "\n".join(lines)


def _table(tensors: Iterable[dict[str, Any]], every: bool) -> list[str]:
    groups: dict[tuple[Any, ...], tuple[int, str]] = {}  # how many, and the first one's name
    for t in tensors:
        full = one_line(t["name"])
        name = full if every else _NUMBERS.sub("*", full)
        key = (name, tuple(t["shape"]), t["bits_per_weight"], t["format"], t["kind"])
        count, first = groups.get(key, (0, full))
        groups[key] = (count + 1, first)
    lines = [f"{'count':>5}  {'shape':<14} {'bits':>6}  {'format':<22} name"]
    for (name, axes, bits, bridge, kind), (count, first) in groups.items():
        shape = "×".join(map(str, axes)) or "scalar"
        what = kind if bridge == "plain" else f"{bridge} {kind}"
        shown = name if count > 1 else first
        lines += fitted(f"{count:>5}  {shape:<14} {bits:>6.3f}  {what:<21}", shown)
    return [*lines, ""]
