# SPDX-License-Identifier: Apache-2.0
"""Tables of what recipes cost and keep."""

from __future__ import annotations

import special_values

from documents.markdown import load, table

# What a reader chooses from: the recipe's call, its elements, and what shares a scale.
CHOICES = [
    ("Float8CurrentScaling()", "E4M3, E5M2", "tensor (or row): fp32"),
    ("DelayedScaling()", "E4M3, E5M2", "tensor: fp32, from an amax history"),
    ("Float8BlockScaling()", "E4M3, E5M2", "128 of a row: fp32, bf16 or E8M0"),
    ("Float8BlockScaling(block_m=128)", "E4M3, E5M2", "128 × 128 tile: the same"),
    ("Float8ExpandedScaling()", "E4M3, E5M2", "128 of a row (or any): fp32, and an exponent: fp16"),
    ("MXFP8BlockScaling()", "E4M3, E5M2", "32 of a row: E8M0"),
    ("MXFP6BlockScaling()", "E2M3, E3M2, a byte each", "32 of a row: E8M0"),
    ("MXFP4BlockScaling()", "E2M1", "32 of a row: E8M0"),
    ("NVFP4BlockScaling()", "E2M1", "16 of a row: E4M3; and the tensor: fp32"),
    ("INT8Scaling()", "−128 … 127", "row (or any group): fp32, fp16, bf16"),
    ("INT8ExpandedScaling()", "−127 … 127", "128 of a row (or any): fp32, and an exponent: fp16"),
    ("INT4Scaling()", "−8 … 7, or 0 … 15", "128 of a row (or any): fp16, bf16, fp32"),
]


def bits(row: dict) -> float:
    return 32 * row["ratio"]


def recipes() -> str:
    found = {row["recipe"]: row for row in load("accuracy")["results"]}
    rows = [
        [f"`{name}`", element, shares, f"{bits(found[name]):.2f}", f"{found[name]['sqnr_db']:.1f}"]
        for name, element, shares in CHOICES
    ]
    return table(["recipe", "elements", "one scale for", "bits per weight", "SQNR, dB"], rows, "lllrr")


def every_recipe() -> str:
    rows = [
        [f"`{row['recipe']}`", f"{bits(row):.2f}", f"{row['cosine']:.6f}", f"{row['sqnr_db']:.2f}"]
        for row in load("accuracy")["results"]
    ]
    return table(["recipe", "bits", "cosine", "SQNR dB"], rows, "lrrr")


def small_values() -> str:
    chosen = ("NVFP4BlockScaling()", "NVFP4BlockScaling(two_level=False)", "INT4Scaling()")
    rows = [
        [f"`{row['recipe']}`", f"{row['cosine']:.6f}", f"{row['sqnr_db']:.2f}"]
        for row in load("accuracy_sigma0.002")["results"]
        if row["recipe"] in chosen
    ]
    return table(["recipe", "cosine", "SQNR dB"], rows, "lrr")


def specials() -> str:
    """The page benchmarks/results/special_values.md."""
    found = load("special_values")
    rows = [
        [name, *(special_values.cell(cases[case]) for case in special_values.CASES)] for name, cases in found.items()
    ]
    about = (
        "What becomes of special values: of the value; after the semicolon, of a 1 in the same block; in brackets the"
        " stored scale (E8M0 and E4M3 as codes), and zp, the zero point; an asterisk where the next block changes too."
        ' "All zero" and "subnormals" are whole blocks. The subnormal is 1.175e-38.'
    )
    return f"{about}\n\n{table(['recipe', *special_values.CASES], rows)}\n"


def sentences() -> str:
    rows = [
        [row["name"] if row["name"].startswith(("torchao", "random")) else f"`{row['name']}`", *row["shown"]]
        for row in (
            {**row, "shown": [f"{row['mean']:.4f}", f"{row['least']:.4f}"]}
            for row in load("sentence_embeddings")["rows"]
        )
    ]
    return table(["weights", "mean", "least"], rows, "lrr")
