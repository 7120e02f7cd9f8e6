# SPDX-License-Identifier: Apache-2.0
"""Converting a checkpoint in parts, each by a process of its own, on any machine that sees source and destination.

Every part is a run of neighbouring tensors, planned from headers alone and the same in every process. A part is made
in ``.OUT.parts/.I-of-N.partial`` with a lock and a journal (`Work`) and is there as ``.OUT.parts/I-of-N`` when it is
complete. Each of its files has the part's tensors of one output file, and is that file where it has them all. Beside
them are checksums of what was read and written. `finish` compares them with the source and the parts, and puts these
together.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breccia.checkpoint.arguments import count_of, existing, path_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.identity import Identity, digest
from breccia.checkpoint.planning.plan import Files, Plan, Planner
from breccia.checkpoint.planning.request import Options, Request
from breccia.checkpoint.planning.shares import shares
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reports import ConvertReport
from breccia.checkpoint.writing import part_sums
from breccia.checkpoint.writing.convert import Job, RunOptions
from breccia.checkpoint.writing.work import Done, Work, check_destination, names_folder

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MARK = "part.identity"  # in a part's directory: what it was made from
_NAME = re.compile(r"\.?(\d+)-of-(\d+)(\.partial)?")
_STEP = 16 << 20  # bytes copied at a time
_SHOWN = 20  # missing parts that an error names
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class Piece:
    """One part of a conversion; can be pickled, and run anywhere, any number of times.

    Attributes:
        part: its number, from 1.
        parts: how many there are.
        tensors: how many it converts.
        bytes_read: of the source.
        bytes_written: of the output.
        identity: of the source and target that it was planned for.
        request: what was asked for.
    """

    source: str
    destination: str
    request: Request
    part: int
    parts: int
    tensors: int
    bytes_read: int
    bytes_written: int
    identity: str

    @property
    def cost(self) -> int:
        """What parts are balanced by: bytes read and bytes written."""
        return self.bytes_read + self.bytes_written

    def run(
        self, *, progress: bool = False, threads: int | None = None, checksums: bool = True, device: str = "cpu"
    ) -> dict[str, Any]:
        """Convert this part; at once where it is there already. One that was killed goes on where it was.

        Args:
            progress: draw a line on a terminal.
            threads: how many to use (default: one per core).
            checksums: keep checksums of what is read and written, which `finish` looks at.
            device: where weights are rounded, as for `convert`; each part may have its own.

        Returns:
            What was done, of JSON types.

        Raises:
            ValueError: source or target are not those of the plan, or a tensor is not valid.
            FileExistsError: the destination is there.
            BlockingIOError: another process is at work on this part.
            OSError: the disk is full or the like. What is done is kept, and the same call goes on from there.
        """
        how = RunOptions(progress, threads, checksums=checksums, device=Device.of(device))
        with _opened(self.source, self.destination, self.request, self.parts, how) as job:
            if job.identity != self.identity:
                raise ValueError(f"source {self.source} must be as it was planned for, it is another now: plan again")
            return job.convert_part(self.part)


def plan(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    parts: int,
    **options: Unpack[Options],
) -> list[Piece]:
    """Divide a conversion into parts that cost about the same, from headers alone.

    Args:
        source: as for `convert`.
        destination: as for `convert`; ``.NAME.parts`` beside it takes what is made.
        to: as for `convert`.
        parts: how many.
        options: as for `convert`, from ``include`` to ``damp``, and ``unmarked``.

    Returns:
        The parts. Run each, in any order and on any machine, then `finish`.

    Raises:
        ValueError: ``parts`` is below 1 or above 65,536, or what `convert` refuses.
        FileExistsError: the destination is there.
    """
    request = Request(to, **options)
    with _opened(source, destination, request, parts, RunOptions(threads=1)) as job:
        return [
            Piece(
                source=os.fspath(source),
                destination=os.fspath(destination),
                request=request,
                part=part,
                parts=parts,
                tensors=len(job.shares[part - 1]),
                bytes_read=sum(job.read[i] for i in job.shares[part - 1]),
                bytes_written=sum(job.flat[i][1].nbytes for i in job.shares[part - 1]),
                identity=job.identity,
            )
            for part in range(1, parts + 1)
        ]


def convert_part(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    part: int,
    parts: int,
    *,
    progress: bool = False,
    threads: int | None = None,
    checksums: bool = True,
    device: str = "cpu",
    **options: Unpack[Options],
) -> dict[str, Any]:
    """`Piece.run` of one part of `plan`, which is planned once."""
    request = Request(to, **options)
    how = RunOptions(progress, threads, checksums=checksums, device=Device.of(device))
    with _opened(source, destination, request, parts, how) as job:
        return job.convert_part(part)


def finish(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    parts: int | None = None,
    progress: bool = False,
    strict: bool = False,
    checksums: bool = True,
    **options: Unpack[Options],
) -> ConvertReport:
    """Put parts together: check that all are there, write index and config.json, and give the output its name.

    The output has the bytes that `convert` writes. A file whose tensors one part has is linked; others are copied
    together. The parts are removed at the end.

    Args:
        source: as it was for the parts.
        destination: as it was for the parts.
        to: as it was for the parts.
        parts: how many; None looks at what is there.
        progress: draw a line on a terminal.
        strict: as for `convert`.
        checksums: read the source and the parts again, compare them with the parts' checksums, and write these into
            ``breccia.json``.
        options: as they were for the parts.

    Returns:
        What was done, as `convert` says it.

    Raises:
        ValueError: parts are missing, or of another source or target, or their bytes are not those that they wrote.
        FileExistsError: the destination is there.
    """
    request = Request(to, **options)
    count = _count(path_of(destination, "destination")) if parts is None else parts
    with _opened(source, destination, request, count, RunOptions(progress, strict=strict, checksums=checksums)) as job:
        return job.finish()


def parts_of(destination: Path) -> Path:
    """Where the parts of an output are made."""
    return destination.with_name(f".{destination.name}.parts")


def _count(destination: Path) -> int:
    """How many parts an output has, as the names of those that are there say."""
    folder = parts_of(destination)
    names = [entry.name for entry in os.scandir(folder)] if folder.is_dir() else []
    counts = sorted({int(found[2]) for found in map(_NAME.fullmatch, names) if found})
    if not counts:
        raise ValueError(f"parts must be there before --finish, there are none in {folder}")
    if len(counts) > 1:
        said = " and ".join(map(str, counts))
        raise ValueError(f"parts in {folder} must be of one division, there are some of {said}: remove the others")
    return counts[0]


@contextlib.contextmanager
def _opened(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    request: Request,
    parts: int,
    how: RunOptions,
) -> Iterator[_Parts]:
    wanted = request.target(how.device)
    parts = count_of(parts, "parts", MAX_PARTS)
    source = existing(source, "source")
    place = path_of(destination, "destination")
    try:
        check_destination(place, source)
    except FileExistsError as error:
        if not parts_of(place).is_dir():
            raise
        raise FileExistsError(f"{error}: it is complete, and {parts_of(place)} is not needed any more") from None
    with request.opened(source, wanted) as (checkpoint, target):
        plan = Planner(checkpoint, target).plan(place, names_folder(destination))
        yield _Parts(plan, parts, how, request)


class _Parts(Job):
    """A conversion in parts.

    Attributes:
        flat: output file and choice of every tensor, in the order in which parts take them.
        read: bytes of the source that each needs.
        shares: which of them each part has.
        identity: what the parts depend on.
    """

    def __init__(self, plan: Plan, parts: int, how: RunOptions, request: Request) -> None:
        super().__init__(plan, how, request)
        self.kept: dict[str, Done] = {}
        self._of_parts: part_sums.OfParts = {}
        self.parts, self.folder = parts, parts_of(plan.destination)
        self.flat = [(name, choice) for name, choices in self.plan.files for choice in choices]
        self.read = self._read()
        costs = [read + choice.nbytes for read, (_, choice) in zip(self.read, self.flat, strict=True)]
        self.shares = shares(costs, parts)
        self._depends_on = self._identity()
        self.identity = digest(self._depends_on)

    def _read(self) -> list[int]:
        """What several tensors are read from counts for each of them in part."""
        names = [set(choice.found.parts.values()) for _, choice in self.flat]
        users = Counter(name for some in names for name in some)
        return [sum(self.checkpoint.entries[name].nbytes // users[name] for name in some) for some in names]

    def _identity(self) -> Identity:
        sizes = [[file.path.name, file.file.size] for file in self.checkpoint.files]
        parts = [self.parts, self.plan.destination.name, self.plan.into_directory, sizes]
        return super()._identity() | {"parts": digest(parts)}

    def _files_of(self, part: int) -> Files:
        """Output files that a part has tensors of, and which."""
        files: dict[str, list[Choice]] = {}
        for i in self.shares[part - 1]:
            name, choice = self.flat[i]
            files.setdefault(name, []).append(choice)
        return list(files.items())

    def _place(self, part: int) -> Path:
        return self.folder / f"{part}-of-{self.parts}"

    def _there(self, part: int) -> bool:
        """Whether a part is complete. Raises ValueError where it is one of another source or target."""
        place = self._place(part)
        if not os.path.lexists(place):
            return False
        mark = place / _MARK
        if not mark.is_file() or mark.read_text() != self.identity:
            raise ValueError(f"{place} must be made from this source and target, it is from others: remove it")
        return True

    def convert_part(self, part: int) -> dict[str, Any]:
        """Make one part, if it is not there."""
        begin, files = time.monotonic(), self._files_of(part)
        total = sum(choice.nbytes for _, choices in files for choice in choices)
        self.progress = Progress(total, self.how.progress)
        there = self._there(part)
        if not there:
            self._make_part(part, files)
        self.progress.finish()
        return {
            "part": part,
            "parts": self.parts,
            "tensors": len(self.shares[part - 1]),
            "bytes_written": 0 if there else total,
            "seconds": round(time.monotonic() - begin, 3),
            "was_there": there,
        }

    def _make_part(self, part: int, files: Files) -> None:
        work = Work(self._place(part), self._depends_on, directory=True)
        with work.kept_when_interrupted():
            if not work.finished:
                work.check_space(sum(choice.nbytes for _, choices in files for choice in choices))
                self._write_files(files, work)
                self._check_unchanged()
                with work.noting():
                    part_sums.write(work.out, self.kept, self.how.checksums)
                    disk.write_file(work.out / _MARK, self.identity.encode())
            work.finish()

    def _keep(self, file: str, choices: list[Choice], done: Done) -> None:
        super()._keep(file, choices, done)
        self.kept.setdefault(file, Done({}, {}, {}, {}, {})).add(done)

    def finish(self) -> ConvertReport:
        """See `finish`."""
        missing = [part for part in range(1, self.parts + 1) if not self._there(part)]
        if missing:
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise ValueError(
                f"parts must all be there before --finish, {len(missing)} of {self.parts} are not: "
                f"run --part I/{self.parts} for I = {', '.join(map(str, missing[:_SHOWN]))}{more}"
            )
        places = {self._place(part): dict(self._files_of(part)) for part in range(1, self.parts + 1)}
        for place in places:
            self._of_parts |= {(place, name): done for name, done in part_sums.read(place, self.how.checksums).items()}
        if self.how.checksums:
            part_sums.check_source(self.checkpoint, self._of_parts, self.threads)
        for (place, name), done in self._of_parts.items():
            super()._keep(name, places[place][name], done)
        report: ConvertReport = self.run()
        if not disk.remove_tree(self.folder):
            report["notes"].append(f"{self.folder} is not needed any more and could not be removed")
        return report

    def _pieces(self) -> dict[str, list[tuple[Path, list[Choice]]]]:
        """Files of parts, and what is in each, by the names of output files."""
        pieces: dict[str, list[tuple[Path, list[Choice]]]] = {}
        for part in range(1, self.parts + 1):
            for name, choices in self._files_of(part):
                pieces.setdefault(name, []).append((self._place(part) / name, choices))
        return pieces

    def _new_bytes(self) -> int:
        pieces = self._pieces()
        return sum(c.nbytes for name, choices in self.plan.files if len(pieces[name]) > 1 for c in choices)

    def _make(self, work: Work) -> None:
        """Put the files of all parts together."""
        pieces = self._pieces()
        work.remove_others(list(pieces))
        for name, choices in self.plan.files:
            if len(pieces[name]) == 1:
                path = pieces[name][0][0]
                self._check(path, choices)
                disk.link_or_copy(path, work.out / name)
                self.progress.add(sum(c.nbytes for c in choices))
            else:
                self._join(work, name, choices, pieces[name])
            work.note(name)

    def _check(self, path: Path, choices: list[Choice]) -> PlannedWriter:
        """What says where a part's tensors are in its file."""
        writer = self._writer(path, choices) if path.is_file() else None
        if writer is None or not writer.complete:
            if writer is not None:
                writer.abort()
            raise ValueError(f"{path} must be as its part wrote it, it is not: {part_sums.again(path.parent)}")
        if self.how.checksums:
            part_sums.check_written(writer, self._of_parts[path.parent, path.name].wrote, self.threads)
        return writer

    def _join(self, work: Work, file: str, choices: list[Choice], pieces: list[tuple[Path, list[Choice]]]) -> None:
        writer = self._writer(work.out / file, choices)
        try:
            if writer.complete:
                self.progress.add(sum(c.nbytes for c in choices))
                return
            for source, some in pieces:
                spans = self._check(source, some).spans
                with disk.open_regular(source) as fd:
                    for name in (name for choice in some for name in choice.outputs):
                        self._copy_span(fd, spans[name], name, writer)
            work.record(file, {"": Done({}, {}, {}, {}, {})})  # else the next run takes it for another's
            writer.commit()
        finally:
            writer.close()

    def _copy_span(self, fd: int, span: tuple[int, int], name: str, writer: PlannedWriter) -> None:
        begin, end = span
        for at in range(begin, end, _STEP):
            with disk.reading(self.folder):
                raw = os.pread(fd, min(_STEP, end - at), at)
            writer.write_stored(name, raw, at - begin)
            self.progress.add(len(raw))
