# SPDX-License-Identifier: Apache-2.0
"""The commands that write checkpoints: convert and merge-lora."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from breccia import _core
from breccia.cli import conversion
from breccia.cli.arguments import number, progress_of
from breccia.cli.printing import Shown
from breccia.cli.terminal import said
from breccia.screen import after, amount, wrapped

if TYPE_CHECKING:
    from breccia.checkpoint.reports import ConvertReport

__all__ = ["add_rounding", "convert", "merge_lora", "rounding_lines"]


def convert(args: argparse.Namespace) -> Shown:
    """``breccia convert``."""
    from breccia import checkpoint
    from breccia.checkpoint.planning.request import Options
    from breccia.checkpoint.planning.targets import parse_target, targets

    if args.to == "list":
        rows = targets()
        return rows, conversion.table(rows), True
    options: dict[str, Any] = {name: getattr(args, name) for name in Options.__annotations__}
    if args.dry_run:
        return _dry_run(args, options)
    if "," in args.to:
        raise ValueError(f"--to must be one target, or --dry-run given, which compares several, got {args.to!r}")
    if args.source is None or args.destination is None:
        raise ValueError("IN and OUT must be given, except with --to list")
    conversion.check_names(args.source, args.destination, parse_target(args.to))
    progress = progress_of(args)
    if args.strict and args.part:
        raise ValueError("--strict must be left out with --part: --finish refuses what would be noted")
    if args.force and (args.part or args.finish):
        raise ValueError("--force must be left out with --part and --finish: remove OUT before")
    if args.manifest and (args.part or args.finish):
        raise ValueError("--manifest must be left out with --part and --finish")
    if args.finish and args.device != "cpu":
        raise ValueError(f"--device must be left out with --finish, which rounds nothing, got {args.device}")
    if args.part:
        return _convert_part(args, options, progress)
    options |= {"strict": args.strict, "checksums": not args.no_checksums}
    if args.finish:
        report = checkpoint.finish(args.source, args.destination, args.to, progress=progress, **options)
    else:
        more = {"threads": args.threads, "force": args.force, "device": args.device}
        options |= more | {"manifest": args.manifest}
        report = checkpoint.convert(args.source, args.destination, args.to, progress=progress, **options)
    lines = [*conversion.notes(report), *conversion.cost(report), *_lost(report["requantized"]), *_kept(args, report)]
    lines += rounding_lines(report["output_errors"])
    lines += _advice(args, report)
    lines += conversion.following(report, parse_target(args.to).bridge)
    return report, lines, True


def _advice(args: argparse.Namespace, report: ConvertReport) -> list[str]:
    from breccia.checkpoint.planning.targets import parse_target

    return conversion.advice(report, parse_target(report["to"]).bridge, bool(args.imatrix or args.moments))


def _kept(args: argparse.Namespace, report: ConvertReport) -> list[str]:
    """The share of weights that stay as they were, for people."""
    kept = report["kept"]
    if not kept or not kept["largest"] or args.include or kept["bytes"] <= 0.1 * report["bytes_written"]:
        return []
    from breccia import bridges
    from breccia.checkpoint.planning.choices import unread_embedding
    from breccia.checkpoint.planning.targets import parse_target
    from breccia.checkpoint.reading.models import is_embedding

    share = kept["bytes"] / report["bytes_written"]
    target = parse_target(report["to"])
    if is_embedding(kept["largest"]) and target.bridge.readers.embeddings and target.format != bridges.OWN:
        part, saved = kept["largest_bytes"] / report["bytes_written"], kept["largest_bytes"] // 2
        kind = "int8" if "int8" in target.bridge.recipes else "q8_0"
        return wrapped(f"{part:.0%} of the bytes are the embedding: --embeddings {kind} saves {amount(saved)}")
    lines = [f"{share:.0%} of the bytes are weights kept as they were, the largest:", f"  {kept['largest']}"]
    if why := unread_embedding(kept["largest"], target):
        return [*lines, *wrapped(f"  {why}")]
    return [*lines, "  --include '*' takes those that are left out by name"]


def _dry_run(args: argparse.Namespace, options: dict[str, Any]) -> Shown:
    """Plan one target, or compare several."""
    from breccia import checkpoint
    from breccia.checkpoint.planning.targets import parse_target

    if args.source is None:
        raise ValueError("IN must be given, except with --to list")
    if args.part or args.finish:
        raise ValueError("--part and --finish must be left out with --dry-run")
    options |= {"strict": args.strict, "dry_run": True, "device": args.device}
    names = [name.strip() for name in args.to.split(",") if name.strip()]
    if len(names) == 1:
        if args.destination is not None:
            conversion.check_names(args.source, args.destination, parse_target(names[0]))
        report = checkpoint.convert(args.source, args.destination or "OUT", names[0], **options)
        lines = [
            *conversion.plan_lines(report),
            "",
            *conversion.notes(report),
            *conversion.cost(report),
            *_kept(args, report),
        ]
        lines += _advice(args, report)
        return report, [*lines, "nothing was written"], True

    def planned(name: str) -> Any:
        try:
            return checkpoint.convert(args.source, "OUT", name, **options)  # one name does not suit files and folders
        except ValueError as error:
            return {"to": name, "error": said(error)}

    reports = [planned(name) for name in names]
    if all("error" in one for one in reports):
        raise ValueError(reports[0]["error"])
    return {"plans": reports}, conversion.compared(reports), True


def _lost(requantized: Any) -> list[str]:
    """What requantizing changed, for people."""
    if requantized is None:
        return []
    count, lossless, sqnr = (requantized[key] for key in ("tensors", "lossless", "sqnr_db"))
    if lossless == count:
        return [f"requantize: lossless, {count} tensors hold every value that they held"]
    noise = "not finite" if sqnr is None else f"{sqnr:.1f} dB"
    return [f"requantize: {lossless} of {count} tensors lossless, SQNR of the others {noise}"]


def _convert_part(args: argparse.Namespace, options: dict[str, Any], progress: bool) -> Shown:
    from breccia.checkpoint.writing.parts import convert_part

    number, parts = args.part
    more = {"threads": args.threads, "checksums": not args.no_checksums, "device": args.device}
    report = convert_part(args.source, args.destination, args.to, number, parts, progress=progress, **more, **options)
    did = "was there" if report["was_there"] else f"{report['bytes_written']:,} bytes in {report['seconds']} s"
    return report, [f"part {number} of {parts}: {report['tensors']} tensors, {did}"], True


def merge_lora(args: argparse.Namespace) -> Shown:
    """``breccia merge-lora``."""
    from breccia import checkpoint

    report = checkpoint.merge_lora(
        args.base,
        args.adapter,
        args.destination,
        rounding=args.rounding,
        seed=args.seed if args.stochastic is None else args.stochastic,
        moments=args.moments,
        device=args.device,
        progress=progress_of(args),
        threads=args.threads,
        force=args.force,
        strict=args.strict,
    )
    tensors = ", ".join(f"{count} {action}" for action, count in report["tensors"].items())
    lines = conversion.notes(report)
    done = f"{conversion.amount(report['bytes_written'])} in {report['seconds']} s ({tensors})"
    lines += after(f"{report['destination']}:", done)
    if (kept := report["change"]["kept"]) is not None:
        share = f"{round(kept, 3) + 0.0:.1%}"  # no minus before a zero
        lines.append(f"{share} of the adapter's change kept, rounding: {report['change']['rounding']}")
    said = {"base": args.base, "out": args.destination, "adapter": args.adapter}
    lines += conversion.next_step("breccia verify {base} {out} --adapter {adapter}", **said)
    return report, lines, True


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
