# SPDX-License-Identifier: Apache-2.0
"""One look tells which layers suffer: a row per quantized tensor, with its scales' histogram and, where
there is a reference, its errors'. HTML needs nothing; PNG needs matplotlib."""

from __future__ import annotations

import html
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges._common import codes, float32, global_scale, require
from breccia.bridges._outside import OutsideTensor
from breccia.checkpoint.source import Checkpoint
from breccia.checkpoint.verify import compare, values
from breccia.formats import decode
from breccia.scaled_tensor import ScaledTensor

__all__ = ["measure", "plot", "scales_of"]

_BINS = 24


def measure(path: str | os.PathLike[str], reference: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Per quantized tensor: histogram of log2 of its scales and, against a reference checkpoint, SQNR and
    histogram of its errors in units of the reference's root mean square. JSON types only."""
    checkpoint = Checkpoint(path, mapped=False)
    known = None if reference is None else Checkpoint(reference, mapped=False)
    originals = {} if known is None else {f.name: f for f in known.found}
    rows = []
    for found in checkpoint.found:
        if found.format == "plain":
            continue
        tensor = checkpoint.load(found)
        scaled = tensor.scaled if isinstance(tensor, OutsideTensor) else tensor
        row: dict[str, Any] = {"name": found.name, "format": f"{found.format} {found.kind}", "sqnr_db": None}
        if isinstance(scaled, ScaledTensor):
            scales = np.abs(scales_of(scaled)).reshape(-1)
            logs = np.log2(scales[np.isfinite(scales) & (scales > 0)])
            low, high = (math.floor(logs.min()), math.ceil(logs.max())) if logs.size else (0, 1)
            counts, _ = np.histogram(logs, bins=_BINS, range=(low, max(high, low + 1)))
            row |= {
                "scales": counts.tolist(),
                "low": low,
                "high": max(high, low + 1),
                "zeros": int((scales == 0).sum()),
            }
        original = originals.get(found.name)
        if known is not None and original is not None and original.shape == found.shape:
            reference_values = known.load(original)
            row["sqnr_db"] = compare(found.name, reference_values, tensor).sqnr_db
            row |= _errors(values(reference_values), values(tensor))
        rows.append(row)
        checkpoint.release(found)
    return rows


def _errors(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Histogram of the errors in units of the reference's root mean square, from -1 to 1 of the largest."""
    x = wanted.astype(np.float32).reshape(-1)
    root = math.sqrt(float(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0
    error = (got.astype(np.float32).reshape(-1) - x)[np.isfinite(x)]
    error = error[np.isfinite(error)] / (root or 1.0)
    most = float(np.abs(error).max()) if error.size else 0.0
    counts, _ = np.histogram(error, bins=_BINS, range=(-(most or 1.0), most or 1.0))
    return {"errors": counts.tolist(), "largest_error": most}


def scales_of(scaled: ScaledTensor) -> np.ndarray[Any, Any]:
    """Block scales as floats, the global scale in them."""
    scale = np.asarray(scaled.scale)
    if scale.dtype.itemsize == 1:
        scale = decode(codes(scale, "scale"), "float8_e4m3fn" if scaled.recipe.name == "nvfp4" else "float8_e8m0fnu")
    scale = float32(scale) if scale.dtype != np.float32 else scale
    second = global_scale(scaled, "multiplier")
    return scale if second is None else scale * second.reshape(-1)[0]


def plot(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
) -> list[dict[str, Any]]:
    """Draw a checkpoint's quantized tensors to ``out``, an .html, .svg or .png file.

    Raises:
        ImportError: PNG without matplotlib.
        ValueError: another kind of file, or nothing is quantized.
    """
    kind = Path(out).suffix.lower()
    if kind not in (".html", ".svg", ".png"):
        raise ValueError(f"out must end in .html, .svg or .png, got {str(out)!r}")
    if kind == ".png":
        require("matplotlib", "plot")
    rows = measure(path, reference)
    if not rows:
        raise ValueError(f"path must have quantized tensors, {path} has none")
    if kind == ".png":
        _png(rows, Path(out), str(path))
        return rows
    picture = _svg(rows)
    if kind == ".html":
        title = html.escape(str(path))
        picture = (
            f"<!doctype html><meta charset=utf-8><title>{title}</title>"
            f"<body style='font-family:sans-serif'><h1>{title}</h1>{picture}</body>\n"
        )
    Path(out).write_text(picture, "utf-8")
    return rows


def _colour(sqnr: float | None) -> str:
    if sqnr is None or math.isnan(sqnr):
        return "#88a"
    share = min(max((sqnr - 10) / 25, 0.0), 1.0)  # red at 10 dB, green at 35
    return f"hsl({round(share * 120)},65%,45%)"


_HEIGHT, _LABEL, _CHART, _BAR = 22, 460, 300, 260


def _svg(rows: list[dict[str, Any]]) -> str:
    finite = [r["sqnr_db"] for r in rows if r["sqnr_db"] is not None and math.isfinite(r["sqnr_db"])]
    most = max([*finite, 1.0])
    errors = _LABEL + _CHART + 20
    bars = errors + _CHART + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{bars + _BAR + 90}" height="{_HEIGHT * (len(rows) + 2)}" '
        f'font-family="monospace" font-size="12">',
        f'<text x="{_LABEL}" y="14">log2 of scales</text><text x="{errors}" y="14">errors</text>'
        f'<text x="{bars}" y="14">SQNR dB</text>',
    ]
    for i, row in enumerate(rows):
        y = _HEIGHT * (i + 1)
        name = row["name"] if len(row["name"]) <= 58 else "…" + row["name"][-57:]
        parts.append(f'<text x="0" y="{y + 15}">{html.escape(name)}<title>{html.escape(row["format"])}</title></text>')
        if "scales" in row:
            parts += _columns(row["scales"], _LABEL, y, "#557", f"2^{row['low']} to 2^{row['high']}")
        if "errors" in row:
            parts += _columns(row["errors"], errors, y, "#a66", f"up to {row['largest_error']:.3g} times the RMS")
        value = row["sqnr_db"]
        if value is not None:
            long = _BAR * min(value / most, 1) if math.isfinite(value) and value > 0 else _BAR * (value > 0)
            parts.append(
                f'<rect x="{bars}" y="{y + 3}" width="{long:.1f}" height="{_HEIGHT - 7}" fill="{_colour(value)}"/>'
                f'<text x="{bars + _BAR + 8}" y="{y + 15}">{value:.1f}</text>'
            )
    return "\n".join([*parts, "</svg>\n"])


def _columns(counts: list[int], x: float, y: float, colour: str, title: str) -> list[str]:
    top, width = max([*counts, 1]), _CHART / _BINS
    parts = []
    for k, count in enumerate(counts):
        tall = (_HEIGHT - 4) * count / top
        if count:
            parts.append(
                f'<rect x="{x + k * width:.1f}" y="{y + _HEIGHT - 2 - tall:.1f}" width="{width - 1:.1f}" '
                f'height="{tall:.1f}" fill="{colour}"><title>{title}</title></rect>'
            )
    return parts


def _png(rows: list[dict[str, Any]], out: Path, title: str) -> None:
    figure_module = require("matplotlib.figure", "plot")
    figure = figure_module.Figure(figsize=(18, 1.5 + 0.24 * len(rows)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=[3, 3, 2])
    figure.suptitle(title)
    for axes, key, label in (
        (left, "scales", "log2 of scales, each tensor's range"),
        (middle, "errors", "errors, from minus to plus each tensor's largest"),
    ):
        grid = np.array([np.array(r.get(key, [0] * _BINS)) / max([*r.get(key, []), 1]) for r in rows])
        axes.imshow(grid, aspect="auto", cmap="magma", interpolation="nearest", vmin=0, vmax=1)
        axes.set_xlabel(label)
    left.set_yticks(range(len(rows)), [r["name"][-60:] for r in rows], fontsize=7)
    values_db = [r["sqnr_db"] if r["sqnr_db"] is not None and math.isfinite(r["sqnr_db"]) else 0.0 for r in rows]
    right.barh(range(len(rows)), values_db)
    right.set_xlabel("SQNR dB against the reference")
    figure.savefig(out, dpi=120)
