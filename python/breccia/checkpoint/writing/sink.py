# SPDX-License-Identifier: Apache-2.0
"""Where what is made of tensors goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from breccia.checkpoint.workers import Workers

__all__ = ["Sink"]


@dataclass(frozen=True)
class Sink:
    """An output at work.

    Attributes:
        writer: takes bytes of its tensors, as `PlannedWriter` does.
        workers: threads that make and write pieces.
        done: is told of each piece how many bytes it has.
    """

    writer: Any
    workers: Workers
    done: Callable[[int], None] = lambda nbytes: None

    def put(self, name: str, array: Any, at: int = 0) -> None:
        """Write a stored tensor, or a piece of it that begins at a byte."""
        self.writer.write(name, array, at)
        self.done(array.nbytes)
