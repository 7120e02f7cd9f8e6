# SPDX-License-Identifier: Apache-2.0
"""Markdown tables, and results as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def load(name: str) -> Any:
    """A result, without its record."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    if isinstance(found, dict):
        found.pop("made", None)
    return found


def measured(name: str, how: str = "") -> str:
    """A line that says on which machine, with which version and when a result was measured; nothing where its record
    is not there, which `make_docs.py --check` does not let pass."""
    made = json.loads((RESULTS / f"{name}.json").read_text()).get("made")
    if not made:
        return ""
    machine = made.get("gpu") or made["cpu"].replace("(R)", "")
    return f"\n\n*{machine}{how}; breccia {made['breccia']} at {made['commit'][:7]}, {made['date']}.*"


def table(head: list[str], rows: list[list[Any]], align: str = "") -> str:
    """``align``: a letter for each column, l or r; left where it is short."""
    rule = [{"r": "--:"}.get(letter, "---") for letter in align.ljust(len(head), "l")]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def times(value: float) -> str:
    """How many times as fast: three figures at most."""
    return f"{value:.0f} ×" if value >= 10 else f"{value:.1f} ×" if value >= 2 else f"{value:.2f} ×"
