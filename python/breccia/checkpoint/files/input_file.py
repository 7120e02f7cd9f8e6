# SPDX-License-Identifier: Apache-2.0
"""A file that is read: through a mapping, for callers that want views, or by read calls. When another program cuts the
file meanwhile, a call raises an error, where access to a mapping would kill the process."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from breccia.checkpoint.arguments import existing
from breccia.checkpoint.files import disk

Array: TypeAlias = "np.ndarray[Any, Any]"
_MOST = 1 << 30  # bytes of one call
# Pages of a private mapping can be given back to the system one by one.
_OWN = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class InputFile:
    """An open regular file. Any thread may read it.

    Attributes:
        size: when it was opened.
        stamp: what changes when the file does.

    Raises:
        ValueError: it is a directory, pipe or device.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = disk.open_input(path)
        said = os.fstat(self._fd)
        self.size, self.stamp = said.st_size, disk.stamp_of(said)
        self._map: mmap.mmap | None = None

    def read(self, start: int, count: int) -> bytes:
        """Bytes, all of them. Raises ValueError where the file is shorter now, OSError where they cannot be read."""
        return self.array(start, start + count).tobytes()

    def array(self, start: int, stop: int) -> Array:
        """The same as an array of its own memory."""
        result = np.empty(stop - start, np.uint8)
        self._fill(result.data, start)
        return result

    @contextlib.contextmanager
    def scratch(self, start: int, count: int) -> Iterator[mmap.mmap]:
        """The same in memory whose pages can be given back one by one, for a while."""
        with mmap.mmap(-1, max(count, 1), **_OWN) as memory:
            with memoryview(memory) as every, every[:count] as view:
                self._fill(view, start)
            yield memory

    def _opened(self) -> int:
        """Its descriptor. One of -1 would be of memory that is all zeros to mmap."""
        if self._fd < 0:
            raise ValueError(f"{self.path}: must be open to be read, it was closed")
        return self._fd

    def _fill(self, view: memoryview, start: int) -> None:
        at, stop = start, start + len(view)
        while at < stop:
            try:
                got = os.preadv(self._fd, [view[at - start : at - start + _MOST]], at)
            except OSError as error:
                self._opened()
                raise OSError(error.errno, f"cannot read {self.path}: {os.strerror(error.errno or 0)}") from None
            if not got:
                raise ValueError(f"{self.path}: must not change while it is read: it ends at {at}, not {self.size}")
            at += got

    def view(self, start: int, stop: int) -> Array:
        """A view of the mapped file, read-only."""
        if start == stop:
            return np.empty(0, np.uint8)
        if self._map is None:
            self._map = mmap.mmap(self._opened(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8, stop - start, start)

    def private(self, start: int, stop: int) -> Array:
        """A view that can be written to, which changes no file."""
        if start == stop:
            return np.empty(0, np.uint8)
        begin = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        private = mmap.mmap(self._opened(), stop - begin, access=mmap.ACCESS_COPY, offset=begin)
        return np.frombuffer(private, np.uint8, stop - start, start - begin)

    def release(self, start: int, stop: int) -> None:
        """Tell the system that pages of the mapping are not needed any more."""
        page = mmap.PAGESIZE
        begin = -(-start // page) * page
        length = stop // page * page - begin
        if length > 0 and self._map is not None and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, length)

    def check_unchanged(self) -> None:
        """Raise ValueError where the file, or what its name leads to, is not what was opened."""
        if {disk.stamp_of(os.fstat(self._opened())), disk.stamp_of(os.stat(self.path))} != {self.stamp}:
            raise ValueError(f"{self.path}: must not change while it is read, it did")

    def close(self) -> None:
        """Let go of the file; a mapping stays until the last array that views it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
                self._map = None

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1


class JoinedFiles(InputFile):
    """Files that are read as one: the bytes of each come behind those of the one before it. What is read at a time lies
    in one of them.

    Attributes:
        files: the open files.
        starts: where each begins.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path, self._fd = paths[0], -1
        self.files: list[InputFile] = []
        try:
            for path in paths:
                self.files.append(InputFile(path))
        except BaseException:
            self.close()
            raise
        *self.starts, self.size = itertools.accumulate((file.size for file in self.files), initial=0)
        one, two, three, four = (sum(numbers) for numbers in zip(*(file.stamp for file in self.files), strict=True))
        self.stamp = one, two, three, four

    def _place(self, start: int, stop: int) -> tuple[InputFile, int, int]:
        number = bisect.bisect_right(self.starts, start) - 1
        return self.files[number], start - self.starts[number], stop - self.starts[number]

    def array(self, start: int, stop: int) -> Array:
        """See `InputFile.array`."""
        file, begin, end = self._place(start, stop)
        return file.array(begin, end)

    def view(self, start: int, stop: int) -> Array:
        """See `InputFile.view`."""
        file, begin, end = self._place(start, stop)
        return file.view(begin, end)

    def release(self, start: int, stop: int) -> None:
        """See `InputFile.release`."""
        file, begin, end = self._place(start, stop)
        file.release(begin, end)

    def check_unchanged(self) -> None:
        """See `InputFile.check_unchanged`."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """See `InputFile.close`."""
        for file in self.files:
            file.close()


def read_bounded(path: Path, most: int) -> tuple[bytes, disk.Stamp]:
    """All of a small regular file, and its stamp."""
    with contextlib.closing(InputFile(path)) as file:
        if file.size > most:
            raise ValueError(f"{path}: must be at most {most} bytes, it has {file.size}")
        return file.read(0, file.size), file.stamp


def sha256_of(path: Path) -> str:
    """Of a file's contents, in hexadecimal."""
    found = hashlib.sha256()
    with disk.reading(path), path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


class DataFile:
    """A file beside the source by which a conversion chooses: what tells one from another. Messages name it as
    ``argument``."""

    def __init__(self, path: str | os.PathLike[str], argument: str) -> None:
        self.path = existing(path, argument)
        self._stamp = disk.stamp_of(self.path.stat())

    def __repr__(self) -> str:
        """What tells one file from another, wherever they lie."""
        return f"{type(self).__name__}({self.sha256})"

    @functools.cached_property
    def sha256(self) -> str:
        """Of its contents."""
        return sha256_of(self.path)

    def check_unchanged(self) -> None:
        """Raise ValueError where the file is not what was opened."""
        if disk.stamp_of(self.path.stat()) != self._stamp:
            raise ValueError(f"{self.path}: must not change while it is read, it did")
