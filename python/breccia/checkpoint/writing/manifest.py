# SPDX-License-Identifier: Apache-2.0
"""``breccia.json``: by what a checkpoint was made, of what, and checksums of both, so that anyone can look whether it
is as it was written, or make it again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from breccia._version import __version__
from breccia.bridges.parts import Found
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.sums import Sums, add_lines, differing, joined, pieces_of
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.request import Request
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.folder import read_json
from breccia.checkpoint.reading.source import Checkpoint, container_of
from breccia.checkpoint.workers import Workers

NAME = "breccia.json"
_OF_BLAS = "codes beside ties depend on how a CPU, its BLAS or a GPU adds: made again elsewhere they may be others"


def place_of(path: Path) -> Path:
    """Where the manifest of a checkpoint is: in its folder, or beside its file."""
    return path / NAME if path.is_dir() else path.with_name(f"{path.name}.{NAME}")


def read(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None where there is none. Raises ValueError where it is not of its form."""
    place = place_of(path)
    if not place.is_file():
        return None
    said = read_json(place)
    files = said.get("files")
    if not isinstance(files, dict) or not all(isinstance(one, dict) for one in files.values()):
        raise ValueError(f"{place}: files must map names to tensors")
    return said


class Manifest:
    """What is known of an output while it is made, a file after the other; ``read``: checksums of all that was read so
    far, a line for each name."""

    def __init__(self, target: Target, request: Request | None) -> None:
        self._target, self._request = target, request
        self.read: dict[str, str] = {}
        self._file, self._wrote = "", dict[str, str]()
        self._made: dict[str, Choice] = {}
        self._files: dict[str, bytes] = {}  # JSON of those before, compressed

    def add(self, file: str, choices: Iterable[Choice], read: Mapping[str, str], wrote: Mapping[str, str]) -> None:
        """What was written of some tensors in a file of the output, and what was read for them."""
        add_lines(self.read, read)
        if file != self._file:
            self._close(file)
        self._wrote |= wrote
        for choice in choices:
            self._made |= dict.fromkeys(choice.outputs, choice)

    def _close(self, following: str = "") -> None:
        if self._file:
            self._files[self._file] = zlib.compress(json.dumps(self.known()).encode(), 1)
        self._file, self._wrote, self._made = following, {}, {}

    def known(self) -> dict[str, list[str]]:
        """What is known of the tensors of the file that is made."""
        made = sorted(self._made.items(), key=itemgetter(0))
        return {name: [one.action, one.found.name, self._wrote.get(name, "")] for name, one in made}

    def write(self, place: Path, notes: Sequence[str], sha256: Mapping[str, Any] | None) -> None:
        """Write it; ``notes`` are those of the plan, ``sha256`` those of tensors."""
        self._close()
        disk.write_file(place, self._pieces(notes, sha256))

    def _pieces(self, notes: Sequence[str], sha256: Mapping[str, Any] | None) -> Iterator[bytes]:
        said: dict[str, Any] = {"breccia": __version__, "to": self._target.spelled}
        if (request := self._request) is not None:
            said |= {"to": request.to, "options": request.said(), "data": _data(self._target, request)}
        if self._target.feedback is not None:
            said["repeatable"] = _OF_BLAS
        said |= ({"notes": list(notes)} if notes else {}) | ({"sha256": sha256} if sha256 else {})
        source = {name: joined(line) for name, line in sorted(self.read.items())}
        yield json.dumps(said).encode()[:-1] + b', "source": ' + json.dumps(source).encode()
        before = b', "files": {'
        for name, text in sorted(self._files.items()):
            yield before + json.dumps(name).encode() + b": " + zlib.decompress(text)
            before = b", "
        yield b"}}\n" if self._files else b', "files": {}}\n'


def _data(target: Target, request: Request) -> dict[str, dict[str, str]]:
    """The files that weights were rounded by, by the options that named them."""
    amax = None if target.asked is None else target.asked.amax
    given = {"moments" if request.imatrix is None else "imatrix": target.importance, "amax": amax}
    return {what: {"file": one.path.name, "sha256": one.sha256} for what, one in given.items() if one is not None}


def sha256_of_tensors(files: Mapping[str, Any], threads: int) -> dict[str, str]:
    """Of the bytes of stored tensors; ``files`` are those that each is in."""
    found: dict[str, str] = {}

    def look(name: str, _: Any) -> None:
        file = files[name]
        digest, nbytes = hashlib.sha256(), file.entries[name].nbytes
        for at in range(0, nbytes, 1 << 24):
            digest.update(file.span(name, at, min(at + (1 << 24), nbytes), False))
        found[name] = digest.hexdigest()

    with contextlib.closing(Workers(threads)) as workers:
        workers.each(look, iter(files))
    return dict(sorted(found.items()))


def sha256_of_file(path: Path, threads: int) -> dict[str, str]:
    """Of a file's tensors."""
    with contextlib.closing(container_of(path).open(path)) as file:
        return sha256_of_tensors(dict.fromkeys(file.entries, file), threads)


class Written:
    """Whether the stored tensors of an open checkpoint have the bytes that its manifest says. Takes checksums of what
    is read of it; without a manifest it knows nothing.

    Raises:
        ValueError: the manifest is not of its form.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        said = read(checkpoint.path)
        files = {} if said is None else said["files"]
        try:
            lines = {name: str(one[2]) for some in files.values() for name, one in some.items() if one[2]}
            self._wanted = {name: pieces_of(line) for name, line in lines.items()}
        except (IndexError, TypeError, ValueError):
            raise ValueError(
                f"{place_of(checkpoint.path)}: tensors must have checksums as convert writes them"
            ) from None
        self._checkpoint = checkpoint
        checkpoint.sums = Sums() if lines else None

    def differing(self, found: Found) -> list[str]:
        """Names of the stored tensors that a tensor is made of, of which bytes are others than were written. What was
        not read yet is."""
        checkpoint = self._checkpoint
        if checkpoint.sums is None:
            return []
        was, wrong = checkpoint.sums.taken(), []
        for name in dict.fromkeys(found.parts.values()):
            wanted, got = self._wanted.get(name, {}), pieces_of(joined(was.get(name, "")))
            if got.keys() == wanted.keys():
                wrong += [name] if got != wanted else []
            else:
                pieces = ((name, *span, sum_of) for span, sum_of in wanted.items())
                entry = checkpoint.entries[name]
                fits = all(stop <= entry.nbytes for _, stop in wanted)
                wrong += [] if fits and not any(differing(pieces, checkpoint.span)) else [name]
                checkpoint.sums.taken()
        return wrong
