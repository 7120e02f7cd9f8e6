# SPDX-License-Identifier: Apache-2.0
"""Checks of what functions over files are given: a message names the argument, what it was and what it must be."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def path_of(value: Any, argument: str) -> Path:
    """What stands for a path, as one."""
    try:
        return Path(value)
    except TypeError:
        raise TypeError(f"{argument} must be a path (str or os.PathLike), got {type(value).__name__}") from None


def existing(value: Any, argument: str) -> Path:
    """What stands for the path of something that is there. Raises FileNotFoundError where it is not: the next step is
    told of a URL, and of a name of the Hugging Face Hub."""
    path = path_of(value, argument)
    if path.exists():
        return path
    more = ": breccia calibrate makes one" if argument in ("moments", "amax") else ""
    if re.match(r"\w+:/", str(path)):
        more = ": a URL is not opened, what it names must be downloaded first"
    elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) and not path.parent.exists():
        more = f": as a name of the Hugging Face Hub, hf download {path} --local-dir {path.name} gets it"
    raise FileNotFoundError(f"{argument} must be a file or a directory, there is no {path}{more}")


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
