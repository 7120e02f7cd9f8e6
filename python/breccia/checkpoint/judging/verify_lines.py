# SPDX-License-Identifier: Apache-2.0
"""The report of `breccia.checkpoint.verify` for people: layers that are alike share a line, the summary is last."""

from __future__ import annotations

import math
import statistics
from typing import Any

from breccia.checkpoint.judging.output_error import lines_of
from breccia.checkpoint.reports import VerifiedTensor, VerifyReport
from breccia.screen import any_layer, fitted, one_line, wrapped

_SHOWN = 12  # names in a list


def render(report: VerifyReport, every: bool = False) -> str:
    """The report of `verify` as a table of at most 80 columns, worst first. With ``every`` a line for each tensor,
    equal ones too; else layers that differ by a number alone, and both passed or failed alike, share a line with the
    worst figures of them."""
    rows = [t for t in report["tensors"] if every or not t["equal"]]
    judged = "output_error" in report
    groups: dict[Any, list[VerifiedTensor]] = {}
    failed = set(report["failed"])
    for t in rows:
        label = t["name"] if every else any_layer(t["name"])
        alike = (label, tuple(t["shape"]), t["mistake"], t["name"] in failed, t["bound_db"], "output_error" in t)
        groups.setdefault(alike, []).append(t)
    lines = [f"{'count':>5}  {'SQNR dB':>8}  {'cosine':>10}  {'max error':>10}"] if rows else []
    lines = [f"{line}  {'output' if judged else 'tensor'}{'  tensor' * judged}" for line in lines]
    for (label, *_), some in sorted(groups.items(), key=lambda item: _lowest(item[1])):
        lines += _line(label, some, judged)
    return "\n".join([*lines, *_summary(report)])


def _db(tensor: VerifiedTensor) -> float:
    return float(tensor["sqnr_db"])


def _lowest(some: list[VerifiedTensor]) -> float:
    return min((_db(t) for t in some), key=lambda db: -math.inf if math.isnan(db) else db)


def _line(label: str, some: list[VerifiedTensor], judged: bool) -> list[str]:
    """A line of tensors that are alike: the worst figures of them."""
    cosine, most = min(t["cosine"] for t in some), max(float(t["max_error"]) for t in some)
    figures = f"{len(some):>5}  {_lowest(some):>8.2f}  {cosine:>10.7f}  {most:>10.3g}"
    if judged:
        known = [float(t["output_error"]) for t in some if "output_error" in t]
        figures += f"  {max(known):>6.2%}" if known else "        "
    name = label if len(some) > 1 else some[0]["name"]
    mistake = some[0]["mistake"]
    return fitted(figures, one_line(name), *([f"← {mistake}?"] if mistake else []))


def _summary(report: VerifyReport) -> list[str]:
    tensors = report["tensors"]
    same = sum(t["equal"] for t in tensors)
    lines = [f"{len(tensors)} tensors compared, {same} equal in every value"]
    if "kept" in report:
        lines += _of_adapter(report)
    if "output_error" in report:
        lines += lines_of(report["output_error"])
    lines += [line for some in _findings(report) for line in _listed(some)]
    differ = [t for t in tensors if not t["equal"]]
    found = [_db(t) for t in differ if not math.isnan(_db(t))]
    if found:
        worst = min(differ, key=lambda t: math.inf if math.isnan(_db(t)) else _db(t))
        held = ", ".join(f"{bound:g} dB" for bound in sorted({t["bound_db"] for t in differ}))
        lines += wrapped(f"found: median {statistics.median(found):.2f} dB, lowest {min(found):.2f} dB {worst['name']}")
        lines.append(f"lowest SQNR allowed: {held}; {_below(report)}")
    lines.append("ok" if report["ok"] else "not ok (failed its bound, not the same, or missing)")
    return lines


def findings(report: VerifyReport) -> list[str]:
    """All that is wrong, in words."""
    return [text for some in _findings(report) for text in some]


def _findings(report: VerifyReport) -> list[list[str]]:
    known = {t["name"]: t for t in report["tensors"]}
    damaged = report["damaged"]
    return [
        [f"missing: {name}" for name in report["missing"]],
        report["scheme"],
        [f"damaged: {name} (not the bytes that convert wrote, by breccia.json)" for name in damaged],
        [f"failed: {name}{_why(known.get(name))}" for name in report["failed"] if name not in damaged],
    ]


def _why(tensor: VerifiedTensor | None) -> str:
    if tensor is None:
        return ""
    mistake = f": {tensor['mistake']}?" if tensor["mistake"] else ""
    return f" ({_db(tensor):.2f} dB, below {tensor['bound_db']:g} dB{mistake})"


def _below(report: VerifyReport) -> str:
    compared = {t["name"] for t in report["tensors"]}
    count = len(compared.intersection(report["failed"]))
    return f"{count or 'none'} below"


def _listed(texts: list[str]) -> list[str]:
    """Texts that begin with a mark, the first of many."""
    lines = [line for text in texts[:_SHOWN] for line in wrapped(f"! {text}")]
    more = len(texts) - _SHOWN
    return [*lines, f"! and {more} more, which --json has"] if more > 0 else lines


def _of_adapter(report: VerifyReport) -> list[str]:
    """What became of an adapter's change, the three tensors that kept least of it named."""
    changed = sorted((t for t in report["tensors"] if "kept" in t), key=lambda t: float(t["kept"]))
    lines = [f"{report['kept']:.1%} of the adapter's change kept, in {len(changed)} tensors"]
    for t in changed[:3]:
        lines += fitted(f"{t['kept']:>8.1%}", one_line(t["name"]))
    return lines
