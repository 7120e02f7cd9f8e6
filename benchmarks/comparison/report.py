# SPDX-License-Identifier: Apache-2.0
"""The results as rows, a Markdown table and a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from documents.drawing import GRID, NOTE, axes
from documents.drawing import svg as as_svg

from comparison.timing import Work

OURS = ("breccia", "breccia prepared")
# What a contestant is called in the picture, and its colour, by the start of its name.
FAMILIES = {
    "torch.compile": ("torch.compile", "#c0392b"),
    "torch bf16": ("torch bf16 or fp32", "#8e44ad"),
    "torch fp32": ("torch bf16 or fp32", "#8e44ad"),
    "torch int": ("torch int8 or int4", "#d35400"),
    "torch": ("torch eager", "#e59866"),
    "ggml": ("ggml", "#27ae60"),
    "NumPy": ("NumPy", "#7f8c8d"),
    "ml_dtypes": ("NumPy", "#7f8c8d"),
    "breccia 0": ("published breccia", "#2c3e50"),
}


def row(
    work: Work, times: dict[str, float], memory: dict[str, float], limits: dict[str, Any], threads: int
) -> dict[str, Any]:
    """Times in ms, our speed, which fraction of its limit that is, and how many times as fast as each peer."""
    flop = work.limit.endswith("FLOP")
    result: dict[str, Any] = {
        "threads": threads,
        "group": work.group,
        "name": work.name,
        "ms": {name: seconds * 1e3 for name, seconds in times.items()},
        "rate": work.size / times["breccia"] / 1e9,
        "unit": "GFLOP/s" if flop else "GB/s",
        "limit": work.limit,
        "of_limit": {name: _of_limit(work.size, times, name, work.limit, limits) for name in OURS if name in times},
        "times_as_fast_as": {
            name: seconds / times["breccia"] for name, seconds in times.items() if name not in (*OURS, "memcpy")
        },
    }
    if memory:
        result["memory"] = {
            "ms": {name: seconds * 1e3 for name, seconds in memory.items()},
            "rate": work.size / memory["breccia"] / 1e9,
            "limit": work.memory_limit,
            "of_limit": {
                name: _of_limit(work.size, memory, name, work.memory_limit, limits) for name in OURS if name in memory
            },
        }
    return result


def _of_limit(size: float, times: dict[str, float], name: str, limit: str, limits: dict[str, Any]) -> float | None:
    if "memcpy" in times:  # measured in turn with the rest, over as many bytes
        return times["memcpy"] / times[name]
    rate = limits.get(limit)
    return size / times[name] / 1e9 / rate if rate else None


def add_published(rows: Iterable[dict[str, Any]], published: dict[str, Any], elements: dict[str, float]) -> None:
    """The published version's times, scaled to as many elements, among the peers of the same work."""
    name = f"breccia {published['version']}"
    for r in rows:
        source, _, what = r["name"].replace(" × ", " → ").partition(" → ")
        if r["group"] == "dequantize":
            source, what = what, source
        found = published["found"].get(f"{r['group']} {what}")
        if found is None or source != "fp32":
            continue
        seconds = found["seconds"] / found["elements"] * elements[r["group"]]
        r["ms"][name] = seconds * 1e3
        r["times_as_fast_as"][name] = seconds * 1e3 / r["ms"]["breccia"]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def markdown(results: dict[str, Any]) -> str:
    """A table for each number of threads and kind of work."""
    lines = [f"{results['cpu']['model']}; {', '.join(results['versions'])}", ""]
    for threads in dict.fromkeys(r["threads"] for r in results["rows"]):
        rows = [r for r in results["rows"] if r["threads"] == threads]
        limits = results["limits"][str(threads)]
        measured = ", ".join(f"{k} {v:.0f}" for k, v in limits.items() if isinstance(v, float))
        lines += [f"### {threads} thread{'s' if threads > 1 else ''}", "", f"Limits: {measured}", ""]
        for group in dict.fromkeys(r["group"] for r in rows):
            members = [r for r in rows if r["group"] == group]
            lines += [
                f"| {group} | ms | {members[0]['unit']} | of {_bound(members)} | from memory | times as fast as |",
                "|---|--:|--:|--:|--:|---|",
                *map(_line, members),
                "",
            ]
    return "\n".join(lines)


def _bound(members: list[dict[str, Any]]) -> str:
    kinds = {"read": "the read rate", "memcpy": "memcpy"}
    return " or ".join(dict.fromkeys(kinds.get(r["limit"].split()[0], "the peak") for r in members))


def _line(r: dict[str, Any]) -> str:
    ms, share = f"{r['ms']['breccia']:.3g}", _percent(r["of_limit"]["breccia"])
    memory = ""
    if "memory" in r:
        memory = f"{r['memory']['rate']:.1f} {r['unit']}, {_percent(r['memory']['of_limit']['breccia'])}"
    if "breccia prepared" in r["ms"]:
        ms += f" ({r['ms']['breccia prepared']:.3g})"
        share += f" ({_percent(r['of_limit']['breccia prepared'])})"
    peers = ", ".join(f"{name} {_ratio(ratio)}" for name, ratio in r["times_as_fast_as"].items())
    return f"| {r['name']} | {ms} | {r['rate']:.4g} | {share} | {memory} | {peers} |"


def _ratio(x: float) -> str:
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}" if x >= 2 else f"{x:.2f}"


# --- the picture ------------------------------------------------------------------------------------------------------

LEFT, SCALE, LINE, TOP = 190, 420, 14, 62  # points


# What the picture shows, so that it fits on a screen; the tables have the rest.
SHOWN = re.compile(
    r"cast: fp32 → {0}|dequantize: {0} → bf16|matmul M=\d+: bf16 × {0}".format("(FP8 1×128|MXFP8|NVFP4|INT4 g128)")
)


def svg(results: dict[str, Any], threads: int) -> str:
    """Bars: the fraction of the hardware's limit each piece of work reaches. Dots: its peers on the same scale."""
    chosen = [
        r
        for r in results["rows"]
        if r["threads"] == threads
        and r["of_limit"]["breccia"] is not None
        and SHOWN.fullmatch(f"{r['group']}: {r['name']}")
    ]
    groups = {name: [r for r in chosen if r["group"] == name] for name in dict.fromkeys(r["group"] for r in chosen)}
    lines = sum(len(members) + 1.6 for members in groups.values())
    bottom = TOP + round(LINE * lines)
    title = f"Fraction of the hardware's limit, {threads} thread{'s' if threads > 1 else ''}, {results['cpu']['model']}"
    plot = axes(LEFT + SCALE + 45, bottom + 20, title, (LEFT, TOP, LEFT + SCALE, bottom))
    plot.set(xlim=(0, 1), ylim=(lines, 0))
    plot.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    plot.grid(axis="x", color=GRID)
    y, names = 0.0, {}
    legend: dict[str, Any] = {}
    for group, members in groups.items():
        plot.text(-0.44, y + 1.1, group, transform=plot.get_yaxis_transform(), fontweight="bold", va="center")
        plot.text(0, y + 1.1, f"of {_bound(members)}", color=NOTE, fontsize=8, va="center")
        y += 1.6
        for r in members:
            _draw(plot, r, y + 0.5, legend)
            names[y + 0.5] = r["name"]
            y += 1
    plot.set_yticks(list(names), list(names.values()))
    plot.figure.legend(
        legend.values(), legend.keys(), loc="upper left", bbox_to_anchor=(0, 1 - 24 / (bottom + 20)), ncols=6,
        frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.0,
    )  # fmt: skip
    return as_svg(plot.figure)


def _draw(plot: Any, r: dict[str, Any], y: float, legend: dict[str, Any]) -> None:
    """One piece of work; what is new of it goes into the legend."""
    share = r["of_limit"]
    for name, label, colour in (
        ("breccia prepared", "breccia, prepared weight", "#aed6f1"),
        ("breccia", "breccia", "#2e86c1"),
    ):
        if share.get(name) is not None:
            bar = plot.barh(y, min(share[name], 1.08), height=0.6, color=colour, clip_on=False)
            legend.setdefault(label, bar)
    for name, times in r["times_as_fast_as"].items():
        family = next((start for start in FAMILIES if name.startswith(start)), None)
        if family is None:
            continue
        label, colour = FAMILIES[family]
        (dot,) = plot.plot(
            min(share["breccia"] / times, 1.08), y, "o", color=colour, markersize=5, markeredgecolor="white",
            markeredgewidth=0.6, linestyle="none", clip_on=False,
        )  # fmt: skip
        legend.setdefault(label, dot)
