# SPDX-License-Identifier: Apache-2.0
"""What zeros, subnormals, outliers, infinities, NaN and -0.0 become under every family of recipes.

    python benchmarks/special_values.py                # Markdown, as in benchmarks/results/special_values.md
    python benchmarks/special_values.py --json FILE

The first block of a row is 1, 0.5, -0.25, 0.125, 1, 0.5 ... with the special value for its fourth element;
the second block, without it, is the neighbour. "All zero" and "subnormals" are whole blocks; the subnormals
begin with the largest. A cell reads: what the special value becomes after cast and dequantize; what the 1
beside it becomes (stored scale of the block). An asterisk: the neighbour's values are not what they are
without the special value.
"""

import argparse
import json
from pathlib import Path

import breccia
import numpy as np

FAMILIES = {
    "FP8 per tensor": breccia.Float8CurrentScaling(),
    "FP8 blocks, fp32 scale": breccia.Float8BlockScaling(block_k=32),
    "FP8 blocks, e8m0 scale": breccia.Float8BlockScaling(block_k=32, scale_format="e8m0"),
    "MXFP8": breccia.MXFP8BlockScaling(),
    "MXFP8 floor": breccia.MXFP8BlockScaling(scale_rounding="floor"),
    "MXFP6": breccia.MXFP6BlockScaling(),
    "MXFP4": breccia.MXFP4BlockScaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "NVFP4 torchao rule": breccia.NVFP4BlockScaling(scale_rule="torchao"),
    "NVFP4 one level": breccia.NVFP4BlockScaling(two_level=False),
    "INT4": breccia.INT4Scaling(group_size=32),
    "INT4 asymmetric": breccia.INT4Scaling(group_size=32, signed=False, symmetric=False),
    "INT8": breccia.INT8Scaling(group_size=32),
}
SUBNORMAL = float(np.uint32(0x7FFFFF).view(np.float32))  # the largest one
CASES = ("all zero", "subnormals", "outlier 1000", "outlier 3.4e38", "+Inf", "-Inf", "NaN", "-0.0")


def width(recipe):
    names = ("block_size", "block_k", "group_size")
    return next((getattr(recipe, name) for name in names if hasattr(recipe, name)), 32)


def blocks(case, n):
    """A row of two blocks, the special one first, and where in it the special value is."""
    x = np.resize(np.array([1.0, 0.5, -0.25, 0.125], np.float32), (1, 2 * n))
    if case == "all zero":
        x[0, :n] = 0
    elif case == "subnormals":
        x[0, :n] = np.resize(np.array([SUBNORMAL, -SUBNORMAL / 2, 0], np.float32), n)
    else:
        special = {"outlier 1000": 1000.0, "outlier 3.4e38": 3.4e38}
        x[0, 3] = special[case] if case in special else float(case)
    return x


def stored(scaled):
    scale = np.asarray(scaled.scale).ravel()[0]
    return f"0x{scale:02X}" if scaled.scale.dtype == np.uint8 else f"{scale:.3g}"


def number(value):
    return "-0" if value == 0 and np.signbit(value) else f"{value:.4g}"


def measure(recipe, case):
    n = width(recipe)
    x = blocks(case, n)
    plain = blocks("-0.0", n)
    scaled = breccia.cast(x, recipe)
    back = breccia.dequantize(scaled)[0]
    reference = breccia.dequantize(breccia.cast(plain, recipe))[0]
    whole = case in ("all zero", "subnormals")
    return {
        "scale": stored(scaled),
        "zero_point": None if scaled.zero_point is None else int(np.asarray(scaled.zero_point).ravel()[0]),
        "special": number(back[0 if whole else 3]),
        "one": None if whole else number(back[0]),
        "neighbour_kept": bool(np.array_equal(back[n:], reference[n:])),
    }


def cell(result):
    zero = "" if result["zero_point"] is None else f", zp {result['zero_point']}"
    one = "" if result["one"] is None else f"; 1 → {result['one']}"
    star = "" if result["neighbour_kept"] else " \\*"
    return f"{result['special']}{one} ({result['scale']}{zero}){star}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    results = {name: {case: measure(recipe, case) for case in CASES} for name, recipe in FAMILIES.items()}
    print("| recipe | " + " | ".join(CASES) + " |\n|---|" + "---|" * len(CASES))
    for name, row in results.items():
        print(f"| {name} | " + " | ".join(cell(result) for result in row.values()) + " |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
