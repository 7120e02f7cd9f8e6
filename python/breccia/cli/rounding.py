# SPDX-License-Identifier: Apache-2.0
"""What ``breccia convert`` takes of how weights are rounded, and what it says of it."""

from __future__ import annotations

import argparse
from typing import Any

from breccia import _core
from breccia.cli.arguments import number

__all__ = ["add_rounding", "rounding_lines"]


def add_rounding(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument(
        "--imatrix",
        metavar="FILE",
        help="importance of each column: an imatrix of llama.cpp, or a file of breccia calibrate",
    )
    parser.add_argument(
        "--moments", metavar="FILE", help="file of breccia calibrate, for better scales and for --method gptq"
    )
    parser.add_argument(
        "--method",
        type=str.lower,
        choices=["nearest", "gptq"],
        default="nearest",
        help="how weights are rounded; gptq corrects in later columns the error of earlier ones, and needs --moments "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        type=str.lower,
        choices=["act", "natural"],
        help="order of columns for gptq; act takes those with the largest inputs first (default: act)",
    )
    parser.add_argument(
        "--smooth",
        action="store_true",
        help="make inputs easier to quantize, by --moments: factors go into norms and weights, the float model stays",
    )
    damping = f"damping of gptq, as a share of the mean diagonal (default: {_core.GPTQ_DAMP:g})"
    parser.add_argument("--damp", type=number, metavar="SHARE", help=damping)


def rounding_lines(errors: dict[str, dict[str, Any]]) -> list[str]:
    """What is said of a report's "output_errors" on a terminal: the mean, that of nearest, and the worst."""
    known = {name: said for name, said in errors.items() if said["output_error"] is not None}
    if not errors:
        return []
    if not known:
        return [f"gptq: {len(errors)} tensors"]
    mean, nearest = (sum(said[key] for said in known.values()) / len(known) for key in ("output_error", "nearest"))
    worst = max(known, key=lambda name: known[name]["output_error"])
    return [
        f"gptq: output error {mean:.2%} on average of {len(known)} tensors, to nearest without data {nearest:.2%}",
        f"  the largest, {known[worst]['output_error']:.2%}: {worst}",
    ]
