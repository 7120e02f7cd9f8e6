# SPDX-License-Identifier: Apache-2.0
"""The ``breccia`` command.

Exit codes: 0 done, 1 a check did not pass, 2 a wrong argument or input, 130 interrupted, 143 terminated. Whether
standard output and standard error take what is said does not change them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from breccia._version import __version__
from breccia.cli import convert_commands, explain, text_commands
from breccia.cli.arguments import Parser, add_common, add_device, count, json_last, number, part, progress_of, whole
from breccia.cli.convert_commands import add_rounding
from breccia.cli.printing import Shown, show, show_json
from breccia.cli.terminal import Terminated, plain_characters, said, streams, terminable
from breccia.peers import require
from breccia.screen import amount, wrapped

__all__ = ["main"]

_GOES_ON = dict.fromkeys(("convert", "merge-lora"), ": the same command goes on where this one was")
_GOES_ON["calibrate"] = ": the same command goes on from the sums that it keeps beside --out once a minute"
_FORCE = "replace OUT when the new one is complete, and not before; never IN"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    if argv is None:  # a process of its own: objects of planned tensors live to its end, so look at them less often
        gc.set_threshold(20_000)
    plain_characters()
    with streams():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    words = json_last(list(sys.argv[1:] if argv is None else argv))
    parser = _parser("demo" in words)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for what could stand next
        require("argcomplete", "completion").autocomplete(parser)
    if not words:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(words)
    try:
        with terminable():
            done: Shown | None = args.run(args)
            if done is not None:
                show(args, *done[:2])
    except KeyboardInterrupt as error:
        print(f"breccia: interrupted{_GOES_ON.get(args.command, '')}", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    except Exception as error:
        text, more = parser.with_option(args.command, said(error)), explain.hint([said(error)])
        if args.json:
            print(json.dumps({"error": text, "kind": type(error).__name__}))
        print(f"breccia {args.command}: {text}{more and f' ({more})'}", file=sys.stderr)
        return 2
    return 0 if done is None or done[2] else 1


def _parser(with_demo: bool) -> Parser:
    parser = Parser(
        prog="breccia",
        description="Convert, check and improve quantized checkpoints.",
        epilog="Start with 'breccia demo' or 'breccia inspect PATH'; 'breccia COMMAND --help' has examples.",
    )
    parser.add_argument("--version", action="version", version=f"breccia {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    convert = _command(
        commands,
        "convert",
        convert_commands.convert,
        "convert a checkpoint to another format",
        "breccia convert --to list",
        "breccia convert model/ model-nvfp4/ --to compressed-tensors:nvfp4",
        "breccia convert model.safetensors small.safetensors --to fp8 --exclude '*.0.*'",
        "breccia convert model/ out/ --to modelopt --set '*.experts.*=nvfp4' --kv fp8",
        "breccia convert model/ out/ --to nvfp4 --moments m.safetensors --method gptq",
    )
    convert.add_argument("source", metavar="IN", nargs="?", help="safetensors file, directory of shards, or GGUF file")
    convert.add_argument("destination", metavar="OUT", nargs="?", help="file or directory to make; OUT/ is a directory")
    convert.add_argument(
        "--to",
        required=True,
        metavar="RECIPE|FORMAT",
        help="bf16, fp16, fp32, a recipe (nvfp4, mxfp8, ...), or a format, perhaps with a recipe "
        "(compressed-tensors:nvfp4); 'list' lists them all",
    )
    convert.add_argument("--include", action="append", default=[], metavar="PATTERN", help="quantize only these names")
    convert.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="leave these names alone")
    convert.add_argument(
        "--scale-search",
        type=str.lower,
        choices=["amax", "mse"],
        help="how scales are chosen; mse searches for the least squared error",
    )
    convert.add_argument(
        "--group-size",
        "--block-size",
        type=_group_size,
        metavar="N|auto",
        help="elements that share a scale, for recipes with groups",
    )
    convert.add_argument(
        "--scheme",
        metavar="FILE",
        help="TOML file with a rule for each kind of layer (see docs/schemes.md), or a checkpoint to do as it does",
    )
    convert.add_argument(
        "--set",
        dest="rules",
        action="append",
        default=[],
        metavar="RULE",
        help="one rule, which goes before those of --scheme: 'PATTERN=RECIPE' or "
        "'PATTERN=RECIPE,inputs=dynamic|static|local|none'",
    )
    convert.add_argument(
        "--kv", type=str.lower, metavar="WORD", help="how the KV cache is quantized: fp8, int8, nvfp4 or none"
    )
    convert.add_argument(
        "--activations",
        type=str.lower,
        choices=["dynamic", "static", "local", "none"],
        help="how inputs of layers are quantized where no rule says so",
    )
    convert.add_argument("--amax", metavar="FILE", help="file of breccia calibrate, for static scales of inputs")
    for name, what in (("embeddings", "embeddings, where the format's programs load such"), ("head", "output layers")):
        convert.add_argument(f"--{name}", metavar="RECIPE", help=f"recipe or type for {what}; 'keep' leaves floats")
    convert.add_argument(
        "--dtype-of-rest",
        type=str.lower,
        choices=["keep", "bf16", "fp16", "fp32"],
        default="keep",
        help="float type of what is not quantized; keep leaves float32 beside codes, too (default: %(default)s)",
    )
    add_rounding(convert)
    add_device(convert, "weights are rounded")
    add_common(convert, force=_FORCE, threads=True)
    pieces = convert.add_mutually_exclusive_group()
    pieces.add_argument("--part", type=part, metavar="I/N", help="convert only the I-th of N parts, on any machine")
    pieces.add_argument("--finish", action="store_true", help="put the parts together when all are there")
    convert.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the sizes and write nothing; --to nvfp4,int4 compares several targets",
    )
    convert.add_argument(
        "--strict", action="store_true", help="stop with an error if anything would be lost or changed"
    )
    convert.add_argument(
        "--no-checksums",
        action="store_true",
        help="compute no checksums; with --finish, check none",
    )
    convert.add_argument("--manifest", action="store_true", help="SHA-256 of every tensor too, in breccia.json")
    _add_unmarked(convert)

    merge = _command(
        commands,
        "merge-lora",
        convert_commands.merge_lora,
        "merge a LoRA adapter into a checkpoint, which keeps its format",
        "breccia merge-lora model-nvfp4/ adapter/ merged/",
    )
    merge.add_argument(
        "base", metavar="BASE", help="safetensors file, directory of shards, or GGUF file; quantized or not"
    )
    merge.add_argument(
        "adapter", metavar="ADAPTER", help="folder that PEFT saved, or GGUF file of llama.cpp's convert_lora_to_gguf.py"
    )
    merge.add_argument("destination", metavar="OUT", help="file or directory to make")
    merge.add_argument(
        "--rounding",
        type=str.lower,
        choices=["nearest", "stochastic", "feedback"],
        help="how quantized weights are rounded: to the nearest code, at random in proportion, or so that later "
        "columns correct the error of earlier ones (default: nearest)",
    )
    drawn = "seed of --rounding stochastic or feedback (default: 0); without --rounding it means stochastic"
    merge.add_argument("--seed", type=whole, metavar="N", help=drawn)
    merge.add_argument("--stochastic", type=whole, metavar="SEED", help="the same as --rounding stochastic --seed SEED")
    merge.add_argument("--moments", metavar="FILE", help="file of breccia calibrate, for --rounding feedback")
    add_device(merge, "weights are quantized again")
    merge.add_argument("--strict", action="store_true", help="stop with an error if anything would be lost")
    add_common(merge, force=_FORCE, threads=True)

    inspect = _command(
        commands,
        "inspect",
        _inspect,
        "show what a checkpoint holds; reads its headers alone",
        "breccia inspect model/ --summary",
    )
    inspect.add_argument("path", metavar="PATH", help="safetensors file, directory of shards, or GGUF file")
    inspect.add_argument("--summary", action="store_true", help="print totals and findings only")
    inspect.add_argument(
        "--scheme", action="store_true", help="print what weights, inputs and the KV cache are quantized to"
    )
    inspect.add_argument("--toml", action="store_true", help="print the scheme as a TOML file for convert --scheme")
    inspect.add_argument(
        "--all", action="store_true", help="print a line for every tensor instead of one for similar layers"
    )

    verify = _command(
        commands,
        "verify",
        _verify,
        "compare a checkpoint with its reference, or check that it is whole",
        "breccia verify model/ model-nvfp4/ --min-sqnr 18",
        "breccia verify --complete model-nvfp4/",
    )
    verify.add_argument("a", metavar="A", help="the reference; with --complete, the checkpoint to check")
    verify.add_argument("b", metavar="B", nargs="?", help="the checkpoint to check against it")
    verify.add_argument(
        "--complete",
        action="store_true",
        help="check one checkpoint by itself: every tensor is there, every scale is a number",
    )
    verify.add_argument(
        "--min-sqnr",
        type=number,
        metavar="DB",
        help="lowest SQNR that passes (default: 3 dB per bit of a tensor's format, 12 dB for floats)",
    )
    verify.add_argument(
        "--adapter",
        metavar="ADAPTER",
        help="LoRA adapter that was merged into A to make B: measure how much of it B has",
    )
    verify.add_argument(
        "--moments", metavar="FILE", help="file of breccia calibrate for A: measure the error of layers' outputs, too"
    )
    _add_unmarked(verify)
    verify.add_argument(
        "--rederive", action="store_true", help="convert A again as breccia.json of B says, and compare"
    )
    verify.add_argument("--data", action="append", default=[], metavar="FILE", help="with --rederive: what B was given")
    verify.add_argument("--in-toto", action="store_true", help="with --rederive: print a statement of provenance")
    verify.add_argument("--all", action="store_true", help="list equal tensors, too")
    add_common(verify)

    calibrate = _command(
        commands,
        "calibrate",
        text_commands.calibrate,
        "record the inputs of a model's linear layers over text",
        "breccia calibrate model/ --text a.txt b.txt --out moments.safetensors",
        "breccia calibrate model/ --text a.txt --memory 8GiB --out m.safetensors",
    )
    text_commands.add_calibrate(calibrate)
    planned = _command(
        commands,
        "plan-bits",
        text_commands.plan_bits,
        "choose a format for each layer within a budget of bits per weight",
        "breccia plan-bits model/ --moments m.safetensors --bits 4.8 --out plan.toml",
    )
    text_commands.add_plan_bits(planned)
    evaluate = _command(
        commands,
        "evaluate",
        text_commands.evaluate,
        "measure on text how far a checkpoint's predictions are from the reference's",
        "breccia evaluate model/ model-nvfp4/ --text held-out.txt --tokens 8192",
    )
    text_commands.add_evaluate(evaluate)

    report = _command(
        commands,
        "report",
        _report,
        "write one HTML page about a checkpoint, its bits and errors by layer",
        "breccia report model-nvfp4/ --reference model/ --html report.html",
    )
    report.add_argument("path", metavar="PATH", help="safetensors file, directory of shards, or GGUF file")
    report.add_argument(
        "--html", dest="out", metavar="FILE", default="report.html", help="file to write (default: %(default)s)"
    )
    report.add_argument("--reference", metavar="A", help="checkpoint that PATH was made of, to measure errors against")
    report.add_argument(
        "--moments", metavar="FILE", help="file of breccia calibrate for A: show the error of layers' outputs, too"
    )
    add_common(report, force="replace the page that is there")

    explained = _command(
        commands,
        "explain",
        _explain,
        "say what a note or an error means, and how to mend it",
        "breccia explain left-as-it-is",
    )
    explained.add_argument("name", metavar="NAME", nargs="*", help="name that a command printed (default: list all)")

    _command(commands, "doctor", _doctor, "show what runs on this machine and what to install for the rest")

    demo = _command(commands, "demo", _demo, "compare bits and errors of every recipe on one set of weights")
    if with_demo:  # its module is imported only then
        from breccia.cli import demo as demo_module

        demo_module.add_arguments(demo)
    return parser


def _add_unmarked(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unmarked",
        type=str.lower,
        choices=["comfyui", "modelopt"],
        help="which program wrote IN, where the file does not say in which order block scales are stored",
    )


def _group_size(text: str) -> int | str:
    return "auto" if text.lower() == "auto" else count(text)


def _command(commands: Any, name: str, run: Any, text: str, *examples: str) -> argparse.ArgumentParser:
    shown = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=shown,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _inspect(args: argparse.Namespace) -> Shown | None:
    from breccia.checkpoint.judging.inspect import describe, lines, scheme_lines
    from breccia.checkpoint.reading.source import without_collection
    from breccia.io import load_scheme as breccia_scheme

    if args.toml and args.json:
        raise ValueError("--json must be left out with --toml")
    if args.toml:
        print(breccia_scheme(args.path).to_toml(), end="")
        return None
    if args.scheme:
        scheme = breccia_scheme(args.path)
        return scheme.to_dict(), scheme_lines(args.path, scheme), True
    with without_collection():
        if args.json:
            show_json(describe(args.path))
        else:
            for line in lines(args.path, summary=args.summary, every=args.all):
                print(line)
    return None


def _verify(args: argparse.Namespace) -> Shown | None:
    from breccia.checkpoint.judging.verify import verify
    from breccia.checkpoint.judging.verify_lines import render

    if args.complete:
        for option in ("adapter", "moments", "unmarked"):
            if (given := getattr(args, option)) is not None:
                raise ValueError(f"--{option} must be left out with --complete, got {given}")
        return _complete(args)
    if args.b is None:
        raise ValueError("B must be given: the checkpoint to compare with A")
    if args.rederive:
        return _rederive(args)
    if args.data or args.in_toto:
        raise ValueError(f"--{'data' if args.data else 'in-toto'} must be left out without --rederive")
    options = {"min_sqnr_db": args.min_sqnr, "adapter": args.adapter, "moments": args.moments}
    report = verify(args.a, args.b, progress=progress_of(args), unmarked=args.unmarked, **options)
    return report, [] if args.json else [render(report, args.all)], report["ok"]


def _rederive(args: argparse.Namespace) -> Shown | None:
    from breccia.checkpoint.judging import rederive

    report = rederive.rederive(args.a, args.b, data=args.data, progress=progress_of(args))
    if args.in_toto and report["ok"]:
        print(json.dumps(rederive.statement(report), indent=2))
        return None
    return report, rederive.render(report), report["ok"]


def _complete(args: argparse.Namespace) -> Shown:
    from breccia.checkpoint.judging.complete import complete, render

    if args.b is not None:
        raise ValueError(f"B must be left out with --complete, got {args.b}")
    report = complete(args.a)
    return report, [] if args.json else [render(report)], report["ok"]


def _report(args: argparse.Namespace) -> Shown:
    from breccia.checkpoint import report

    options = {"moments": args.moments, "force": args.force, "progress": progress_of(args)}
    data = report(args.path, args.out, args.reference, **options)
    model, size = data["model"], amount(Path(args.out).stat().st_size)
    lines = [f"{args.out}: {model['tensors']:,} tensors in {len(data['layers']):,} sections, {size}"]
    return data, [*lines, *(wrapped(data["found"]) if data["found"] else [])], True


def _explain(args: argparse.Namespace) -> Shown:
    if not args.name:
        return explain.names(), explain.names(), True
    pages = {name: explain.page(name) for name in args.name}
    return (
        {name: "\n".join(lines) for name, lines in pages.items()},
        "\n\n".join(map("\n".join, pages.values())).split("\n"),
        True,
    )


def _doctor(_: argparse.Namespace) -> Shown:
    from breccia.checkpoint.judging.doctor import doctor, render

    report = doctor()
    return report, [render(report)], True


def _demo(args: argparse.Namespace) -> Shown:
    from breccia.cli import demo

    return demo.run(args)
