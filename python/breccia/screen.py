# SPDX-License-Identifier: Apache-2.0
"""Text for a terminal of 80 columns, whatever names in files hold."""

from __future__ import annotations

import re
import textwrap
from typing import Any

__all__ = ["COLUMNS", "after", "amount", "any_layer", "fitted", "is_terminal", "lines_of", "one_line", "wrapped"]

COLUMNS = 80
_LONGEST = 2000
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


def amount(nbytes: int) -> str:
    """Bytes for people: 5.75 MB."""
    size, unit = float(nbytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            break
        size /= 1000
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:.3g} {unit}"


def any_layer(name: str) -> str:
    """A tensor's name with * for numbers between dots: layers that differ by a number alone have one."""
    return _NUMBERS.sub("*", name)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is there, open and a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False


def one_line(text: str) -> str:
    """Text whose control characters a terminal would obey, escaped: names in a file can have any."""
    if text.isprintable() and len(text) <= _LONGEST:
        return text
    words = " ".join(text.split("\n"))
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in words)
    return clean if len(clean) <= _LONGEST else f"{clean[:_LONGEST]} …"


def lines_of(texts: list[str]) -> list[str]:
    """`one_line` of each: all are looked at together, since nearly all stay as they are."""
    if "".join(texts).isprintable() and max(map(len, texts), default=0) <= _LONGEST:
        return texts
    return [one_line(text) for text in texts]


def fitted(start: str, *ends: str) -> list[str]:
    """One line of at most 80 columns; else every end on a line of its own: names are what people copy, and stay
    whole."""
    line = "  ".join([start, *ends])
    return [line] if len(line) <= COLUMNS else [start.rstrip(), *(f"       {end}" for end in ends)]


def after(name: str, text: str) -> list[str]:
    """One line of at most 80 columns; else the text on a line below the name, which people copy."""
    line = f"{name} {text}"
    return [line] if len(line) <= COLUMNS else [name, f"  {text}"]


def wrapped(text: str, indent: int = 2) -> list[str]:
    """Lines of at most 80 columns, words whole, all but the first so far to the right."""
    text = one_line(text)
    if len(text) <= COLUMNS:
        return [text]
    return textwrap.wrap(text, COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
