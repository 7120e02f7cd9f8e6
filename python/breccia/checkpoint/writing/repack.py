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
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from breccia.bridges.file_kinds import Spec
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Part, ghost
from breccia.checkpoint.planning.choices import Choice, target_parts
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.rows import STEP
from breccia.checkpoint.workers import Workers
from breccia.checkpoint.writing.losses import FLOATS, in_piece
from breccia.scaled_tensor import ScaledTensor

_PIECE = 2 << 20  # bytes of codes at a time


def repack(scaled: ScaledTensor | OutsideTensor, choice: Choice, target: Target, sink: Sink) -> None:
    """Write a quantized tensor."""
    turned = choice.found.name in target.products  # not stored by its rows
    if turned or isinstance(scaled, OutsideTensor) or scaled.data.size <= _PIECE or len(list(_runs(scaled))) < 2:
        parts, _ = target_parts(target, choice.found.name, scaled)
        for name, part in parts.items():
            sink.put(name, np.asarray(part.make()))
        return
    _Repack(scaled, choice, target, sink).run(iter([(0, scaled)]))


def repack_pieces(pieces: Iterator[tuple[int, Any]], choice: Choice, target: Target, sink: Sink) -> None:
    """Write a quantized tensor that comes in pieces, each with the number of its first row."""
    start, first = next(pieces)
    if first.shape == choice.found.shape:
        repack(first, choice, target, sink)
    else:
        _Repack(_whole(choice, first), choice, target, sink).run(chain([(start, first)], pieces))


def _whole(choice: Choice, piece: ScaledTensor) -> ScaledTensor:
    """What a piece is of, in memory that is never touched but for the scales that are of all rows."""
    found, recipe = choice.found, choice.recipe
    assert recipe is not None
    whole = found.ghost() if choice.action == "repack" else ghost(found.shape, recipe)
    both = ((name, getattr(piece, name), getattr(whole, name)) for name in ("scale", "global_scale"))
    return whole._with(**{name: own for name, own, of_all in both if own is not None and own.size == of_all.size})


def _runs(scaled: ScaledTensor) -> Iterator[tuple[int, int]]:
    count = scaled.shape[0]
    each = max(math.prod(scaled.data.shape[1:]), 1)
    multiple = STEP if scaled.ndim == 2 else 2
    step = -(-max(_PIECE // each, 1) // multiple) * multiple
    for start in range(0, count, step):
        yield start, min(start + step, count)


class _Repack:
    def __init__(self, whole: ScaledTensor, choice: Choice, target: Target, sink: Sink) -> None:
        self.choice, self.target, self.sink = choice, target, sink
        self.whole = self._parts(whole)
        self.gathered: dict[str, np.ndarray[Any, Any]] = {}
        self.lock = threading.Lock()

    def _parts(self, scaled: ScaledTensor) -> dict[str, Part]:
        return target_parts(self.target, self.choice.found.name, scaled)[0]

    def run(self, pieces: Iterator[tuple[int, ScaledTensor]]) -> None:
        for at, scaled in pieces:
            runs = list(_runs(scaled))
            if not at:
                self.step = runs[0][1]
                self.first = {name: part.shape for name, part in self._parts(scaled[: self.step]).items()}
            self.sink.workers.each(self._piece, ((scaled, at, *run) for run in runs))
        for name, part in self.whole.items():
            if name in self.gathered:
                self.sink.put(name, self.gathered.pop(name))
            elif self.first[name] == part.shape:  # says something of the tensor, not of its rows
                self.sink.put(name, np.asarray(part.make()))

    def _piece(self, run: tuple[ScaledTensor, int, int, int], _: Any) -> None:
        scaled, at, start, stop = run
        for name, part in self._parts(scaled[start:stop]).items():
            axis = _axis(part, self.whole[name])
            if axis is None:
                continue
            array = np.asarray(part.make()).reshape(*_stored(part))
            first = (at + start) * self.first[name][axis] // self.step  # pieces begin at whole bytes, words and tiles
            if axis == 0:
                self.sink.put(name, array, first * (array.nbytes // array.shape[0]))
                continue
            with self.lock:
                if name not in self.gathered:
                    self.gathered[name] = np.empty(self.whole[name].shape, array.dtype)
            into = [slice(None)] * array.ndim
            into[axis] = slice(first, first + array.shape[axis])
            self.gathered[name][tuple(into)] = array


def _axis(piece: Part, whole: Part) -> int | None:
    """The axis along which a piece is shorter than the whole. The global scale of a batch of one has no axes."""
    if len(piece.shape) < len(whole.shape):
        return 0
    return next((i for i, (a, b) in enumerate(zip(piece.shape, whole.shape, strict=True)) if a != b), None)


def _stored(part: Part) -> tuple[int, ...]:
    """A shape whose first axis is the part's; the elements of block types and sub-byte types share bytes."""
    return (part.shape[0], -1) if part.shape else (1,)


@dataclass(frozen=True)
class Sink:
    """An output at work.

    Attributes:
        writer: takes bytes of its tensors, as `PlannedWriter` does.
        workers: threads that make and write pieces.
        done: is told of each piece how many bytes it has.
        specs: dtypes and shapes of what is written, by name, where numbers that are not finite are to be counted.
        not_finite: how many numbers of each new piece are infinite or NaN.
    """

    writer: Any
    workers: Workers
    done: Callable[[int], None] = lambda nbytes: None
    specs: dict[str, Spec] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)

    def put(self, name: str, array: Any, at: int = 0, *, copied: bool = False) -> None:
        """Write a stored tensor, or a piece of it that begins at a byte; ``copied``: its bytes are the source's."""
        if not copied and name in self.specs and (dtype := self.specs[name][0]) in FLOATS:
            self.not_finite.append(in_piece(array, dtype))
        self.writer.write(name, array, at)
        self.done(array.nbytes)
