# SPDX-License-Identifier: Apache-2.0
"""Every call by which a conversion changes a disk. Errors name the file and what was being done to it."""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from breccia.screen import amount

# Called with the name of a call and its path before each of them. Tests stop a process there or raise an error.
before: Callable[[str, Path], None] | None = None

_NO_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
_PIECE = 1 << 20
Stamp = tuple[int, int, int, int]
# Small files that are made: `write_file` and `copy_file` enter them here where a conversion asks for it.
made: ContextVar[dict[Path, Stamp] | None] = ContextVar("made", default=None)


@contextlib.contextmanager
def reading(path: Path, what: str = "read") -> Iterator[None]:
    """Errors of calls that change nothing say of which file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"cannot {what} {path}: {os.strerror(error.errno)}") from None


def _call(what: str, path: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what changes the disk; its errors say what could not be done to which file."""
    try:
        if before is not None:
            before(what, path)
        return function(*arguments)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, f"cannot {what} {path}: {os.strerror(error.errno)}") from None


def make_directory(path: Path) -> bool:
    """Make a directory; False where one was there."""
    try:
        _call("make directory", path, os.mkdir, path)
        return True
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{path} must be a directory, it is something else") from None
        return False


def create(path: Path, *, keep: bool = False, anew: bool = False) -> int:
    """Open a file for writing, empty unless it is to be kept. Follows no link. Raises FileExistsError where it is to be
    made ``anew``, and is there."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    fd: int = _call(
        "create", path, os.open, path, flags | (0 if keep else os.O_TRUNC) | (os.O_EXCL if anew else 0), 0o644
    )
    return fd


def reserve(fd: int, size: int, path: Path) -> None:
    """Give a file its size, and the space for it where the file system can."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            _call("reserve space for", path, os.posix_fallocate, fd, 0, size)
            return
        except OSError as error:
            if error.errno not in _NO_RESERVE:
                raise
    _call("reserve space for", path, os.ftruncate, fd, size)


def write(fd: int, data: bytes | memoryview, at: int, path: Path) -> None:
    """Write at a place, all of it."""
    view = memoryview(data)
    while view:
        written = _call("write", path, os.pwrite, fd, view[: 1 << 30], at)
        view, at = view[written:], at + written


def check_space(path: Path, nbytes: int) -> None:
    """Raise OSError where so many bytes do not fit beside what is on a directory's disk."""
    if not hasattr(os, "statvfs"):
        return
    said = os.statvfs(path)
    free = said.f_bavail * said.f_frsize
    if nbytes > free and said.f_blocks:  # some file systems say nothing
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {path} needs {amount(nbytes)}, {amount(free)} free")


def truncate(fd: int, size: int, path: Path) -> None:
    """Cut a file."""
    _call("truncate", path, os.ftruncate, fd, size)


def sync(fd: int, path: Path) -> None:
    """Put a file on disk."""
    _call("flush", path, os.fsync, fd)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk."""
    fd = _call("flush", path, os.open, path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has nothing to flush for directories
            raise OSError(error.errno, f"cannot flush {path}: {error.strerror}") from None
    finally:
        os.close(fd)


def rename(source: Path, destination: Path) -> None:
    """Give a file or directory another name."""
    _call("rename to", destination, os.replace, source, destination)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        _call("remove", path, os.unlink, path)


def remove_directory(path: Path) -> None:
    """Remove an empty directory."""
    _call("remove", path, os.rmdir, path)


def remove_tree(path: Path, last: str = "") -> bool:
    """Remove a directory and all that is in it, links but not what they lead to, the name ``last`` after all others;
    whether it is gone."""
    try:
        entries = {entry.name: entry for entry in os.scandir(path)}
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if last in entries:
        entries[last] = entries.pop(last)
    gone = True
    for entry in entries.values():
        gone &= (remove_tree if entry.is_dir(follow_symlinks=False) else try_remove)(Path(entry.path))
    return gone and try_remove(path, remove_directory)


def try_remove(path: Path, call: Callable[[Path], None] = remove) -> bool:
    """Remove a file, if it is there; whether it is gone."""
    try:
        call(path)
    except OSError:
        return False
    return True


def write_file(path: Path, data: bytes | Iterable[bytes], *, anew: bool = False) -> None:
    """A file of bytes, or of pieces of them, on disk when this returns; see `create`."""
    fd, at = create(path, anew=anew), 0
    try:
        for piece in (data,) if isinstance(data, bytes) else data:
            write(fd, piece, at, path)
            at += len(piece)
        sync(fd, path)
        _note(fd, path)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes) -> None:
    """A small file that is there under its name when it is complete and on disk; what is there gives way then."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_file(partial, data)
        rename(partial, path)
    except BaseException:
        try_remove(partial)
        raise
    sync_directory(path.parent)


def _note(fd: int, path: Path) -> None:
    files = made.get()
    if files is not None:
        files[path] = stamp_of(os.fstat(fd))


def copy_file(source: Path, destination: Path) -> None:
    """Copy a regular file's bytes, on disk when this returns."""
    with open_regular(source) as fd_in:
        fd = create(destination)
        try:
            at = 0
            while piece := _read(fd_in, at, source):
                write(fd, piece, at, destination)
                at += len(piece)
            sync(fd, destination)
            _note(fd, destination)
        finally:
            os.close(fd)


def _read(fd: int, at: int, path: Path) -> bytes:
    with reading(path):
        return os.pread(fd, _PIECE, at)


def link_or_copy(source: Path, destination: Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    remove(destination)
    try:
        _call("link", destination, functools.partial(os.link, follow_symlinks=False), source, destination)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        copy_file(source, destination)


# The part of a file's status that changes when its contents change.
stamp_of: Callable[[os.stat_result], Stamp] = operator.attrgetter("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A file for reading that is a file: no pipe, which would wait for its writer, and no device, which has no end.
    Raises ValueError where it is something else."""
    fd = open_input(path)
    try:
        yield fd
    finally:
        os.close(fd)


def open_input(path: Path) -> int:
    """See `open_regular`; the caller closes it."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ValueError(f"{path}: must be a regular file, it is a directory, pipe or device")
