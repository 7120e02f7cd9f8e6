# SPDX-License-Identifier: Apache-2.0
"""Standard streams that may be closed or full, and a terminal that may not know every character."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

from breccia.screen import is_terminal, one_line

__all__ = ["plain_characters", "streams"]


_PLAIN = {"×": "x", "…": "...", "−": "-", "–": "-", "←": "<-"}


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
