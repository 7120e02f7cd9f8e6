# SPDX-License-Identifier: Apache-2.0
"""Bytes of a (1024, 1024) weight under every recipe, against FP32 and FP16.

python benchmarks/bench_memory.py
"""

from accuracy import RECIPES, measure

SIDE = 1024


def main():
    full = 4 * SIDE * SIDE
    print(f"{'format':<44} {'bytes':>9} {'x FP32':>7}")
    for name, nbytes in {"FP32": full, "FP16": full // 2}.items():
        print(f"{name:<44} {nbytes:>9,} {nbytes / full:>7.3f}")
    for name, recipe in RECIPES.items():
        row = measure(name, recipe, SIDE, sigma=1.0, seeds=1)
        print("{recipe:<44} {bytes:>9,} {ratio:>7.3f}".format(**row))


if __name__ == "__main__":
    main()
