# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documents."""

from __future__ import annotations

from typing import Any

from documents.drawing import GRID, NOTE, axes, svg
from documents.markdown import load

# The points of the accuracy picture: recipe, label, and where its label stands from the point.
POINTS = [
    ("INT8Scaling()", "INT8, per row", 12, 5),
    ("INT8Scaling(group_size=128)", "INT8, 128", 12, 5),
    ("Float8BlockScaling()", "FP8, 1 × 128", 12, -3),
    ("Float8CurrentScaling()", "FP8, per tensor", -12, 6),
    ("MXFP8BlockScaling()", "MXFP8", 12, 13),
    ("NVFP4BlockScaling()", "NVFP4", 12, 12),
    ('NVFP4BlockScaling(scale_search="mse")', "NVFP4, searched", 12, 0),
    ("MXFP4BlockScaling()", "MXFP4", 12, 13),
    ("INT4Scaling()", "INT4, 128", -12, 8),
    ('INT4Scaling(scale_search="mse")', "INT4, 128, searched", -12, 0),
]
COLOURS = {"INT": "#c0562f", "FP8": "#1f5f8b", "MXFP8": "#1f5f8b", "NVFP4": "#2d8a57", "MXFP4": "#2d8a57"}


def accuracy() -> str:
    """Bits per weight against signal to quantization noise."""
    found = {row["recipe"]: row for row in load("accuracy")["results"]}
    title = "What bits buy: Gaussian weights, 1024 × 1024, mean of 8 seeds"
    plot = axes(560, 310, title, (56, 42, 540, 264))
    plot.set(xlim=(2, 10), ylim=(14, 46), xticks=range(2, 11), yticks=range(15, 46, 5))
    plot.grid(color=GRID)
    plot.set_xlabel("bits per weight, all scales included", color=NOTE)
    plot.set_ylabel("signal to quantization noise, dB", color=NOTE)
    for recipe, label, dx, dy in POINTS:
        row = found[recipe]
        colour = next(value for start, value in COLOURS.items() if label.startswith(start))
        at = 32 * row["ratio"], row["sqnr_db"]
        plot.plot(*at, "o", color=colour, markersize=7)
        side = "left" if dx > 0 else "right"
        plot.annotate(label, at, (0.7 * dx, 0.7 * (4 - dy)), textcoords="offset points", ha=side, va="center")
    return svg(plot.figure)


def _gpu_groups() -> list[tuple[str, list[tuple[str, float]]]]:
    """Titles, and the names and ratios below each."""
    results = load("gpu")["results"]
    products = [
        (f"{r['name'].replace('x', ' × ')}, {r['accumulate']}", r["ratio"])
        for r in results
        if r["group"] == "product" and r.get("ratio") and r["shape"] == "4096x4096x4096"
    ]
    groups = [("FP8 × FP8, against cuBLASLt", products)]
    for rows in (1, 16, 64, 256):
        members = [
            (
                r["name"].split(",")[0].replace("BlockScaling", "").replace("Scaling", "").replace("Float8", "FP8"),
                r["ratio"],
            )
            for r in results
            if r["group"] == "weight-only"
            and r["shape"] == f"{rows}x7168x4096"
            and r["name"].endswith("cold")
            and not r["name"].startswith("reading")
        ]
        groups.append((f"{rows} row{'s' * (rows > 1)} of bf16, against cuBLAS", members))
    return groups


def gpu() -> str:
    """Speed on a GPU relative to a peer of the same run, on a logarithmic axis around 1."""
    groups = _gpu_groups()
    lines = sum(len(members) + 1.4 for _, members in groups)
    bottom = 48 + 15 * lines
    note = "products of 4096³, and of quantized weights 7168 × 4096 that are not in the L2 cache"
    title = f"{load('gpu')['machine']['before']['gpu']}: times as fast as the vendor's library"
    plot = axes(570, round(bottom) + 26, title, (214, 48, 540, round(bottom)), note)
    plot.set_xscale("log", base=2)
    plot.set(xlim=(0.5, 4), ylim=(lines, 0))
    plot.set_xticks([0.5, 1, 2, 4], ["0.5 ×", "1 ×", "2 ×", "4 ×"])
    plot.grid(axis="x", color=GRID)
    plot.axvline(1, color="#888888", linewidth=0.8)
    y, names = 0.0, {}
    for heading, members in groups:
        plot.text(-0.62, y + 0.7, heading, transform=plot.get_yaxis_transform(), fontweight="bold", va="center")
        y += 1
        for name, ratio in members:
            _bar(plot, y + 0.5, ratio)
            names[y + 0.5] = name
            y += 1
        y += 0.4
    plot.set_yticks(list(names), list(names.values()))
    return svg(plot.figure)


def _bar(plot: Any, y: float, ratio: float) -> None:
    """From 1 to the ratio, with the number at its end."""
    faster = ratio >= 1
    plot.barh(y, ratio - 1, left=1, height=0.64, color="#1f5f8b" if faster else "#c0562f")
    side = "left" if faster else "right"
    plot.annotate(
        f"{ratio:.2f}", (ratio, y), (4 if faster else -4, 0), textcoords="offset points", ha=side, va="center"
    )
