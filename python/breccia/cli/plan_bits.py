# SPDX-License-Identifier: Apache-2.0
"""``breccia plan-bits``: its arguments, and what it says."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from breccia.cli.arguments import add_common, number, progress_of, size
from breccia.cli.conversion import amount, next_step, notes
from breccia.cli.printing import Shown
from breccia.screen import after, wrapped

__all__ = ["add_plan_bits", "plan_bits"]


def add_plan_bits(parser: argparse.ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("source", metavar="MODEL", help="safetensors file, directory of shards, or GGUF file")
    parser.add_argument("--moments", metavar="FILE", required=True, help="file of breccia calibrate for MODEL")
    most = parser.add_mutually_exclusive_group(required=True)
    most.add_argument(
        "--bits",
        type=number,
        metavar="B",
        help="bits that a weight which is planned may take on average; embeddings and all that stays as it is are not "
        "counted",
    )
    most.add_argument(
        "--size", type=size, metavar="BYTES", help="bytes that the whole model may take, such as 4GB or 4GiB"
    )
    parser.add_argument(
        "--formats",
        default="nvfp4,fp8,bf16",
        metavar="NAMES",
        help="recipes to choose from; bf16 means that a layer stays as it is (default: %(default)s)",
    )
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN", help="plan only these names")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="leave these names alone")
    parser.add_argument("--out", metavar="FILE", help="TOML file to write the scheme to (default: print it)")
    add_common(parser, force="replace FILE when the new one is complete")


def plan_bits(args: argparse.Namespace) -> Shown:
    """Run it: its report, and the lines that it prints."""
    from breccia.checkpoint import plan_bits as run
    from breccia.checkpoint.files import disk
    from breccia.checkpoint.planning.bits import to_toml

    out = None if args.out is None else Path(args.out)
    if out is not None and out.exists() and not args.force:
        raise FileExistsError(f"{out} is there: --force replaces it")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(f"{out.parent} must be a folder: the scheme is to be written there")
    formats = [name.strip() for name in args.formats.split(",") if name.strip()]
    options = {"size": args.size, "include": args.include, "exclude": args.exclude, "progress": progress_of(args)}
    report = run(args.source, args.moments, args.bits, formats, **options)
    lines = list(_summary(report))
    if out is None:
        return report, [*(f"# {line}" for line in lines), "", to_toml(report).rstrip()], True
    disk.replace_file(out, to_toml(report).encode())
    said = after(f"{out}:", f"{len(report['groups'])} groups of layers")
    step = "breccia convert {source} OUT --to FORMAT --scheme {out}"
    return report, [*lines, *said, *next_step(step, source=args.source, out=out)], True


def _summary(report: Mapping[str, Any]) -> list[str]:
    weights = sum(group["weights"] for group in report["groups"])
    lines = notes(report)
    for name in report["rules"]:
        some = [group for group in report["groups"] if group["format"] == name]
        share = sum(group["weights"] for group in some) / weights
        groups = f"{len(some):>5} {'groups,' if some[1:] else 'group, '}"
        lines.append(f"{name:<16} {groups} {share:.1%} of the weights that are planned")
    lines.append(
        f"{report['bits']:.3f} bits a planned weight, {report['bits_of_all']:.3f} a weight of the model: "
        f"{amount(report['bytes'])}"
    )
    others = "".join(f"; {name} alone {error:.4g}" for name, error in report["errors"].items())
    return [*lines, *wrapped(f"summed output error {report['error']:.4g}{others}")]
