# SPDX-License-Identifier: Apache-2.0
"""The command line's parser and the types of its arguments."""

from __future__ import annotations

import argparse
import re
from typing import Any

from breccia.recipe_names import suggestion

__all__ = ["Parser", "add_common", "count", "json_last", "part", "progress_of", "size"]


class Parser(argparse.ArgumentParser):
    """A parser that answers a word which is none of the choices with the close ones."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"{value!r} is unknown, {suggestion(str(value), known)}")


def add_common(parser: argparse.ArgumentParser, *, force: str = "", threads: bool = False) -> None:
    """The options of every command that works for long: ``--quiet``, and where they apply ``--threads``, ``--force``.

    Args:
        parser: of the command.
        force: what is replaced, and when; "" where the command makes no file.
        threads: whether the command is told how many to use.
    """
    if threads:
        parser.add_argument("--threads", type=count, metavar="N", help="threads to use (default: one per core)")
    if force:
        parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--quiet", action="store_true", help="draw no progress bar")


def progress_of(args: argparse.Namespace) -> bool:
    """Whether a command that has ``--quiet`` draws a progress bar."""
    return not args.quiet and not args.json


def count(text: str) -> int:
    """An argument that counts something.

    Raises:
        argparse.ArgumentTypeError: it is not a whole number of 1 or more.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return number


def size(text: str) -> int:
    """An argument of bytes: 500MB, 8GiB, or a bare number.

    Raises:
        argparse.ArgumentTypeError: it is no such number, or less than a byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text, re.IGNORECASE)
    number = (
        0 if found is None else float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    )
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be bytes, as 500MB or 8GiB, got {text!r}")
    return int(number)


def part(text: str) -> tuple[int, int]:
    """An argument I/N: one of so many.

    Raises:
        argparse.ArgumentTypeError: it is not two whole numbers of which the first is one of 1 … N.
    """
    first, slash, second = text.partition("/")
    if slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first), int(second)
    raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text!r}")


def json_last(words: list[str]) -> list[str]:
    """The words with ``--json`` behind the command, which may stand before it too."""
    end = words.index("--") if "--" in words else len(words)
    if not words or words[0] != "--json" or len([w for w in words[:end] if w != "--json"]) == 0:
        return words
    rest = [word for word in words[:end] if word != "--json"]
    return [rest[0], "--json", *rest[1:], *words[end:]]
