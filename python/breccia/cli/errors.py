# SPDX-License-Identifier: Apache-2.0
"""How a command that fails ends: with one line, whatever its input was, and an exit code."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from breccia.screen import one_line

__all__ = ["Terminated", "said", "terminable"]


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
