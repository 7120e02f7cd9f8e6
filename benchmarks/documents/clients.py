# SPDX-License-Identifier: Apache-2.0
"""The tables of what programs load, of the results of benchmarks/clients.py and gguf_programs.py."""

from __future__ import annotations

import textwrap
from typing import Any

from documents.markdown import load, table

EXACT = 1e-4


def matrix() -> str:
    """Targets, the programs that open them, and how far their logits are from those of the quantized values."""
    found = load("clients")
    rows: list[list[Any]] = [
        [_target(row["target"]), row["client"], "yes" if {"error", "wrong"} & row.keys() else "no", _logits(row)]
        for row in found["rows"]
    ]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    versions = textwrap.fill(f"{versions}.", 120)
    return f"{table(['`--to`', 'opened by', 'loads', 'logits'], rows)}\n\n{versions}"


def programs() -> str:
    """What programs themselves made of each target, a column a model, of benchmarks/program_runs.py."""
    found = load("programs")
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    targets = list(dict.fromkeys((row["program"], row["target"]) for row in found["rows"]))
    outcomes = {(row["program"], row["target"], row["model"]): _logits(row) for row in found["rows"]}
    rows = [
        [f"`{target}`", who, *(outcomes.get((who, target, model), "") for model in models)] for who, target in targets
    ]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    header = ["`--to`", "program", *models]
    return f"{table(header, rows)}\n\n{textwrap.fill(f'{versions}.', 120)}"


def _target(row: str) -> str:
    target, comma, model = row.partition(", ")
    return f"`{target}`{comma}{model}"


def _logits(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"`convert` refuses: {row['refused']}"
    if "fails" in row:
        return f"its message: `{row['fails']}`"
    if "wrong" in row:
        return f"**other ones**: {row['wrong']}"
    if row["error"] is None:
        return "NaN"
    return "equal" if row["error"] < EXACT else f"within {100 * row['error']:.1f} %"


def gguf_programs() -> str:
    """Models as GGUF: how far a token's logits are from the model's, of benchmarks/gguf_programs.py."""
    found = load("gguf_programs")
    rows: list[list[Any]] = []
    for row in found["rows"]:
        theirs = _percent(row["llama.cpp"]) if "llama.cpp" in row else f"its message: `{row['fails']}`"
        back = _percent(row["transformers"]) if row["kind"] == "f16" and "transformers" in row else ""
        rows.append([row["model"], f"`gguf:{row['kind']}`", back, theirs])
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    header = ["model", "`--to`", "converted back, in transformers", "in llama.cpp"]
    return f"{table(header, rows)}\n\n{textwrap.fill(f'{versions}.', 120)}"


def _percent(errors: dict[str, float]) -> str:
    return "equal" if errors["median"] < EXACT else f"{100 * errors['median']:.1f} %"
