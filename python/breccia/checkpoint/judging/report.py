# SPDX-License-Identifier: Apache-2.0
"""One page about a checkpoint, to be sent around: what it is, where its bits and its errors are, what was lost, and
which programs open it. `gather` finds the data, the files of the folder ``page`` show them."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia._version import __version__
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import existing, path_of
from breccia.checkpoint.files import disk
from breccia.checkpoint.judging import histograms, template
from breccia.checkpoint.judging.output_error import OutputErrors
from breccia.checkpoint.judging.verify import verify_open
from breccia.checkpoint.judging.verify_lines import findings
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.models import is_embedding, is_head
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.reports import VerifyReport
from breccia.checkpoint.writing import manifest
from breccia.schemes import traps
from breccia.screen import amount, any_layer

_FAR = 6  # median deviations
_NAMED = 3  # tensors in a sentence
_LAYER = re.compile(r"(.*?\.\d+)\.(.+)")
_ROOMS = (  # the first that matches a name
    ("norms", re.compile(r"norm|(^|\.)ln_|layer_?scale")),
    ("experts", re.compile(r"experts?\b|router|mlp\.gate\.|moe")),
    ("attention", re.compile(r"attn|attention|[qkvo]_proj|qkv")),
    ("mlp", re.compile(r"mlp|ffn|feed_forward|(gate|up|down)_proj|\bfc\d?\b|intermediate|output\.dense")),
)


def report(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    *,
    moments: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Write one HTML page about a checkpoint, which needs no other file and no network.

    Args:
        path: the checkpoint, in any format.
        out: the .html file to write; must not be there.
        reference: the checkpoint that ``path`` was made of, to measure errors against.
        moments: file of `breccia.calibrate` of the reference, to measure the errors of layers' outputs, too.
        force: overwrite ``out``.
        progress: draw a line on a terminal.

    Returns:
        What the page shows, of JSON types: ``model``, ``rooms``, ``lost``, ``programs``, ``kinds``, ``layers``.

    Raises:
        FileExistsError: ``out`` is there.
        ValueError: ``out`` has another ending, or a checkpoint is not valid, or has no tensor of the other.
    """
    file = path_of(out, "out")
    if file.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out must end in .html, got {str(out)!r}")
    if file.exists() and not force:
        raise FileExistsError(f"out must not be there, {file} is: force=True replaces it")
    data = gather(path, reference, moments, progress)
    page = template.render(Path(__file__).parent / "page" / "report.html", data, FILTERS)
    disk.replace_file(file, page.encode())
    return data


def gather(
    path: str | os.PathLike[str],
    reference: str | os.PathLike[str] | None = None,
    moments: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """What `report` shows. JSON types only."""
    if moments is not None and reference is None:
        raise ValueError(f"moments must be left out without a reference, got {moments}")
    checkpoint = Checkpoint(existing(path, "path"), mapped=False)
    rows = {found.name: _row(checkpoint, found) for found in checkpoint.found}
    verified = None
    if reference is None:
        _measure_scales(checkpoint, rows, progress)
    else:
        verified = _measure(checkpoint, rows, Path(reference), moments, progress)
    made = manifest.read(checkpoint.path) or {}
    noted = made.get("notes")
    lost = [str(one) for one in noted] if isinstance(noted, list) else []
    lost += [f"{name}: {text}" for name, row in rows.items() for text in row["findings"]]
    lost += [] if verified is None else findings(verified)
    found = sorted(rows.values(), key=lambda row: _urgency(row, moments is not None))
    layers = _layers(rows.values())
    for number, row in enumerate(found):
        row["rank"] = number
    data = {
        "breccia": __version__,
        "title": _name(path),
        "reference": None if reference is None else _name(reference),
        "judged": moments is not None,
        "model": _model(checkpoint, rows, made),
        "found": in_words(found),
        "rooms": sorted(_groups(rows.values(), "room"), key=lambda one: -one["nbytes"]),
        "lost": list(dict.fromkeys(lost)),
        **_programs(checkpoint),
        "kinds": _groups(rows.values(), "kind", "shape", "format"),
        "layers": layers,
        "maps": _maps(layers, reference is not None, moments is not None),
    }
    checkpoint.close()
    return data


def _row(checkpoint: Checkpoint, found: Found) -> dict[str, Any]:
    """What headers say of a tensor."""
    weights, nbytes = math.prod(found.shape), checkpoint.nbytes(found)
    match = _LAYER.fullmatch(found.name)
    layer, rest = match.groups() if match else ("", found.name)
    return {
        "name": found.name,
        "layer": layer,
        "kind": any_layer(rest),
        "room": _room(found.name),
        "format": found.kind if found.format == "plain" else f"{found.format} {found.kind}",
        "quantized": found.format != "plain",
        "shape": list(found.shape),
        "weights": weights,
        "nbytes": nbytes,
        "bits": _bits(weights, nbytes),
        "findings": list(found.findings),
        "sqnr_db": None,
        "output_error": None,
        "bound_db": None,
        "failed": False,
        "mistake": "",
        "scales": None,
        "errors": None,
    }


def _room(name: str) -> str:
    if is_embedding(name) or "embed" in name:
        return "embeddings"
    if is_head(name):
        return "head"
    return next((room for room, pattern in _ROOMS if pattern.search(name.lower())), "other")


def _measure_scales(checkpoint: Checkpoint, rows: Mapping[str, Any], progress: bool) -> None:
    quantized = [found for found in checkpoint.found if found.format != "plain"]
    line = Progress(sum(map(checkpoint.nbytes, quantized)), progress)
    for found in quantized:
        rows[found.name]["scales"] = _scales_of(checkpoint, found, checkpoint.load(found))
        checkpoint.release(found)
        line.add(checkpoint.nbytes(found))
    line.finish()


def _measure(
    checkpoint: Checkpoint,
    rows: Mapping[str, Any],
    reference: Path,
    moments: str | os.PathLike[str] | None,
    progress: bool,
) -> VerifyReport:
    """Compare with the reference, and fill the rows: the report of `verify`."""

    def look(found: Found, exact: Any, tensor: Any) -> None:
        if found.format != "plain":
            row = rows[found.name]
            row["scales"] = _scales_of(checkpoint, found, tensor)
            row["errors"] = histograms.of_errors(exact, tensor)

    with Checkpoint(existing(reference, "reference"), mapped=False) as first:
        outputs = None if moments is None else OutputErrors(moments)
        verified = verify_open(first, checkpoint, outputs=outputs, moments=moments, progress=progress, look=look)
    ours = {name.removesuffix(".weight"): row for name, row in rows.items()}
    for one in verified["tensors"]:
        row = ours[one["name"].removesuffix(".weight")]
        row |= {"mistake": one["mistake"], "bound_db": one["bound_db"], "failed": one["name"] in verified["failed"]}
        row["sqnr_db"] = float(one["sqnr_db"])
        row["output_error"] = float(one["output_error"]) if "output_error" in one else None
    if not verified["tensors"]:
        raise ValueError(f"reference must have tensors of {checkpoint.path}, {reference} has none of them")
    return verified


def _scales_of(checkpoint: Checkpoint, found: Found, tensor: Any) -> dict[str, Any] | None:
    scaled = tensor.scaled if isinstance(tensor, OutsideTensor) else tensor
    scales = histograms.scales_of(checkpoint, found, scaled)
    return None if scales is None else histograms.of_scales(scales)


def _model(checkpoint: Checkpoint, rows: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    weights, nbytes = (sum(row[key] for row in rows.values()) for key in ("weights", "nbytes"))
    config = checkpoint.config
    named = config.get("architectures") or [config.get("model_type")]
    options = made.get("options") if isinstance(made.get("options"), dict) else {}
    version = made.get("breccia")
    given = {key: value for key, value in (options or {}).items() if value not in (None, False, [], {}, "nearest")}
    formats = dict.fromkeys(row["format"] for row in rows.values() if row["quantized"])
    return {
        "architecture": str(named[0]) if isinstance(named, list) and named and named[0] else "",
        "formats": list(formats) or ["not quantized"],
        "tensors": len(rows),
        "files": len(checkpoint.files),
        "weights": weights,
        "nbytes": nbytes,
        "bits": _bits(weights, nbytes),
        "made_by": f"breccia {version}" if version else "",
        "to": str(made.get("to", "")),
        "options": ", ".join(f"{key} {value}" for key, value in given.items()),
    }


def _groups(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Rows that are alike in some keys: their sizes, the median and lowest SQNR of those that are not equal to the
    reference's, and the place of the worst."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(repr([row[key] for key in keys]), []).append(row)
    total, found = sum(row["nbytes"] for some in groups.values() for row in some), []
    for some in groups.values():
        weights, nbytes = (sum(row[key] for row in some) for key in ("weights", "nbytes"))
        known = [row["sqnr_db"] for row in some if row["sqnr_db"] is not None and math.isfinite(row["sqnr_db"])]
        outputs = [row["output_error"] for row in some if row["output_error"] is not None]
        group = {key: some[0][key] for key in keys}
        group |= {"count": len(some), "weights": weights, "nbytes": nbytes, "bits": _bits(weights, nbytes)}
        group |= {"share": nbytes / total if total else 0.0, "formats": list(dict.fromkeys(r["format"] for r in some))}
        group |= {"median_db": statistics.median(known) if known else None, "lowest_db": min(known, default=None)}
        group |= {"output_error": max(outputs, default=None), "worst": min(some, key=_rank)["place"]}
        found.append(group)
    return found


def _rank(row: Mapping[str, Any]) -> int:
    return int(row["rank"])


def _bits(weights: int, nbytes: int) -> float:
    return 8 * nbytes / weights if weights else 0.0


def _programs(checkpoint: Checkpoint) -> dict[str, Any]:
    """Programs that open the formats, what they need for it, and what some of them refuse or misread."""
    pairs = {(found.format, found.kind) for found in checkpoint.found if found.format != "plain"}
    known: list[list[str]] = []
    needs = dict[str, None]()
    for name, kind in sorted(pairs or {("", "")}):
        format_ = bridges.bridge(name)
        known.append(format_.programs(kind))
        needs |= {format_.needs: None} if format_.needs else {}
    every = [program for program in known[0] if all(program in some for some in known)]
    return {"programs": every, "needs": list(needs), "readers": traps.readers(checkpoint)}


def _layers(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers in the order of their numbers, with a row for each kind of tensor in them; many experts share a row,
    the worst of them. Gives each row a place on the page."""
    layers: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        layers.setdefault(row["layer"], {}).setdefault(row["kind"], []).append(row)
    stacks = {layer.rpartition(".")[0] for layer in layers if layer}
    found, place = [], 0
    for layer in sorted(layers, key=_in_order):
        shown = []
        for some in layers[layer].values():
            place += 1
            for row in some:
                row["place"] = f"t{place}"
            worst = min(some, key=lambda row: _urgency(row, row["output_error"] is not None))
            label = f"{len(some)} × {worst['kind']}" if some[1:] else worst["kind"]
            look = "low" if worst["failed"] else "" if worst["quantized"] else "plain"
            ranked = worst["quantized"] and worst["sqnr_db"] is not None
            shown.append({"place": worst["place"], "label": label, "look": look, "ranked": ranked, "row": worst})
        label = layer.rpartition(".")[2] if len(stacks) == 1 else layer
        found.append({"layer": layer or "outside of the layers", "label": label or "other", "tensors": shown})
    return found


def _in_order(layer: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in layer.split(".")]


def _maps(layers: list[dict[str, Any]], compared: bool, judged: bool) -> list[dict[str, Any]]:
    """Heat maps of layers by kinds."""
    if not compared:
        return [_map(layers, "bits", "Bits a weight", lambda bits: f"{bits:.1f}", float, float)]
    maps = [_map(layers, "sqnr_db", "SQNR in dB", decibels, float, float)]
    if judged:
        maps.append(_map(layers, "output_error", "Error of the layer's output", percent, _loudness, _share))
    return maps


def _loudness(error: float) -> float:
    return -20 * math.log10(error) if error > 0 else math.inf


def _share(decibels: float) -> float:
    return float(10 ** (-decibels / 20))


def _map(
    layers: list[dict[str, Any]],
    key: str,
    title: str,
    text: Callable[[Any], str],
    goodness: Callable[[Any], float],
    inverse: Callable[[float], Any],
) -> dict[str, Any]:
    """One heat map of a figure, whose ``goodness`` the colours show: 12 of it at least between the best and the worst,
    so that tensors that are alike have like colours."""
    shown = [(layer, [one["row"] for one in layer["tensors"]]) for layer in layers]
    shown = [(layer, [row for row in some if row["quantized"] and row[key] is not None]) for layer, some in shown]
    columns = list(dict.fromkeys(row["kind"] for layer, some in shown if layer["label"] != "other" for row in some))
    values = {row["place"]: goodness(row[key]) for _, some in shown for row in some}
    finite = {value: None for value in values.values() if math.isfinite(value)}
    best = max(finite, default=0.0)
    width = max(best - min(finite, default=0.0), 12.0)
    rows = []
    for layer, some in shown:
        by_kind = {row["kind"]: row for row in some}
        cells: list[dict[str, Any]] = []
        for kind in columns:
            if (row := by_kind.get(kind)) is None:
                cells.append({"there": False})
                continue
            value = values[row["place"]]
            good = 1.0 if value == math.inf else max(1 - (best - value) / width, 0.0) if math.isfinite(value) else 0.0
            said = f"{row['name']}: {text(row[key])}"
            look = f"{'hot ' if good < 0.3 else ''}{'low' if row['failed'] else ''}"
            shown_cell = {"there": True, "to": row["place"], "text": text(row[key]), "said": said}
            cells.append({**shown_cell, "good": round(100 * good), "look": look})
        if any(cell["there"] for cell in cells):
            rows.append({"label": layer["label"], "layer": layer["layer"], "cells": cells})
    worst, top = (text(inverse(end)) for end in (best - width, best))
    names = [kind.removesuffix(".weight") for kind in columns]
    return {"title": title, "columns": names, "rows": rows, "worst": worst, "best": top}


def _name(path: str | os.PathLike[str]) -> str:
    """The last part of a path: a page is shown to others, for whom the rest means nothing."""
    return os.path.basename(os.path.abspath(path))


def in_words(rows: Iterable[Mapping[str, Any]]) -> str:
    """What stands out, three names at most: tensors below their bound, and those whose SQNR is far below the others';
    "" where nothing was compared."""
    known = [(float(row["sqnr_db"]), row) for row in rows if row["sqnr_db"] is not None]
    known = sorted(((db, row) for db, row in known if not math.isnan(db)), key=lambda pair: pair[0])
    finite = [db for db, _ in known if math.isfinite(db)]
    if not finite:
        return ""
    middle = statistics.median(finite)
    spread = max(statistics.median(abs(db - middle) for db in finite), 0.1)
    below = [(db, row) for db, row in known if db < row["bound_db"]]
    far = [(db, row) for db, row in known if db < middle - _FAR * spread]
    found, what = (below, "below the bound") if below else (far, "far below the others")
    if not found:
        return f"median {middle:.1f} dB, lowest {known[0][0]:.1f} dB: none is below its bound or far from the others"
    named = ", ".join(f"{row['name']} {db:.1f} dB" for db, row in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{what}, median {middle:.1f} dB: {named}{more}"


def _urgency(row: Mapping[str, Any], judged: bool) -> tuple[float, float, str]:
    """The worst first: the largest error of outputs where it is known, then the lowest SQNR."""
    db, error = row["sqnr_db"], row["output_error"]
    known = math.inf if db is None or math.isnan(db) else db
    return (-error if judged and error is not None and not math.isnan(error) else 0.0), known, row["name"]


def decibels(db: float | None) -> str:
    """Text of an SQNR."""
    if db is None or math.isnan(db):
        return "–"
    return "equal" if db == math.inf else f"{db:.1f}"


def percent(share: float | None) -> str:
    """Text of a share."""
    return "–" if share is None or math.isnan(share) else f"{100 * share:.2g}%"


def _bars(counts: list[int]) -> str:
    """A histogram as the path of an SVG of 2 × 20 units a bin."""
    most = max([1, *counts])
    drawn = [(2 * at, math.ceil(18 * count / most)) for at, count in enumerate(counts) if count]
    return "".join(f"M{x} 20v-{height}h2v{height}z" for x, height in drawn)


FILTERS: dict[str, Callable[[Any], str]] = {
    "bytes": amount,
    "bits": lambda bits: f"{bits:.2f}",
    "count": lambda number: f"{number:,}",
    "db": decibels,
    "percent": percent,
    "shape": lambda shape: "×".join(map(str, shape)) or "scalar",
    "bars": _bars,
    "wide": lambda counts: str(2 * len(counts)),
    "list": ", ".join,
}
