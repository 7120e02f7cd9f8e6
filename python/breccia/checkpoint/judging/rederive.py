# SPDX-License-Identifier: Apache-2.0
"""A conversion done again, file by file, and compared with what is there, byte by byte."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia._version import __version__
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.input_file import sha256_of
from breccia.checkpoint.files.locks import scratch
from breccia.checkpoint.files.sums import Sums, joined
from breccia.checkpoint.planning.plan import Planner
from breccia.checkpoint.planning.request import Request
from breccia.checkpoint.workers import Workers
from breccia.checkpoint.writing import manifest
from breccia.checkpoint.writing.convert import Job, RunOptions
from breccia.checkpoint.writing.work import Work

_STEP = 1 << 22  # bytes compared at a time


def rederive(
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    data: Sequence[str | os.PathLike[str]] = (),
    progress: bool = False,
) -> dict[str, Any]:
    """Convert ``base`` again as the manifest of ``out`` says, one file at a time, and stop at the first byte that
    differs. The largest file of ``out`` must fit on its disk once more, or on that of temporary files where its folder
    cannot be written.

    Args:
        base: what ``out`` was made of.
        out: what `convert` wrote, with its manifest.
        data: the files that it was given (moments, imatrix, amax), in any order, known by their SHA-256.
        progress: draw a line on a terminal.

    Returns:
        ``ok``; ``differs``, where, or ""; ``files``, name → SHA-256 of each that is equal; ``base``, the same of the
        files that were read; ``to`` and ``options``; ``notes``. JSON types only.

    Raises:
        ValueError: there is no manifest, or it is of a merge, or a file of ``data`` is missing.
    """
    base, out = path_of(base, "base"), path_of(out, "out")
    said = manifest.read(out)
    if said is None:
        raise ValueError(f"{out} must have {manifest.place_of(out).name} to be made again, which convert writes")
    if "options" not in said:
        raise ValueError(f"{out} must be a conversion to be made again, it is of {said.get('to')}")
    request = Request.again(said, _files(said.get("data", {}), data))
    notes = [f"made by breccia {said['breccia']}, this is {__version__}"] if said["breccia"] != __version__ else []
    notes += [str(said["repeatable"])] if "repeatable" in said else []
    with request.opened(base, request.target()) as (checkpoint, target):
        plan = Planner(checkpoint, target).plan(out, out.is_dir())
        again = _Again(plan, RunOptions(progress), request)
        differs = again.against(out, said)
        read = {} if differs else {one.path.name: sha256_of(one.path) for one in checkpoint.files}
    return {
        "ok": not differs,
        "differs": differs,
        "files": again.equal,
        "base": read,
        "to": said["to"],
        "options": said["options"],
        "notes": notes,
    }


def _files(wanted: dict[str, Any], given: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """Files of data by what each is for."""
    known = {sha256_of(path): path for path in (path_of(one, "data") for one in given)}
    for what, one in wanted.items():
        if one["sha256"] not in known:
            raise ValueError(f"data must have the {what} of SHA-256 {one['sha256']}, which was {one['file']}")
    return {what: known[one["sha256"]] for what, one in wanted.items()}


class _Again(Job):
    """A conversion whose files are compared and removed as soon as they are complete."""

    equal: dict[str, str]

    def against(self, out: Path, said: dict[str, Any]) -> str:
        """Where the first byte differs, "" where none does."""
        self.equal = {}
        whole = self.plan.into_directory
        names = [name for name, _ in self.plan.files]
        if set(names) != set(said["files"]):
            return f"files: {', '.join(sorted(set(names) ^ set(said['files'])))}"
        beside = out.parent if os.access(out.parent, os.W_OK) else None
        with scratch(".breccia-rederive-", beside) as folder:
            work = Work(folder / out.name, self._identity(), directory=whole)
            try:
                self.checkpoint.sums = Sums()
                with contextlib.closing(Workers(self.threads)) as workers:
                    for name, choices in self.plan.files:
                        self._write(name, choices, work, workers)
                        if found := self._compared(work.out / name, out / name if whole else out):
                            return self._blamed(found, name, said)
                self._companions(work)
                index = [] if self.checkpoint.index is None else [self.checkpoint.index.name]
                for name in (*bridges.config_files(), *index) if whole else ():
                    if (work.out / name).is_file() and (found := self._compared(work.out / name, out / name)):
                        return found
            finally:
                self.progress.finish()
                work.abandon()
        return ""

    def _compared(self, made: Path, there: Path) -> str:
        """Where a file differs from what is there; removes it."""
        if not there.is_file():
            return f"{there.name}: it is not there"
        at = 0
        with made.open("rb") as first, there.open("rb") as second:
            while (piece := first.read(_STEP)) == (other := second.read(_STEP)):
                at += len(piece)
                if not piece:
                    self.equal[there.name] = sha256_of(there)
                    disk.remove(made)
                    return ""
        at += next(
            (i for i, (a, b) in enumerate(zip(piece, other, strict=False)) if a != b), min(len(piece), len(other))
        )
        return f"{there.name}: byte {at:,}"

    def _blamed(self, found: str, file: str, said: dict[str, Any]) -> str:
        """With the first tensor of the source, or else of the file, that is not what it was."""
        assert self.manifest is not None
        some = self.manifest.known()
        for name, line in self.manifest.read.items():
            if said["source"].get(name, joined(line)) != joined(line):
                return f"{found}; base is not what it was made of: tensor {name!r} has other bytes"
        other = [name for name, one in some.items() if said["files"][file].get(name) != one]
        return f"{found}; {f'tensor {other[0]!r} was written as other bytes' if other else 'it was changed afterwards'}"


def statement(report: dict[str, Any]) -> dict[str, Any]:
    """An in-toto statement of SLSA provenance: that these files are what this conversion makes of those."""

    def listed(files: dict[str, str]) -> list[dict[str, Any]]:
        return [{"name": name, "digest": {"sha256": digest}} for name, digest in files.items()]

    definition = {
        "buildType": f"pkg:pypi/breccia@{__version__}#convert",
        "externalParameters": {"to": report["to"], "options": report["options"]},
        "resolvedDependencies": listed(report["base"]),
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": listed(report["files"]),
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": definition,
            "runDetails": {"builder": {"id": f"pkg:pypi/breccia@{__version__}"}},
        },
    }


def render(report: dict[str, Any]) -> list[str]:
    """The report as lines."""
    notes = [f"! {note}" for note in report["notes"]]
    found = [f"! differs: {report['differs']}"] if report["differs"] else []
    equal = f"{len(report['files'])} files are equal, byte by byte"
    return [*notes, *found, equal, "ok" if report["ok"] else "not ok"]
