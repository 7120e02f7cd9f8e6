# SPDX-License-Identifier: Apache-2.0
"""Sums over rows of one input, on the device where its rows are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from breccia.moments import Moments


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
