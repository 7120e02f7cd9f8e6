# SPDX-License-Identifier: Apache-2.0
"""How much is kept of each input, so that all of it fits into memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

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
