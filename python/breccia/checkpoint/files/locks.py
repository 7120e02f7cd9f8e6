# SPDX-License-Identifier: Apache-2.0
"""Locks between processes: `flock`, or a file that one process alone can make where a file system has no locks."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from breccia.checkpoint.files import disk

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


class Lock:
    """A file that this process alone has locked, open as ``fd``."""

    def __init__(self, path: Path, fd: int, owner: Path | None = None) -> None:
        self.path, self.fd, self._owner = path, fd, owner

    def holds(self) -> bool:
        """Whether the name still leads to the file: else another process may have locked another of that name."""
        owned = self._owner is None or _said(self._owner) == _me()
        return owned and self.fd >= 0 and _is_at(self.fd, self.path)

    def close(self) -> None:
        """Unlock."""
        if self._owner is not None:
            owner, self._owner = self._owner, None
            if _said(owner) == _me():
                disk.try_remove(owner)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def lock(path: Path) -> Lock | None:
    """A lock on a file of that name, which is created if need be; None where another has it. Raises BlockingIOError
    where the file system has no locks, and there is a file that another process made instead, OSError where there can
    be no lock for another reason."""
    while True:
        fd = disk.create(path, keep=True)
        try:
            locked = _locked(fd, path)
            if locked is False:
                os.close(fd)
                return None
            owner = None if locked else _own(path)
            if _is_at(fd, path):
                return Lock(path, fd, owner)
        except BaseException:
            os.close(fd)
            raise
        Lock(path, fd, owner).close()  # the process that held the lock removed the file: try again


@contextlib.contextmanager
def scratch(prefix: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A folder for temporary files, below ``parent`` or where the system has them; those that processes that were
    killed left there are removed."""
    place = Path(tempfile.gettempdir() if parent is None else parent)
    for old in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # of another user, or gone meanwhile
            if (ended := lock(old / "lock")) is not None:  # made where its process had none yet, or none any more
                disk.remove_tree(old, last="lock")
                ended.close()
    held = None
    while held is None:  # another process may take the new folder for one that was left
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with contextlib.suppress(FileNotFoundError):
            held = lock(made / "lock")
    try:
        yield made
    finally:
        disk.remove_tree(made, last="lock")
        held.close()


def _is_at(fd: int, path: Path) -> bool:
    try:
        held, named = os.fstat(fd), os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _locked(fd: int, path: Path) -> bool | None:
    """Whether this process has the lock now; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise OSError(error.errno, f"cannot lock {path}: {error.strerror}") from None
        return None
    return True


def _own(path: Path) -> Path:
    """A file beside that says which process is at work; it is made where there is none, or its process has ended."""
    owner = path.with_name(f"{path.name}.owner")
    if _has_ended(_said(owner)):
        disk.remove(owner)
    try:
        disk.write_file(owner, _me().encode(), anew=True)
    except FileExistsError:
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"{owner} must not be there: the file system has no locks, and by that file process {_said(owner)!r} is at "
            f"work; remove it if that has ended",
        ) from None
    return owner


def _me() -> str:
    return f"{_here()} {os.getpid()} {_begin(os.getpid())}"


def _here() -> str:
    """This machine, and the table of its processes that this one sees."""
    try:
        boot, table = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = table = "?"
    return f"{os.uname().nodename if hasattr(os, 'uname') else '?'} {boot} {table}"


def _begin(process: int) -> str:
    """When a process began, by the clock of the machine: numbers of processes come again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "?"


def _said(owner: Path) -> str:
    try:
        return owner.read_text()
    except (OSError, ValueError):
        return ""


def _has_ended(said: str) -> bool:
    """Whether a process that was on this machine is not there any more."""
    here, _, rest = said.rpartition(" ")[0].rpartition(" ")
    begin = said.rpartition(" ")[2]
    if here != _here() or "?" in said or not rest.isdecimal():
        return False
    return _begin(int(rest)) != begin
