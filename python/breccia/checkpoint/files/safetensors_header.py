# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, read entry by entry: memory follows the number of tensors, whatever else
its bytes may be, and every number is checked against the file."""

from __future__ import annotations

import json
import math
import mmap
import re
from typing import Any, NamedTuple, NoReturn

from breccia.checkpoint.files.dtypes import DTYPES

MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_METADATA = 1 << 18  # entries: one a quantized tensor in breccia's own files, for more of which no header has room
_MAX_AXES = 64
_MAX_EMPTY = 1 << 20  # rows without elements, which take no bytes

_ALIKE = 4096  # kinds of tensors that are checked once
_PASSED = 1 << 23  # bytes of the header that are let go of at a time

_SPACE = re.compile(rb"[ \t\n\r]*")
_NUMBER = rb"(?:0|[1-9][0-9]{0,18})"
# An entry as programs write it, up to what comes after it.
_ENTRY = re.compile(
    rb'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*'
    rb'\{ ?"dtype": ?"([A-Za-z0-9_]+)", ?'
    rb'"shape": ?\[((?:%b(?:, ?%b){0,%d})?)\], ?'
    % (_NUMBER, _NUMBER, _MAX_AXES - 1)
    + rb'"data_offsets": ?\[(%b), ?(%b)\] ?\}[ \t\n\r]*([,}])' % (_NUMBER, _NUMBER)
)
_STRING = rb'"([^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*){0,500})"'
# An entry of the metadata of no more escapes than that, up to what comes after it.
_PAIR = re.compile(rb"[ \t\n\r]*%b[ \t\n\r]*:[ \t\n\r]*%b[ \t\n\r]*([,}])" % (_STRING, _STRING))
_FLAT = re.compile(rb"\{[^{}]{0,8192}\}")  # any other spelling of one


class Entry(NamedTuple):
    """What a header says of one tensor. ``start`` and ``stop`` are file offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def parse_header(
    raw: bytes | mmap.mmap, data_start: int, file_size: int, where: str
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a header; its numbers checked against the size of the file. Of a header in memory that
    was mapped, pages that were read are let go of."""
    reader = _Reader(raw, data_start, file_size - data_start, where)
    try:
        reader.read()
    except (ValueError, RecursionError) as error:
        said = str(error)
        raise ValueError(said if said.startswith(where) else f"{where}: header must be JSON in UTF-8: {said}") from None
    _check_layout(reader.entries, data_start, file_size, where)
    return reader.entries, reader.metadata


class _Reader:
    def __init__(self, raw: bytes | mmap.mmap, data_start: int, size: int, where: str) -> None:
        self.text, self.at, self.passed = raw, 0, 0
        self.start, self.size, self.where = data_start, size, where
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self.seen_metadata = False
        self.alike: dict[tuple[bytes, bytes], tuple[str, tuple[int, ...], int]] = {}  # dtype, shape and bytes by text

    def read(self) -> None:
        if self._next() != b"{":
            raise ValueError(
                f"{self.where}: header must be a JSON object, it begins with {self.text[:1].decode('latin-1')!r}"
            )
        if self._next(take=False) == b"}":
            self.at += 1
        else:
            self._members()
        if self._next() != b"":
            raise ValueError(f"{self.where}: header must end with its object, there is more after it")

    def _members(self) -> None:
        match, text, entries, alike = _ENTRY.match, self.text, self.entries, self.alike
        start, size, new = self.start, self.size, tuple.__new__
        last = start  # where the last tensor ends, which is where the next one starts: one object for both
        at, far = self.at, self.passed + _PASSED
        while True:
            found = match(text, at)
            if found is None or (parts := found.groups())[0] == b"__metadata__":
                self.at = at
                after = self._member()
                at = self.at
            else:
                raw, dtype, axes, first, stop, after = parts
                name, begin, end = raw.decode("utf-8"), int(first), int(stop)
                if name in entries:
                    self._fail(name, "must appear once, it appears twice")
                known = alike.get((dtype, axes))
                if known is not None and known[2] == end - begin and end <= size:
                    begin = last if start + begin == last else start + begin
                    last = start + end
                    entries[name] = new(Entry, (name, *known[:2], begin, last))
                else:
                    shape = tuple(map(int, axes.split(b","))) if axes else ()
                    entry = entries[name] = self._entry(name, dtype, shape, begin, end, last)
                    last = entry.stop
                    if len(alike) < _ALIKE:
                        alike[dtype, axes] = entry.dtype, shape, end - begin
                at = found.end()
            if at > far or after == b"}":
                self.at = at
                self._let_go()
                far = self.passed + _PASSED
            if after == b"}":
                return

    def _let_go(self) -> None:
        """Of the pages before the place that is read."""
        stop = self.at // mmap.PAGESIZE * mmap.PAGESIZE
        if isinstance(self.text, mmap.mmap) and hasattr(self.text, "madvise"):
            self.text.madvise(mmap.MADV_DONTNEED, self.passed, stop - self.passed)
        self.passed = stop

    def _member(self) -> bytes:
        """A member in any spelling; what comes after it."""
        name = self._string()
        if self._next() != b":":
            raise ValueError(f"{name!r} must be followed by a colon")
        if name == "__metadata__":
            self._strings()
        else:
            if name in self.entries:
                self._fail(name, "must appear once, it appears twice")
            self._next(take=False)
            found = _FLAT.match(self.text, self.at)
            fields = None if found is None else _fields(found[0])
            if found is None or fields is None or set(fields) != {"dtype", "shape", "data_offsets"}:
                self._fail(name, "must have dtype, shape and data_offsets and nothing else")
            self.at = found.end()
            self.entries[name] = self._checked(name, **fields)
        after = self._next()
        if after not in (b",", b"}"):
            raise ValueError(f"{name!r} must be followed by a comma or the end of the object")
        return after

    def _checked(self, name: str, dtype: Any, shape: Any, data_offsets: Any) -> Entry:
        if not isinstance(dtype, str):
            self._dtype(name, dtype)
        if not _naturals(shape) or len(shape) > _MAX_AXES:
            self._fail(
                name, f"shape must be a list of at most {_MAX_AXES} numbers from 0 to 2^63 - 1, got {str(shape)[:80]}"
            )
        if not _naturals(data_offsets) or len(data_offsets) != 2:
            self._fail(name, f"data_offsets must be [begin, end], got {str(data_offsets)[:80]}")
        begin, end = data_offsets
        return self._entry(name, dtype.encode("utf-8", "replace"), tuple(shape), begin, end, None)

    def _entry(self, name: str, dtype: bytes, shape: tuple[int, ...], begin: int, end: int, last: int | None) -> Entry:
        row = _ROWS.get(dtype)
        if row is None:
            self._dtype(name, dtype.decode("utf-8"))
        if not begin <= end <= self.size:
            cut = f": the file is truncated, it needs {self.start + end} bytes and has {self.start + self.size}"
            self._fail(
                name,
                f"data_offsets must be [begin, end] with begin <= end <= {self.size}, got [{begin}, {end}]"
                + (cut if begin <= end else ""),
            )
        bits = math.prod(shape) * row.bits
        if bits != 8 * (end - begin) or (not bits and (max(shape) >= 2**63 or emptied(shape))):
            self._misfit(name, row.name, shape, bits, end - begin)
        start = self.start + begin
        return Entry(name, row.name, shape, last if last is not None and last == start else start, self.start + end)

    def _dtype(self, name: str, dtype: Any) -> NoReturn:
        self._fail(name, f"dtype must be one of {', '.join(DTYPES)}, got {str(dtype)[:80]!r}")

    def _misfit(self, name: str, dtype: str, shape: tuple[int, ...], bits: int, spanned: int) -> NoReturn:
        if bits % 8:
            self._fail(name, f"shape {list(shape)} of dtype {dtype} must fill whole bytes, it has {bits} bits")
        if bits >= 2**66 or max(shape) >= 2**63:
            self._fail(name, f"shape must have less than 2^63 bytes, got {list(shape)}")
        if not bits:
            self._fail(name, f"shape must have at most {_MAX_EMPTY} rows without elements, got {list(shape)}")
        self._fail(
            name,
            f"data_offsets must span {bits // 8} bytes for shape {list(shape)} of {dtype}, they span {spanned}",
        )

    def _strings(self) -> None:
        """The metadata: an object of strings."""
        if self.seen_metadata:
            raise ValueError(f"{self.where}: __metadata__ must appear once, it appears twice")
        self.seen_metadata = True
        if self._next() != b"{":
            raise ValueError(f"{self.where}: __metadata__ must map strings to strings")
        if self._next(take=False) == b"}":
            self.at += 1
            return
        after = b","
        while after == b",":
            if len(self.metadata) >= MAX_METADATA:
                raise ValueError(f"{self.where}: __metadata__ must have at most {MAX_METADATA} entries, it has more")
            found = _PAIR.match(self.text, self.at)
            key, value, after = self._pair() if found is None else (_text(found[1]), _text(found[2]), found[3])
            if found is not None:
                self.at = found.end()
            if key in self.metadata:
                raise ValueError(f"{self.where}: __metadata__ must have {key!r} once, it appears twice")
            self.metadata[key] = value

    def _pair(self) -> tuple[str, str, bytes]:
        """An entry of the metadata in any spelling, and what comes after it."""
        key = self._string()
        if self._next() != b":" or self._next(take=False) != b'"':
            raise ValueError(f"{self.where}: __metadata__ must map strings to strings, {key!r} has something else")
        value, after = self._string(), self._next()
        if after not in (b",", b"}"):
            raise ValueError(f"{self.where}: __metadata__ must map strings to strings")
        return key, value, after

    def _string(self) -> str:
        if self._next() != b'"':
            raise ValueError(f"a string must begin at byte {self.at - 1}")
        begin, self.at = self.at - 1, self._end_of_string()
        return _text(self.text[begin + 1 : self.at - 1])

    def _end_of_string(self) -> int:
        """What follows the quote that no odd number of backslashes stands before."""
        quote = self.text.find(b'"', self.at)
        while quote >= 0:
            first = quote
            while first > self.at and self.text[first - 1 : first] == b"\\":
                first -= 1
            if (quote - first) % 2 == 0:
                return quote + 1
            quote = self.text.find(b'"', quote + 1)
        raise ValueError(f"the string that begins at byte {self.at - 1} must end")

    def _next(self, take: bool = True) -> bytes:
        """The next byte that is no space, none at the end; one that is not taken comes again."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        byte = self.text[self.at : self.at + 1]
        self.at += len(byte) if take else 0
        return byte

    def _fail(self, name: str, what: str) -> NoReturn:
        raise ValueError(f"{self.where}: tensor {name[:200]!r}: {what}")


def emptied(shape: tuple[int, ...]) -> bool:
    """Whether a shape of no elements has more rows than there should be: programs may look at each of them."""
    return math.prod(shape[: shape.index(0)]) > _MAX_EMPTY


def _text(raw: bytes) -> str:
    """What is between the quotes of a JSON string."""
    value = str(json.loads(f'"{raw.decode("utf-8")}"'))
    if b"\\" in raw:
        value.encode()  # half a surrogate pair is no character
    return value


_ROWS = {name.encode(): row for name, row in DTYPES.items()}


def _fields(raw: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_constant)
    return fields


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key[:80]!r} must appear once, it appears twice")
        result[key] = value
    return result


def _constant(text: str) -> NoReturn:
    raise ValueError(f"there must be no {text}")


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_layout(entries: dict[str, Entry], data_start: int, file_size: int, where: str) -> None:
    """Tensors must fill the file from the header to its end."""
    end = data_start
    ordered = list(entries.values())
    for entry in ordered:
        if entry.start != end:  # not in the order of the file: sort
            ordered.sort(key=lambda e: (e.start, e.stop))
            break
        end = entry.stop
    end = data_start
    for entry in ordered:
        if entry.start != end:
            problem = "overlaps another tensor" if entry.start < end else "leaves a hole before it"
            raise ValueError(
                f"{where}: tensor {entry.name[:200]!r}: data_offsets must start at {end - data_start}, "
                f"got {entry.start - data_start}, which {problem}"
            )
        end = entry.stop
    if end != file_size:
        raise ValueError(f"{where}: file must have {end} bytes, as its header says, it has {file_size}")
