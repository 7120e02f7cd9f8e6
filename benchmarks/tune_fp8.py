# SPDX-License-Identifier: Apache-2.0
"""Times every tile of the Hopper FP8 kernel on shapes of up to 1,024 rows: what `products/configs.py` is made from.

    python benchmarks/tune_fp8.py --json tiles.json

For each shape: the tile that `fp8_tile` picks, the quickest of all, and how much slower the pick is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from breccia.kernels.triton.products.configs import PARTS, TIMED, Tile, divides, fp8_tile
from breccia.kernels.triton.products.dense_matmul import dense_matmul
from comparison.gpu_products import block_operands
from comparison.gpu_timing import replay_time

ROWS = (1, 16, 32, 64, 128, 192, 256, 512, 1024)
WEIGHTS = ((7168, 4096), (4096, 4096), (2112, 7168), (576, 7168), (4096, 7168), (24576, 1536))


def tiles(m: int, k: int) -> list[Tile]:
    """Every tile of the table that is not much higher than m rows, in parts and pairs."""
    found = []
    for _, _, tile in TIMED:
        if (m > tile.cols) if tile.swap else (tile.rows > max(64, 2 * m)):
            continue
        found += [dataclasses.replace(tile, parts=parts) for parts in PARTS if divides(parts, k)]
        found.append(dataclasses.replace(tile, pairs=False))
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for n, k in WEIGHTS:
        for m in ROWS:
            x, x_scale, w, w_scale = block_operands(m, n, k)

            def time(tile: Tile, given: tuple = (x, w, x_scale, w_scale)) -> float:
                return replay_time([lambda: dense_matmul(*given, block=True, tile=tile)], 32, 3)

            times = {tile: time(tile) for tile in [fp8_tile(m, n, k, "block"), *tiles(m, k)]}
            picked, best = fp8_tile(m, n, k, "block"), min(times, key=lambda tile: times[tile])
            print(f"{m} x {n} x {k}: {times[picked]:.2f} us, best {times[best]:.2f} with {best}", flush=True)
            rows.append(
                {"shape": [m, n, k], "us": {str(tile): us for tile, us in times.items()}, "picked": str(picked)}
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
