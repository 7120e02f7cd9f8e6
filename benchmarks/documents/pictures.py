# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG, without a library: text stays text, and a diff can be read."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from documents.markdown import load

STYLE = """<style>
text { font: 13px system-ui, 'DejaVu Sans', sans-serif; fill: #222 }
.title { font-size: 15px; font-weight: 600 } .note { fill: #666; font-size: 12px } .axis { stroke: #e3e3e3 }
.mid { text-anchor: middle } .end { text-anchor: end }
</style>"""

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


def _page(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join(
        [
            head,
            STYLE,
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="16" y="26" class="title">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def accuracy() -> str:
    """Bits per weight against signal to quantization noise."""
    found = {row["recipe"]: row for row in load("accuracy")["results"]}
    left, right, top, bottom = 70, 700, 52, 350
    low, high = (2.0, 10.0), (14.0, 46.0)

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + (x - low[0]) / (low[1] - low[0]) * (right - left)
        return across, bottom - (y - high[0]) / (high[1] - high[0]) * (bottom - top)

    parts = []
    for bits in range(2, 11):
        x, _ = at(bits, 0)
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top}" y2="{bottom}" class="axis"/>')
        parts.append(f'<text x="{x:.0f}" y="{bottom + 18}" class="note mid">{bits}</text>')
    for db in range(15, 46, 5):
        _, y = at(0, db)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}" class="axis"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" class="note end">{db}</text>')
    middle = (left + right) // 2
    parts.append(f'<text x="{middle}" y="{bottom + 40}" class="note mid">bits per weight, all scales included</text>')
    parts.append(
        f'<text x="24" y="{(top + bottom) // 2}" class="note mid" transform="rotate(-90 24 {(top + bottom) // 2})">'
        "signal to quantization noise, dB</text>"
    )
    for recipe, label, dx, dy in POINTS:
        row = found[recipe]
        x, y = at(32 * row["ratio"], row["sqnr_db"])
        colour = next(value for start, value in COLOURS.items() if label.startswith(start))
        side = ' class="end"' if dx < 0 else ""
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{colour}"/>')
        parts.append(f'<text x="{x + dx:.1f}" y="{y + dy:.1f}"{side}>{escape(label)}</text>')
    return _page(740, 404, "What bits buy: Gaussian weights, 1024 × 1024, mean of 8 seeds", parts)


def gpu() -> str:
    """Speed on the H200 relative to a peer of the same run, on a logarithmic axis around 1."""
    results = load("gpu_h200")["results"]
    groups = []
    products = [
        (f"{r['name'].replace('x', ' × ')}, {r['accumulate']}", r["ratio"])
        for r in results
        if r["group"] == "product" and r.get("ratio") and r["shape"] == "4096x4096x4096"
    ]
    groups.append(("FP8 × FP8, against cuBLASLt", products))
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
    left, right, line, y = 285, 700, 20, 72
    unit = (right - left) / math.log2(8)  # from 1/2 to 4

    def x(ratio: float) -> float:
        return left + (math.log2(ratio) + 1) * unit

    parts: list[str] = []
    for title, members in groups:
        parts.append(f'<text x="16" y="{y + 14}" font-weight="600">{escape(title)}</text>')
        y += line + 2
        for name, ratio in members:
            start, end = sorted((x(1), x(ratio)))
            colour = "#1f5f8b" if ratio >= 1 else "#c0562f"
            parts.append(f'<text x="{left - 10}" y="{y + 13}" class="end">{escape(name)}</text>')
            parts.append(
                f'<rect x="{start:.1f}" y="{y + 3}" width="{max(end - start, 1):.1f}" height="13" fill="{colour}"/>'
            )
            shown, side = (end + 6, "") if ratio >= 1 else (start - 6, ' class="end"')
            parts.append(f'<text x="{shown:.1f}" y="{y + 14}"{side}>{ratio:.2f}</text>')
            y += line
        y += 8
    axis = []
    for tick in (0.5, 1, 2, 4):
        stroke = "#888" if tick == 1 else "#e3e3e3"
        axis.append(f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="56" y2="{y}" stroke="{stroke}"/>')
        axis.append(f'<text x="{x(tick):.0f}" y="{y + 16}" class="note mid">{tick:g} ×</text>')
    note = "products of 4096³, and of quantized weights 7168 × 4096 that are not in the L2 cache"
    parts.append(f'<text x="16" y="46" class="note">{note}</text>')
    return _page(760, y + 28, "NVIDIA H200: times as fast as the vendor's library", [*axis, *parts])
