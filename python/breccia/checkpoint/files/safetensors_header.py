# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, read entry by entry: memory follows the number of tensors, whatever else
its bytes may be, and every number is checked against the file."""

from __future__ import annotations

import json
import math
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple, NoReturn

from breccia.checkpoint.dtypes import DTYPES

__all__ = ["MAX_HEADER", "Entry", "parse_header"]

MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_METADATA = 1 << 20  # entries: one a tensor in breccia's own files
_MAX_AXES = 64

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = r"(?:0|[1-9][0-9]{0,18})"
# An entry as programs write it, up to what comes after it.
_ENTRY = re.compile(
    r'[ \t\n\r]*"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*'
    r'\{ ?"dtype": ?"([A-Za-z0-9_]+)", ?'
    rf'"shape": ?\[((?:{_NUMBER}(?:, ?{_NUMBER}){{0,{_MAX_AXES - 1}}})?)\], ?'
    rf'"data_offsets": ?\[({_NUMBER}), ?({_NUMBER})\] ?\}}[ \t\n\r]*([,}}])'
)
_FLAT = re.compile(r"\{[^{}]{0,8192}\}")  # any other spelling of one


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


def parse_header(raw: bytes, data_start: int, file_size: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a header; its numbers checked against the size of the file.

    Raises:
        ValueError: anything is not as the format demands; the message names the file and the tensor.
    """
    reader = _Reader(raw, data_start, file_size - data_start, where)
    try:
        reader.read()
    except (ValueError, RecursionError) as error:
        said = str(error)
        raise ValueError(said if said.startswith(where) else f"{where}: header must be JSON in UTF-8: {said}") from None
    _check_layout(reader.entries, data_start, file_size, where)
    return reader.entries, reader.metadata


class _Reader:
    """Reads bytes as Latin-1, one character each: strings alone can have others, and are decoded one by one."""

    def __init__(self, raw: bytes, data_start: int, size: int, where: str) -> None:
        self.text, self.at = raw.decode("latin-1"), 0
        self.start, self.size, self.where = data_start, size, where
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self.seen_metadata = False

    def read(self) -> None:
        if self._next() != "{":
            raise ValueError(f"{self.where}: header must be a JSON object, it begins with {self.text[:1]!r}")
        if self._peek() == "}":
            self.at += 1
        else:
            self._members()
        if self._next() != "":
            raise ValueError(f"{self.where}: header must end with its object, there is more after it")

    def _members(self) -> None:
        match, text, entries = _ENTRY.match, self.text, self.entries
        while True:
            found = match(text, self.at)
            if found is None or found[1] == "__metadata__":
                after = self._member()
            else:
                name, dtype, shape, begin, end, after = found.groups()
                if not name.isascii():
                    name = name.encode("latin-1").decode("utf-8")
                if name in entries:
                    self._fail(name, "must appear once, it appears twice")
                axes = tuple(map(int, shape.split(","))) if shape else ()
                entries[name] = self._entry(name, dtype, axes, int(begin), int(end))
                self.at = found.end()
            if after == "}":
                return

    def _member(self) -> str:
        """A member in any spelling; what comes after it."""
        name = self._string()
        if self._next() != ":":
            raise ValueError(f"{name!r} must be followed by a colon")
        if name == "__metadata__":
            self._strings()
        else:
            if name in self.entries:
                self._fail(name, "must appear once, it appears twice")
            self._peek()
            found = _FLAT.match(self.text, self.at)
            fields = None if found is None else json.loads(found[0], object_pairs_hook=_once, parse_constant=_constant)
            if found is None or fields is None or set(fields) != {"dtype", "shape", "data_offsets"}:
                self._fail(name, "must have dtype, shape and data_offsets and nothing else")
            self.at = found.end()
            self.entries[name] = self._checked(name, **fields)
        after = self._next()
        if after not in (",", "}"):
            raise ValueError(f"{name!r} must be followed by a comma or the end of the object")
        return after

    def _checked(self, name: str, dtype: Any, shape: Any, data_offsets: Any) -> Entry:
        if not isinstance(dtype, str):
            self._fail(name, f"dtype must be one of {', '.join(DTYPES)}, got {str(dtype)[:80]!r}")
        if not _naturals(shape) or len(shape) > _MAX_AXES:
            self._fail(
                name, f"shape must be a list of at most {_MAX_AXES} numbers from 0 to 2^63 - 1, got {str(shape)[:80]}"
            )
        if not _naturals(data_offsets) or len(data_offsets) != 2:
            self._fail(name, f"data_offsets must be [begin, end], got {str(data_offsets)[:80]}")
        return self._entry(name, dtype, tuple(shape), *data_offsets)

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Entry:
        row = DTYPES.get(dtype)
        if row is None:
            self._fail(name, f"dtype must be one of {', '.join(DTYPES)}, got {dtype[:80]!r}")
        if not begin <= end <= self.size:
            cut = f": the file is truncated, it needs {self.start + end} bytes and has {self.start + self.size}"
            self._fail(
                name,
                f"data_offsets must be [begin, end] with begin <= end <= {self.size}, got [{begin}, {end}]"
                + (cut if begin <= end else ""),
            )
        bits = math.prod(shape) * row.bits
        if bits != 8 * (end - begin) or (not bits and max(shape) >= 2**63):
            self._misfit(name, dtype, shape, bits, end - begin)
        return Entry(name, row.name, shape, self.start + begin, self.start + end)

    def _misfit(self, name: str, dtype: str, shape: tuple[int, ...], bits: int, spanned: int) -> NoReturn:
        if bits % 8:
            self._fail(name, f"shape {list(shape)} of dtype {dtype} must fill whole bytes, it has {bits} bits")
        if bits >= 2**66 or max(shape) >= 2**63:
            self._fail(name, f"shape must have less than 2^63 bytes, got {list(shape)}")
        self._fail(
            name,
            f"data_offsets must span {bits // 8} bytes for shape {list(shape)} of {dtype}, they span {spanned}",
        )

    def _strings(self) -> None:
        """The metadata: an object of strings."""
        if self.seen_metadata:
            raise ValueError(f"{self.where}: __metadata__ must appear once, it appears twice")
        self.seen_metadata = True
        if self._next() != "{":
            raise ValueError(f"{self.where}: __metadata__ must map strings to strings")
        if self._peek() == "}":
            self.at += 1
            return
        while True:
            key = self._string()
            if self._next() != ":" or self._peek() != '"':
                raise ValueError(f"{self.where}: __metadata__ must map strings to strings, {key!r} has something else")
            if key in self.metadata:
                raise ValueError(f"{self.where}: __metadata__ must have {key!r} once, it appears twice")
            if len(self.metadata) >= MAX_METADATA:
                raise ValueError(f"{self.where}: __metadata__ must have at most {MAX_METADATA} entries, it has more")
            self.metadata[key] = self._string()
            after = self._next()
            if after == "}":
                return
            if after != ",":
                raise ValueError(f"{self.where}: __metadata__ must map strings to strings")

    def _string(self) -> str:
        if self._next() != '"':
            raise ValueError(f"a string must begin at byte {self.at - 1}")
        begin = self.at
        value, self.at = scanstring(self.text, begin, True)
        value = str(value)
        if len(value) != self.at - 1 - begin:  # something is escaped
            value = str(json.loads(self.text[begin - 1 : self.at].encode("latin-1")))
            value.encode()  # half a surrogate pair is no character
        elif not value.isascii():
            value = value.encode("latin-1").decode("utf-8")
        return value

    def _peek(self) -> str:
        """The next character that is no space, "" at the end."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return self.text[self.at : self.at + 1]

    def _next(self) -> str:
        character = self._peek()
        self.at += len(character)
        return character

    def _fail(self, name: str, what: str) -> NoReturn:
        raise ValueError(f"{self.where}: tensor {name[:200]!r}: {what}")


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
