# SPDX-License-Identifier: Apache-2.0
"""What a command prints: text, or JSON where that was asked for."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Shown", "show", "show_json"]


# What a command gives to be printed: its report, lines that tell people of it, and whether a check passed.
Shown = tuple[Any, Iterable[str], bool]


def show(args: argparse.Namespace, report: Any, lines: Iterable[str]) -> None:
    """Print a report for programs, or its lines for people."""
    if not args.json:
        for line in lines:
            print(line)
        return
    if isinstance(report, dict):
        show_json(report.items())
    else:
        print(_encoded(report, 2))


_JSON = json.JSONEncoder(default=str, allow_nan=False)


def _encoded(value: Any, indent: int | None = None) -> str:
    """JSON, which has no infinity and no NaN: they are written as text."""
    if indent is None:
        try:
            return _JSON.encode(value)
        except ValueError:
            pass  # nearly no value has one: it is looked for afterwards
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def show_json(pairs: Iterable[tuple[str, Any]]) -> None:
    """An object, a line for each item of its lists: whole, it can be gigabytes."""
    between = "{"
    for key, value in pairs:
        sys.stdout.write(f"{between}\n  {_encoded(key)}: ")
        if isinstance(value, (list, Iterator)):
            comma = ""
            sys.stdout.write("[")
            for item in value:
                sys.stdout.write(f"{comma}\n    {_encoded(item)}")
                comma = ","
            sys.stdout.write("\n  ]" if comma else "]")
        else:
            sys.stdout.write(_encoded(value, 2).replace("\n", "\n  "))
        between = ","
    print("\n}" if between == "," else "{}")
