# SPDX-License-Identifier: Apache-2.0
"""One look tells which layers suffer: a row per quantized tensor, with its scales' histogram and, where
there is a reference, its errors'."""

from __future__ import annotations

import math
import os
import statistics
from typing import Any

import numpy as np

from breccia.bridges.common import codes, float32, global_scale
from breccia.bridges.outside import OutsideTensor, comparable
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import count_of, path_of
from breccia.checkpoint.judging.bounds import bits_of, least
from breccia.checkpoint.judging.picture import ERROR_RANGE, draw
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.source import Checkpoint
from breccia.comparison import compare, error_magnitudes, magnitudes
from breccia.formats import decode
from breccia.peers import require
from breccia.scaled_tensor import ScaledTensor

__all__ = ["MOST_ROWS", "in_words", "measure", "plot", "scales_of"]

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
