# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format that breccia reads, as ``torch.distributed.checkpoint`` wants to read them: each rank
reads the bytes of its own rows, a few at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from breccia import verbs
from breccia.bridges.common import check_upright, to_torch, turned_shape
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import packed_codes
from breccia.bridges.parts import Found, as_torch
from breccia.checkpoint.files.dtypes import DTYPES, stored_name, torch_dtype
from breccia.checkpoint.reading.models import is_written_turned, tied
from breccia.checkpoint.reading.rows import rows_of, stored_shape, together
from breccia.checkpoint.reading.source import Checkpoint
from breccia.formats import finfo
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS
from breccia.value.slicing import block_along

__all__ = ["CheckpointReader"]

_PIECE = 32 << 20  # bytes of float32 values that are made at a time


@dataclass(frozen=True)
class _Source:
    """Where a tensor of a state dict comes from."""

    index: int  # of the logical tensor
    part: str  # which of its parts, as bytes; "" for its values
    shape: tuple[int, ...]  # as the state dict has it
    dtype: Any
    rows: int = 1  # of the logical tensor, to each index of the first axis; 0 where any of them tell all
    turned: bool = False  # whether matrices are transposed


@dataclass(frozen=True, eq=False)
class _Wish:
    """One item of a plan, and the rows of the logical tensor that it needs: all from ``start`` to ``stop``."""

    source: _Source
    item: ReadItem
    target: Any
    start: int
    stop: int


class CheckpointReader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint of any format into a state dict, sharded or not, for ``torch.distributed.checkpoint.load``.

    A parameter of a float dtype gets the values of the tensor of its name. ``NAME_data``, ``NAME_scale``,
    ``NAME_zero_point`` and ``NAME_global_scale`` of uint8 (one number: of its own dtype) get the parts of a quantized
    one, as `breccia.distributed.make_shardable_` has them. Every rank reads its rows' bytes alone, in pieces; formats
    that cannot be read by rows (bitsandbytes, ComfyUI, torchao) are read tensor by tensor.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.
        names: the model's name of each of the checkpoint's tensors, where it has another.
    """

    def __init__(self, path: str | os.PathLike[str], *, names: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self.path, self.names = path, names or str
        self._checkpoint: Checkpoint | None = None
        self._found: list[Found] = []
        self._sources: dict[str, _Source] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another path, where one is given.

        Args:
            checkpoint_id: the path.
        """
        if checkpoint_id is not None and checkpoint_id != self.path:
            self.close()
            self.path = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes and dtypes, from headers.

        Args:
            args: ignored.
            kwargs: ignored.

        Returns:
            What the planner of a load asks for.

        Raises:
            ValueError: the checkpoint is not valid.
        """
        self._open()
        described = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=source.dtype),
                size=torch.Size(source.shape),
                chunks=[ChunkStorageMetadata(torch.Size([0] * len(source.shape)), torch.Size(source.shape))],
            )
            for name, source in self._sources.items()
        }
        return Metadata(state_dict_metadata=described)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up: see `torch.distributed.checkpoint.StorageReader`."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is: see `torch.distributed.checkpoint.StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are: see `torch.distributed.checkpoint.StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill this rank's tensors.

        Args:
            plan: what to read.
            planner: knows where it goes.

        Returns:
            A future that is done.

        Raises:
            ValueError: stored bytes do not fit; the message names the tensor.
        """
        checkpoint = self._open()
        wishes: dict[int, list[_Wish]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                raise ValueError(f"{self.path}: state_dict[{name!r}] must be a tensor, it is an object")
            wish = self._wish(self._sources[name], item, planner.resolve_tensor(item).detach())
            wishes.setdefault(wish.source.index, []).append(wish)
        for index in sorted(wishes):
            self._fulfil(checkpoint, self._found[index], wishes[index])
            for wish in wishes[index]:
                planner.commit_tensor(wish.item, wish.target)
        checkpoint.check_unchanged()
        self.close()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is such a path: see `torch.distributed.checkpoint.StorageReader`."""
        return Path(checkpoint_id).exists()

    def close(self) -> None:
        """Let go of the files."""
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None

    def found(self) -> dict[str, Found]:
        """The checkpoint's logical tensors, by the model's names.

        Returns:
            Their descriptions.
        """
        self._open()
        return {self.names(one.name): one for one in self._found}

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(self.path, mapped=False)  # a file that is cut meanwhile is an error
            self._found = [self._checkpoint.refined(one) for one in self._checkpoint.found]
            self._sources = dict(self._describe(self._checkpoint))
        return self._checkpoint

    def _describe(self, checkpoint: Checkpoint) -> Iterator[tuple[str, _Source]]:
        """Names of a state dict; those of parts first, where a plain tensor's own name counts more."""
        by_name = {}
        for index, one in enumerate(self._found):
            name, shape = self.names(one.name), stored_shape(checkpoint, one)
            if one.recipe is not None and len(shape) == 2 and name.endswith("weight"):
                yield from _parts_of(name, index, one)
            turned = one.format != "plain" and is_written_turned(one.name, shape, checkpoint.config)
            shape = turned_shape(shape) if turned else shape
            dtype = torch_dtype(one.dtype) if one.format == "plain" else torch.bfloat16
            by_name[name] = _Source(index, "", shape, dtype, turned=turned)
        yield from by_name.items()
        for head, embedding in tied(by_name).items():
            yield f"{head}.weight", by_name[embedding]

    def _wish(self, source: _Source, item: ReadItem, target: Any) -> _Wish:
        one = self._found[source.index]
        rows = one.shape[0] if one.shape else 1
        if not source.shape or source.rows == 0:
            return _Wish(source, item, target, 0, 0)
        if source.turned and len(source.shape) == 2:
            return _Wish(source, item, target, 0, rows)
        first, count = item.storage_offsets[0], item.lengths[0]
        limit = source.shape[0] if one.format == "plain" else rows
        return _Wish(source, item, target, first * source.rows, min((first + count) * source.rows, limit))

    def _fulfil(self, checkpoint: Checkpoint, found: Found, wishes: list[_Wish]) -> None:
        """Read the rows that any of the wishes needs, a piece at a time."""
        shape = stored_shape(checkpoint, found)
        step, rows = together(checkpoint, found), shape[0] if shape else 1
        spans = [wish for wish in wishes if wish.stop > wish.start]
        start = min((wish.start for wish in spans), default=0) // step * step
        stop = max((wish.stop for wish in spans), default=min(step, rows))
        width = 4 * max(1, math.prod(shape[1:]))
        length = max(_PIECE // width // step, 1) * step
        if any(wish.source.turned and len(shape) == 2 for wish in wishes):
            length = rows
        for begin in range(start, stop, length):
            end = min(begin + length, -(-stop // step) * step, rows)
            tensor = rows_of(checkpoint, found, begin, end)
            for wish in wishes:
                if wish in spans or begin == start:
                    _take(found, tensor, wish, begin, end)


def _parts_of(name: str, index: int, found: Found) -> Iterator[tuple[str, _Source]]:
    """Bytes of the parts of a quantized matrix."""
    ghost = found.ghost()
    for part in PARTS:
        array = getattr(ghost, part)
        if array is None:
            continue
        if not array.shape:
            yield f"{name}_{part}", _Source(index, part, (), torch.float32, 0)
            continue
        shape = (*array.shape[:-1], array.shape[-1] * array.itemsize)
        rows = 1 if shape[0] == found.shape[0] else -(-found.shape[0] // shape[0])
        tile = getattr(found.layout, "block_m", 1) if part != "data" else 1
        yield f"{name}_{part}", _Source(index, part, shape, torch.uint8, tile if rows > 1 else 1)


def _take(found: Found, tensor: Any, wish: _Wish, begin: int, end: int) -> None:
    """Copy what a piece, rows ``begin`` to ``end``, has of a wish."""
    source, item = wish.source, wish.item
    place = [slice(at, at + count) for at, count in zip(item.storage_offsets, item.lengths, strict=True)]
    into = wish.target
    if source.shape and source.rows and not (source.turned and len(source.shape) == 2):
        low, high = begin // source.rows, -(-end // source.rows)
        first, last = max(place[0].start, low), min(place[0].stop, high)
        if first >= last:
            return
        into = into[first - place[0].start : last - place[0].start]
        place[0] = slice(first - low, last - low)
    if source.part:
        bytes_of_part(tensor, source.part, source.shape, place, into)
    else:
        floats_of(found, tensor, source.turned, place, into)


_HEADERS = {row.torch: row.name for row in DTYPES.values() if row.torch}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def header_dtype(dtype: torch.dtype) -> str:
    """A header's name of torch's type; KeyError where there is none."""
    return _HEADERS[str(dtype).removeprefix("torch.")]


def floats_of(found: Found, tensor: Any, turned: bool, place: list[slice], into: Any) -> None:
    """The values of ``tensor[place]``, in the dtype of ``into``; ``turned``: of its matrices transposed."""
    if found.format != "plain" and into.dtype not in _FLOATS:
        raise ValueError(
            f"the parameter for {found.name!r} must be of a float dtype to hold a {found.format} tensor's values, "
            f"got {into.dtype}"
        )
    if isinstance(tensor, ScaledTensor):
        part, place = (tensor, place) if turned else _narrowed(tensor, place)
        values = verbs.dequantize(part.to("torch"), into.dtype)
    else:
        array = tensor.dequantize() if isinstance(tensor, OutsideTensor) else tensor
        values = as_torch(array, found.dtype if found.format == "plain" else stored_name(array), array.shape)
    into.copy_((values.mT if turned else values)[tuple(place)])


def bytes_of_part(tensor: ScaledTensor, part: str, shape: tuple[int, ...], place: list[slice], into: Any) -> None:
    """The bytes of ``tensor``'s part; ``shape`` is that of all of the part's bytes, () for one number."""
    if part == "data" and finfo(tensor.recipe.element).bits == 4:
        check_upright(tensor)
        array = to_torch(packed_codes(tensor))
    else:
        array = getattr(tensor.to("torch"), part)
    if not shape:
        into.copy_(array.reshape(()))
        return
    raw = array.contiguous().view(torch.uint8).reshape(-1, *shape[1:])
    (into if into.dtype == torch.uint8 else into.view(torch.uint8)).copy_(raw[tuple(place)])


def _narrowed(tensor: ScaledTensor, place: list[slice]) -> tuple[ScaledTensor, list[slice]]:
    """Of a matrix, the blocks that have the columns of ``place``, and the place in these."""
    if tensor.ndim != 2:
        return tensor, place
    rows, columns = place
    block = block_along(tensor.layout, tensor.is_packed, -1)
    start = columns.start // block * block
    stop = min(-(-columns.stop // block) * block, tensor.shape[-1])
    if (start, stop) == (0, tensor.shape[-1]):
        return tensor, place
    return tensor[:, start:stop], [rows, slice(columns.start - start, columns.stop - start)]
