# SPDX-License-Identifier: Apache-2.0
"""Errors of stored bytes name the file and the tensor."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import NamedTuple

NAMELESS = ""  # of an error that concerns the file, not one tensor


class naming(NamedTuple):  # noqa: N801
    """Add the file and the tensor to the message of a ValueError raised inside: wrong bytes in a file cause it. Other
    errors are defects of a bridge and stay as they are."""

    path: Path
    name: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, ValueError):
            return
        text = str(error)
        if not text.startswith(str(self.path)):
            of = f"tensor {self.name[:200]!r}: " if self.name else ""
            text = f"{self.path}: {of}{text}"
        raise ValueError(text) from error
