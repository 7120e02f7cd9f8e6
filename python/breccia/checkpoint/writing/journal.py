# SPDX-License-Identifier: Apache-2.0
"""What of a conversion is on disk, in records that a killed process cannot leave half-written unnoticed and
that no name in a checkpoint can imitate: those that are added at once are one JSON list, which has its length and a
checksum keyed by the conversion."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from breccia.checkpoint.files import disk

_MAGIC = b"breccia journal\n"
_SUM = 16
Record = tuple[Any, ...]  # of JSON types


def read_journal(path: Path, identity: bytes) -> tuple[list[Record], int]:
    """Records of a conversion up to the first that is cut or another's, and where they end: none where there
    is no such file."""
    raw = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    records: list[Record] = []
    if not raw.startswith(_MAGIC):
        return records, 0
    at = len(_MAGIC)
    while at + 4 <= len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        text = raw[at + 4 : at + 4 + length]
        mark = raw[at + 4 + length : at + 4 + length + _SUM]
        if mark != _mark(identity, at, text):
            break
        records += map(tuple, json.loads(text))
        at += 4 + length + _SUM
    return records, at


def first_record(path: Path) -> Record:
    """The first record, of whichever conversion. Raises ValueError where there is none."""
    raw, at = path.read_bytes() if path.is_file() else b"", len(_MAGIC) + 4
    return tuple(json.loads(raw[at : at + int.from_bytes(raw[at - 4 : at], "little")])[0])


def _mark(key: bytes, at: int, text: bytes) -> bytes:
    return hashlib.blake2b(struct.pack("<Q", at) + text, digest_size=_SUM, key=key).digest()


class Journal:
    """An append-only file of records of one conversion, which 32 bytes of ``identity`` tell from every other. What the
    file holds of another is discarded.

    Attributes:
        records: that an earlier process left.
        last: the newest record, in a list; none in a new file.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self.path, self._key = path, identity
        self.records, self._end = read_journal(path, identity)
        self.last = self.records[-1:]
        self._fd = disk.create(path, keep=True)
        try:
            if self._end < os.fstat(self._fd).st_size:
                disk.truncate(self._fd, self._end, path)
        except BaseException:
            self.close()
            raise

    def add(self, records: list[Record]) -> None:
        """Append records; they are on disk when this returns."""
        start, text = b"" if self._end else _MAGIC, json.dumps(records).encode()
        at = self._end + len(start)
        data = start + struct.pack("<I", len(text)) + text + _mark(self._key, at, text)
        disk.write(self._fd, data, self._end, self.path)
        disk.sync(self._fd, self.path)
        self._end += len(data)
        self.last = records[-1:] or self.last

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
