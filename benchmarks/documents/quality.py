# SPDX-License-Identifier: Apache-2.0
"""Tables and the picture of what 4 bits lose, by how weights are rounded."""

from __future__ import annotations

from typing import Any

from documents.drawing import GRID, NOTE, axes, svg
from documents.markdown import load, measured, table

LANGUAGE, SENTENCES = "SmolLM2-135M", "MiniLM-L6"
NOT_HELPING = ("AWQ", "Hadamard")
# How a method is drawn: what its name begins with, its colour and its name in the picture.
KINDS = [
    ("nearest, amax", "#9a9a9a", "nearest, amax"),
    ("nearest, mse", "#1f5f8b", "nearest, mse"),
    ("nearest, importance", "#c0562f", "importance, imatrix"),
    ("imatrix", "#c0562f", ""),
    ("GPTQ, natural", "#b9a13c", "GPTQ, natural order, amax"),
    ("GPTQ", "#2d8a57", "GPTQ"),
    ("HQQ", "#1f5f8b", ""),
    ("nearest", "#9a9a9a", ""),
    ("AWQ", "#b9a13c", ""),
]
SHAPES = {"NVFP4": "o", "MXFP4": "s", "INT4": "^", "GGUF": "D"}


def _rows(model: str) -> list[dict[str, Any]]:
    return [row for row in load("quality")["rows"] if row["model"] == model]


def _format(row: dict[str, Any]) -> str:
    """Without the size of its groups, which differs between the models."""
    first, *rest = row["format"].split(", ")
    return ", ".join([first, *(part for part in rest if not part.isdigit())])


def _pairs() -> list[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """The rows of both models by format, method and program; the language model's first."""

    def key(row: dict[str, Any]) -> tuple[str, str, str]:
        return _format(row), row["method"], row["program"]

    language, sentences = ({key(row): row for row in _rows(name)} for name in (LANGUAGE, SENTENCES))
    keys = dict.fromkeys([*language, *sentences])
    order = list(dict.fromkeys(k[0] for k in keys))

    def rank(k: tuple[str, str, str]) -> tuple[int, bool, float]:
        value = language[k]["kld"]["mean"]["value"] if k in language else sentences[k]["output_error"]
        return order.index(k[0]), k not in language, value

    return [(language.get(k), sentences.get(k)) for k in sorted(keys, key=rank)]


def _cells(language: dict[str, Any] | None, sentences: dict[str, Any] | None) -> list[str]:
    left = ["", "", ""]
    if language:
        kld = language["kld"]
        left = [
            f"{100 * language['output_error']:.2f}",
            f"{kld['mean']['value']:.4f} ± {kld['mean']['error']:.4f}",
            f"{100 * language['same_top']['value']:.1f}",
        ]
    return [*left, f"{100 * sentences['output_error']:.2f}" if sentences else ""]


HEAD = [
    "output error, %",
    "KLD mean",
    "same top token, %",
    "MiniLM: output error, %",
]


def _line(language: dict[str, Any] | None, sentences: dict[str, Any] | None) -> list[str]:
    row = language or sentences
    assert row is not None
    names = [_format(row), row["method"], row["program"]]
    return [*names, f"{row['bits']:.2f}", *_cells(language, sentences)]


def _does_not_help(row: dict[str, Any]) -> bool:
    """What other programs do is theirs to choose."""
    return row["program"] == "breccia" and row["method"].startswith(NOT_HELPING)


def _repeats(row: dict[str, Any]) -> bool:
    """Another damping or order, plain rounding of others, which is ours, and an importance matrix that ggml ignores."""
    ignored = row["format"] in ("GGUF MXFP4", "GGUF NVFP4") and row["method"] == "imatrix"
    plain = row["method"] == "nearest" and not row["format"].startswith("GGUF")
    return ignored or plain or "damping" in row["method"] or "natural" in row["method"]


def ways() -> str:
    """Every format and way to round but those of ours that do not help."""
    lines = [
        _line(language, sentences)
        for language, sentences in _pairs()
        if language and not (_does_not_help(language) or _repeats(language))
    ]
    head = ["format", "rounding", "by", "bits", *HEAD]
    return table(head, lines, "lllrrrrr") + measured("quality")


def files() -> str:
    """Files as programs run them: their size, and what they lose."""
    lines = [
        [
            row["file"],
            row["method"],
            f"{row['bytes'] / 1e6:.1f} MB",
            f"{row['kld']['mean']['value']:.4f} ± {row['kld']['mean']['error']:.4f}",
            f"{100 * row['same_top']['value']:.1f}",
        ]
        for row in load("quality_files")["rows"]
    ]
    head = ["SmolLM2-135M, quantized", "rounding", "tensors", "KLD mean", "same top token, %"]
    return table(head, lines, "llrrr") + measured("quality_files")


def bits_and_kld() -> str:
    """The picture: bits of a weight against KLD, filled where it is ours."""
    title = "SmolLM2-135M: what bits buy, by how weights are rounded"
    note = "filled: breccia; hollow: other programs, given the same text. Circle NVFP4, square MXFP4, triangle INT4,"
    plot = axes(600, 400, title, (56, 52, 580, 352), f"{note} diamond GGUF")
    plot.set_yscale("log")
    plot.set_xlabel("bits per weight, all scales included", color=NOTE)
    plot.set_ylabel("mean KLD, nats", color=NOTE)
    plot.grid(color=GRID, which="both")
    named = set()
    for row in _rows(LANGUAGE):
        if _does_not_help(row) or row["method"].startswith("GPTQ, damping"):
            continue
        _, colour, name = next(kind for kind in KINDS if row["method"].startswith(kind[0]))
        shape = next(s for start, s in SHAPES.items() if row["format"].startswith(start))
        own = row["program"] == "breccia"
        at = row["bits"], row["kld"]["mean"]["value"]
        label = name if own and name not in named else None
        named |= {label} - {None}
        face = colour if own else "none"
        plot.plot(*at, shape, color=colour, markerfacecolor=face, markersize=7, label=label, linestyle="none")
        if text := _label(row, own):
            side, dx, dy = BESIDE.get(text, ("left", 7, -3))
            place = {"ha": side, "fontsize": 8, "color": NOTE}
            plot.annotate(text, at, (dx, dy), textcoords="offset points", **place)
    plot.set_xlim(4.05, max(row["bits"] for row in _rows(LANGUAGE)) + 0.2)
    plot.legend(facecolor="white", edgecolor="none", framealpha=1, fontsize=8, loc="upper right")
    plot.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    plot.minorticks_off()
    return svg(plot.figure)


# Where a point's name stands that would cover another: its alignment and its distance from the point.
BESIDE = {
    "MXFP4": ("right", -7, -3),
    "INT4, sym.": ("right", -7, -3),
    "INT4, asym.": ("left", -4, -14),
    "NVFP4 and FP8": ("right", -7, -3),
}


def _label(row: dict[str, Any], own: bool) -> str:
    """The name of a point, nothing for most of them."""
    name = _format(row).removeprefix("GGUF ").replace("symmetric", "sym.")
    imatrix = row["method"] == "imatrix"
    if name == "Q4_K_M":
        return f"{name}, imatrix" if imatrix else name
    return name if (own and row["method"] == "GPTQ") or (imatrix and name in ("Q4_1", "IQ4_NL")) else ""
