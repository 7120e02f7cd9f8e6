# SPDX-License-Identifier: Apache-2.0
"""What ``breccia convert`` prints: what it cost, what to do next, a plan, plans side by side, and all targets."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breccia import bridges
from breccia.bridges.contract import FileFormat
from breccia.cli import explain
from breccia.screen import COLUMNS, after, amount, any_layer, fitted, one_line, wrapped

if TYPE_CHECKING:
    from breccia.checkpoint.planning.targets import Target

__all__ = [
    "advice",
    "amount",
    "check_names",
    "compared",
    "cost",
    "following",
    "next_step",
    "notes",
    "plan_lines",
    "table",
]

_HEADS = {"": "floats", bridges.OWN: "breccia's own"}
_NOTES = 12  # that a screen shows
# What a program of `FileFormat.opens_in` is started with.
_STARTS = {
    "vLLM": "vllm serve {out}",
    "SGLang": "python -m sglang.launch_server --model-path {out}",
    "transformers": "transformers.AutoModelForCausalLM.from_pretrained({out!r})",
    "llama.cpp": "llama-server -m {out}",
    "mlx-lm": "mlx_lm.generate --model {out} --prompt Hello",
    "ComfyUI": "copy {out} to ComfyUI/models/diffusion_models",
}


def notes(report: Mapping[str, Any]) -> list[str]:
    """What is to be said beside the result: of layers that differ by a number alone once, and of hundreds the first."""
    groups: dict[str, list[str]] = {}
    for note in report["notes"]:
        name, colon, text = note.partition(": ")
        groups.setdefault(f"{any_layer(name)}{colon}{text}", []).append(note)
    shown = [f"{len(some)} × {label}" if len(some) > 1 else some[0] for label, some in groups.items()]
    lines = [line for note in shown[:_NOTES] for line in wrapped(f"! {note}")]
    more = len(shown) - _NOTES
    lines += [f"! and {more} more, which --json has"] if more > 0 else []
    return [*lines, *wrapped(explain.hint(report["notes"]))] if lines else []


def cost(report: Mapping[str, Any]) -> list[str]:
    """What a conversion costs: sizes of the tensors before and after, bits a weight, what was lost."""
    done = f"{amount(report['bytes_read'])} → {amount(report['bytes_written'])}"
    tensors = ", ".join(f"{count} {action}" for action, count in report["tensors"].items())
    seconds = "" if "plan" in report else f" in {report['seconds']} s"
    lines = [] if "plan" in report else after(f"{report['destination']}:", f"{done}{seconds} ({tensors})")
    if "plan" in report:
        lines += wrapped(f"{report['to']}: {done} ({tensors})")
    lines += wrapped(report["accounted"])
    bits = _bits(report)
    errors = report["errors"]
    if errors is None:
        lines += [bits] if bits else []
    elif errors["worst_db"] == "inf":
        lines += wrapped(f"{bits}, lossless in {errors['tensors']} tensors")
    else:
        lines += wrapped(
            f"{bits}, median {float(errors['median_db']):.1f} dB, "
            f"worst {float(errors['worst_db']):.1f} dB {one_line(errors['worst'])}"
        )
    return lines


def _bits(report: Mapping[str, Any]) -> str:
    every, codes = report["bits_per_weight"], report["bits_per_quantized_weight"]
    if every is None:
        return ""
    return f"{every:.2f} bits a weight" + ("" if codes is None else f" ({codes:.2f} quantized)")


def advice(report: Mapping[str, Any], target: FileFormat, calibrated: bool) -> list[str]:
    """That codes are rounded to nearest in a format that people know for better ones, unless the user gave what errors
    of columns count."""
    if not target.calibrated or calibrated or not report["tensors"].get("cast"):
        return []
    return wrapped("rounded to nearest: --moments FILE --method gptq, with FILE of breccia calibrate, loses less")


def following(report: Mapping[str, Any], target: FileFormat) -> list[str]:
    """What to do next, by the target, and what the program needs for it."""
    from breccia.gguf.files import NAMES_KEPT

    out = Path(report["destination"])
    program = next(iter(target.programs(str(report["to"]).partition(":")[2].partition(":")[0])), None)
    in_one = target.container.whole or program == "ComfyUI"  # else programs want a folder with config.json
    whole = out.is_file() if in_one else (out / "config.json").is_file()
    opened = whole and not any(note.startswith(NAMES_KEPT) for note in report["notes"])
    known = _STARTS.get((program or "").partition(" with ")[0]) if opened else None
    start = known or "breccia verify {source} {out}"
    needs = [f"  needs: {target.needs}"] if known and target.needs else []
    return next_step(start, out=report["destination"], source=report["source"]) + needs


def next_step(command: str, **paths: Any) -> list[str]:
    """What to do next, on as many lines as it takes: a shell reads them as one. ``command`` has names of ``paths`` in
    braces, quoted where a shell would take a path for something else; ``{name!r}`` is Python's literal."""
    plain = {name: str(path) for name, path in paths.items()}
    quoted = {name: shlex.quote(path) for name, path in plain.items()}
    words = [word.format(**(plain if "!r}" in word else quoted)) for word in f"next: {command}".split()]
    text = " ".join(words)
    if len(text) <= COLUMNS:
        return [text]
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= COLUMNS - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def check_names(source: str, destination: str, target: Target) -> None:
    """That OUT is not called what it will not be. Raises ValueError where OUT ends as files of another kind do, or as a
    file where a folder is made."""
    suffix, whole = Path(destination).suffix.lower(), target.bridge.container.whole
    if destination.endswith("/") or suffix not in (".gguf", ".safetensors") or (whole and suffix == ".gguf"):
        return
    if whole or suffix == ".gguf":
        written = "safetensors" if not whole else "a file of its own kind"
        more = "" if whole else ": GGUF is written by --to gguf:q4_k and its like"
        raise ValueError(
            f"OUT must not end in {suffix} with --to {target.spelled}, which is {written}, got {destination}{more}"
        )
    if Path(source).is_dir():
        raise ValueError(f"OUT must be a folder, as IN is, got {destination}: {destination}/ makes one of that name")


def plan_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A dry run as a table: layers that differ by a number alone share a line."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in report["plan"]:
        key = (any_layer(one["name"]), tuple(one["shape"]), one["action"], one["from"])
        groups.setdefault(key, []).append(one)
    rows = [("count", "shape", "from", "action", "bits", "name")]
    for (label, shape, action, kind), some in groups.items():
        count = math.prod(shape)
        bits = f"{8 * some[0]['nbytes'] / count:.2f}" if count else "-"
        name = one_line(label if len(some) > 1 else some[0]["name"])
        rows.append((str(len(some)), "×".join(map(str, shape)) or "scalar", kind, action, bits, name))
    n, axes, kinds, actions, sizes = (max(map(len, column)) for column in list(zip(*rows, strict=True))[:5])
    for count_of, shape_of, kind, action, bits, name in rows:
        start = f"{count_of:>{n}}  {shape_of:<{axes}}  {kind:<{kinds}}  {action:<{actions}}  {bits:>{sizes}}"
        yield from fitted(start, name)


def compared(reports: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Dry runs side by side; of a target that is refused, why."""
    yield f"{'to':<32} {'size':>9}  {'of IN':>6}  {'bits':>6}  {'quantized':>9}  notes"
    for one in reports:
        if "error" in one:
            yield from wrapped(f"{one['to']}: {one['error']}")
            continue
        share = one["bytes_written"] / one["bytes_read"] if one["bytes_read"] else 0.0
        bits, codes = (one[key] for key in ("bits_per_weight", "bits_per_quantized_weight"))
        shown = [f"{n:.2f}" if n is not None else "-" for n in (bits, codes)]
        row = f"{amount(one['bytes_written']):>9}  {share:>6.1%}  {shown[0]:>6}  {shown[1]:>9}  {len(one['notes'])}"
        yield from [f"{one['to']:<32} {row}"] if len(one["to"]) <= 32 else [one["to"], f"{'':<32} {row}"]


def table(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """All targets, a format after the other: its recipes of as many bits share a line."""
    folded: dict[str, dict[int, list[str]]] = {}
    shown: dict[int, str] = {}
    opens: dict[str, str] = {}
    for row in rows:
        bits = round(50 * row["bits"])  # what differs by less is one number to a reader
        shown.setdefault(bits, f"{row['bits']:.2f}")
        every = bridges.bridge(row["format"]).opens_in
        without = [program for program in every if program not in row["opens_in"]]
        key = f"{row['key']} (not in {', '.join(without)})" if without else row["key"]
        folded.setdefault(row["format"], {}).setdefault(bits, []).append(key)
        opens[row["format"]] = "; ".join(part for part in (", ".join(every), row["needs"]) if part)
    yield f"{'bits':>6}  {'name':<19} opens in; needs"
    for name, recipes in folded.items():
        yield from wrapped(f"{_HEADS.get(name, f'{name}:'):<27} {opens[name]}".rstrip(), 28)
        for bits, keys in recipes.items():
            yield from wrapped(f"{shown[bits]:>6}  {', '.join(keys)}", 8)
    yield ""
    yield from wrapped("FORMAT alone keeps what the source has, or takes the first of its recipes")
