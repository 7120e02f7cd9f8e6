# SPDX-License-Identifier: Apache-2.0
"""The table of what programs load, of the results of benchmarks/clients.py."""

from __future__ import annotations

import textwrap
from typing import Any

from documents.markdown import load, table

EXACT = 1e-4


def matrix() -> str:
    """Targets, the programs that open them, and how far their logits are from those of the quantized values."""
    found = load("clients")
    rows: list[list[Any]] = [
        [_target(row["target"]), row["client"], "yes" if "error" in row else "no", _logits(row)]
        for row in found["rows"]
    ]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    versions = textwrap.fill(f"{versions}.", 120)
    return f"{table(['`--to`', 'opened by', 'loads', 'logits'], rows)}\n\n{versions}"


def _target(row: str) -> str:
    target, comma, model = row.partition(", ")
    return f"`{target}`{comma}{model}"


def _logits(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"`convert` refuses: {row['refused']}"
    if "fails" in row:
        return f"its message: `{row['fails']}`"
    if row["error"] is None:
        return "NaN"
    return "equal" if row["error"] < EXACT else f"within {100 * row['error']:.1f} %"
