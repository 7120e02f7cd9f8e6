# SPDX-License-Identifier: Apache-2.0
"""The `breccia` command: its parser, what it prints, and how it fails."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """`main`, which is loaded when it is asked for: modules below the command print and fail as it does."""
    if name != "main":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("breccia.cli.command").main
