# SPDX-License-Identifier: Apache-2.0
"""The picture of `breccia plot`: a row per tensor, on axes that all rows share."""

from __future__ import annotations

import html
import io
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from breccia.checkpoint.files import disk
from breccia.peers import require

__all__ = ["ERROR_RANGE", "PER_OCTAVE", "draw"]

PER_OCTAVE = 2  # bins, as breccia.comparison counts
ERROR_RANGE = (-14, 2)  # log2 of errors in units of the reference's RMS; what is beyond counts at the ends
_NAME = 48  # characters
_STYLE = """<style>svg { max-width: 100%; height: auto; }
body { font-family: sans-serif } table { border-collapse: collapse; font-size: 13px }
td, th { padding: 2px 10px; text-align: left } th { cursor: pointer } tr:hover { background: #e8f1f5 }
.low td { color: #c0392b }</style>"""  # a narrow window shows every panel
_SCRIPT = """<script>
for (const [column, head] of document.querySelectorAll("th").entries()) head.onclick = () => {
  const body = head.closest("tbody"), up = head.dataset.up = head.dataset.up === "1" ? "0" : "1";
  const of = row => row.cells[column].textContent, sign = up === "1" ? 1 : -1;
  const rows = [...body.rows].slice(1);
  const words = (a, b) => of(a).localeCompare(of(b), "en", {numeric: true});
  rows.sort((a, b) => sign * (parseFloat(of(a)) - parseFloat(of(b)) || words(a, b)));
  body.append(...rows);
};
</script>"""


def draw(rows: list[dict[str, Any]], out: Path, title: str) -> None:
    """Draw rows of `breccia.checkpoint.plot.measure` to an .html, .svg or .png file. Raises ImportError where
    matplotlib is not installed."""
    figure = _figure(rows, title)
    if out.suffix.lower() == ".png":
        pixels = io.BytesIO()
        figure.savefig(pixels, format="png", dpi=100)
        disk.replace_file(out, pixels.getvalue())
        return
    text = io.StringIO()
    with require("matplotlib", "plot").rc_context({"svg.fonttype": "none", "svg.hashsalt": "breccia"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    picture = text.getvalue()
    if out.suffix.lower() == ".html":
        inner = picture[picture.index("<svg") :]
        head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>{_STYLE}"
        picture = f"{head}<body>{inner}{_table(rows)}{_SCRIPT}</body>\n"
    disk.replace_file(out, picture.encode())


def _table(rows: list[dict[str, Any]]) -> str:
    """The rows' numbers, which a click on a head sorts; whole names are what the picture has no place for."""
    heads = ("tensor", "format", "SQNR dB", "lowest allowed", "octaves of scales")
    lines = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for row in rows:
        db = "" if row["sqnr_db"] is None else f"{float(row['sqnr_db']):.2f}"
        bound = f"{row['bound_db']:g}" if "bound_db" in row else ""
        octaves = str(row["high"] - row["low"]) if "scales" in row else ""
        low = ' class="low"' if db and bound and float(db) < float(bound) else ""
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in (row["name"], row["format"], db, bound, octaves))
        lines.append(f"<tr{low}>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _figure(rows: list[dict[str, Any]], title: str) -> Any:
    compared = any(row["sqnr_db"] is not None for row in rows)
    height = 1.9 + 0.19 * len(rows)
    make = require("matplotlib.figure", "plot").Figure
    figure = make(figsize=(15 if compared else 9, height), layout="constrained")
    wide = 150 if compared else 90  # characters
    lines = [piece for line in title.split("\n") for piece in textwrap.wrap(line, wide, break_on_hyphens=False)]
    figure.suptitle("\n".join(lines), fontsize=11)
    panels = figure.subplots(1, 3 if compared else 1, sharey=True, width_ratios=[3, 3, 2] if compared else None)
    panels = list(np.atleast_1d(panels))
    names = [row["name"] if len(row["name"]) <= _NAME else "…" + row["name"][1 - _NAME :] for row in rows]
    panels[0].set_yticks(range(len(rows)), names, fontsize=7, family="monospace")
    low = min((row["low"] for row in rows if "scales" in row), default=0)
    high = max((row["high"] for row in rows if "scales" in row), default=1)
    _heat(figure, panels[0], _common(rows, low, high), (low, high), "log2 of scales", "share of a tensor's scales")
    if compared:
        errors = np.array([row.get("errors", [0] * _error_bins()) for row in rows], float)
        label = "log2 of |error| / RMS of the reference"
        _heat(figure, panels[1], errors, ERROR_RANGE, label, "share of a tensor's values")
        _bars(panels[2], rows)
    return figure


def _error_bins() -> int:
    return PER_OCTAVE * (ERROR_RANGE[1] - ERROR_RANGE[0])


def _common(rows: list[dict[str, Any]], low: int, high: int) -> Any:
    """Histograms of the rows' own ranges on one range."""
    grid = np.zeros((len(rows), PER_OCTAVE * (high - low)))
    for i, row in enumerate(rows):
        if "scales" in row:
            start = PER_OCTAVE * (row["low"] - low)
            grid[i, start : start + len(row["scales"])] = row["scales"]
    return grid


def _heat(figure: Any, axes: Any, counts: Any, extent: tuple[int, int], label: str, bar: str) -> None:
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.ma.masked_equal(counts / np.maximum(totals, 1), 0)
    picture = axes.imshow(
        shares,
        aspect="auto",
        cmap="viridis_r",
        interpolation="nearest",
        vmin=0,
        vmax=float(shares.max()) if shares.count() else 1.0,
        extent=(*extent, len(counts) - 0.5, -0.5),
    )
    axes.set_xlabel(label)
    axes.grid(axis="x", linewidth=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    tall = figure.get_figheight()
    figure.colorbar(picture, ax=axes, location="top", label=bar, aspect=40, fraction=0.2 / tall, pad=0.05 / tall)


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    known = [row["sqnr_db"] if row["sqnr_db"] is not None else math.nan for row in rows]
    most = max([1.0, *(value for value in known if math.isfinite(value))])
    drawn = [most if value == math.inf else max(value, 0.0) if math.isfinite(value) else 0.0 for value in known]
    axes.barh(range(len(rows)), drawn, height=0.8, color="#7aa6c2")
    for i, value in enumerate(known):
        text = "exact" if value == math.inf else "not compared" if math.isnan(value) else f"{value:.1f}"
        axes.text(0.01 * most, i, text, va="center", fontsize=7)
    bounds = [row.get("bound_db", math.nan) for row in rows]
    if any(not math.isnan(bound) for bound in bounds):
        edges = [place + side for place in range(len(rows)) for side in (-0.5, 0.5)]
        axes.plot([bound for bound in bounds for _ in (0, 1)], edges, color="#c0392b", linewidth=1)
        axes.set_title("red: the lowest SQNR allowed", fontsize=8)
        most = max(most, *(bound for bound in bounds if not math.isnan(bound)))
    axes.set_xlim(0, 1.02 * most)
    axes.set_xlabel("SQNR, dB: larger is better")
