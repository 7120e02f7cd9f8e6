# SPDX-License-Identifier: Apache-2.0
"""Checks of what functions over files are given: a message names the argument, what it was and what it must be."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["count_of", "path_of", "patterns_of"]


def path_of(value: Any, argument: str) -> Path:
    """What stands for a path, as one."""
    try:
        return Path(value)
    except TypeError:
        raise TypeError(f"{argument} must be a path (str or os.PathLike), got {type(value).__name__}") from None


def patterns_of(value: Iterable[str], argument: str) -> tuple[str, ...]:
    """Patterns of names; a string alone is not taken for a list of its letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{argument} must be a list of patterns, as ['*.q_proj.weight'], got {value!r}")
    found = tuple(value)
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must be a list of patterns, as ['*.q_proj.weight'], got {pattern!r} in it")
    return found


def count_of(value: Any, argument: str, most: int | None = None) -> int:
    """A whole number from 1 to ``most``."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an integer, got {value!r}") from None
    if count < 1:
        raise ValueError(f"{argument} must be 1 or more, got {count}")
    if most is not None and count > most:
        raise ValueError(f"{argument} must be at most {most}, got {count}")
    return count
