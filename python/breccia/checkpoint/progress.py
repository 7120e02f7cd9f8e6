# SPDX-License-Identifier: Apache-2.0
"""A line on a terminal: how far, how fast, how long still."""

from __future__ import annotations

import sys
import threading
import time

from breccia.screen import is_terminal


class Progress:
    """Counts bytes, or what ``unit`` says, of which one has ``per`` bytes; draws on standard error where that is a
    terminal and ``show`` asks for it."""

    def __init__(self, total: int, show: bool, unit: str = "MB/s", per: float = 1e6) -> None:
        self._unit, self._per = unit, per
        self.total, self.done = total, 0
        self._show = show and is_terminal(sys.stderr)
        self._start = self._drawn = time.monotonic()
        self._skipped = 0
        self._block = "█" if str(getattr(sys.stderr, "encoding", "")).lower().startswith("utf") else "#"
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes as done."""
        with self._lock:
            self.done += nbytes
            now = time.monotonic()
            if self._show and now - self._drawn >= 0.1:
                self._drawn = now
                self._draw(now)

    def skip(self, nbytes: int) -> None:
        """Count bytes as done by an earlier run, which says nothing of this one's speed."""
        self._skipped += nbytes
        self.add(nbytes)

    def finish(self) -> None:
        """Draw for the last time."""
        if self._show:
            self._draw(time.monotonic(), "\n")

    def _draw(self, now: float, end: str = "") -> None:
        share = self.done / self.total if self.total else 1.0
        rate = (self.done - self._skipped) / max(now - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate else 0.0
        bar = self._block * int(share * 24)
        try:
            speed = f"{rate / self._per:8.1f} {self._unit}"
            sys.stderr.write(f"\r{bar:<24} {share:4.0%}  {speed}  {_clock(left)} left {end}")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # nobody looks any more
            self._show = False


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
