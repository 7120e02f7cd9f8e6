# SPDX-License-Identifier: Apache-2.0
"""How much is kept of each input, so that all of it fits into memory, and the sums over rows of one input, on the
device where its rows are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from breccia.moments import Moments

Level: TypeAlias = Literal["diag", "block", "full"]
LEVELS = get_args(Level)
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.|$)")


def is_expert(name: str) -> bool:
    """Whether a layer is one expert's: ``….experts.3.up_proj``."""
    return bool(_EXPERT.search(name))


def of_any_expert(name: str) -> str:
    """A layer's name with ``*`` for the expert's number."""
    return _EXPERT.sub("*", name)


@dataclass(frozen=True)
class Choice:
    """The level of each input, and sentences on those that are not at the one that was asked for."""

    levels: dict[str, str]
    notes: tuple[str, ...]


def _numbers(level: str, columns: int, block: int) -> int:
    return columns * {"diag": 1, "block": 1 + block, "full": 1 + columns}[level]


def choose(
    widths: Mapping[str, int],
    level: str,
    memory: int | None,
    block: int,
    itemsize: int,
    counts: Mapping[str, int] | None = None,
) -> Choice:
    """The level of each input of so many columns: the one asked for, unless it is an expert's, has no whole runs of
    ``block`` columns, or ``memory`` is short. ``counts`` are of experts that are fused."""
    counts = counts or {}
    levels = dict.fromkeys(widths, level)
    notes = []
    if experts := [name for name in widths if level == "full" and (is_expert(name) or name in counts)]:
        levels |= dict.fromkeys(experts, "block")
        number = sum(counts.get(name, 1) for name in experts)
        notes.append(f"{number} inputs of experts are kept at block: full would be K x K for each expert")

    def lowered(names: Sequence[str]) -> None:
        """One level down; from full past block where K is no multiple of it."""
        for name in names:
            whole = levels[name] == "full" and not widths[name] % block
            levels[name] = "block" if whole else "diag"

    if odd := [name for name in widths if levels[name] == "block" and widths[name] % block]:
        lowered(odd)
        notes.append(f"{len(odd)} inputs are kept at diag: their K is no multiple of {block}")
    asked = dict(levels)

    def size(name: str) -> int:
        return itemsize * counts.get(name, 1) * _numbers(levels[name], widths[name], block)

    total = sum(map(size, widths))
    wanted = total
    while memory is not None and total > memory:
        largest = max(widths, key=lambda name: (levels[name] != "diag", size(name)))
        if levels[largest] == "diag":
            least = f"diag of {len(widths)} inputs takes {total:,} bytes"
            raise ValueError(f"memory must be enough for the least that is kept, got {memory:,}: {least}")
        total -= size(largest)
        lowered([largest])
        total += size(largest)
    for now in LEVELS:
        if fewer := [name for name in widths if levels[name] == now != asked[name]]:
            columns = ", ".join(str(k) for k in sorted({widths[name] for name in fewer}))
            why = f"all that was asked for takes {wanted:,} bytes, memory is {memory:,}"
            notes.append(f"{len(fewer)} inputs (K = {columns}) are kept at {now}: {why}")
    return Choice(levels, tuple(notes))


class Sums:
    """Σ x.T x in ``dtype``, or what a level keeps of it (of "block": runs of ``block`` columns), and the largest
    |x| of each column."""

    def __init__(self, columns: int, level: str, block: int, dtype: torch.dtype) -> None:
        self.columns, self.level, self.block, self.dtype = columns, level, block, dtype
        self.count = 0
        shapes: dict[str, tuple[int, ...]] = {"diag": (columns,), "column_amax": (columns,)}
        if level == "block":
            shapes["block"] = (columns // block, block, block)
        if level == "full":
            shapes["full"] = (columns, columns)
        self._parts = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

    def add(self, rows: torch.Tensor) -> None:
        """Add rows (R, K) of any dtype."""
        if not len(rows):
            return
        x = rows.to(self.dtype)
        if self._parts["diag"].device != x.device:
            self._parts = {name: part.to(x.device) for name, part in self._parts.items()}
        self.count += len(x)
        self._parts["column_amax"] = torch.maximum(self._parts["column_amax"], x.abs().amax(0))
        self._parts["diag"] += x.square().sum(0)
        if self.level == "block":
            runs = x.reshape(len(x), -1, self.block).transpose(0, 1)
            self._parts["block"].baddbmm_(runs.mT, runs)
        elif self.level == "full":
            self._parts["full"].addmm_(x.mT, x)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The sums as they are, for a file of which `put` takes them."""
        return {"count": np.asarray(self.count, np.int64), **{k: v.cpu().numpy() for k, v in self._parts.items()}}

    def put(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Go on from the sums of another run. Raises ValueError where they are of other shapes or types."""
        wanted = {name: (array.shape, array.dtype) for name, array in self.arrays().items()}
        got = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        if wanted != got:
            raise ValueError(f"sums must be {wanted}, got {got}")
        self.count = int(arrays["count"])
        self._parts = {name: torch.from_numpy(np.array(arrays[name])) for name in self._parts}

    def moments(self) -> Moments:
        """In float32, symmetric in every bit. The sums are spent: nothing can be added to them."""
        parts = {name: part.cpu().to(torch.float32) for name, part in self._parts.items()}
        self._parts = {}
        for name in parts.keys() & {"block", "full"}:
            lower = parts[name].tril(-1).mT
            parts[name].tril_().add_(lower)
        parts["amax"] = parts["column_amax"].amax()
        arrays = {name: part.numpy() for name, part in parts.items()}
        return Moments(count=np.asarray(self.count, np.int64), **arrays)


class StackedSums:
    """Those of the ``count`` experts of one parameter."""

    def __init__(self, count: int, columns: int, level: str, block: int, dtype: torch.dtype) -> None:
        self.columns = columns
        self._each = [Sums(columns, level, block, dtype) for _ in range(count)]

    def add(self, expert: int, rows: torch.Tensor) -> None:
        """Add rows (R, K) that an expert was given."""
        self._each[expert].add(rows)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The sums as they are, (E, …) each, for a file of which `put` takes them."""
        each = [one.arrays() for one in self._each]
        return {name: np.stack([one[name] for one in each]) for name in each[0]}

    def put(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Go on from the sums of another run. Raises ValueError where they are of other shapes or types."""
        for number, one in enumerate(self._each):
            one.put({name: array[number] for name, array in arrays.items()})

    def moments(self) -> Moments:
        """As `Sums.moments`, of E experts."""
        each = [one.moments().arrays() for one in self._each]
        return Moments(**{name: np.stack([one[name] for one in each]) for name in each[0]})
