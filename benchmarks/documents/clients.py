# SPDX-License-Identifier: Apache-2.0
"""The tables of what programs load, of the results of benchmarks/clients.py and gguf_programs.py."""

from __future__ import annotations

import textwrap
from typing import Any

from documents.markdown import load, table

EXACT = 1e-4


def matrix() -> str:
    """Targets, the programs that open them, and how far their logits are from those of the quantized values; targets
    of one format and outcome share a row."""
    found = load("clients")
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in found["rows"]:
        target, _, model = row["target"].partition(", ")
        loads = "yes" if {"error", "wrong"} & row.keys() else "no"
        groups.setdefault((_format(target), model, row["client"], loads, _logits(row)), []).append(target)
    alike: dict[tuple[str, ...], list[str]] = {}  # models of one row
    for (_, model, *outcome), targets in groups.items():
        alike.setdefault((_targets(targets), *outcome), []).append(model)
    rows: list[list[Any]] = [
        [targets if models == [""] else f"{targets}; {', '.join(name or 'llama' for name in models)}", *outcome]
        for (targets, *outcome), models in alike.items()
    ]
    return f"{table(['`--to`', 'opened by', 'loads', 'logits'], rows)}\n\n{_versions(found)}"


def programs() -> str:
    """What programs themselves made of each target, a column a model, of benchmarks/program_runs.py; targets of one
    format share a row where each column has a message, or none, and its largest error."""
    found = load("programs")
    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    outcomes = {(row["program"], row["target"], row["model"]): row for row in found["rows"]}
    groups: dict[tuple[str, ...], list[str]] = {}
    for who, target in dict.fromkeys((row["program"], row["target"]) for row in found["rows"]):
        row = [outcomes.get((who, target, model), {}) for model in models]
        kinds = ["error" if "error" in one else _logits(one) if one else "" for one in row]
        groups.setdefault((_format(target), who, *kinds), []).append(target)
    rows = []
    for (_, who, *kinds), targets in groups.items():
        cells = [
            _logits(max((outcomes[who, target, model] for target in targets), key=lambda one: one["error"] or 0.0))
            if kind == "error"
            else kind
            for model, kind in zip(models, kinds, strict=True)
        ]
        rows.append([_targets(targets), who, *cells])
    return f"{table(['`--to`', 'program', *models], rows)}\n\n{_versions(found)}"


def _format(target: str) -> str:
    return target.partition(":")[0] if ":" in target else ""


def _targets(targets: list[str]) -> str:
    """The first with its format, the others without."""
    first, *rest = targets
    return ", ".join(f"`{name}`" for name in [first, *(target.rpartition(":")[2] for target in rest)])


def _versions(found: dict[str, Any]) -> str:
    return textwrap.fill(", ".join(f"{name} {number}" for name, number in found["versions"].items()) + ".", 120)


def _logits(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"`convert` refuses: {row['refused']}"
    if "fails" in row:
        return f"its message: `{textwrap.shorten(row['fails'].replace('`', ''), 75, placeholder=' …')}`"
    if "wrong" in row:
        return f"**other ones**: {row['wrong']}"
    if row["error"] is None:
        return "NaN"
    return "equal" if row["error"] < EXACT else f"within {100 * row['error']:.1f} %"


def gguf_programs() -> str:
    """Models as GGUF: how far a token's logits are from the model's, of benchmarks/gguf_programs.py; models of one
    outcome share a row."""
    found = load("gguf_programs")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        float16 = row["kind"] == "f16"
        theirs = _percent(row["llama.cpp"]) if "llama.cpp" in row else f"its message: `{row['fails']}`"
        back = _percent(row["transformers"]) if float16 and "transformers" in row else ""
        key = ("f16", back, theirs) if float16 or "llama.cpp" not in row else ("", row["model"], "")
        groups.setdefault(key, []).append(row)
    rows = []
    for (kind, back, theirs), alike in groups.items():
        models = ", ".join(dict.fromkeys(row["model"].replace(", ", " ") for row in alike))
        kinds = list(dict.fromkeys(f"gguf:{row['kind']}" for row in alike))
        worst = max((row["llama.cpp"]["median"] for row in alike if "llama.cpp" in row), default=0.0)
        rows.append([models, _targets(kinds), *([back, theirs] if kind else ["", f"within {100 * worst:.1f} %"])])
    header = ["model", "`--to`", "converted back, in transformers", "in llama.cpp"]
    return f"{table(header, rows)}\n\n{_versions(found)}"


def _percent(errors: dict[str, float]) -> str:
    return "equal" if errors["median"] < EXACT else f"{100 * errors['median']:.1f} %"
