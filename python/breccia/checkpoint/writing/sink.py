# SPDX-License-Identifier: Apache-2.0
"""Where what is made of tensors goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from breccia.checkpoint.workers import Workers
from breccia.checkpoint.writing.finite import in_piece

__all__ = ["Sink"]


@dataclass(frozen=True)
class Sink:
    """An output at work.

    Attributes:
        writer: takes bytes of its tensors, as `PlannedWriter` does.
        workers: threads that make and write pieces.
        done: is told of each piece how many bytes it has.
        dtypes: of the floats that are written, by name.
        not_finite: how many numbers of each new piece are infinite or NaN.
    """

    writer: Any
    workers: Workers
    done: Callable[[int], None] = lambda nbytes: None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    not_finite: list[int] = field(default_factory=list)

    def put(self, name: str, array: Any, at: int = 0, *, copied: bool = False) -> None:
        """Write a stored tensor, or a piece of it that begins at a byte; ``copied``: its bytes are the source's."""
        if not copied and name in self.dtypes:
            self.not_finite.append(in_piece(array, self.dtypes[name]))
        self.writer.write(name, array, at)
        self.done(array.nbytes)
