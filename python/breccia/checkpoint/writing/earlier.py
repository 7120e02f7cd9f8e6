# SPDX-License-Identifier: Apache-2.0
"""What an earlier run of a conversion did, and whether the source still has the bytes that it was made of."""

from __future__ import annotations

from collections import Counter

from breccia.checkpoint.files.sums import differing, every_piece
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.plan import Files
from breccia.checkpoint.planning.remarks import Remark
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.writing.work import Done, Work


def look(checkpoint: Checkpoint, files: Files, work: Work) -> None:
    """Forget what was made of bytes that are others now. A file of the source whose stamp is as it was is not read;
    others are, where there are checksums of what was read of them."""
    stamps = {file.path.name: file.file.stamp for file in checkpoint.files}
    touched = {name for name, stamp in stamps.items() if tuple(work.stamps.get(name, ())) != stamp}
    changed: set[str] = set()  # stored tensors
    stale: list[tuple[str, str]] = []
    known: dict[tuple[str, int, int], bool] = {}
    sums, checkpoint.sums = checkpoint.sums, None
    for file, choices in files if touched and work.records else ():
        for choice, done in _done(choices, work.done(file)):
            homes = {name: checkpoint.home.get(name) for name in choice.found.parts.values()}
            names = {name for name, home in homes.items() if home is not None and home.path.name in touched}
            other = names - done.read.keys()
            for piece in every_piece(done.read):
                name = piece[0]
                if name not in checkpoint.home:
                    other.add(name)
                elif checkpoint.home[name].path.name in touched:
                    if piece[:3] not in known:
                        known[piece[:3]] = _is_other(checkpoint, piece)
                    other |= {name} if known[piece[:3]] else set()
            changed |= other
            stale += [(file, next(iter(choice.outputs)))] if other else []
    checkpoint.sums = sums
    stale += _with_them(files, work, changed, set(stale))
    count = sum(map(len, work.records.values()))
    if count:
        again = f", {len(stale)} are made anew: {_why(checkpoint, changed)}" if stale else ""
        work.notes.append(Remark(f"{count - len(stale)} tensors are kept of an earlier run{again}"))
    if touched or stale:
        work.forget(stale, stamps)


def _done(choices: list[Choice], done: dict[str, Done]) -> list[tuple[Choice, Done]]:
    names = ((choice, next(iter(choice.outputs))) for choice in choices)
    return [(choice, done[name]) for choice, name in names if name in done]


def _is_other(checkpoint: Checkpoint, piece: tuple[str, int, int, int]) -> bool:
    if piece[2] > checkpoint.entries[piece[0]].nbytes:
        return True
    return any(differing([piece], checkpoint.span))


def _with_them(files: Files, work: Work, changed: set[str], stale: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Further tensors, whose scales are those of layers with parts that changed."""
    found = []
    for file, choices in files if changed else ():
        done = work.records.get(file, {})
        for choice in choices:
            name = next(iter(choice.outputs))
            parts = [part for one in getattr(choice.shared, "parts", ()) for part in one.parts.values()]
            if name in done and (file, name) not in stale and not changed.isdisjoint(parts):
                found.append((file, name))
    return found


def _why(checkpoint: Checkpoint, changed: set[str]) -> str:
    """Which file has other bytes than it had."""
    homes = Counter(checkpoint.home[name].path.name for name in changed if name in checkpoint.home)
    if not homes:
        return "the source has other tensors now"
    more = f" and {len(homes) - 1} more files have" if len(homes) > 1 else " has"
    return f"{homes.most_common(1)[0][0]}{more} other bytes now"
