# SPDX-License-Identifier: Apache-2.0
"""Which modules a rule is for: the ways in which formats name layers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["Match"]

_MOST = 1024  # characters of a pattern
_REPEATS = 8  # of unbounded repetitions in a regular expression

# How each kind of pattern is written in front of it.
_MARKS = {
    "name": "",
    "under": "",
    "glob": "",
    "regex": "re:",
    "regex-start": "re:",
    "regex-search": "re:",
    "class": "class ",
    "contains": "…",
    "all": "all",
}


@dataclass(frozen=True)
class Match:
    """A pattern of module names.

    Attributes:
        kind: "name" (exactly), "under" (a module and all inside of it), "glob", "regex" (the whole name),
            "regex-start" (from the start, not to the end), "regex-search" (anywhere), "class" (the name of the
            module's class), "contains", or "all".
        pattern: of that kind; "" for "all".
    """

    kind: str
    pattern: str = ""

    def __post_init__(self) -> None:
        if self.kind not in _MARKS:
            raise ValueError(f"kind must be one of {', '.join(_MARKS)}, got {self.kind!r}")
        if len(self.pattern) > _MOST:
            raise ValueError(f"pattern must have at most {_MOST} characters, got {len(self.pattern)}")
        if self.kind.startswith("regex"):
            _compiled(self.pattern)

    def matches(self, name: str, kinds: Iterable[str] = ()) -> bool:
        """Whether a module is meant.

        Args:
            name: of the module, parts with dots between them.
            kinds: names of its classes.

        Returns:
            True where it is.
        """
        match self.kind:
            case "name":
                return name == self.pattern
            case "under":
                return name == self.pattern or name.startswith(self.pattern + ".")
            case "glob":
                return fnmatchcase(name, self.pattern)
            case "regex":
                return _compiled(self.pattern).fullmatch(name) is not None
            case "regex-start":
                return _compiled(self.pattern).match(name) is not None
            case "regex-search":
                return _compiled(self.pattern).search(name) is not None
            case "class":
                return self.pattern in kinds
            case "contains":
                return self.pattern in name
        return True

    def __str__(self) -> str:
        return _MARKS[self.kind] + self.pattern


@functools.lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression of a stranger: without repetitions inside of repetitions, whose time has no bound.

    Raises:
        ValueError: it is none, or takes too long.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern[:80]!r}: {error}") from None
    plain = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "x", pattern)
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", plain))
    nested = re.search(r"\([^()]*[*+}][^()]*\)[*+{]", plain)
    if repeats > _REPEATS or nested:
        raise ValueError(f"pattern must not repeat what repeats, or more than {_REPEATS} times, got {pattern[:80]!r}")
    return compiled
