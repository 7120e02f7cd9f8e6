# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal of 80 columns, which may not know every character."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, cast

from breccia.cli.errors import one_line

__all__ = ["COLUMNS", "after", "amount", "fitted", "is_terminal", "plain_characters", "streams", "wrapped"]

COLUMNS = 80

_PLAIN = {"×": "x", "…": "...", "−": "-", "–": "-", "←": "<-"}


def amount(nbytes: int) -> str:
    """Bytes for people: 5.75 MB."""
    size, unit = float(nbytes), "bytes"
    for unit in ("bytes", "kB", "MB", "GB", "TB", "PB"):
        if size < 999.5 or unit == "PB":
            break
        size /= 1000
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:.3g} {unit}"


class _Stream:
    """A standard stream that may be closed, full, or None, and raises nothing for it; ``error`` is why no more is
    written."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.error = inner, None if inner is None else ""

    def _try(self, call: Any, *args: Any) -> None:
        if self.error == "":
            try:
                call(*args)
            except BrokenPipeError:
                self.error = None  # who reads has enough
            except (OSError, ValueError) as error:  # a closed file is a ValueError
                self.error = getattr(error, "strerror", None) or str(error)

    def write(self, text: str) -> int:
        self._try(getattr(self._inner, "write", None), text)
        return len(text)

    def flush(self) -> None:
        self._try(getattr(self._inner, "flush", None))

    def isatty(self) -> bool:
        return is_terminal(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def end(self) -> None:
        """Write what waits; what cannot be written goes nowhere, or the interpreter complains of it when it exits."""
        self.flush()
        if self.error != "" and self._inner is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere, place = os.open(os.devnull, os.O_WRONLY), self._inner.fileno()
                os.dup2(nowhere, place)
                os.close(nowhere)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is there, open and a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """While inside, errors of standard output and standard error are not raised. At the end, standard error tells of
    those of standard output, where it can."""
    before = sys.stdout, sys.stderr
    with contextlib.suppress(OSError):  # a file that is opened must not become the standard output of C
        while (free := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(free)
    out, err = _Stream(sys.stdout), _Stream(sys.stderr)
    sys.stdout, sys.stderr = cast(Any, out), cast(Any, err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        out.end()
        if out.error:
            err.write(f"breccia: standard output cannot be written: {one_line(out.error)}\n")
        err.end()


def plain_characters() -> None:
    """Print ``x`` for ``×`` and the like, and ``?`` for the rest, where standard output cannot encode them."""
    if hasattr(sys.stdout, "reconfigure"):
        codecs.register_error("breccia.plain", _plain)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.reconfigure(errors="breccia.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


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
