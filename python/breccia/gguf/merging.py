# SPDX-License-Identifier: Apache-2.0
"""The merge of a LoRA adapter into a GGUF file: metadata, tensors that do not change and all places stay byte for byte,
and a tensor that changes keeps its type.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.common import float32
from breccia.bridges.gguf import KINDS, RECIPE_OF, to_gguf
from breccia.bridges.parts import Found
from breccia.checkpoint.files.input_file import JoinedFiles
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.lora.job import Merge
from breccia.checkpoint.lora.plan import FLOATS, MergePlanner
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.writing.execute import as_dtype
from breccia.checkpoint.writing.losses import Loss
from breccia.checkpoint.writing.sink import Sink
from breccia.gguf.container import GgufFile

__all__ = ["MergeInPlace"]

_ENCODED = {kind.name: kind for kind in KINDS.values() if kind.encode is not None}
_WRITTEN = (*FLOATS, *RECIPE_OF, *_ENCODED)


def _file_of(checkpoint: Checkpoint) -> GgufFile:
    file = checkpoint.files[0]
    assert isinstance(file, GgufFile)
    return file


class _InPlace(MergePlanner):
    """See `MergePlanner`; the base is a GGUF file."""

    def _target_of(self, checkpoint: Checkpoint) -> Target:
        if isinstance(_file_of(checkpoint).file, JoinedFiles):
            raise ValueError(f"base must be one GGUF file, {checkpoint.path} is one of several")
        return Target("merge-lora", format="gguf", exclude=("*",))

    def _settled(self, target: Target) -> Target:
        return target  # names are the file's

    def _to_convert(self, found: list[Found]) -> list[Found]:
        """Stored tensors once each: of several logical ones in one tensor, the first; of a half and its whole, too."""
        listed, seen = [], set[str]()
        for one in found:
            parts = dict.fromkeys(one.parts.values())
            if one.name in self.adapter.changes or not seen.issuperset(parts):
                listed.append(one)
                seen.update(parts)
        return listed

    def _choose(self, found: Found, target: Target) -> Choice:
        names = dict.fromkeys(found.parts.values())
        stored = {name: self.checkpoint.entries[name] for name in names}
        outputs = {name: (entry.dtype, entry.shape) for name, entry in stored.items()}
        if found.name not in self.adapter.changes:
            return Choice(found, "same", outputs, found.recipe)
        origin = found.origin
        if origin.expert is not None or origin.members or origin.cut is not None:
            raise ValueError(f"tensor {found.name!r} must be one in the file, which keeps it with others or in parts")
        kind = _file_of(self.checkpoint).kinds[next(iter(names))]
        if kind not in _WRITTEN:
            raise ValueError(f"tensor {found.name!r} must be of {', '.join(_WRITTEN)} to be merged into, it is {kind}")
        note = ""
        if kind in _ENCODED and self.rounding.rounding != "nearest":
            note = f"{kind} is rounded to nearest: {self.rounding.rounding} has no form in it"
        return Choice(found, "merge", outputs, found.recipe, note=note)

    def _share(self) -> tuple[list[Choice], list[str]]:
        return self.choices, []

    def _note_levels(self) -> list[str]:
        return []


class MergeInPlace(Merge):
    """See `Merge`; the base is a GGUF file."""

    planner = _InPlace

    def _execute(self, choice: Choice, sink: Sink, losses: dict[str, Loss]) -> int:
        if choice.action != "merge":
            return super()._execute(choice, sink, losses)
        found = choice.found
        for name, array in self._stored(choice).items():
            sink.put(name, array)
        self.checkpoint.release(found)
        return self.bad.get(found.name, 0)

    def takes_rounding(self, choice: Choice) -> bool:
        """Only kinds that are a recipe's codes: K-quants and floats are rounded to nearest."""
        return _file_of(self.checkpoint).kinds[next(iter(choice.found.parts.values()))] in RECIPE_OF

    def _stored(self, choice: Choice) -> dict[str, Any]:
        """What the file stores of a tensor with its change, by name."""
        found = choice.found
        (first, *others), order = dict.fromkeys(found.parts.values()), found.origin.row_order
        kind = _file_of(self.checkpoint).kinds[first]
        second: dict[str, Any] = {}
        if kind in RECIPE_OF:
            parts = to_gguf(self._made(choice))
            rows = parts[kind]
            second = {others[0]: parts["scale"]} if others else {}
        else:
            values = self.values(found)
            rows, decoded = _encoded(kind, values, found.origin.offset)
            self.note_kept(found, values, decoded)
        return {first: rows if order is None else rows[order], **second}

    def _writer(self, path: Path, choices: list[Choice]) -> PlannedWriter:
        whole = _file_of(self.checkpoint)
        spans = {name: (entry.start, entry.stop) for name, entry in whole.entries.items()}
        start = min((begin for begin, _ in spans.values()), default=whole.file.size)
        return PlannedWriter(path, whole.file.read(0, start), spans, whole.file.size, resume=True)


def _encoded(kind: str, values: Any, offset: float) -> tuple[Any, Callable[[slice], Any]]:
    """Values as a type of the file has them, and the values of rows of that."""
    if kind in _ENCODED:
        encode, decode = _ENCODED[kind].encode, _ENCODED[kind].decode
        assert encode is not None
        assert decode is not None
        blocks = encode(values)
        return blocks, lambda rows: decode(blocks[rows])
    moved = values + np.float32(offset) if offset else values
    array = as_dtype(moved, kind)
    return array, lambda rows: float32(array[rows]) - np.float32(offset)
