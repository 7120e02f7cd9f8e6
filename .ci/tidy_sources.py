#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Of the sources that are given, those that clang-tidy looks at in this landing, a line each.

    .ci/tidy_sources.py SOURCE...

They are those that the change (of .ci/stages.py) touches, for each header that it touches one that includes it, and of
the rest one of BRECCIA_TESTS_ONE_OF, by the turn that BRECCIA_TESTS_TURN says. Where it touches more than half of them,
these have their turn, too. All of them without a turn, or where the change touches what says how to look at them.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from pathlib import Path

import stages

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# A backend's own files are found by each of its units; what is looked at is the portable one.
FOLDERS = ("cpp/src", "cpp/include", "cpp/src/backends/portable")
HOW = (".clang-tidy", ".ci/tidy_sources.py")


def included(source: str) -> set[str]:
    """The files of cpp/ that a source includes, or what it includes does, and itself."""
    found: set[str] = set()
    new = {source}
    while new:
        found |= new
        texts = {path: (stages.ROOT / path).read_text() for path in new}
        asked = {(path, name) for path, text in texts.items() for name in INCLUDE.findall(text)}
        places = {
            os.path.normpath(f"{folder}/{name}") for path, name in asked for folder in (*FOLDERS, Path(path).parent)
        }
        new = {path for path in places if (stages.ROOT / path).is_file()} - found
    return found


def looked_at(sources: list[str], touched: list[str] | None, of: int, turn: int) -> list[str]:
    """The sources whose turn it is, or that tell most of what the change touches.

    Args:
        sources: all of them.
        touched: paths that the change touches; None where that is not known.
        of: in how many turns each source has one.
        turn: whose turn it is.
    """
    if of < 2 or not set(HOW).isdisjoint(touched or ()):
        return sources
    chosen = {path for path in sources if zlib.crc32(path.encode()) % of == turn % of}
    edited = set(sources).intersection(touched or ())
    if 2 * len(edited) <= len(sources):
        chosen |= edited
    includes = {path: included(path) for path in sources}
    for path in set(touched or ()) - edited:
        tells = [source for source in sources if path in includes[source]]
        if tells and chosen.isdisjoint(tells):
            chosen.add(tells[turn % len(tells)])
    return [path for path in sources if path in chosen]


if __name__ == "__main__":
    of, turn = (int(os.environ.get(f"BRECCIA_TESTS_{name}") or 0) for name in ("ONE_OF", "TURN"))
    print(*looked_at(sys.argv[1:], stages.touched_since(stages.base()), of, turn), sep="\n")
