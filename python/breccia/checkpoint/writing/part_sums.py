# SPDX-License-Identifier: Apache-2.0
"""What parts of a conversion say of what they read and wrote, and whether it is still so."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from breccia.checkpoint.files import disk
from breccia.checkpoint.files.input_file import read_bounded
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.sums import differing, every_piece
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.workers import Workers
from breccia.checkpoint.writing.work import Done

_NAME = "part.sums"
_MOST = 1 << 30  # bytes: a piece of 16 MiB takes 30
OfParts = dict[tuple[Path, str], Done]  # by a part's directory and the name of a file in it


def again(place: Path) -> str:
    """What to do about a part, for messages."""
    return f"remove {place} and run the part"


def write(folder: Path, kept: dict[str, Done], summed: bool) -> None:
    """Write what is known of the files of a part, and whether that has checksums."""
    text = json.dumps([summed, kept]).encode()
    disk.write_file(folder / _NAME, b"%08x" % zlib.crc32(text) + text)


def read(place: Path, wanted: bool) -> dict[str, Done]:
    """What `write` wrote in a part's directory."""
    path = place / _NAME
    raw = read_bounded(path, _MOST)[0] if path.is_file() else b""
    if raw[:8] != b"%08x" % zlib.crc32(raw[8:]):
        raise ValueError(f"{path} must be as its part wrote it, it is not: {again(place)}")
    summed, said = json.loads(raw[8:])  # what this package wrote
    if wanted and not summed:
        raise ValueError(f"{place} must have checksums, it was made without: {again(place)}, or leave them out here")
    return {name: Done(*one) for name, one in said.items()}


def check_source(checkpoint: Checkpoint, parts: OfParts, threads: int) -> None:
    """Whether what parts read is what is there. Raises ValueError where it is not; the message names a tensor and a
    part."""
    pieces: dict[tuple[str, int, int], tuple[int, Path]] = {}
    for (place, _), done in parts.items():
        for name, start, stop, crc in every_piece(done.read):
            before, other = pieces.setdefault((name, start, stop), (crc, place))
            if before != crc:
                raise ValueError(
                    f"{checkpoint.path}: tensor {name!r} must be one for all parts, {other} and {place} are of "
                    f"different bytes: remove them and run the parts"
                )

    def look(piece: tuple[tuple[str, int, int], tuple[int, Path]], _: Any) -> None:
        (name, start, stop), (crc, place) = piece
        if name not in checkpoint.entries or any(differing([(name, start, stop, crc)], checkpoint.span)):
            part = place.name.partition("-")[0]
            raise ValueError(
                f"{checkpoint.path}: tensor {name!r} must be as part {part} read it, it is another now: {again(place)}"
            )

    with contextlib.closing(Workers(threads)) as workers:
        workers.each(look, iter(pieces.items()))


def check_written(writer: PlannedWriter, wrote: Mapping[str, str], threads: int) -> None:
    """Whether a part's file has the bytes that were written to it. Raises ValueError where it has not; the message
    names a tensor."""

    def look(name: str, _: Any) -> None:
        if not writer.has(name, wrote.get(name, "")):
            raise ValueError(
                f"{writer.path}: tensor {name!r} must be as its part wrote it, it is not: {again(writer.path.parent)}"
            )

    with contextlib.closing(Workers(threads)) as workers:
        workers.each(look, iter(writer.spans))
