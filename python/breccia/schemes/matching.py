# SPDX-License-Identifier: Apache-2.0
"""Which modules a rule is for: the ways in which formats name layers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from breccia.schemes.patterns import Patterns

_MOST = 1024  # characters of a pattern
_REPEATS = 2  # repetitions in a regular expression that is left to Python
_LONGEST = 256  # characters of a name for one that looks around, which may repeat once more

_LOOKS_AROUND = "(?"  # and groups that are not captured, and flags

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
KINDS = tuple(_MARKS)


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
            case "regex" | "regex-start" | "regex-search":
                return _matches(self.pattern, name, self.kind)
            case "class":
                return self.pattern in kinds
            case "contains":
                return self.pattern in name
        return True

    def __str__(self) -> str:
        return _MARKS[self.kind] + self.pattern


def _matches(pattern: str, name: str, kind: str) -> bool:
    """Whether a regular expression of a stranger fits a name, in time that a stranger cannot make long."""
    compiled = _compiled(pattern)
    if compiled is not None:
        if len(name) > _LONGEST and _LOOKS_AROUND in pattern:
            raise ValueError(
                f"pattern must not look around in names of over {_LONGEST} characters, got {pattern[:80]!r}"
            )
        way = {"regex": compiled.fullmatch, "regex-start": compiled.match, "regex-search": compiled.search}
        return way[kind](name) is not None
    anywhere = (2 << len(name)) - 1
    ends = Patterns("pattern").places(pattern, name, anywhere if kind == "regex-search" else 1)
    return bool(ends >> len(name) & 1 if kind == "regex" else ends)


@functools.lru_cache(4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """A regular expression that Python matches in little time; None for one that `Patterns` takes."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"pattern must be a regular expression, got {pattern[:80]!r}: {error}") from None
    plain = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "x", pattern)
    most = _REPEATS + (_LOOKS_AROUND in pattern)
    if len(re.findall(r"[*+{]", plain)) <= most and not re.search(r"\)[*+{]", plain):
        return compiled
    Patterns("pattern").places(pattern, "", 1)
    return None
