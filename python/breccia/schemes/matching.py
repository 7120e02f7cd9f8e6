# SPDX-License-Identifier: Apache-2.0
"""Which modules a rule is for: the ways in which formats name layers; and regular expressions that come with a file,
matched in time in proportion to their length and the text's, which Python's own matching is not, whatever their author
wants."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

_MOST = 256  # characters of a pattern
_DEEP = 8  # groups inside of each other
_STEPS = 10_000_000  # of matching, for all patterns and texts
_PLAIN = re.compile(r"(\w|-|\.|\\\.)*")
_SPECIAL = re.compile(r"\\[dDwWsS.\\^$*+?()\[\]{}|/_-]|\[\^?(\\.|[^\\\[\]])+\]|[^\\\[\](){}*+?|^$]")
_ENDS = "^$"

# Sets of places in a text are numbers whose bits are the places.
Node = Callable[[int], int]


class Patterns:
    """Regular expressions of names: characters and classes, groups, alternatives and repetitions. Messages call them
    ``argument``."""

    def __init__(self, argument: str) -> None:
        self.argument, self._steps = argument, 0

    def ends(self, pattern: str, name: str) -> bool:
        """Whether the last parts of a name, or all of it, match: what ``re.fullmatch(r"(.*\\.)?" + pattern, name)``
        tells."""
        if len(pattern) > _MOST:
            raise ValueError(f"{self.argument} must have patterns of at most {_MOST} characters, got {len(pattern)}")
        if _PLAIN.fullmatch(pattern):
            self._spend(1 + len(pattern) // 16)
            length = len(pattern.replace("\\.", "."))
            begin = len(name) - length
            starts = begin == 0 or (begin > 0 and name[begin - 1] == "." and "\n" not in name[:begin])
            return starts and _plain(pattern).fullmatch(name, begin) is not None
        starts_ = 1 | _places(name.partition("\n")[0], {"."}) << 1
        return bool(self.places(pattern, name, starts_) >> len(name) & 1)

    def places(self, pattern: str, name: str, starts: int) -> int:
        """The places where matches of a pattern end, as bits; it may begin at those of ``starts``, bit i before
        character i. Raises ValueError where the pattern is not a regular expression of this kind, or there is too much
        to match."""
        return _Reader(self, pattern, name).read()(starts)

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _STEPS:
            raise ValueError(f"{self.argument} must take less work, it takes more than {_STEPS} steps")


class _Reader:
    """A pattern, made into a function from the places where it may begin to those where it ends."""

    def __init__(self, owner: Patterns, pattern: str, name: str) -> None:
        self.owner, self.pattern, self.name, self.at = owner, pattern, name, 0
        self.depth = 0  # groups that are open

    def read(self) -> Node:
        node = self._alternatives()
        return node if self.at == len(self.pattern) else self._refuse()

    def _refuse(self) -> Node:
        raise ValueError(
            f"{self.owner.argument} must be of regular expressions of characters, classes, groups, alternatives and "
            f"repetitions, got {self.pattern!r}"
        )

    def _next(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _alternatives(self) -> Node:
        choices = [self._sequence()]
        while self._next() == "|":
            self.at += 1
            choices.append(self._sequence())
        if len(choices) == 1:
            return choices[0]

        def either(places: int) -> int:
            found = 0
            for choice in choices:
                found |= choice(places)
            return found

        return either

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._next() and self._next() not in "|)":
            items.append(self._repeated())

        def after(places: int) -> int:
            for item in items:
                places = item(places)
            return places

        return after

    def _repeated(self) -> Node:
        end = self._next() in _ENDS
        item, mark = self._item(), self._next()
        if not mark or mark not in "*+?":
            return item
        if end:
            return self._refuse()
        self.at += 1
        if mark == "?":
            return lambda places: places | item(places)
        if self._next() == "?":  # as few as possible: the same places
            self.at += 1
        if self._next() and self._next() in "*+?{":
            return self._refuse()

        def closure(places: int) -> int:
            found, new = places, places
            while new:
                new = item(new) & ~found
                found |= new
            return found

        return closure if mark == "*" else lambda places: closure(item(places))

    def _item(self) -> Node:
        sign = self._next()
        if sign == "(":
            self.at += 3 if self.pattern.startswith("(?:", self.at) else 1
            self.depth += 1
            group = self._alternatives() if self.depth <= _DEEP else self._refuse()
            self.depth -= 1
            if self._next() != ")":
                return self._refuse()
            self.at += 1
            return group
        if sign in _ENDS:
            self.at += 1
            place = 1 if sign == "^" else 1 << len(self.name)
            return lambda places: places & place
        match = _SPECIAL.match(self.pattern, self.at)
        if match is None:
            return self._refuse()
        self.at = match.end()
        try:
            fits = _plain(match[0])
        except re.error:
            return self._refuse()
        here = _places(self.name, {character for character in set(self.name) if fits.match(character)})
        self.owner._spend(1 + len(self.name) // 8)

        def step(places: int) -> int:
            self.owner._spend(1 + len(self.name) // 64)
            return (places & here) << 1

        return step


def _places(text: str, characters: set[str]) -> int:
    """Where a text has one of some characters: bit i is of its character i."""
    bits = {ord(character): "1" if character in characters else "0" for character in set(text)}
    return int(text[::-1].translate(bits) or "0", 2)


@lru_cache(1024)
def _plain(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


_MOST_OF_A_MATCH = 1024  # characters
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
        if len(self.pattern) > _MOST_OF_A_MATCH:
            raise ValueError(f"pattern must have at most {_MOST_OF_A_MATCH} characters, got {len(self.pattern)}")
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
