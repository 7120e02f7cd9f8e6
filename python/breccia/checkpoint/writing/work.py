# SPDX-License-Identifier: Apache-2.0
"""The directory ``.OUT.partial`` in which one conversion at a time works until its output is complete:
``lock``, ``journal``, and below ``out`` what is being made, where no name can be that of another file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from breccia.checkpoint.files import disk
from breccia.checkpoint.files.locks import Lock, lock
from breccia.checkpoint.files.sums import add_lines
from breccia.checkpoint.planning.identity import Identity
from breccia.checkpoint.planning.remarks import Remark
from breccia.checkpoint.writing.journal import Journal, Record, first_record, read_journal
from breccia.checkpoint.writing.losses import Loss
from breccia.checkpoint.writing.manifest import place_of

_WORTH = 10.0  # seconds of work


class Done(NamedTuple):
    """What is known of tensors that were converted, of JSON types.

    Attributes:
        read: checksums of what was read for them, a line for each stored name.
        wrote: checksums of what was written, by the names in the output.
        not_finite: how many numbers are infinite or NaN, by logical names, where any are.
        losses: how far new codes are from what was read, by logical names: see `Loss`.
        rounded: what became of those that were rounded by GPTQ, by logical names: see `feedback.rounded`.
    """

    read: dict[str, str]
    wrote: dict[str, str]
    not_finite: dict[str, int]
    losses: dict[str, Loss]
    rounded: dict[str, dict[str, Any]]

    def add(self, other: Done) -> None:
        """Take in what is known of others. Raises ValueError where something was read for both, and had other bytes for
        one than for the other."""
        add_lines(self.read, other.read)
        add_lines(self.wrote, other.wrote)
        self.not_finite.update(other.not_finite)
        self.losses.update(other.losses)
        self.rounded.update(other.rounded)


def partial_of(destination: Path) -> Path:
    """Where a conversion to ``destination`` works."""
    return destination.with_name(f".{destination.name}.partial")


def names_folder(destination: str | os.PathLike[str]) -> bool:
    """Whether a destination is a directory by its spelling, whatever the source is."""
    return os.fspath(destination).endswith(("/", os.sep))


def check_destination(destination: Path, *sources: str | os.PathLike[str], force: bool | None = None) -> None:
    """Whether something may be written there; what is there gives way with ``force``, None where that cannot be asked
    for. Raises ValueError where it is inside of a source, or would replace one, FileExistsError where it is
    there."""
    place = destination.resolve()
    for source in map(Path, sources):
        if source.is_dir() and source.resolve() in place.parents:
            raise ValueError(f"destination must not be inside of the source {source}, got {destination}")
        same = place.exists() and place.samefile(source)
        if same or place in source.resolve().parents:
            raise ValueError(f"destination must not replace the source {source}, got {destination}")
    if not force and os.path.lexists(destination) and not os.path.lexists(partial_of(destination)):
        hint = "" if force is None else ": force=True replaces it"
        raise FileExistsError(f"destination must not be there, {destination} is{hint}")


class ReplaceError(ValueError):
    """What is at the destination is not an output that may be replaced."""


def check_replaceable(destination: Path, directory: bool) -> None:
    """Whether a new output, a directory or a file, may take the place of what is there: nothing, or a file or a
    directory with a checkpoint. Raises ReplaceError where it may not."""
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
        identity: what the output depends on beside the bytes of the source.
        directory: whether the output is the whole of ``out``, or one file of the destination's name in it.
        replace: whether what is at the destination gives way when the output is complete. It is whole until then, and
            after a kill between its going and the output's coming the next run puts it back first.

    Attributes:
        out: directory of what is being made.
        finished: whether an earlier run was stopped after giving the output its name.
        made: files of the output that are complete, and what changes when they do.
        records: what an earlier run said of tensors on disk, by files and tensors.
        stamps: of the source's files that those are made of, by names.
        notes: what became of the work of an earlier run.

    Raises:
        BlockingIOError: another conversion to this destination is at work.
        FileExistsError: the destination is there and is not to be replaced.
        ValueError: it must not be replaced, see `check_replaceable`.
    """

    def __init__(self, destination: Path, identity: Identity, *, directory: bool, replace: bool = False) -> None:
        self._start = time.monotonic()
        self.destination, self._directory, self._replace = destination, directory, replace
        self.records: dict[str, dict[str, Done]] = {}
        self._files = set[str]()  # of which this run recorded tensors
        self._waiting: list[Record] = []  # that go with the first of tensors
        self._recorded = False  # whether there is work that an error must not lose
        self.notes: list[Remark] = []
        self.path = partial_of(destination)
        self.out = self.path / "out"
        self._old = self.path / "replaced"
        self._made = self.out if directory else self.out / destination.name
        self._journal: Journal | None = None
        self._lock: Lock | None = None
        self.made: dict[Path, disk.Stamp] = {}
        self._parents: list[Path] = []
        self.finished = False
        try:
            self._make_parents(destination.parent)
            self._fresh = disk.make_directory(self.path)
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
        try:
            self._lock = lock(self.path / "lock")
        except BlockingIOError:
            raise
        except OSError:
            if self._fresh and [entry.name for entry in os.scandir(self.path)] == ["lock"]:
                disk.remove_tree(self.path)
            raise
        if self._lock is None:
            raise BlockingIOError(
                f"destination must be written by one conversion at a time: another is at work in {self.path}"
            )

    def _begin(self, identity: Identity) -> None:
        path, said = self.path / "journal", json.dumps(identity)
        key = hashlib.sha256(said.encode()).digest()
        self._put_back()
        if os.path.lexists(self.destination):
            records, _ = read_journal(path, key)
            self.finished = records[-1:] == [("complete",)] and not os.path.lexists(self._made)
            if self.finished:
                return
            disk.remove_tree(self._old)  # of an output that has come, and was not tidied up
        if self._replace:
            check_replaceable(self.destination, self._directory)
        elif os.path.lexists(self.destination):
            if os.path.lexists(self.out):
                raise FileExistsError(f"destination must not be there, {self.destination} is")
            self._clear()  # nothing is being made: what cleaning up left
            raise FileExistsError(
                f"destination must not be there, {self.destination} is: it is complete, an earlier conversion to it "
                f"was stopped while it tidied up"
            )
        self._note_other(identity, path)
        self._journal = Journal(path, key)
        if not self._journal.records:
            disk.remove_tree(self.out)
            self._waiting.append(("begin", said))
        disk.make_directory(self.out)
        self.stamps: dict[str, list[int]] = {}
        for kind, *words in self._journal.records:
            if kind == "tensor":
                self.records.setdefault(words[0], {})[words[1]] = Done(*words[2])
            elif kind == "again":
                self.records[words[0]].pop(words[1])
            elif kind == "restart":
                self.records.pop(words[0])
            elif kind == "stamps":
                self.stamps = words[0]
        self._journal.records.clear()
        self._recorded = any(self.records.values())
        self._start -= _WORTH if self._recorded else 0

    def _note_other(self, identity: Identity, journal: Path) -> None:
        """Say which of the things that the output depends on was another in an earlier run: the first, on which
        others depend."""
        try:
            before = json.loads(first_record(journal)[1])
            changed = [what for what, digest in identity.items() if before.get(what) != digest]
        except (OSError, IndexError, TypeError, ValueError, AttributeError):
            return
        if changed:
            self.notes.append(Remark(f"all is made anew: an earlier run was of other {changed[0]}"))

    def done(self, file: str) -> dict[str, Done]:
        """Tensors of a file that an earlier run put on disk."""
        return self.records.get(file, {})

    def restart(self, file: str) -> None:
        """Forget what is said to be on disk of a file."""
        assert self._journal is not None
        if self.records.pop(file, None) or file in self._files:
            self._journal.add([("restart", file)])

    def forget(self, tensors: Sequence[tuple[str, str]], stamps: Mapping[str, disk.Stamp]) -> None:
        """Forget what is said to be on disk of some tensors, each of a file; all others are made of files with these
        stamps, by names."""
        assert self._journal is not None
        for file, name in tensors:
            del self.records[file][name]
        self._waiting += [*(("again", *one) for one in tensors), ("stamps", dict(stamps))]
        if tensors:
            self._add([])

    def record(self, file: str, tensors: Mapping[str, Done]) -> None:
        """Say that tensors of a file are on disk."""
        self._add([("tensor", file, name, done) for name, done in tensors.items()])
        self._recorded |= bool(tensors)
        self._files.add(file)

    def _add(self, records: list[Record]) -> None:
        assert self._journal is not None
        self._journal.add([*self._waiting, *records])
        self._waiting = []

    def remove_others(self, files: Collection[str]) -> None:
        """Remove all of the output but some files and what is written of them: what an earlier run copied may not be
        beside the source any more."""
        for path in sorted(self.out.rglob("*"), reverse=True):
            of = path.name[1:].removesuffix(".partial") if path.name.endswith(".partial") else path.name
            if path.parent != self.out or of not in files or of not in self.records:
                (disk.remove_directory if path.is_dir() and not path.is_symlink() else disk.remove)(path)

    def check_space(self, nbytes: int) -> None:
        """Raise OSError where the disk has no place for an output of so many bytes, beside what is there of it."""
        there = sum(path.stat().st_blocks * 512 for path in self.out.rglob("*") if path.is_file())
        disk.check_space(self.path, nbytes - there)

    def note(self, name: str) -> None:
        """Say that a file of the output is complete."""
        self.made[self.out / name] = disk.stamp_of(os.stat(self.out / name, follow_symlinks=False))

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """While inside, small files that are made are noted."""
        token = disk.made.set(self.made)
        try:
            yield
        finally:
            disk.made.reset(token)

    def check(self) -> None:
        """Whether the output consists of the files that were noted, as they were then. Raises ValueError where a file
        is missing, another one, or too many; or the work is another process's now."""
        if self._lock is None or not self._lock.holds():
            raise ValueError(f"{self.path} must be this conversion's alone, another program removed it meanwhile")
        for path, (inode, size, changed, _) in self.made.items():
            try:
                now = disk.stamp_of(os.stat(path, follow_symlinks=False))
            except FileNotFoundError:
                raise ValueError(f"{path} must stay until the output is complete, it was removed") from None
            if now[:3] != (inode, size, changed):
                self.restart(path.name)
                raise ValueError(f"{path} must stay as it was written until the output is complete, it was changed")
        for folder, _, names in os.walk(self.out):
            for name in names:
                if not name.startswith(".") and (path := Path(folder) / name) not in self.made:
                    raise ValueError(f"{path} must not be there, another program made it")

    @contextlib.contextmanager
    def kept_when_interrupted(self) -> Iterator[None]:
        """Do what makes the output: an interruption leaves the work for the next run, as does an error where any of it
        is done, which the message says then. An error of the source or of what is asked for, which comes again, leaves
        what took long."""
        try:
            yield
        except Exception as error:
            worth = isinstance(error, OSError) or time.monotonic() - self._start > _WORTH
            if not (worth and self._recorded and self._lock is not None and self._lock.holds()):
                self.abandon()
                raise
            with contextlib.suppress(OSError):
                self._forget_that_it_is_complete()
                self._put_back()
            self.close()
            said = f"what is done is kept in {self.path}, and the same command goes on from there"
            if isinstance(error, OSError) and error.strerror:
                error.strerror = f"{error.strerror}; {said}"
            else:
                error.args = (f"{error}; {said}",)
            raise
        except BaseException:
            self.close()
            raise

    def finish(self) -> list[str]:
        """Give the output its name and clean up; what could not be done after that leaves the output complete."""
        notes = []
        if not self.finished:
            assert self._journal is not None
            disk.sync_directory(self.out)
            self._journal.add([("complete",)])
            self.check()
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
        if not self._directory:
            manifest, old = place_of(self._made), place_of(self.destination)
            if manifest.exists():
                disk.rename(manifest, old)
            elif old.exists():
                disk.remove(old)  # of a file that was here
        disk.rename(self._made, self.destination)

    def _forget_that_it_is_complete(self) -> None:
        """Else what is left of abandoned work, beside an output that is still the old one, would say that it came."""
        if self._journal is not None and self._journal.last == [("complete",)]:
            with contextlib.suppress(OSError):
                self._journal.add([("abandoned",)])

    def _put_back(self) -> None:
        """Undo the first of two steps."""
        if os.path.lexists(self._old) and not os.path.lexists(self.destination):
            disk.rename(self._old, self.destination)

    def abandon(self) -> None:
        """Remove all of it, and the directories made for it."""
        held = self._lock is not None and self._lock.holds()
        if held:
            self._forget_that_it_is_complete()
            self._put_back()
        if held or not (self.path / "lock").exists():
            self._clear()
        self.close()
        for parent in reversed(self._parents):
            with contextlib.suppress(OSError):  # something is in it that is not this conversion's
                disk.remove_directory(parent)

    def _clear(self) -> bool:
        if self._journal is not None:
            self._journal.close()
        disk.remove_tree(self.out)  # first what is large
        gone = disk.remove_tree(self.path, last="journal")  # which says that the output is complete
        self.close()
        return gone

    def close(self) -> None:
        """Leave the work for the next run of the same conversion."""
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
