# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's importance matrices: sums of squares of what each column of a tensor was multiplied with.

GGUF files, as `llama-imatrix` writes them, have ``NAME.in_sum2`` and ``NAME.counts``; older ``.dat`` files are a list
of names and numbers.
"""

from __future__ import annotations

import contextlib
import os
import struct

import numpy as np

from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.dtypes import typed
from breccia.gguf.container import GgufFile
from breccia.moments import Moments

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_ENTRIES, _MOST_NAME = 1 << 16, 4096


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, Moments]:
    """The diagonals of an importance matrix, by a tensor's name as GGUF spells it, ``.weight`` included. Those of all
    experts of a layer are (E, K) in a GGUF file; a ``.dat`` file has them one after the other, as E · K columns, and
    means in place of sums: ``count`` is then that of the calls. Raises ValueError where the file is not valid."""
    path = path_of(path, "path")
    with open(path, "rb") as file:
        start = file.read(4)
    found = _of_gguf(path) if start == b"GGUF" else _of_dat(path)
    if not found:
        raise ValueError(f"{path}: file must be an importance matrix, it has no tensor called NAME{_SUMS}")
    return found


def _of_gguf(path: str | os.PathLike[str]) -> dict[str, Moments]:
    found = {}
    with contextlib.closing(GgufFile(path)) as file:
        for name in file.entries:
            if not name.endswith(_SUMS):
                continue
            base = name.removesuffix(_SUMS)
            if base + _COUNTS not in file.entries:
                raise ValueError(f"{path}: tensor {base + _COUNTS!r} must be there, as {name!r} is")
            sums, counts = (_floats(file, base + end) for end in (_SUMS, _COUNTS))
            if sums.ndim > 2 or counts.size != (sums.shape[0] if sums.ndim == 2 else 1):
                raise ValueError(
                    f"{path}: {base}: counts must be one for each of the {sums.shape[:-1]} rows, got {counts.shape}"
                )
            if sums.ndim == 2 and sums.shape[0] == 1:
                sums = sums[0]
            count = np.rint(np.nan_to_num(counts.reshape(sums.shape[:-1]).astype(np.float64))).astype(np.int64)
            found[base] = Moments(diag=np.array(sums, np.float32), count=count)
    return found


def _floats(file: GgufFile, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    entry = file.entries[name]
    if entry.dtype != "F32":
        raise ValueError(f"{file.path}: tensor {name!r} must be F32, it is {file.kinds[name]}")
    return np.array(typed(file.raw(name), entry.dtype, entry.shape), np.float32)


def _of_dat(path: str | os.PathLike[str]) -> dict[str, Moments]:
    with open(path, "rb") as file:
        raw = file.read()
    at = 0

    def take(count: int, what: str) -> bytes:
        nonlocal at
        if count < 0 or at + count > len(raw):
            raise ValueError(f"{path}: file must be an importance matrix of llama.cpp: {what} ends after its end")
        at += count
        return raw[at - count : at]

    def number(what: str, most: int) -> int:
        (value,) = struct.unpack("<i", take(4, what))
        if not 0 <= value <= most:
            raise ValueError(
                f"{path}: file must be an importance matrix of llama.cpp: {what} must be from 0 to {most}, got {value}"
            )
        return int(value)

    found = {}
    for i in range(number("the number of its entries", _MOST_ENTRIES)):
        name = take(number("the length of a name", _MOST_NAME), "a name").decode("utf-8", "replace")
        calls = number(f"{name}: the number of calls", 2**31 - 1)
        columns = number(f"{name}: the number of values", len(raw) // 4)
        if not name or not columns or name in found:
            raise ValueError(f"{path}: each entry must have a name of its own and values, entry {i} is {name!r}")
        values = np.frombuffer(take(4 * columns, f"{name}: its values"), "<f4").astype(np.float32)
        found[name] = Moments(diag=values, count=np.asarray(calls, np.int64))
    return found
