# SPDX-License-Identifier: Apache-2.0
"""The command line's parser and the types of its arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from breccia.spelling import suggestion

__all__ = ["Parser", "add_common", "add_device", "count", "json_last", "number", "part", "progress_of", "size", "whole"]


Number = TypeVar("Number")
# Commands by what other programs call them.
_COMMANDS = {
    **dict.fromkeys(("quantize", "quantise", "compress", "export", "save"), "convert"),
    **dict.fromkeys(("compare", "check", "diff", "validate", "test"), "verify"),
    **dict.fromkeys(("info", "show", "list", "ls", "dump"), "inspect"),
    **dict.fromkeys(("perplexity", "ppl", "benchmark"), "evaluate"),
    **dict.fromkeys(("plot", "html", "page"), "report"),
    **dict.fromkeys(("imatrix", "calibration"), "calibrate"),
}
_SHORT = 6  # lines of usage that are printed above an error


class Parser(argparse.ArgumentParser):
    """A parser that answers a word which is none of the choices with the close ones."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            meant = _COMMANDS.get(str(value)) if action.dest == "command" else None
            said = f"did you mean {meant}?" if meant else suggestion(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r} is unknown, {said}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """What argparse finds; an option that is none of the command's is answered with the close ones."""
        found, rest = super().parse_known_args(args, namespace)
        if strange := next((word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"), ""):
            self.error(f"{strange} is unknown, {suggestion(strange, self._option_string_actions)}")
        return found, rest

    def with_option(self, command: str, text: str) -> str:
        """A sentence about arguments of Python's function, with the command's options in their place."""
        text = text.replace("force=True", "--force")
        commands = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        argument, must, rest = text.partition(" must ")
        for action in commands.choices[command]._actions:
            if must and action.dest == argument:
                return f"{action.option_strings[-1] if action.option_strings else action.metavar}{must}{rest}"
        return text

    def error(self, message: str) -> NoReturn:
        """Leave with what is wrong, below the usage where that is short: else nobody would find it."""
        usage = self.format_usage()
        usage = usage if usage.count("\n") <= _SHORT else f"usage: {self.prog} --help has the options\n"
        self.exit(2, f"{usage}{self.prog}: error: {message}\n")


def add_common(parser: argparse.ArgumentParser, *, force: str = "", threads: bool = False) -> None:
    """The options of every command that works for long: ``--quiet``, and where they apply ``--threads``, and
    ``--force``, with what is replaced and when."""
    if threads:
        parser.add_argument("--threads", type=count, metavar="N", help="threads to use (default: one per core)")
    if force:
        parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--quiet", action="store_true", help="draw no progress bar")


def add_device(parser: argparse.ArgumentParser, does: str) -> None:
    """The option ``--device`` of a command that works on checkpoints, with what is done there."""
    parser.add_argument(
        "--device", default="cpu", metavar="cpu|cuda|cuda:N", help=f"where {does} (default: %(default)s)"
    )


def progress_of(args: argparse.Namespace) -> bool:
    """Whether a command that has ``--quiet`` draws a progress bar."""
    return not args.quiet and not args.json


def count(text: str) -> int:
    """An argument that counts something. Raises ArgumentTypeError where it is not a whole number of 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, got {text!r}")
    return number


def number(text: str) -> float:
    """An argument that is any number. Raises ArgumentTypeError where it is none."""
    return _read(float, text, "a number")


def whole(text: str) -> int:
    """An argument that is any whole number. Raises ArgumentTypeError where it is none."""
    return _read(int, text, "a whole number")


def _read(kind: Callable[[str], Number], text: str, what: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}") from None


def size(text: str) -> int:
    """An argument of bytes: 500MB, 8GiB, or a bare number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text, re.IGNORECASE)
    number = (
        0 if found is None else float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    )
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be bytes, as 500MB or 8GiB, got {text!r}")
    return int(number)


def part(text: str) -> tuple[int, int]:
    """An argument I/N: one of so many."""
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
