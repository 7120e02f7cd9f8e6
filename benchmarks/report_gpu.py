# SPDX-License-Identifier: Apache-2.0
"""The GPU section of docs/benchmarks.md and its plot, from what compare_gpu.py measured.

    python benchmarks/report_gpu.py benchmarks/results/gpu_h200.json

Replaces the section `## GPU` of the page and leaves the others as they are.
"""

from __future__ import annotations

import argparse
import json
import re
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PLOT = "benchmarks_gpu.svg"
BAR, GAP, LEFT, WIDTH = 16, 6, 330, 420  # pixels


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def by(results: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    return [row for row in results if row["group"] == group]


def error(value: float) -> str:
    return f"{value:.1e}"


def products(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            row["name"],
            row["shape"],
            row["accumulate"],
            number(row["us"], 1),
            round(row["tflops"]),
            number(row["cublas_us"], 1),
            number(row["ratio"]),
            f"{error(row['error'])} / {error(row['cublas_error'])}",
        ]
        for row in by(results, "product")
        if "ratio" in row
    ]
    head = ["FP8 product", "M×N×K", "accumulate", "µs", "TFLOP/s", "cuBLASLt µs", "ratio", "error, ours / cuBLASLt"]
    return table(head, rows)


def against(results: list[dict[str, Any]], group: str, title: str, peer: str, key: str) -> str:
    rows = [
        [
            row["name"].replace("BlockScaling", "").replace("Scaling", ""),
            row["shape"],
            number(row["us"], 1),
            number(row[key], 1),
            number(row["ratio"]),
            error(row["error"]) if "error" in row else "",
        ]
        for row in by(results, group)
    ]
    return table([title, "M×N×K", "µs", f"{peer} µs", "ratio", "error"], rows)


def bandwidths(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            row["name"],
            group,
            number(row["us"], 1),
            round(row["gb_per_s"]),
            number(row["of_copy"]),
            number(row.get("torch_operations_us"), 0),
        ]
        for group in ("cast", "dequantize", "requantize", "search")
        for row in by(results, group)
    ]
    return table(["bf16 8192×8192", "", "µs", "GB/s", "of copy", "whole-array operations, µs"], rows)


def bars(results: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """What the plot shows: casts against a copy, products against the vendor's library."""
    found = [(f"{row['group']} {row['name']} / copy", row["of_copy"]) for row in results if "of_copy" in row]
    for row in results:
        if row.get("ratio") is None:
            continue
        mode = f", {row['accumulate']}" if "accumulate" in row else ""
        found.append((f"{row['group']} {row['name']}{mode} {row['shape']}", row["ratio"]))
    return found


def plot(results: list[dict[str, Any]]) -> str:
    shown = bars(results)
    scale = WIDTH / max(value for _, value in shown)
    height = len(shown) * (BAR + GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{height}"'
        ' font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="14">speed relative to the peer in the same run (line: 1.0)</text>',
    ]
    for i, (name, value) in enumerate(shown):
        y = 24 + i * (BAR + GAP)
        colour = "#2a6f97" if value >= 1 else "#8fb8d0"
        parts += [
            f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<text x="{LEFT + value * scale + 4:.1f}" y="{y + 12}">{value:.2f}</text>',
        ]
    line = LEFT + scale
    parts.append(f'<line x1="{line:.1f}" x2="{line:.1f}" y1="20" y2="{height - 10}" stroke="#c1121f"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def section(data: dict[str, Any], source: str) -> str:
    before, after, results = data["machine"]["before"], data["machine"]["after"], data["results"]
    copy = by(results, "copy")[0]["gb_per_s"]
    accuracy = [
        [row["name"], *(error(row[key]) for key in ("block", "tensor_promoted", "tensor_fast"))]
        for row in by(results, "accuracy")
    ]
    return "\n".join(
        [
            "## GPU",
            "",
            f"{before['gpu']}, driver {before['driver_version']}, torch {before['torch']}, Triton {before['triton']},"
            f" CUDA {before['cuda']}; SM clock {before['clocks.sm']} before and {after['clocks.sm']} after the run (at"
            f" most {before['clocks.max.sm']}), memory {before['clocks.mem']}, power limit {before['power.limit']}."
            f" Made by `benchmarks/compare_gpu.py` ({source}) and `benchmarks/report_gpu.py`. Times are medians of CUDA"
            " graph replays; ratios are the peer's time over ours, alternating in one run. Errors are relative, against"
            " float64 of the dequantized operands; outputs are bfloat16, whose rounding alone is 1.7e-3. L2 cold: eight"
            " weights in turn. What falls short of its target, and why, is in [gpu.md](gpu.md).",
            "",
            f"![speed relative to peers]({PLOT})",
            "",
            "### Casts",
            "",
            f"A copy of the same tensor moves {copy:.0f} GB/s, read and written bytes counted.",
            "",
            bandwidths(results),
            "### FP8 by FP8",
            "",
            products(results),
            against(results, "small", "few rows", "cuBLASLt", "cublas_us"),
            "### bfloat16 by quantized weights",
            "",
            against(results, "weight-only", "weights", "bf16 cuBLAS", "bf16_cublas_us"),
            "### Grouped",
            "",
            against(results, "grouped", "weights", "bf16 torch._grouped_mm", "bf16_grouped_us"),
            "### Accumulation",
            "",
            table(["error, float32 output", "1×128 by 128×128", "per tensor, fp32 every 128", "fast"], accuracy),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    data = json.loads(path.read_text())
    page = DOCS / "benchmarks.md"
    text = page.read_text() if page.exists() else "# Benchmarks\n"
    made = section(data, f"results/{path.name}").rstrip() + "\n"
    kept = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    others = [part for part in kept if not part.startswith("## GPU\n")]
    page.write_text("\n".join(part.rstrip() + "\n" for part in [*others, made]))
    (DOCS / PLOT).write_text(plot(data["results"]))


if __name__ == "__main__":
    main()
