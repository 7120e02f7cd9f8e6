# SPDX-License-Identifier: Apache-2.0
"""The commands that run models over text: their arguments, and what they do."""

from __future__ import annotations

import argparse

from breccia.cli.arguments import add_common, count, progress_of, size
from breccia.cli.conversion import amount, next_step, notes
from breccia.cli.printing import Shown
from breccia.peers import require
from breccia.screen import after

__all__ = ["add_calibrate", "add_evaluate", "calibrate", "evaluate"]


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
