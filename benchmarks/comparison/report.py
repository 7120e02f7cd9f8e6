# SPDX-License-Identifier: Apache-2.0
"""The results as rows, a Markdown table and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

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

LEFT, SCALE, LINE, TOP = 250, 560, 19, 58


def svg(results: dict[str, Any], threads: int) -> str:
    """Bars: the fraction of the hardware's limit each piece of work reaches. Dots: its peers on the same scale."""
    chosen = [r for r in results["rows"] if r["threads"] == threads and r["of_limit"]["breccia"] is not None]
    parts: list[str] = []
    y, used = TOP, {}
    for group in dict.fromkeys(r["group"] for r in chosen):
        members = [r for r in chosen if r["group"] == group]
        y += 12
        parts.append(f'<text x="8" y="{y + 12}" class="group">{escape(group)}</text>')
        parts.append(f'<text x="{LEFT}" y="{y + 12}" class="note">of {_bound(members)}</text>')
        y += LINE
        for r in members:
            parts += _bar(r, y, used)
            y += LINE
    axis = "".join(
        f'<line x1="{LEFT + SCALE * p // 100}" x2="{LEFT + SCALE * p // 100}" y1="{TOP}" y2="{y}" class="axis"/>'
        f'<text x="{LEFT + SCALE * p // 100}" y="{y + 14}" class="tick">{p} %</text>'
        for p in (0, 25, 50, 75, 100)
    )
    legend, x = [], 8
    for name, kind in (("breccia", "ours"), ("breccia, prepared weight", "ready")):
        legend.append(f'<rect x="{x}" y="28" width="16" height="9" class="{kind}"/>')
        legend.append(f'<text x="{x + 21}" y="37" class="note">{name}</text>')
        x += 6 * len(name) + 32
    for name, colour in used.items():
        legend.append(f'<circle cx="{x + 4}" cy="33" r="4" fill="{colour}"/>')
        legend.append(f'<text x="{x + 12}" y="37" class="note">{escape(name)}</text>')
        x += 6 * len(name) + 24
    title = f"Fraction of the hardware's limit, {threads} thread{'s' if threads > 1 else ''}, {results['cpu']['model']}"
    width, height = max(LEFT + SCALE + 60, x), y + 26
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 12px system-ui, sans-serif; fill: #222 }}
.title {{ font-size: 14px; font-weight: 600 }} .group {{ font-weight: 600 }}
.note, .tick {{ fill: #666; font-size: 11px }} .tick, .value {{ text-anchor: middle }} .name {{ text-anchor: end }}
.axis {{ stroke: #ddd }} .ours {{ fill: #2e86c1 }} .ready {{ fill: #aed6f1 }}
</style>
<rect width="100%" height="100%" fill="#fff"/>
<text x="8" y="18" class="title">{escape(title)}</text>
{"".join(legend)}
{axis}
{chr(10).join(parts)}
</svg>
"""


def _bar(r: dict[str, Any], y: int, used: dict[str, str]) -> list[str]:
    share = r["of_limit"]
    parts = [f'<text x="{LEFT - 8}" y="{y + 12}" class="name">{escape(r["name"])}</text>']
    for name, kind in (("breccia prepared", "ready"), ("breccia", "ours")):
        if share.get(name) is not None:
            width = min(share[name], 1.08) * SCALE
            parts.append(f'<rect x="{LEFT}" y="{y + 3}" width="{width:.1f}" height="11" class="{kind}"/>')
    for name, times in r["times_as_fast_as"].items():
        family = next((start for start in FAMILIES if name.startswith(start)), None)
        if family is None:
            continue
        label, colour = FAMILIES[family]
        used.setdefault(label, colour)
        x = LEFT + min(share["breccia"] / times, 1.08) * SCALE
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y + 8.5}" r="4" fill="{colour}" stroke="#fff">'
            f"<title>{escape(name)}: {_ratio(times)} times as long</title></circle>"
        )
    return parts
