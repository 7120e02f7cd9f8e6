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

__all__ = ["PlannedWriter", "sync_directory"]


class PlannedWriter:
    """Writes a file of a header and named spans of bytes.

    Args:
        path: where the complete file appears. Until then it is ``partial``, beside it.
        header: the first bytes.
        spans: name → (begin, end) in the file.
        size: of the file.
        resume: keep what an earlier, killed writer of the same plan left in ``partial``.

    Space is reserved on construction, so that a full disk is found before any work. Leaving the ``with``
    block by an exception removes the partial file.
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
        self.path = Path(path)
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self._spans = dict(spans)
        self._left = {name: end - begin for name, (begin, end) in spans.items()}
        self._lock = threading.Lock()
        fits = resume and self.partial.is_file() and self.partial.stat().st_size == size
        self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | (0 if fits else os.O_TRUNC), 0o644)
        try:
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, size)
            else:
                os.ftruncate(self._fd, size)
            _pwrite(self._fd, memoryview(header), 0)
        except BaseException:
            self.abort()
            raise

    def __enter__(self) -> PlannedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    def write(self, name: str, array: np.ndarray[Any, Any], at: int = 0) -> None:
        """Write a span, or a piece of one that begins ``at`` bytes into it. From any thread."""
        begin, end = self._spans[name]
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if begin + at + len(view) > end:
            raise ValueError(f"tensor {name!r} must have {end - begin} bytes, got {at + len(view)}")
        _pwrite(self._fd, view, begin + at)
        with self._lock:
            self._left[name] -= len(view)

    def skip(self, name: str) -> None:
        """Count a span as written: it is there from an earlier run."""
        self._left[name] = 0

    def sync(self) -> None:
        """Put what is written so far on disk."""
        os.fsync(self._fd)

    def commit(self) -> None:
        """Give the complete file its name.

        Raises:
            ValueError: bytes are missing.
        """
        missing = [name for name, left in self._left.items() if left != 0]
        if missing:
            self.abort()
            raise ValueError(f"{self.path}: tensor {missing[0]!r} must be written in full, {len(missing)} are not")
        os.fsync(self._fd)
        self.close()
        self.partial.replace(self.path)
        sync_directory(self.path.parent)

    def close(self) -> None:
        """Stop without removing the partial file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abort(self) -> None:
        """Stop and remove the partial file."""
        self.close()
        self.partial.unlink(missing_ok=True)


def _pwrite(fd: int, view: memoryview, at: int) -> None:
    while len(view):
        written = os.pwrite(fd, view[: 1 << 30], at)
        view, at = view[written:], at + written


def sync_directory(path: Path) -> None:
    """Make a rename last."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
