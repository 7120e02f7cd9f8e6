# SPDX-License-Identifier: Apache-2.0
"""Files whose layout is known before their contents: written in any order, from any thread, and there
under their name only when they are complete and on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.locks import Lock, lock
from breccia.checkpoint.files.sums import Sums, differing, every_piece, pieces_of


class PlannedWriter:
    """Writes a file of a header and named spans of bytes.

    Args:
        path: where the complete file appears. Until then it is ``partial``, beside it.
        header: the first bytes.
        spans: name → (begin, end) in the file.
        size: of the file.
        resume: keep what an earlier, killed writer of the same plan left in ``partial``, or under its name.

    Attributes:
        resumed: whether spans of an earlier writer are there, in ``partial``.
        complete: whether the file is there under its name: nothing is to be written.
        sums: takes checksums of what is written, by the names of spans; None where nobody wants them.

    Space is reserved on construction, so that a full disk is found before any work. Leaving the ``with``
    block by an exception removes the partial file.

    Raises:
        BlockingIOError: another writer of this file is at work.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: bytes,
        spans: Mapping[str, tuple[int, int]],
        size: int,
        *,
        resume: bool = False,
    ) -> None:
        self.path = path_of(path, "path")
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self._header, self._size, self._spans = header, size, dict(spans)
        self._left = {name: end - begin for name, (begin, end) in spans.items()}
        self._lock = threading.Lock()
        self._fd = -1
        self._held: Lock | None = None
        self.sums: Sums | None = None
        self.complete = resume and _fits(self.path, header, size)
        self.resumed = resume and not self.complete and _fits(self.partial, header, size)
        if self.complete:
            return
        self._held = lock(self.partial)
        if self._held is None:
            raise BlockingIOError(f"{self.path} must be written by one writer at a time: {self.partial} is locked")
        self._fd = self._held.fd
        try:
            if not self.resumed:
                self._begin(header, size)
        except BaseException:
            self.abort()
            raise

    def _begin(self, header: bytes, size: int) -> None:
        """Reserve the space, then write the header: a file with a header has its full size."""
        if os.fstat(self._fd).st_size:
            disk.truncate(self._fd, 0, self.partial)
        disk.reserve(self._fd, size, self.partial)
        disk.write(self._fd, header, 0, self.partial)

    def __enter__(self) -> PlannedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()

    def write(self, name: str, array: np.ndarray[Any, Any], at: int = 0) -> None:
        """Write a span, or a piece of one that begins ``at`` bytes into it. From any thread."""
        begin, end = self._spans[name]
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if begin + at + len(view) > end:
            raise ValueError(f"tensor {name!r} must have {end - begin} bytes, got {at + len(view)}")
        disk.write(self._fd, view, begin + at, self.partial)
        if self.sums is not None:
            self.sums.add(name, at, view)
        with self._lock:
            self._left[name] -= len(view)

    @property
    def spans(self) -> Mapping[str, tuple[int, int]]:
        """Where each span begins and ends in the file."""
        return self._spans

    def write_stored(self, name: str, raw: bytes, at: int) -> None:
        """Write bytes of a span that are as the file stores them."""
        PlannedWriter.write(self, name, np.frombuffer(raw, np.uint8), at)

    def has(self, name: str, line: str) -> bool:
        """Whether a span has all the bytes that a line of checksums says, in the file that is there."""
        pieces, (begin, end) = pieces_of(line), self._spans[name]
        covered = sum(stop - start for start, stop in pieces) == end - begin
        path = self.path if self.complete else self.partial
        if not covered:
            return False
        with disk.reading(path), path.open("rb", buffering=0) as file:

            def read(_: str, start: int, stop: int) -> bytes:
                return os.pread(file.fileno(), stop - start, begin + start)

            return not any(differing(every_piece({name: line}), read))

    def skip(self, name: str) -> None:
        """Count a span as written: it is there from an earlier run."""
        self._left[name] = 0

    def sync(self) -> None:
        """Put what is written so far on disk."""
        disk.sync(self._fd, self.partial)

    def commit(self) -> None:
        """Give the complete file its name. Raises ValueError where bytes are missing, or the header or the size on disk
        are not those that were planned; an error leaves the partial file to `close`, or `abort`."""
        missing = [name for name, left in self._left.items() if left != 0]
        if missing:
            raise ValueError(f"{self.path}: tensor {missing[0]!r} must be written in full, {len(missing)} are not")
        disk.sync(self._fd, self.partial)
        same = os.pread(self._fd, len(self._header), 0) == self._header
        if not same or os.fstat(self._fd).st_size != self._size:
            raise ValueError(f"{self.partial}: must keep its header and size while it is written, they changed")
        disk.rename(self.partial, self.path)
        self.close()
        disk.sync_directory(self.path.parent)

    def close(self) -> None:
        """Stop without removing the partial file."""
        if self._held is not None:
            self._held.close()
        self._held, self._fd = None, -1

    def abort(self) -> None:
        """Stop and remove the partial file."""
        if self._fd < 0:
            return
        try:
            disk.remove(self.partial)  # while it is locked: another writer's is not touched
        finally:
            self.close()


def _fits(path: Path, header: bytes, size: int) -> bool:
    """Whether a file is there that has this size and begins with this header."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
        return False
    with disk.reading(path), path.open("rb") as file:
        return file.read(len(header)) == header
