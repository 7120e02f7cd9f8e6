# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib as SVG whose bytes follow from their numbers: text stays text, and a diff can be read."""

from __future__ import annotations

import io
from typing import Any

TEXT, NOTE, GRID = "#222222", "#666666", "#e3e3e3"
_SIZE = 72  # points, and units of the SVG, to an inch
_LOOK = {
    "font.family": ["system-ui", "DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "text.color": TEXT,
    "svg.fonttype": "none",
    "svg.hashsalt": "breccia",
}


def axes(width: int, height: int, title: str, area: tuple[int, int, int, int], note: str = "") -> Any:
    """Axes on a white page of so many points; `area` is their left, top, right and bottom on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _SIZE, height / _SIZE))
    left, top, right, bottom = area
    made = figure.add_axes(
        (left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height), frameon=False
    )
    figure.text(12 / width, 1 - 18 / height, title, fontsize=11, fontweight="bold", va="center")
    figure.text(12 / width, 1 - 34 / height, note, fontsize=8, color=NOTE, va="center")
    made.tick_params(length=0, labelcolor=NOTE, labelsize=8)
    made.set_axisbelow(True)
    return made


def svg(figure: Any) -> str:
    """The text of the picture."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(_LOOK):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
