# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal of 80 columns, which may not know every character."""

from __future__ import annotations

import codecs
import sys
import textwrap

from breccia._command_errors import one_line

__all__ = ["after", "fitted", "plain_characters", "wrapped"]

_COLUMNS = 80

_PLAIN = {"×": "x", "…": "...", "−": "-", "–": "-", "←": "<-"}


def plain_characters() -> None:
    """Print ``x`` for ``×`` and the like, and ``?`` for the rest, where standard output cannot encode them."""
    if hasattr(sys.stdout, "reconfigure"):
        codecs.register_error("breccia.plain", _plain)
        sys.stdout.reconfigure(errors="breccia.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


def fitted(start: str, *ends: str) -> list[str]:
    """One line of at most 80 columns; else every end on a line of its own: names are what people copy, and stay
    whole."""
    line = "  ".join([start, *ends])
    return [line] if len(line) <= _COLUMNS else [start.rstrip(), *(f"       {end}" for end in ends)]


def after(name: str, text: str) -> list[str]:
    """One line of at most 80 columns; else the text on a line below the name, which people copy."""
    line = f"{name} {text}"
    return [line] if len(line) <= _COLUMNS else [name, f"  {text}"]


def wrapped(text: str) -> list[str]:
    """Lines of at most 80 columns, words whole."""
    text = one_line(text)
    if len(text) <= _COLUMNS:
        return [text]
    return textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
