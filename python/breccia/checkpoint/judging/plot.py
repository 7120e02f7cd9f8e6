# SPDX-License-Identifier: Apache-2.0
"""One look tells which layers suffer: a row per quantized tensor, with its scales' histogram and, where
there is a reference, its errors'."""

from __future__ import annotations

import html
import io
import math
import os
import statistics
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.common import codes, float32, global_scale
from breccia.bridges.outside import OutsideTensor, comparable
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import count_of, path_of
from breccia.checkpoint.files import disk
from breccia.checkpoint.judging.verify import bits_of, least
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.source import Checkpoint
from breccia.comparison import compare, error_magnitudes, magnitudes
from breccia.formats import decode
from breccia.peers import require
from breccia.scaled_tensor import ScaledTensor

__all__ = ["ERROR_RANGE", "MOST_ROWS", "PER_OCTAVE", "draw", "in_words", "measure", "plot", "scales_of"]

_FAR = 6  # median deviations
_NAMED = 3  # tensors in a sentence
MOST_ROWS = 200  # of a picture whose caller does not say how many


def measure(
    path: str | os.PathLike[str], reference: str | os.PathLike[str] | None = None, progress: bool = False
) -> list[dict[str, Any]]:
    """Per quantized tensor: histogram of log2 of its scales, of half an octave a bin, and, against a reference
    checkpoint, SQNR, the bound that `verify` has for it, and histogram of log2 of its errors. JSON types only."""
    checkpoint = Checkpoint(path, mapped=False)
    known = None if reference is None else Checkpoint(reference, mapped=False)
    originals = {} if known is None else {f.name: f for f in known.found}
    rows = []
    quantized = [found for found in checkpoint.found if found.format != "plain"]
    line = Progress(sum(checkpoint.nbytes(found) for found in quantized), progress)
    for found in quantized:
        tensor = checkpoint.load(found)
        scaled = tensor.scaled if isinstance(tensor, OutsideTensor) else tensor
        row: dict[str, Any] = {"name": found.name, "format": f"{found.format} {found.kind}", "sqnr_db": None}
        scales = scales_of(scaled) if isinstance(scaled, ScaledTensor) else _scales_of_blocks(checkpoint, found)
        row |= {} if scales is None else _scales(scales)
        original = originals.get(found.name)
        if known is not None and original is not None and original.shape == found.shape:
            stored = known.load(original)
            row |= _errors(comparable(stored), comparable(tensor))
            row["bound_db"] = least(bits_of(known, original, stored), bits_of(checkpoint, found, tensor))
        rows.append(row)
        checkpoint.release(found)
        line.add(checkpoint.nbytes(found))
    line.finish()
    return rows


def _scales_of_blocks(checkpoint: Checkpoint, found: Found) -> np.ndarray[Any, Any] | None:
    """Scales of a tensor of blocks that is read as values: of K-quants and others; None where they are not known."""
    parts = [_scales_of_blocks(checkpoint, one) for one in found.origin.members]
    if parts:
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if "blocks" not in found.parts or found.origin.whole is not None:
        return None
    scales: np.ndarray[Any, Any] | None = checkpoint.container.scales_of_blocks(checkpoint.blocks(found), found.kind)
    return scales


def _scales(scales: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Histogram of log2 of the scales, from the octave of the least to that of the largest."""
    found = magnitudes(scales)
    there = np.flatnonzero(found.counts)
    low = (found.first + int(there[0])) // 2 if there.size else 0
    mantissa, exponent = math.frexp(found.largest)
    high = exponent - (mantissa == 0.5) if there.size else 1  # a power of two ends the octave below it
    high = max(high, low + 1)
    return {"scales": found.between(low, high).tolist(), "low": low, "high": high, "zeros": found.zeros}


def _errors(reference: Any, tensor: Any) -> dict[str, Any]:
    """SQNR, and a histogram of log2 of the errors' sizes in units of the reference's root mean square, over
    `ERROR_RANGE`."""
    sums = compare(reference, tensor)
    root = math.sqrt(sums.signal / sums.count) if sums.count else 0.0
    limits = np.finfo(np.float32)
    unit = 1.0 if root == 0 or math.isnan(root) else min(max(root, float(limits.tiny)), float(limits.max))
    found = error_magnitudes(reference, tensor, unit)
    errors = found.between(*ERROR_RANGE)
    errors[0] += found.zeros
    return {"sqnr_db": sums.sqnr_db, "errors": errors.tolist(), "largest_error": found.largest}


def scales_of(scaled: ScaledTensor) -> np.ndarray[Any, Any]:
    """Block scales as floats, the global scale in them."""
    scale = np.asarray(scaled.scale)
    if scale.dtype.itemsize == 1:
        scale = decode(codes(scale, "scale"), "float8_e4m3fn" if scaled.recipe.name == "nvfp4" else "float8_e8m0fnu")
    scale = float32(scale) if scale.dtype != np.float32 else scale
    second = global_scale(scaled, "multiplier")
    with np.errstate(invalid="ignore", over="ignore"):  # what a file says may be anything
        return scale if second is None else scale * second.reshape(-1)[0]


def plot(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    *,
    top: int | None = None,
    force: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Draw a checkpoint's quantized tensors.

    Args:
        path: the checkpoint.
        out: an .html, .svg or .png file; must not be there.
        reference: checkpoint to measure errors against.
        top: draw only so many. Those of the least SQNR come first; without a reference those of the widest range of
            scales. By default all, or 200 of more than that.
        force: overwrite ``out``.
        progress: draw a line on a terminal.

    Returns:
        What was measured of every tensor, of JSON types.

    Raises:
        ImportError: matplotlib is not installed.
        FileExistsError: ``out`` is there.
        ValueError: another kind of file, or nothing is quantized.
    """
    file = path_of(out, "out")
    most = None if top is None else count_of(top, "top")
    if file.suffix.lower() not in (".html", ".svg", ".png"):
        raise ValueError(f"out must end in .html, .svg or .png, got {str(out)!r}")
    if file.exists() and not force:
        raise FileExistsError(f"out must not be there, {file} is: --force overwrites it")
    require("matplotlib", "plot")
    rows = measure(path, reference, progress)
    if not rows:
        raise ValueError(f"path must have quantized tensors, {path} has none")
    if reference is not None and all(row["sqnr_db"] is None for row in rows):
        raise ValueError(f"reference must have tensors that {path} has quantized, {reference} has none of them")
    shown = sorted(rows, key=_urgency)[: most or MOST_ROWS]
    title = _name(path) if reference is None else f"{_name(path)} against {_name(reference)}"
    kind = "widest range of scales" if reference is None else "largest error"
    title += f"\nthe {len(shown)} of {len(rows)} tensors with the {kind}" if len(shown) < len(rows) else ""
    title += f"\n{said}" if (said := in_words(rows)) else ""
    draw(shown, file, title)
    return rows


def _name(path: str | os.PathLike[str]) -> str:
    """The last part of a path: a picture is shown to others, for whom the rest means nothing."""
    return os.path.basename(os.path.abspath(path))


def in_words(rows: list[dict[str, Any]]) -> str:
    """What stands out of `measure`'s rows, three at most: tensors below their bound, and those whose SQNR is far below
    the others'; "" where nothing was compared."""
    known = [(float(row["sqnr_db"]), row) for row in rows if row["sqnr_db"] is not None]
    known = sorted(((db, row) for db, row in known if not math.isnan(db)), key=lambda pair: pair[0])
    finite = [db for db, _ in known if math.isfinite(db)]
    if not finite:
        return ""
    middle = statistics.median(finite)
    spread = max(statistics.median(abs(db - middle) for db in finite), 0.1)
    below = [(db, row) for db, row in known if db < row.get("bound_db", -math.inf)]
    far = [(db, row) for db, row in known if db < middle - _FAR * spread]
    found, what = (below, "below the bound") if below else (far, "far below the others")
    if not found:
        return f"median {middle:.1f} dB, lowest {known[0][0]:.1f} dB: none is below its bound or far from the others"
    named = ", ".join(f"{row['name']} {db:.1f} dB" for db, row in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{what}, median {middle:.1f} dB: {named}{more}"


def _urgency(row: dict[str, Any]) -> tuple[float, float]:
    value = row["sqnr_db"]
    return (math.inf if value is None or math.isnan(value) else value), row.get("low", 0) - row.get("high", 0)


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
