# SPDX-License-Identifier: Apache-2.0
"""Pages about notes and refusals: what happened, an example, and repairs. A file of the folder ``explain`` is a page,
its name is what ``breccia explain`` takes, and its comments say which texts it is about, with ``…`` for what varies."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from breccia.spelling import suggestion

__all__ = ["hint", "name_of", "names", "page"]

_PAGES = Path(__file__).parent / "explain"
_SAYS = re.compile(r"<!-- says: (.*?) -->\n", re.DOTALL)
_STRICT = re.compile(r"strict: .*?, there is: (.*?)(, and \d+ more)?", re.DOTALL)  # a refusal with a note in it


@functools.cache
def _texts() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(_PAGES.glob("*.md"))}


@functools.cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    said = [(name, one) for name, text in _texts().items() for one in _SAYS.findall(text)]
    said.sort(key=lambda pair: pair[1].startswith("…"))  # those that say how a text begins go first
    parts = [(name, map(re.escape, " ".join(one.split()).split("…"))) for name, one in said]
    return [(name, re.compile(".*".join(some), re.DOTALL)) for name, some in parts]


def name_of(text: str) -> str:
    """The page about a note or an error; "" where there is none."""
    return next((name for name, pattern in _patterns() if pattern.fullmatch(text)), "")


def hint(texts: Sequence[str]) -> str:
    """The command that explains some notes or errors; "" where no page is about them."""
    inner = [match[1] for match in map(_STRICT.fullmatch, texts) if match]
    found = dict.fromkeys(filter(None, map(name_of, [*inner, *texts])))
    return f"breccia explain {' '.join(found)}" if found else ""


def page(name: str) -> list[str]:
    """The lines of a page for a terminal, where code is indented. Raises ValueError where there is no such page."""
    texts = _texts()
    if name not in texts:
        raise ValueError(f"NAME must be one that 'breccia explain' lists, got {name!r}: {suggestion(name, texts)}")
    lines, inside = list[str](), False
    for line in re.sub(r"\n{3,}", "\n\n", _SAYS.sub("", texts[name])).rstrip().split("\n"):
        if line.startswith("```"):
            inside = not inside
        else:
            lines.append(f"    {line}" if inside else line)
    return lines


def names() -> list[str]:
    """Of all pages."""
    return list(_texts())
