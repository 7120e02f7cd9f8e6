# SPDX-License-Identifier: Apache-2.0
"""The merge of a LoRA adapter into a GGUF file: metadata, tensors that do not change and all places stay byte for byte,
and a tensor that changes keeps its type. And LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes
and its llama-adapter.cpp reads them.

``general.type`` is "adapter", ``adapter.type`` "lora". A tensor NAME of the model is changed by two matrices,
NAME.lora_a of (r, IN) and NAME.lora_b of (OUT, r), the rows of the latter in the order of GGUF's NAME; of embeddings
lora_a is (tokens, r). What is added is alpha / r · B A, where ``adapter.lora.alpha`` is missing or zero B A.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.common import float32
from breccia.bridges.gguf import KINDS, RECIPE_OF, dequantize_gguf, to_gguf
from breccia.bridges.parts import Found
from breccia.checkpoint.files.dtypes import typed
from breccia.checkpoint.files.input_file import JoinedFiles
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.lora.adapters import Adapter, Change
from breccia.checkpoint.lora.merge import Merge, MergePlanner
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.source import FLOATS, Checkpoint
from breccia.checkpoint.writing.execute import as_dtype
from breccia.checkpoint.writing.losses import Loss
from breccia.checkpoint.writing.repack import Sink
from breccia.gguf.container import GgufFile
from breccia.gguf.files import model_names
from breccia.gguf.models import ModelMap

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


_SIDES = (".lora_a", ".lora_b")
_TOKENS = "adapter.alora.invocation_tokens"


def read_adapter(path: Path, base: Checkpoint) -> Adapter:
    """An adapter of llama.cpp by the names of the model's own checkpoints; names in the GGUF file are those that GGUF
    gives the base's model. Raises ValueError where it is not LoRA, or a kind of it that is not a product of two
    matrices for each weight, or it is of another model."""
    file = GgufFile(path)
    try:
        return _read(path, file, base)
    except BaseException:
        file.close()
        raise


def _read(path: Path, file: GgufFile, base: Checkpoint) -> Adapter:
    fields = {key: value for key, (_, value) in file.fields.items()}
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(key) != wanted:
            raise ValueError(f"adapter's {key} must be {wanted!r}, {path} has {str(fields.get(key))[:80]!r}")
    if _TOKENS in fields:
        raise ValueError(f"adapter must not have {_TOKENS}: it acts after these alone, which is not merged here")
    alpha = fields.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise ValueError(f"adapter.lora.alpha must be a finite float32, got {str(alpha)[:80]}")
    names, reason = model_names(base)
    if names is None:
        raise ValueError(f"adapter must be PEFT's folder, whose names are the base's own, not a GGUF file: {reason}")
    if fields.get("general.architecture") != names.architecture:
        said = str(fields.get("general.architecture"))[:80]
        raise ValueError(f"adapter's general.architecture must be the base's, {names.architecture!r}, got {said!r}")
    made = Adapter(path, {"alpha": alpha}, file, {})
    for inside in _changed(file):
        name = names.outside(inside)
        made.changes[name] = _change(file, inside, name, names, alpha)
    return made


def _changed(file: GgufFile) -> list[str]:
    """Names of the tensors that pairs change, in order."""
    for name in file.entries:
        if not name.endswith(_SIDES):
            raise ValueError(f"adapter's tensor {name!r} must end in .lora_a or .lora_b: others are not merged here")
    pairs = dict.fromkeys(name[: -len(_SIDES[0])] for name in file.entries)
    for name in pairs:
        for side in _SIDES:
            if name + side not in file.entries:
                raise ValueError(f"adapter must have .lora_a and .lora_b of {name!r}, it has no {side}")
    if not pairs:
        raise ValueError("adapter must change a tensor, it has none")
    return list(pairs)


def _change(file: GgufFile, inside: str, name: str, names: ModelMap, alpha: float) -> Change:
    a, b = (_values(file, inside + side) for side in _SIDES)
    embedding = inside.endswith("token_embd.weight")
    a = a.T if embedding and a.ndim == 2 else a
    if a.ndim != 2 or b.ndim != 2 or not 0 < a.shape[0] == b.shape[1]:
        wanted = "(tokens, r) and (OUT, r)" if embedding else "(r, IN) and (OUT, r)"
        shapes = ", ".join(str(file.shapes[inside + side]) for side in _SIDES)
        raise ValueError(f"adapter's matrices of {inside!r} must be {wanted}, got {shapes}")
    order = names.row_order(name, b.shape[0])
    if order is not None:
        stored, b = b, np.empty_like(b)
        b[order] = stored
    return Change(a, b, alpha / a.shape[0] if alpha else 1.0, turned=embedding)


def _values(file: GgufFile, name: str) -> Any:
    """A tensor in memory of its own, float32 where its type has blocks."""
    entry, kind = file.entries[name], file.kinds[name]
    raw = file.span(name, 0, entry.stop - entry.start, mapped=False)
    if kind in ("F32", "F16", "BF16"):
        return typed(raw, entry.dtype, entry.shape)
    if entry.dtype != "U8" or len(entry.shape) != 2:
        raise ValueError(f"adapter's tensor {name!r} must be a matrix of floats or of blocks, got {kind} {entry.shape}")
    return dequantize_gguf(raw.reshape(entry.shape), kind)
