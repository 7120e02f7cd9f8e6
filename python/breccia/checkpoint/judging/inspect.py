# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint, from headers alone."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from breccia.checkpoint.reading.account import keys_of, unread_modules
from breccia.checkpoint.reading.logical import Batch, Said
from breccia.checkpoint.reading.source import Checkpoint, without_collection
from breccia.checkpoint.reports import InspectReport
from breccia.schemes import ModelScheme, folded
from breccia.screen import fitted, lines_of, wrapped

_NUMBERS = re.compile(r"\.\d+(?=\.)")


def inspect(path: str | os.PathLike[str]) -> InspectReport:
    """Per tensor and in total: format, shape, bits per weight, scales' layout, findings. JSON types only.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.

    Returns:
        ``tensors``, a list with an entry each, and totals.

    Raises:
        ValueError: the checkpoint is not valid.

    Examples:
        >>> from breccia import checkpoint
        >>> q = breccia.cast(np.ones((64, 256), np.float32), "nvfp4")
        >>> breccia.save({"up_proj.weight": q}, "small.safetensors")
        >>> tensor = checkpoint.inspect("small.safetensors")["tensors"][0]
        >>> tensor["kind"], tensor["shape"], tensor["bits_per_weight"]
        ('nvfp4', [64, 256], 4.502)
    """
    with without_collection():
        report: Any = {key: list(value) if key == "tensors" else value for key, value in describe(path)}
    inspected: InspectReport = report
    return inspected


def describe(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """The same in pairs of key and value, one after the other: "tensors" is an iterator, to be used up before the next
    pair is asked for. Memory is that of the checkpoint's headers."""
    checkpoint = Checkpoint(path)
    totals = _Totals()
    yield "path", str(checkpoint.path)
    yield "files", len(checkpoint.files)
    yield "tensors", _tensors(checkpoint, totals)
    yield "total", totals.report()
    yield "quantization_config", checkpoint.quantization
    yield "findings", [*totals.findings, *_unread_keys(checkpoint)]
    checkpoint.close()


def _unread_keys(checkpoint: Checkpoint) -> list[str]:
    """What the checkpoint says of its quantization in words that nobody here reads."""
    fates = keys_of(checkpoint.quantization, {}) if checkpoint.quantization else {}
    return [f"{key} in quantization_config: nobody here reads it" for key, fate in fates.items() if fate == "unread"]


@dataclass(eq=False, slots=True)
class _Figures:
    """What is listed of a tensor, but its name; plain ones that are alike share one."""

    said: Said
    format: str
    nbytes: int
    weights: int
    bits: float  # per weight


class _Totals:
    def __init__(self) -> None:
        self.tensors = self.weights = self.nbytes = 0
        self.kinds: Counter[tuple[str, str]] = Counter()
        self.findings: list[str] = []

    def add(self, batch: Batch, figures: list[_Figures]) -> None:
        counts = Counter(figures)
        for one, count in counts.items():
            self.tensors += count
            self.weights += count * one.weights
            self.nbytes += count * one.nbytes
            self.kinds[one.format, one.said.kind] += count
        if any(one.said.findings for one in counts):
            for name, said in zip(batch.names, batch.said, strict=True):
                self.findings += [f"{name}: {text}" for text in said.findings]

    def report(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "weights": self.weights,
            "nbytes": self.nbytes,
            "bits_per_weight": round(8 * self.nbytes / self.weights, 3) if self.weights else 0.0,
            "formats": {f"{bridge} {kind}": count for (bridge, kind), count in self.kinds.most_common()},
        }


def _batches(checkpoint: Checkpoint, totals: _Totals) -> Iterator[tuple[Batch, list[_Figures]]]:
    """All tensors, and the figures of each, which are added to the totals."""

    def made(said: Said, stored: str) -> _Figures:
        nbytes = checkpoint.entries[stored].nbytes if said.found is None else checkpoint.nbytes(said.found)
        weights = math.prod(said.shape)
        bits = round(8 * nbytes / weights, 3) if weights else 0.0
        return _Figures(said, "plain" if said.found is None else said.found.format, nbytes, weights, bits)

    for batch in checkpoint.found.batches():
        figures = {
            said: made(said, stored) for said, stored in dict(zip(batch.said, batch.stored, strict=True)).items()
        }
        every = [figures[said] for said in batch.said]
        totals.add(batch, every)
        yield batch, every


def _tensors(checkpoint: Checkpoint, totals: _Totals) -> Iterator[dict[str, Any]]:
    for batch, figures in _batches(checkpoint, totals):
        for name, stored, one in zip(batch.names, batch.stored, figures, strict=True):
            said, found = one.said, one.said.found
            scales = None
            if found and found.layout is not None:
                scales = {"layout": repr(found.layout), "shape": list(found.layout.scale_shape(found.shape))}
            yield {
                "name": name,
                "format": one.format,
                "kind": said.kind,
                "shape": list(said.shape),
                "nbytes": one.nbytes,
                "bits_per_weight": one.bits,
                "recipe": None if found is None or found.recipe is None else found.recipe.to_dict(),
                "scales": scales,
                "parts": found.parts if found else {"weight": stored},
                "findings": list(said.findings),
            }


def lines(path: str | os.PathLike[str], *, summary: bool = False, every: bool = False) -> Iterator[str]:
    """What `describe` says as a table of at most 80 columns: totals and findings alone (``summary``), one line per
    tensor (``every``), or one for layers that differ by a number alone."""
    checkpoint, totals = Checkpoint(path), _Totals()
    batches = _batches(checkpoint, totals)
    if summary:
        deque(batches, 0)
    else:
        yield f"{'count':>5}  {'shape':<14} {'bits':>6}  {'format':<22} name"
        yield from _each(batches) if every else _groups(batches)
        yield ""
    total, files = totals.report(), len(checkpoint.files)
    yield f"{total['tensors']:,} tensors in {files} file{'s' if files != 1 else ''}: {total['weights']:,} weights,"
    yield f"{total['nbytes']:,} bytes, {total['bits_per_weight']:.3f} bits per weight"
    yield from (f"{count:>8,} × {kind}" for kind, count in total["formats"].items())
    for text in (*totals.findings, *_unread_keys(checkpoint)):
        yield from wrapped(f"! {text}")
    checkpoint.close()


def scheme_lines(path: str | os.PathLike[str], scheme: ModelScheme) -> Iterator[str]:
    """What a model is, a line for each role of its layers, of at most 80 columns."""
    checkpoint = Checkpoint(path)
    unread, every = unread_modules(checkpoint), [one.name for one in checkpoint.found if len(one.shape) > 1]
    modules = (name.rpartition(".")[0] for name in every)
    pairs = zip(every, modules, strict=True)
    names = dict.fromkeys(one if one in unread else name.removesuffix(".weight") for name, one in pairs)
    checkpoint.close()
    for line in folded(scheme, names):
        yield from wrapped(line)
    if scheme.scales:
        kinds = Counter(one.of for one in scheme.scales)
        yield "static scales: " + ", ".join(f"{count} of {of}" for of, count in kinds.items())


def _each(batches: Iterator[tuple[Batch, list[_Figures]]]) -> Iterator[str]:
    for batch, figures in batches:
        starts = {one: _start(1, one.said.shape, one.bits, one.format, one.said.kind) for one in set(figures)}
        for name, one in zip(lines_of(batch.names), figures, strict=True):
            yield from fitted(starts[one], name)


def _groups(batches: Iterator[tuple[Batch, list[_Figures]]]) -> Iterator[str]:
    groups: dict[tuple[Any, ...], tuple[int, str]] = {}  # how many, and the name where it is one
    for batch, figures in batches:
        names = lines_of(batch.names)
        rows = list(zip(_NUMBERS.sub(".*", "\n".join(names)).split("\n"), figures, strict=True))
        counts = Counter(rows)
        alone = dict(zip(rows, names, strict=True)) if 1 in counts.values() else {}
        for row, count in counts.items():
            label, one = row
            key = (label, one.said.shape, one.bits, one.format, one.said.kind)
            before, first = groups.get(key, (0, alone.get(row, label)))
            groups[key] = (before + count, first)
    for (label, *figure), (count, first) in groups.items():
        yield from fitted(_start(count, *figure), label if count > 1 else first)


def _start(count: int, axes: tuple[int, ...], bits: float, bridge: str, kind: str) -> str:
    shape = "×".join(map(str, axes)) or "scalar"
    what = kind if bridge == "plain" else f"{bridge} {kind}"
    return f"{count:>5}  {shape:<14} {bits:>6.3f}  {what:<21}"
