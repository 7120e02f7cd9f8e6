# SPDX-License-Identifier: Apache-2.0
"""Some rows of a logical tensor, of the bytes of those rows alone: pieces of a tensor that is too large to be held.

A row of a matrix, or a matrix of a batch, is a run of each stored tensor along the axis that `FileFormat.row_axis`
names. Where a format has no such axis the whole tensor is read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from breccia import bridges
from breccia.bridges.common import float32
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found
from breccia.checkpoint.files.dtypes import typed
from breccia.checkpoint.files.safetensors_file import Entry
from breccia.checkpoint.reading.experts import stack
from breccia.checkpoint.reading.naming import naming
from breccia.checkpoint.reading.source import Checkpoint, assemble
from breccia.scaled_tensor import ScaledTensor

Tensor: TypeAlias = "ScaledTensor | OutsideTensor | np.ndarray[Any, Any]"
_FEW = 16  # rows: so few are read at once, for a number of them could be anything
_LARGE = 64 << 20  # bytes of a tensor that is read in pieces, and of a piece: stored, or as bfloat16, which are more
STEP = 128  # rows of a piece: whole bytes, words and tiles of every format; of matrices it has two
_WORDS = (2, 4, 8)  # rows whose codes share a byte or a word


class _Run(NamedTuple):
    """How rows lie in a stored tensor: along an axis, so many to each index."""

    axis: int
    rows: int


def stored_shape(checkpoint: Checkpoint, found: Found) -> tuple[int, ...]:
    """The shape that a model's parameter has: that of the file where the tensor is plain, the logical one where not."""
    if found.format != "plain" or found.origin.cut is not None:
        return found.shape
    return _shape(checkpoint, found, found.parts["weight"])


def together(checkpoint: Checkpoint, found: Found) -> int:
    """Rows that `rows_of` gives only together: those of a tile, a byte or a word; all of them where the format cannot
    be read by rows. ``found`` is as `Checkpoint.refined` gives it."""
    runs = _runs(checkpoint, found)
    if runs is None:
        return max(found.shape[0], 1) if found.shape else 1
    return math.lcm(*(run.rows for run in runs.values() if run is not None), _tile(found))


def rows_of(checkpoint: Checkpoint, found: Found, start: int, stop: int) -> Tensor:
    """Rows from one multiple of `together` to another, or the last, of a matrix, or matrices of a batch: as
    `Checkpoint.load` gives them, but that a plain tensor is as the file has it. A checkpoint that is not mapped reads
    no more than it must. Raises ValueError where the tensor's bytes do not fit; the message names it."""
    runs = _runs(checkpoint, found)
    if runs is None:
        whole: Tensor = _cut(checkpoint.load(found), start, stop)
        return whole
    with naming(checkpoint.path, found.name), np.errstate(over="ignore", invalid="ignore"):
        shape = (stop - start, *found.shape[1:])
        order, begin, end = found.origin.row_order, start, stop
        if order is not None:
            order = np.argsort(order)[start:stop]
            begin, end = int(order.min()), int(order.max()) + 1
            order = order - begin
        parts = {}
        for role, name in found.parts.items():
            run = runs[role]
            if role == bridges.bridge(found.format).shape_role:
                if not start:
                    _read(checkpoint, found, name)  # for its checksum
                parts[role] = np.array(shape, np.int64)
            elif run is None:
                parts[role] = _read(checkpoint, found, name)
            else:
                some = _read(checkpoint, found, name, run.axis, begin // run.rows, -(-end // run.rows))
                parts[role] = some if order is None else some[order]
        if found.format == "plain":
            more = found.origin.offset
            return float32(parts["weight"]) - np.float32(more) if more else parts["weight"]
        ordered = replace(found, origin=replace(found.origin, row_order=None))
        return assemble(bridges.bridge(found.format).reshaped(ordered, shape), parts)


def pieces_of(checkpoint: Checkpoint, found: Found) -> list[tuple[int, int]]:
    """Runs of rows, or of matrices of a batch, that `piece_of` reads one by one; all in one of a tensor that is not
    large or cannot be cut."""
    rows, origin = found.shape[0] if found.shape else 1, found.origin
    if 16 * math.prod(found.shape) <= _LARGE:  # more bytes than an element has in any format
        return [(0, rows)]
    nbytes = max(sum(map(checkpoint.nbytes, origin.members or [found])), 2 * math.prod(found.shape))
    made = origin.rotations or origin.numbers or origin.factor or origin.low_rank or origin.cut
    turned = origin.turned and not (found.format == "plain" and len(found.shape) == 3)
    if nbytes <= _LARGE or len(found.shape) < 2 or made or turned:
        return [(0, rows)]
    each = 1 if origin.members else together(checkpoint, found)
    each = math.lcm(each, STEP if len(found.shape) == 2 else 2)
    step = max(_LARGE * rows // nbytes // each, 1) * each
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def piece_of(checkpoint: Checkpoint, found: Found, start: int, stop: int) -> Tensor:
    """A run of `pieces_of`, as `Checkpoint.load` gives it."""
    if not found.shape or stop - start == found.shape[0]:
        return checkpoint.load(found)
    if found.origin.members:
        batch: Tensor = stack([checkpoint.load(one) for one in found.origin.members[start:stop]])
        return batch
    rows = rows_of(checkpoint, found, start, stop)
    return np.swapaxes(rows, -1, -2) if found.origin.turned and isinstance(rows, np.ndarray) else rows


def _runs(checkpoint: Checkpoint, found: Found) -> dict[str, _Run | None] | None:
    """Each role's rows, None for parts that are of all rows; None where the format cannot be read by rows."""
    if found.origin.cut is not None:
        return None
    if found.format == "plain":
        whole = not stored_shape(checkpoint, found) or not _has_whole_rows(checkpoint, found.parts["weight"])
        return None if whole else {"weight": _Run(0, 1)}
    bridge, axes = bridges.bridge(found.format), len(found.shape)
    axis = bridge.row_axis
    if axis is None or found.origin.members or found.origin.factor or found.origin.low_rank:
        return None
    if not (axes == 3 and axis == 0) and not (axes == 2 and found.shape[0] > _FEW):
        return None
    runs: dict[str, _Run | None] = {}
    for role, name in found.parts.items():
        shape = _shape(checkpoint, found, name)
        if math.prod(shape) == 1 or role == bridge.shape_role or (axis and len(shape) < 2):
            runs[role] = None
            continue
        each = _rows_each(shape[axis], found)
        if not each or not _has_whole_rows(checkpoint, name) or (each > 1 and found.origin.row_order is not None):
            return None
        runs[role] = _Run(axis, each)
    return runs


def _rows_each(extent: int, found: Found) -> int:
    """How many rows an index of an axis stands for; 0 where that does not follow."""
    rows, tile = found.shape[0], _tile(found)
    if extent == rows:
        return 1
    if len(found.shape) == 3:
        return 0
    if tile > 1 and extent == -(-rows // tile):
        return tile
    return next((each for each in _WORDS if extent * each == rows), 0)


def _tile(found: Found) -> int:
    return found.layout.block.rows or 1 if found.layout is not None and len(found.shape) == 2 else 1


def _shape(checkpoint: Checkpoint, found: Found, name: str) -> tuple[int, ...]:
    """Of a stored tensor, or of one expert's share."""
    entry = checkpoint.entries[name]
    return entry.shape if _expert(entry, found) is None else entry.shape[1:]


def _expert(entry: Entry, found: Found) -> int | None:
    """Which of all experts in a stored tensor; None where it is of one, or one number for all."""
    expert = found.origin.expert
    return expert if math.prod(entry.shape) > 1 else None


def _has_whole_rows(checkpoint: Checkpoint, name: str) -> bool:
    """Whether rows end on a byte."""
    entry = checkpoint.entries[name]
    return entry.nbytes % max(math.prod(entry.shape[:-1]), 1) == 0


def _read(
    checkpoint: Checkpoint, found: Found, name: str, axis: int = 0, start: int = 0, stop: int | None = None
) -> np.ndarray[Any, Any]:
    """Some of a stored tensor along its first axis, or along the last of two."""
    entry, shape = checkpoint.entries[name], _shape(checkpoint, found, name)
    expert = _expert(entry, found)
    nbytes = entry.nbytes if expert is None else entry.nbytes // entry.shape[0]
    first = 0 if expert is None else expert * nbytes
    if stop is None or (start == 0 and stop == shape[axis]):
        return typed(checkpoint.span(name, first, first + nbytes), entry.dtype, shape)
    row = nbytes // shape[0]
    if axis == 0:
        raw = checkpoint.span(name, first + start * row, first + stop * row)
        return typed(raw, entry.dtype, (stop - start, *shape[1:]))
    item = row // shape[1]
    lines = (first + i * row for i in range(shape[0]))
    raw = np.concatenate([checkpoint.span(name, at + start * item, at + stop * item) for at in lines])
    return typed(raw, entry.dtype, (shape[0], stop - start))


def _cut(tensor: Any, start: int, stop: int) -> Any:
    """Rows of a tensor that was read whole."""
    if not getattr(tensor, "shape", ()) or (start, stop) == (0, tensor.shape[0]):
        return tensor
    if isinstance(tensor, ScaledTensor):
        return tensor[start:stop]
    if isinstance(tensor, OutsideTensor):
        return replace(
            tensor,
            scaled=tensor.scaled[start:stop],
            bias=None if tensor.bias is None else tensor.bias[start:stop],
        )
    return tensor[start:stop]
