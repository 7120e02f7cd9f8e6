# SPDX-License-Identifier: Apache-2.0
"""What every recipe costs and keeps: bytes, cosine similarity and SQNR of cast + dequantize on Gaussian data.

    python benchmarks/accuracy.py                  # 1024 x 1024, mean of 8 seeds, sigma 1
    python benchmarks/accuracy.py --sigma 0.002    # at the scale of trained weights
    python benchmarks/accuracy.py --json benchmarks/results/accuracy.json

Sums are in float64. SQNR is 10 log10(sum x^2 / sum (x - y)^2). Cosine and SQNR are means over the seeds.
Bytes are `ScaledTensor.nbytes`: codes, scales, zero points and global scale.
"""

import argparse
import json
from pathlib import Path

import breccia
import numpy as np

RECIPES = {
    "DelayedScaling()": breccia.DelayedScaling(),
    "Float8CurrentScaling()": breccia.Float8CurrentScaling(),
    'Float8CurrentScaling("E5M2")': breccia.Float8CurrentScaling("E5M2"),
    'Float8CurrentScaling(granularity="row")': breccia.Float8CurrentScaling(granularity="row"),
    'Float8CurrentScaling(scale_search="mse")': breccia.Float8CurrentScaling(scale_search="mse"),
    "Float8BlockScaling()": breccia.Float8BlockScaling(),
    "Float8BlockScaling(block_m=128)": breccia.Float8BlockScaling(block_m=128),
    'Float8BlockScaling(scale_format="e8m0")': breccia.Float8BlockScaling(scale_format="e8m0"),
    'Float8BlockScaling(scale_search="mse")': breccia.Float8BlockScaling(scale_search="mse"),
    "Float8ExpandedScaling()": breccia.Float8ExpandedScaling(),
    'Float8ExpandedScaling("E5M2")': breccia.Float8ExpandedScaling("E5M2"),
    "MXFP8BlockScaling()": breccia.MXFP8BlockScaling(),
    'MXFP8BlockScaling(scale_rounding="floor")': breccia.MXFP8BlockScaling(scale_rounding="floor"),
    'MXFP8BlockScaling(scale_rounding="ceil")': breccia.MXFP8BlockScaling(scale_rounding="ceil"),
    'MXFP8BlockScaling(scale_rounding="even")': breccia.MXFP8BlockScaling(scale_rounding="even"),
    "MXFP6BlockScaling()": breccia.MXFP6BlockScaling(),
    'MXFP6BlockScaling("E3M2")': breccia.MXFP6BlockScaling("E3M2"),
    "MXFP4BlockScaling()": breccia.MXFP4BlockScaling(),
    'MXFP4BlockScaling(scale_rounding="floor")': breccia.MXFP4BlockScaling(scale_rounding="floor"),
    'MXFP4BlockScaling(scale_rounding="even")': breccia.MXFP4BlockScaling(scale_rounding="even"),
    'MXFP4BlockScaling(scale_search="mse")': breccia.MXFP4BlockScaling(scale_search="mse"),
    "NVFP4BlockScaling()": breccia.NVFP4BlockScaling(),
    "NVFP4BlockScaling(two_level=False)": breccia.NVFP4BlockScaling(two_level=False),
    'NVFP4BlockScaling(scale_search="mse")': breccia.NVFP4BlockScaling(scale_search="mse"),
    "INT8Scaling()": breccia.INT8Scaling(),
    "INT8Scaling(group_size=128)": breccia.INT8Scaling(group_size=128),
    "INT8ExpandedScaling()": breccia.INT8ExpandedScaling(),
    "INT4Scaling()": breccia.INT4Scaling(),
    'INT4Scaling(scale_search="mse")': breccia.INT4Scaling(scale_search="mse"),
    "INT4Scaling(signed=False, symmetric=False)": breccia.INT4Scaling(signed=False, symmetric=False),
    "INT4Scaling(group_size=32)": breccia.INT4Scaling(group_size=32),
}


def measure(name, recipe, side, sigma, seeds):
    cosines, sqnrs, nbytes = [], [], 0
    for seed in range(seeds):
        x = np.random.default_rng(seed).standard_normal((side, side), dtype=np.float32) * np.float32(sigma)
        scaled = breccia.cast(x, recipe)
        nbytes = scaled.nbytes
        a, b = x.astype(np.float64).ravel(), breccia.dequantize(scaled).astype(np.float64).ravel()
        power = a @ a
        cosines.append(a @ b / np.sqrt(power * (b @ b)))
        sqnrs.append(10 * np.log10(power / np.square(a - b).sum()))
    return {
        "recipe": name,
        "bytes": nbytes,
        "ratio": nbytes / (4 * side * side),
        "cosine": float(np.mean(cosines)),
        "sqnr_db": float(np.mean(sqnrs)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="rows and columns; a multiple of 128")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()

    rows = []
    print(f"{'recipe':<44} {'bytes':>9} {'x FP32':>7} {'cosine':>9} {'SQNR dB':>8}")
    for name, recipe in RECIPES.items():
        rows.append(measure(name, recipe, options.side, options.sigma, options.seeds))
        print("{recipe:<44} {bytes:>9,} {ratio:>7.3f} {cosine:>9.6f} {sqnr_db:>8.2f}".format(**rows[-1]))
    if options.json:
        report = {
            "breccia": breccia.__version__,
            "numpy": np.__version__,
            "side": options.side,
            "seeds": options.seeds,
            "sigma": options.sigma,
            "results": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
