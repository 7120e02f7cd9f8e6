# SPDX-License-Identifier: Apache-2.0
"""The commands that run models over text: their arguments, and what they do."""

from __future__ import annotations

import argparse
from typing import Any

from breccia.cli.arguments import add_common, count, progress_of, size
from breccia.cli.conversion import amount, next_step, notes
from breccia.cli.terminal import after
from breccia.peers import require

__all__ = ["add_calibrate", "add_evaluate", "calibrate", "evaluate"]


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``breccia calibrate``."""
    parser.add_argument("model", metavar="MODEL", help="a model's folder with its tokenizer, as transformers has them")
    _add_text(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="safetensors file of moments to make")
    parser.add_argument(
        "--level",
        type=str.lower,
        choices=["diag", "block", "full"],
        default="full",
        help="the most to keep (default: %(default)s)",
    )
    parser.add_argument("--memory", type=size, metavar="BYTES", help="for all sums, as 8GiB (default: no bound)")
    parser.add_argument("--block", type=count, default=16, metavar="N", help="columns in a run (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="the model's type (default: that of its files)")
    add_common(parser, force="replace FILE when the new one is complete")


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``breccia evaluate``."""
    parser.add_argument("reference", metavar="REF", help="the reference: a model's folder with its tokenizer")
    parser.add_argument("checkpoint", metavar="OUT", help="what to judge: a checkpoint of any format, of that model")
    _add_text(parser)
    parser.add_argument("--top-k", type=count, metavar="K", help="keep K logits of each prediction (default: all)")
    parser.add_argument("--dtype", default="float32", help="what both compute in (default: %(default)s)")
    parser.add_argument("--scratch", metavar="DIR", help="folder for the reference's logits while this runs")
    add_common(parser)


def _add_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", nargs="+", required=True, help="text files in UTF-8")
    parser.add_argument(
        "--tokens",
        type=count,
        metavar="N",
        help="how many tokens to take, rounded up to a row (default: all of the text)",
    )
    parser.add_argument("--length", type=count, default=512, metavar="N", help="tokens in a row (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where models run, as torch spells it (default: %(default)s)")


def calibrate(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run ``breccia calibrate``: its report, and the lines that it prints."""
    require("transformers", "transformers")
    require("torch", "transformers")
    from breccia.calibration.folder import calibrate_folder

    names = ("tokens", "length", "level", "memory", "block", "dtype", "device", "force")
    options = {name: getattr(args, name) for name in names}
    report = calibrate_folder(args.model, args.text, args.out, progress=progress_of(args), **options)
    inputs = ", ".join(f"{number} {level}" for level, number in report["inputs"].items() if number)
    done = f"{report['layers']} layers, inputs {inputs}, {report['tokens']:,} tokens, {amount(report['bytes'])}"
    step = "breccia convert {model} OUT --to FORMAT --moments {out} --method gptq"
    then = next_step(step, model=args.model, out=report["out"])
    return report, [*notes(report), *after(f"{report['out']}:", done), *then]


def evaluate(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run ``breccia evaluate``: its report, and the lines that it prints."""
    from breccia.evaluation import evaluate as run
    from breccia.evaluation import render

    options = {name: getattr(args, name) for name in ("tokens", "length", "top_k", "dtype", "device")}
    report = run(args.reference, args.checkpoint, args.text, folder=args.scratch, progress=progress_of(args), **options)
    return report, render(report)
