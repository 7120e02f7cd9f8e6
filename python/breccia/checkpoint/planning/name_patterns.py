# SPDX-License-Identifier: Apache-2.0
"""Patterns of names that leave tensors out, or let them be quantized: each must change what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from breccia.bridges.parts import Found
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.targets import Target, names_of

__all__ = ["check_effects", "check_names"]

_NO_NAME = ""  # a pattern that matches nothing


def check_names(found: Iterable[Found], target: Target) -> None:
    """Whether each of the target's patterns matches a tensor's name. Raises ValueError where one matches none."""
    names = [one.name for one in found] if target.include or target.exclude else []
    for option, patterns in (("include", target.include), ("exclude", target.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                example = f", such as {names[0]!r}" if names else ""
                raise ValueError(
                    f"--{option} {pattern!r} must match the name of a tensor, it matches none of {len(names)}{example}"
                )


def check_effects(found: list[Found], target: Target, choose: Callable[[Found, Target], Choice]) -> None:
    """Whether each of the target's patterns, without the others, changes what is written. Raises ValueError where one
    changes nothing."""
    for pattern in target.include:
        one, none = (replace(target, include=(some,), exclude=()) for some in (pattern, _NO_NAME))
        _check(found, "include", pattern, one, none, choose)
    for pattern in target.exclude:
        one, none = (replace(target, exclude=some) for some in ((pattern,), ()))
        _check(found, "exclude", pattern, one, none, choose)


def _check(
    found: list[Found],
    option: str,
    pattern: str,
    one: Target,
    none: Target,
    choose: Callable[[Found, Target], Choice],
) -> None:
    matched = [each for each in found if any(fnmatchcase(name, pattern) for name in names_of(each))]
    if any(_written(each, one, choose) != _written(each, none, choose) for each in matched):
        return
    names = [each.name for each in matched]
    more = f" and {len(names) - 1} more that it matches are" if names[1:] else ", which it matches, is"
    same = f": {names[0]}{more} written the same without it" if names else ""
    raise ValueError(f"--{option} {pattern!r} must change what is written, and changes nothing{same}")


def _written(found: Found, target: Target, choose: Callable[[Found, Target], Choice]) -> Any:
    try:
        choice = choose(found, target)
    except ValueError as error:  # a tensor that has to be left out, as it is with the pattern
        return str(error)
    return choice.action, choice.outputs, choice.recipe, choice.note  # what is said of it is a part of the report
