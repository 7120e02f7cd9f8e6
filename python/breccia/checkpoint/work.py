# SPDX-License-Identifier: Apache-2.0
"""The directory ``.OUT.partial`` in which one conversion at a time works until its output is complete:
``lock``, ``journal``, and below ``out`` what is being made, where no name can be that of another file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from breccia.checkpoint import disk
from breccia.checkpoint.journal import Journal, read_journal

__all__ = ["ReplaceError", "Work", "check_replaceable", "partial_of"]


def partial_of(destination: Path) -> Path:
    """Where a conversion to ``destination`` works."""
    return destination.with_name(f".{destination.name}.partial")


class ReplaceError(ValueError):
    """What is at the destination is not an output that may be replaced."""


def check_replaceable(destination: Path, directory: bool) -> None:
    """Whether a new output, a directory or a file, may take the place of what is there: nothing, or a file or a
    directory with a checkpoint.

    Raises:
        ReplaceError: it may not.
    """
    if not os.path.lexists(destination):
        return
    if destination.is_symlink() or destination.is_dir() != directory or not (directory or destination.is_file()):
        wanted = "directory" if directory else "file"
        raise ReplaceError(f"destination must be a {wanted} to be replaced by one, {destination} is something else")
    if directory and any(destination.iterdir()) and not any(destination.glob("*.safetensors")):
        raise ReplaceError(f"destination must hold a checkpoint to be replaced by one, {destination} holds other files")


class Work:
    """Locked from construction until `close`, `finish` or `abandon`.

    Args:
        destination: where the output is to appear.
        identity: 32 bytes that tell what the output depends on.
        directory: whether the output is the whole of ``out``, or one file of the destination's name in it.
        replace: whether what is at the destination gives way when the output is complete. It is whole until then, and
            after a kill between its going and the output's coming the next run puts it back first.

    Attributes:
        out: directory of what is being made.
        finished: whether an earlier run was stopped after giving the output its name.

    Raises:
        BlockingIOError: another conversion to this destination is at work.
        FileExistsError: the destination is there and is not to be replaced.
        ValueError: it must not be replaced, see `check_replaceable`.
    """

    def __init__(self, destination: Path, identity: bytes, *, directory: bool, replace: bool = False) -> None:
        self.destination, self._directory, self._replace = destination, directory, replace
        self.path = partial_of(destination)
        self.out = self.path / "out"
        self._old = self.path / "replaced"
        self._made = self.out if directory else self.out / destination.name
        self._journal: Journal | None = None
        self._lock = -1
        self._parents: list[Path] = []
        self.finished = False
        try:
            self._make_parents(destination.parent)
            disk.make_directory(self.path)
            self._take_lock()
            self._begin(identity)
        except (BlockingIOError, FileExistsError, NotADirectoryError, KeyboardInterrupt):
            self.close()
            raise
        except BaseException:
            self.abandon()
            raise

    def _make_parents(self, path: Path) -> None:
        for parent in reversed([path, *path.parents]):
            if not parent.exists() and disk.make_directory(parent):
                self._parents.append(parent)

    def _take_lock(self) -> None:
        lock = disk.lock(self.path / "lock")
        if lock is None:
            raise BlockingIOError(
                f"destination must be written by one conversion at a time: another is at work in {self.path}"
            )
        self._lock = lock

    def _begin(self, identity: bytes) -> None:
        path = self.path / "journal"
        self._put_back()
        if os.path.lexists(self.destination):
            records, _ = read_journal(path, identity)
            self.finished = records[-1:] == [("complete",)] and not os.path.lexists(self._made)
            if self.finished:
                return
            disk.remove_tree(self._old)  # of an output that has come, and was not tidied up
        if self._replace:
            check_replaceable(self.destination, self._directory)
        elif os.path.lexists(self.destination):
            if not os.path.lexists(self.out):  # nothing is being made: what cleaning up left
                self._clear()
            raise FileExistsError(f"destination must not be there, {self.destination} is")
        self._journal = Journal(path, identity)
        if not self._journal.records:
            disk.remove_tree(self.out)
            self._journal.add([("begin",)])
        disk.make_directory(self.out)

    def done(self, file: str) -> set[str]:
        """Tensors of a file that are on disk."""
        assert self._journal is not None
        names: set[str] = set()
        for kind, *words in self._journal.records:
            if kind == "tensor" and words[0] == file:
                names.add(words[1])
            elif kind == "restart" and words[0] == file:
                names.clear()
        return names

    def restart(self, file: str) -> None:
        """Forget what is said to be on disk of a file."""
        assert self._journal is not None
        if self.done(file):
            self._journal.add([("restart", file)])

    def record(self, file: str, tensors: Iterable[str]) -> None:
        """Say that tensors of a file are on disk."""
        assert self._journal is not None
        self._journal.add(("tensor", file, name) for name in tensors)

    @contextlib.contextmanager
    def kept_when_interrupted(self) -> Iterator[None]:
        """Do what makes the output: an error abandons the work, an interruption leaves it for the next run."""
        try:
            yield
        except Exception:
            self.abandon()
            raise
        except BaseException:
            self.close()
            raise

    def finish(self) -> list[str]:
        """Give the output its name and clean up.

        Returns:
            What could not be done after that, which leaves the output complete.
        """
        notes = []
        if not self.finished:
            assert self._journal is not None
            disk.sync_directory(self.out)
            self._journal.add([("complete",)])
            self._come()
        try:
            disk.sync_directory(self.destination.parent)
        except OSError as error:
            notes.append(f"{self.destination} is complete, but its name may not outlast a power failure: {error}")
        if not self._clear():
            notes.append(f"{self.path} is not needed any more and could not be removed")
        return notes

    def _come(self) -> None:
        """Give the output its name. A file takes the place of another in one step, a directory in two."""
        if self._replace:
            check_replaceable(self.destination, self._directory)
        elif os.path.lexists(self.destination):
            raise FileExistsError(f"destination must not be there, {self.destination} is")
        if self._directory and os.path.lexists(self.destination):
            disk.rename(self.destination, self._old)
        disk.rename(self._made, self.destination)

    def _forget_that_it_is_complete(self) -> None:
        """Else what is left of abandoned work, beside an output that is still the old one, would say that it came."""
        if self._journal is not None and self._journal.records[-1:] == [("complete",)]:
            with contextlib.suppress(OSError):
                self._journal.add([("abandoned",)])

    def _put_back(self) -> None:
        """Undo the first of two steps."""
        if os.path.lexists(self._old) and not os.path.lexists(self.destination):
            disk.rename(self._old, self.destination)

    def abandon(self) -> None:
        """Remove all of it, and the directories made for it."""
        if self._lock >= 0:
            self._forget_that_it_is_complete()
            self._put_back()
        if self._lock >= 0 or not (self.path / "lock").exists():
            self._clear()
        for parent in reversed(self._parents):
            with contextlib.suppress(OSError):  # something is in it that is not this conversion's
                disk.remove_directory(parent)

    def _clear(self) -> bool:
        if self._journal is not None:
            self._journal.close()
        disk.remove_tree(self.out)  # first what is large
        gone = disk.remove_tree(self.path)
        self.close()
        return gone

    def close(self) -> None:
        """Leave the work for the next run of the same conversion."""
        if self._journal is not None:
            self._journal.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
