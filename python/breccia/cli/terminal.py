# SPDX-License-Identifier: Apache-2.0
"""How a command talks and how it ends: standard streams that may be closed or full, a terminal that may not know every
character, and one line for an error, whatever its input was."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from breccia.screen import is_terminal, one_line

__all__ = ["Terminated", "plain_characters", "said", "streams", "terminable"]

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


class Terminated(KeyboardInterrupt):
    """SIGTERM was received. It is a KeyboardInterrupt, so that work ends as it does after Ctrl-C: threads first."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """While inside, SIGTERM raises `Terminated`, where nobody else handles it."""

    def terminate(*_: object) -> None:
        raise Terminated

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def said(error: BaseException) -> str:
    """One line that tells of an error."""
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, OSError) and error.strerror:  # without its number, which only programs look for
        names = [f"{name}: " for name in (error.filename, error.filename2) if name is not None]
        return one_line("".join([*names, error.strerror]))
    if isinstance(error, (ValueError, TypeError, ImportError, OSError)):
        return one_line(str(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
    return one_line(f"{type(error).__name__} at {place}, a defect: {error}")
