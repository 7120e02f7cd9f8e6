# SPDX-License-Identifier: Apache-2.0
"""GGUF files, versions 2 and 3, little-endian: metadata, tensor table, aligned blocks."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from breccia.bridges.contract import stored_name
from breccia.bridges.gguf import found_of
from breccia.bridges.gguf.blocks import NUMBERS, TYPES
from breccia.bridges.parts import STORED, Found, Origin
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.input_file import InputFile, JoinedFiles
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.safetensors_file import TensorFile
from breccia.checkpoint.files.safetensors_header import Entry, emptied
from breccia.gguf.models import model_of
from breccia.gguf.types import Fields, whole

LEFT_OUT = "breccia.left_out"  # metadata: names of the source's tensors that the file has no place for

_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_INT32, _FLOAT32, _STRING, _ARRAY = 5, 6, 8, 9
_INNER = {str: _STRING, float: _FLOAT32}  # of arrays; integers are of 32 bits
_MAX_NAME = 65_536
_MAX_ITEMS = 1 << 21  # strings in arrays: the largest vocabularies have a quarter of that
_ARRAY_COST = 32  # strings that an array in an array counts as
_MAX_FIELDS = 1 << 16
_MAX_TENSORS = 1 << 17  # the largest models have half of that where each expert has its own
_CHUNK = 1 << 20
_PART = re.compile(r"(.*)-(?:\d{5})-of-(\d{5})\.gguf")  # of the files that llama-gguf-split makes
_PLAIN = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")  # types that safetensors has by these names


class TypedArray(Sequence[Any]):
    """An array of metadata as its bytes in the file, which take no more memory than there; items are made when
    they are asked for."""

    def __init__(self, inner: int, length: int, raw: bytes) -> None:
        self.inner, self.length, self.raw = inner, length, raw

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"an array of {self.length}"

    def __iter__(self) -> Iterator[Any]:
        if self.inner in _SCALARS:
            return iter(value for (value,) in struct.iter_unpack(_SCALARS[self.inner], self.raw))
        return self._others()

    def _others(self) -> Iterator[Any]:
        cursor = _Cursor(self.raw, "array")
        for _ in range(self.length):
            yield cursor.value(self.inner)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class _Cursor:
    """Reads numbers from a file or bytes and never past its end."""

    def __init__(self, source: InputFile | bytes, where: str) -> None:
        self.source, self.at, self.where = source, 0, where
        self.size = len(source) if isinstance(source, bytes) else source.size
        self._chunk, self._begin = (source, 0) if isinstance(source, bytes) else (b"", 0)
        self.items = 0  # of arrays that are not numbers, all together

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > self.size:
            raise ValueError(
                f"{self.where}: file must have {self.at + count} bytes, as its header says, it has {self.size}"
            )
        begin = self.at - self._begin
        if begin < 0 or begin + count > len(self._chunk):  # lists of strings are walked first, then taken
            assert isinstance(self.source, InputFile)
            self._chunk = self.source.read(self.at, min(max(count, _CHUNK), self.size - self.at))
            self._begin, begin = self.at, 0
        self.at += count
        return self._chunk[begin : begin + count]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        raw = self.take(self.number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where}: strings must be UTF-8: {error}") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 4:
            raise ValueError(f"{self.where}: metadata types must be 0 to 12, got {kind}")
        inner, count = self.number("<I"), _bounded(self, self.number("<Q"))
        if inner in _SCALARS:
            return TypedArray(inner, count, self.take(count * struct.calcsize(_SCALARS[inner])))
        self.items += count if inner == _STRING else count * _ARRAY_COST
        if self.items > _MAX_ITEMS:
            raise ValueError(f"{self.where}: metadata must have at most {_MAX_ITEMS} strings in arrays, it has more")
        begin = self.at
        for _ in range(count):
            self.value(inner, depth + 1)
        end, self.at = self.at, begin
        return TypedArray(inner, count, self.take(end - begin))


def _bounded(cursor: _Cursor, count: int) -> int:
    if count > cursor.size:  # each item takes a byte at least
        raise ValueError(f"{cursor.where}: counts must fit in the file, got {count}")
    return int(count)


class GgufFile(TensorFile):
    """Entries of a GGUF file, or of all files of one that was cut, their raw bytes and the metadata, in ``fields`` as
    (type, value).

    An entry's shape is in bytes along the last axis, in rows as NumPy counts them; ``kinds`` has the
    block types and ``shapes`` the logical shapes; ``model`` has the names of the model's own checkpoints.

    Raises:
        ValueError: the file is not valid; the message names file and tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of(path, "path")
        self.metadata: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        self.kinds: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.fields: dict[str, tuple[int, Any]] = {}
        self.file = InputFile(self.path)
        try:
            self.fields = self._read(self.file, 0)
            if (count := whole(self.fields, "split.count", 1)) > 1:
                self._join(count)
            self.model = model_of(self.fields, self.entries)
        except BaseException:
            self.file.close()
            raise

    def _join(self, count: int) -> None:
        """Read all files of a model that llama-gguf-split has cut; the first has the metadata."""
        match = _PART.fullmatch(self.path.name)
        if match is None or int(match[2]) != count:
            wanted = f"NAME-00001-of-{count:05d}.gguf"
            raise ValueError(f"{self.path}: one of {count} files must be called as {wanted}, beside the others")
        paths = [self.path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        if missing := [path.name for path in paths if not path.exists()]:
            raise ValueError(f"{self.path}: all {count} files of the model must be there, {missing[0]} is not")
        self.file.close()
        self.file = joined = JoinedFiles(paths)
        self.path = paths[0]
        for table in (self.entries, self.kinds, self.shapes):
            table.clear()
        for number, (file, start) in enumerate(zip(joined.files, joined.starts, strict=True)):
            fields = self._read(file, start)
            if (whole(fields, "split.count", 0), whole(fields, "split.no", 0)) != (count, number):
                raise ValueError(f"{file.path}: split.no must be {number} and split.count {count}")
            self.fields = self.fields if number else fields
        said = whole(self.fields, "split.tensors.count", len(self.entries))
        if said != len(self.entries):
            raise ValueError(
                f"{paths[0]}: split.tensors.count must be {len(self.entries)}, as many as there are, got {said}"
            )
        self.fields = {key: value for key, value in self.fields.items() if not key.startswith("split.")}

    def _read(self, file: InputFile, base: int) -> Fields:
        """Take the tensors of a file whose bytes begin at ``base`` of all; give its metadata."""
        where, size, known = str(file.path), file.size, Fields()
        cursor = _Cursor(file, where)
        if size < 24 or cursor.take(4) != _MAGIC:
            raise ValueError(f"{where}: file must begin with GGUF and have at least 24 bytes")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise ValueError(f"{where}: version must be 2 or 3, got {version}")
        tensors, fields = _bounded(cursor, cursor.number("<Q")), _bounded(cursor, cursor.number("<Q"))
        if fields > _MAX_FIELDS:
            raise ValueError(f"{where}: metadata must have at most {_MAX_FIELDS} fields, got {fields}")
        if tensors > _MAX_TENSORS:
            raise ValueError(f"{where}: file must have at most {_MAX_TENSORS} tensors, got {tensors}")
        for _ in range(fields):
            key = cursor.text()
            if key in known:
                raise ValueError(f"{where}: metadata {key[:200]!r} must appear once")
            kind = cursor.number("<I")
            known[key] = (kind, cursor.value(kind))
        table = [self._info(cursor) for _ in range(tensors)]
        alignment = known.get("general.alignment", (4, 32))[1]
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise ValueError(f"{where}: general.alignment must be a multiple of 8, got {str(alignment)[:80]}")
        start = -(-cursor.at // alignment) * alignment
        for name, kind_name, shape, offset in table:
            self._add(where, name, kind_name, shape, base + start + offset, base + size)
        end = base + start
        for entry in sorted((self.entries[name] for name, *_ in table), key=lambda e: e.start):
            if entry.start < end:
                raise ValueError(f"{where}: tensor {entry.name!r}: offset must be past the tensor before it")
            end = entry.stop
        return known

    def _info(self, cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
        name = cursor.text()
        axes = cursor.number("<I")
        if len(name) > _MAX_NAME or axes > 8:
            raise ValueError(f"{cursor.where}: tensor {name[:80]!r}: must have at most 8 axes, got {axes}")
        shape = tuple(cursor.number("<Q") for _ in range(axes))[::-1]
        number, offset = cursor.number("<I"), cursor.number("<Q")
        if number not in NUMBERS:
            raise ValueError(
                f"{cursor.where}: tensor {name!r}: type must be one of {', '.join(TYPES)}, got number {number}"
            )
        return name, NUMBERS[number], shape, offset

    def _add(self, path: str, name: str, kind: str, shape: tuple[int, ...], start: int, size: int) -> None:
        where = f"{path}: tensor {name!r}"
        if name in self.entries:
            raise ValueError(f"{where} must appear once")
        _, block, nbytes = TYPES[kind]
        columns = shape[-1] if shape else 1
        if columns % block or (block > 1 and not math.prod(shape)):
            raise ValueError(f"{where}: rows must be whole {kind} blocks of {block}, got shape {shape}")
        if 0 in shape and emptied(shape):
            raise ValueError(f"{where}: shape must have fewer rows without elements, got {shape}")
        total = math.prod(shape) // block * nbytes
        if start + total > size:
            raise ValueError(f"{where}: file must have {start + total} bytes for it, it has {size}")
        stored = shape if block == 1 else (*shape[:-1], columns // block * nbytes)
        dtype = kind if kind in _PLAIN else "U8"
        self.entries[name] = Entry(name, dtype, stored, start, start + total)
        self.kinds[name], self.shapes[name] = kind, shape

    def blocks(self) -> Iterator[Found]:
        """The tensors whose type has blocks, by their names in the file."""
        for name, kind in self.kinds.items():
            if TYPES[kind][1] > 1:
                second = stored_name(name, "scale")
                yield found_of(name, kind, self.shapes[name], second if second in self.entries else None)

    @property
    def left_out(self) -> set[str]:
        """Names of tensors that a conversion to the file had no place for."""
        said = self.fields.get(LEFT_OUT, (_ARRAY, ()))[1]
        return {str(name) for name in said} if isinstance(said, Sequence) else set()

    def described(self) -> list[Found]:
        """The tensors that are stored in blocks, by the model's own names."""
        result = []
        for one in self.blocks():
            outside = one.name if self.model is None else self.model.outside(one.name)
            order = None if self.model is None else self.model.row_order(outside, one.shape[0] if one.shape else 0)
            origin = STORED if order is None else Origin(row_order=order)
            result.append(replace(one, name=outside, origin=origin))
        return result


class GgufWriter(PlannedWriter):
    """Writes a GGUF file from a plan of block types and logical shapes, and metadata by type numbers.

    Of some tensors the file has the rows in another order (``row_orders``: which row each is) or, of type F32, more
    than their values (``offsets``: how much). ``resume``: keep what an earlier, killed writer of the same plan left."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: Mapping[str, tuple[str, tuple[int, ...]]],
        fields: Mapping[str, tuple[int, Any]],
        *,
        row_orders: Mapping[str, np.ndarray[Any, Any]] | None = None,
        offsets: Mapping[str, float] | None = None,
        resume: bool = False,
    ) -> None:
        self._row_orders, self._offsets = dict(row_orders or {}), dict(offsets or {})
        self._waiting: dict[str, np.ndarray[Any, Any]] = {}
        if len(plan) > _MAX_TENSORS:
            raise ValueError(f"{path}: a GGUF file must have at most {_MAX_TENSORS} tensors, got {len(plan)}")
        header = bytearray(_MAGIC + struct.pack("<IQQ", 3, len(plan), len(fields)))
        for key, (kind, value) in fields.items():
            header += _text(key) + struct.pack("<I", kind) + _value(kind, value)
        at, places = 0, {}
        for name, (kind_name, shape) in plan.items():
            number, _, _ = TYPES[kind_name]
            header += _text(name) + struct.pack("<I", len(shape))
            header += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", number, at)
            length = block_bytes(kind_name, shape)
            places[name] = (at, at + length)
            at += -(-length // 32) * 32
        header += bytes(-len(header) % 32)
        base = len(header)
        spans = {name: (base + begin, base + end) for name, (begin, end) in places.items()}
        super().__init__(path, bytes(header), spans, base + at, resume=resume)

    def write(self, name: str, array: np.ndarray[Any, Any], at: int = 0) -> None:
        """See `PlannedWriter.write`. What is to be put in another order waits until all of it is there."""
        if name in self._offsets:
            array = np.ascontiguousarray(array).reshape(-1).view("<f4") + np.float32(self._offsets[name])
        order = self._row_orders.get(name)
        if order is None:
            super().write(name, array, at)
            return
        begin, end = self._spans[name]
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if at + raw.size > end - begin:
            raise ValueError(f"tensor {name!r} must have {end - begin} bytes, got {at + raw.size}")
        with self._lock:
            whole = self._waiting.setdefault(name, np.empty(end - begin, np.uint8))
        whole[at : at + raw.size] = raw
        with self._lock:
            self._left[name] -= raw.size
            complete = self._left[name] == 0
        if complete:
            rows = self._waiting.pop(name).reshape(len(order), -1)
            self._left[name] = rows.size
            super().write(name, rows[order])


def block_type(name: str, dtype: str) -> str:
    """The type of a tensor of that name, of GGUF's own names or of a plain one's dtype."""
    if dtype not in TYPES:
        raise ValueError(f"tensor {name!r} must be of a type that GGUF has, it is {dtype}")
    return dtype


def block_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a type."""
    _, block, nbytes = TYPES[kind]
    return math.prod(shape) // block * nbytes


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind in _SCALARS:
        return struct.pack(_SCALARS[kind], value)
    if kind == _STRING:
        return _text(value)
    if isinstance(value, TypedArray):
        return struct.pack("<IQ", value.inner, len(value)) + value.raw
    inner = _INNER.get(type(value[0]), _INT32) if value else _INT32
    return struct.pack("<IQ", inner, len(value)) + b"".join(_value(inner, item) for item in value)
