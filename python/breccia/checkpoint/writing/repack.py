# SPDX-License-Identifier: Apache-2.0
"""Moving a tensor's codes and scales into another format's bytes: piece by piece, on every core.

Formats work on rows alone, so that a run of rows gives a run of each stored tensor, along the one axis in
which its shape follows the number of rows. Runs along the first axis are written as they are made; others
(GPTQ's and AWQ's, which are transposed) are gathered first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Part
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.planning.choices import Choice, target_parts
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.workers import Workers
from breccia.scaled_tensor import ScaledTensor

__all__ = ["repack"]

_PIECE = 2 << 20  # bytes of codes at a time
_STEP = 128  # rows: whole bytes, words and tiles of every format
Done = Callable[[int], None]


def _store(scaled: Any, choice: Choice, target: Target, writer: PlannedWriter, done: Done) -> None:
    """Write all that a tensor gives, one stored tensor after another."""
    parts, _ = target_parts(target, choice.found.name, scaled)
    for name, part in parts.items():
        array = np.asarray(part.make())
        writer.write(name, array)
        done(array.nbytes)


def repack(
    scaled: ScaledTensor | OutsideTensor,
    choice: Choice,
    target: Target,
    writer: PlannedWriter,
    workers: Workers,
    done: Done,
) -> None:
    """Write a quantized tensor."""
    runs = [] if isinstance(scaled, OutsideTensor) else list(_runs(scaled))
    if len(runs) < 2:
        _store(scaled, choice, target, writer, done)
        return
    assert isinstance(scaled, ScaledTensor)
    _Repack(scaled, choice, target, writer, done).run(runs, workers)


def _runs(scaled: ScaledTensor) -> Iterator[tuple[int, int]]:
    count = scaled.shape[0]
    each = max(math.prod(scaled.data.shape[1:]), 1)
    step = max(_PIECE // each, 1)
    if scaled.ndim == 2:
        step = -(-step // _STEP) * _STEP
    for start in range(0, count, step):
        yield start, min(start + step, count)


class _Repack:
    def __init__(self, scaled: ScaledTensor, choice: Choice, target: Target, writer: PlannedWriter, done: Done) -> None:
        self.scaled, self.choice, self.target, self.writer, self.done = scaled, choice, target, writer, done
        self.whole, _ = target_parts(target, choice.found.name, scaled)
        self.gathered: dict[str, np.ndarray[Any, Any]] = {}
        self.lock = threading.Lock()

    def run(self, runs: list[tuple[int, int]], workers: Workers) -> None:
        self.step = runs[0][1] - runs[0][0]
        first, _ = target_parts(self.target, self.choice.found.name, self.scaled[slice(*runs[0])])
        self.first = {name: part.shape for name, part in first.items()}
        workers.each(lambda run, _: self._piece(*run), iter(runs))
        for name, part in self.whole.items():
            if name in self.gathered:
                self._write(name, self.gathered.pop(name))
            elif self.first[name] == part.shape:  # says something of the tensor, not of its rows
                self._write(name, np.asarray(part.make()))

    def _write(self, name: str, array: np.ndarray[Any, Any], at: int = 0) -> None:
        self.writer.write(name, array, at)
        self.done(array.nbytes)

    def _piece(self, start: int, stop: int) -> None:
        parts, _ = target_parts(self.target, self.choice.found.name, self.scaled[start:stop])
        for name, part in parts.items():
            axis = _axis(part, self.whole[name])
            if axis is None:
                continue
            array = np.asarray(part.make()).reshape(*_stored(part))
            first = start // self.step * self.first[name][axis]  # all runs but the last are as long as the first
            if axis == 0:
                self._write(name, array, first * (array.nbytes // array.shape[0]))
                continue
            with self.lock:
                if name not in self.gathered:
                    self.gathered[name] = np.empty(self.whole[name].shape, array.dtype)
            into = [slice(None)] * array.ndim
            into[axis] = slice(first, first + array.shape[axis])
            self.gathered[name][tuple(into)] = array


def _axis(piece: Part, whole: Part) -> int | None:
    """The axis along which a piece is shorter than the whole."""
    return next((i for i, (a, b) in enumerate(zip(piece.shape, whole.shape, strict=True)) if a != b), None)


def _stored(part: Part) -> tuple[int, ...]:
    """A shape whose first axis is the part's; the elements of block types and sub-byte types share bytes."""
    return (part.shape[0], -1) if part.shape else (1,)
