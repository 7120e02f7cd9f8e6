# SPDX-License-Identifier: Apache-2.0
"""The commands that ask data: their arguments, and what they do."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from breccia.cli.arguments import add_common, count, number, progress_of, size
from breccia.cli.conversion import amount, next_step, notes
from breccia.cli.printing import Shown
from breccia.peers import require
from breccia.screen import after, wrapped

__all__ = ["add_calibrate", "add_evaluate", "add_plan_bits", "calibrate", "evaluate", "plan_bits"]


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``breccia calibrate``."""
    parser.add_argument("model", metavar="MODEL", help="a model's folder with its tokenizer, as transformers has them")
    _add_text(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="safetensors file to write")
    parser.add_argument(
        "--level",
        type=str.lower,
        choices=["diag", "block", "full"],
        default="full",
        help="what to record of each input: squares of columns, products within blocks of columns, or all products "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--memory", type=size, metavar="BYTES", help="bound of memory for all sums, such as 8GiB (default: none)"
    )
    parser.add_argument(
        "--block",
        type=count,
        default=16,
        metavar="N",
        help="columns of a block, for --level block (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="dtype in which the model runs (default: that of its files)")
    add_common(parser, force="replace FILE when the new one is complete")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``breccia evaluate``."""
    parser.add_argument("reference", metavar="REF", help="the reference: a model's folder with its tokenizer")
    parser.add_argument("checkpoint", metavar="OUT", help="the checkpoint to judge, in any format")
    _add_text(parser)
    parser.add_argument(
        "--top-k",
        type=count,
        metavar="K",
        help="keep only the K largest logits of each prediction, which saves disk (default: all)",
    )
    parser.add_argument(
        "--activations",
        type=str.lower,
        metavar="FORMAT",
        help="round inputs of quantized layers to nvfp4, fp8, mxfp8 or int8; 'file' rounds them as OUT says",
    )
    parser.add_argument("--dtype", default="float32", help="dtype in which both models run (default: %(default)s)")
    parser.add_argument("--scratch", metavar="DIR", help="folder for temporary files (the reference's logits)")
    add_common(parser)


def _add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", nargs="+", required=True, help="text files in UTF-8")
    parser.add_argument(
        "--tokens",
        type=count,
        metavar="N",
        help="how many tokens to use, rounded up to whole rows (default: all of the text)",
    )
    parser.add_argument("--length", type=count, default=512, metavar="N", help="tokens of a row (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="torch device on which models run (default: %(default)s)")
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python files of the model's folder that config.json asks for",
    )


def calibrate(args: argparse.Namespace) -> Shown:
    """Run ``breccia calibrate``: its report, and the lines that it prints."""
    require("transformers", "transformers")
    require("torch", "transformers")
    from breccia.calibration.folder import calibrate_folder

    names = ("tokens", "length", "level", "memory", "block", "dtype", "device", "force", "trust_remote_code")
    options = {name: getattr(args, name) for name in names}
    report = calibrate_folder(args.model, args.text, args.out, progress=progress_of(args), **options)
    inputs = ", ".join(f"{number} {level}" for level, number in report["inputs"].items() if number)
    done = f"{report['layers']} layers, inputs {inputs}, {report['tokens']:,} tokens, {amount(report['bytes'])}"
    step = "breccia convert {model} OUT --to FORMAT --moments {out} --method gptq"
    then = next_step(step, model=args.model, out=report["out"])
    return report, [*notes(report), *after(f"{report['out']}:", done), *then], True


def evaluate(args: argparse.Namespace) -> Shown:
    """Run ``breccia evaluate``: its report, and the lines that it prints."""
    from breccia.evaluation import evaluate as run
    from breccia.evaluation import render

    names = ("tokens", "length", "top_k", "dtype", "device", "trust_remote_code", "activations")
    options = {name: getattr(args, name) for name in names}
    report = run(args.reference, args.checkpoint, args.text, folder=args.scratch, progress=progress_of(args), **options)
    return report, render(report), True


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
