# SPDX-License-Identifier: Apache-2.0
"""README's table: four results, each beside the best of another program."""

from __future__ import annotations

from documents.markdown import load, measured, table
from documents.quality import LANGUAGE


def front() -> str:
    """Rows of each result whose record says of what program it is."""
    recorded = [name for name in FRONT if measured(name)]
    rows = [row for name in recorded for row in FRONT[name]()]
    made = dict.fromkeys(measured(name).strip() for name in recorded)
    return table(["", "breccia", "best other program", "its result"], rows, "lrlr") + "\n\n" + "\n".join(made)


def _kld(name: str, kind: str) -> list[str]:
    """GPTQ of breccia and the best GPTQ of another program, in one format."""
    found = [
        (row["kld"]["mean"]["value"], row["bits"], row["program"])
        for row in load("quality")["rows"]
        if (row["model"], row["format"]) == (LANGUAGE, kind)
        and row["method"].startswith("GPTQ")
        and (row["method"] == "GPTQ" or row["program"] != "breccia")
    ]
    ours = next(row for row in found if row[2] == "breccia")
    theirs = min(row for row in found if row[2] != "breccia")
    what = f"4 bits by GPTQ ({name}): change of a language model's predictions, KLD"
    return [what, _bits(ours), theirs[2], _bits(theirs)]


def _bits(row: tuple[float, float, str]) -> str:
    return f"{row[0]:.3f} at {row[1]:.2f} bits"


def _conversion() -> list[list[str]]:
    found = load("convert")
    seconds = {name: f"{taken:.2f} s" for name, taken in found["seconds"].items()}
    what = f"convert {found['weights_gib']:.2f} GiB of FP8 tiles to bf16, {found['cores']} CPU cores"
    return [[what, seconds["breccia"], f"compressed-tensors {found['peer']}", seconds["compressed-tensors"]]]


def _token() -> list[list[str]]:
    found = load("decode_step")
    ms = {row["weights"]: f"{row['ms']:.0f} ms" for row in found["rows"]}
    size, cores = found["parameters"] / 1e9, found["machine"]["cores"]
    what = f"a token of a model of {size:.1f} billion weights in NVFP4, {cores} CPU cores"
    return [[what, ms["nvfp4"], "torch, bf16", ms["bf16"]]]


FRONT = {
    "quality": lambda: [_kld("NVFP4", "NVFP4"), _kld("INT4", "INT4, 64, symmetric")],
    "convert": _conversion,
    "decode_step": _token,
}
