# SPDX-License-Identifier: Apache-2.0
"""How much of a LoRA adapter's change is in the checkpoint that it was merged into."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from breccia import comparison
from breccia.bridges.common import float32
from breccia.bridges.outside import values
from breccia.bridges.parts import Found
from breccia.checkpoint.lora.adapters import Change, open_adapter
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.workers import runs


class Survival:
    """Sums of `breccia.comparison.kept`, tensor by tensor, of an adapter and the checkpoint before. Raises ValueError
    where the adapter changes what that has not."""

    def __init__(self, adapter: str | os.PathLike[str], base: Checkpoint) -> None:
        self.adapter = open_adapter(adapter, base)
        self.sums: dict[str, tuple[float, float]] = {}
        names = {found.name for found in base.found}
        if missing := sorted(self.adapter.changes.keys() - names):
            self.close()
            raise ValueError(f"adapter must change tensors of {base.path}, which has no {missing[0]!r}")

    @property
    def kept(self) -> float:
        """Of all tensors; 1 where nothing was to change."""
        norm = sum(b for _, b in self.sums.values())
        return sum(a for a, _ in self.sums.values()) / norm if norm else 1.0

    def of(self, name: str) -> dict[str, float]:
        """What a report says of a tensor."""
        if name not in self.sums:
            return {}
        dot, norm = self.sums[name]
        return {"kept": dot / norm if norm else 1.0}

    def add(self, found: Found, old: Any, new: Any) -> Any:
        """Look at one tensor as it was loaded from the base and from the merged checkpoint; gives what it should be,
        ``old`` or an array with the change."""
        change = self.adapter.changes.get(found.name)
        if change is None:
            return old
        before, after = _values(old), _values(new)
        change, wanted = change.of(found), np.empty_like(before)
        dot = norm = 0.0
        for rows in runs(before.shape[0]):
            asked = _asked(change, rows, before)
            part = comparison.kept(before[rows], after[rows], asked)
            dot, norm = dot + part[0], norm + part[1]
            wanted[rows] = before[rows] + asked
        self.sums[found.name] = dot, norm
        return wanted

    def close(self) -> None:
        """Let go of the adapter's file."""
        self.adapter.close()


def _values(loaded: Any) -> np.ndarray[Any, Any]:
    return float32(values(loaded))


def _asked(change: Change, rows: slice, old: Any) -> Any:
    """What was to be added to some rows."""
    if change.whole is not None:
        return float32(change.whole.read()).reshape(old.shape)[rows] - old[rows]
    return change.rows(rows)
