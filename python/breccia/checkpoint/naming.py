# SPDX-License-Identifier: Apache-2.0
"""Errors of stored bytes name the file and the tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["NAMELESS", "naming"]

NAMELESS = ""  # of an error that concerns the file, not one tensor


@contextlib.contextmanager
def naming(path: Path, name: str) -> Iterator[None]:
    """Add the file and the tensor to the message of a ValueError raised inside: wrong bytes in a file cause it.

    Raises:
        ValueError: see above. Other errors are defects of a bridge and stay as they are.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        if not text.startswith(str(path)):
            text = f"{path}: tensor {name[:200]!r}: {text}" if name else f"{path}: {text}"
        raise ValueError(text) from error
