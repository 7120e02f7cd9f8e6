# SPDX-License-Identifier: Apache-2.0
"""Times every tile of the Hopper kernel of packed weights, with K in one or more parts: what `WEIGHT_TILES` of
`products/configs.py` is fitted to.

    python benchmarks/tune_weights.py --json tiles.json

For each product of bf16 rows: the tile that `weight_tile` picks, the quickest of all, and bf16's own product. Weights
take turns, more than the L2 cache holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import breccia
import torch
from breccia.kernels.triton import recipes
from breccia.kernels.triton.products.configs import FOUR_BITS, WEIGHT_PARTS, WEIGHT_TILES, WeightTile, weight_tile
from breccia.kernels.triton.products.weights_matmul import kind_of, weights_matmul
from comparison.gpu_timing import randn, replay_time

ROWS = (16, 32, 64, 128, 256, 512)
WEIGHTS = ((28672, 4096), (14336, 4096), (7168, 4096), (4096, 4096), (4096, 14336), (2112, 7168))
RECIPES = {
    "INT4 g128": breccia.INT4Scaling(),
    "NVFP4": breccia.NVFP4BlockScaling(),
    "MXFP4": breccia.MXFP4BlockScaling(),
    "FP8 128x128": breccia.Float8BlockScaling(block_m=128),
}
CACHE = 150e6  # bytes that push earlier weights out of the L2 cache


def tiles(m: int, n: int, k: int, four: bool) -> list[WeightTile]:
    """Every tile about as wide as m, in parts that do not leave the last one empty or fill the machine thrice."""
    found = []
    for _, _, tile in WEIGHT_TILES[four]:
        if tile.cols < min(m, 128) or (tile.cols > max(16, 2 * m) and tile.cols > 16):
            continue
        programs = -(-m // tile.cols) * -(-n // tile.rows)
        for parts in WEIGHT_PARTS[: 1 if tile.order else None]:
            if (parts - 1) * tile.slices(k, parts) * 128 < k and (parts == 1 or programs * parts < 3 * 132):
                found.append(dataclasses.replace(tile, parts=parts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for n, k in WEIGHTS:
        dense = [randn(n, k) for _ in range(max(2, int(CACHE / (2 * n * k)) + 1))]
        for name, recipe in RECIPES.items():
            made = breccia.cast(dense[0], recipe)
            turns = [recipes.operand(made)]
            turns += [recipes.operand(breccia.cast(dense[0], recipe)) for _ in range(int(CACHE / made.nbytes))]
            block = (recipe.block_m, 128) if name.startswith("FP8") else (1, turns[0].block[1])
            kind = kind_of(turns[0].element, turns[0].sfmt, block)
            assert kind is not None
            for m in ROWS:
                x = randn(m, k)
                given = (kind, turns[0].element, block, torch.bfloat16)

                def time(tile: WeightTile, x: torch.Tensor = x, given: tuple = given, turns: list = turns) -> float:
                    calls = [
                        lambda w=w: weights_matmul(x, w.codes, w.scale, *given, w.global_scale, tile=tile)
                        for w in turns
                    ]
                    return replay_time(calls, max(12, len(calls)), 2)

                peer = replay_time([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in dense], 12, 2)
                picked = weight_tile(m, n, k, kind)
                times = {tile: time(tile) for tile in dict.fromkeys([picked, *tiles(m, n, k, kind in FOUR_BITS)])}
                best = min(times, key=lambda tile: times[tile])
                print(f"{name} {m} x {n} x {k}: bf16 {peer:.2f} us, {times[picked]:.2f}, best {times[best]:.2f} {best}")
                us = {str(tile): time for tile, time in times.items()}
                rows.append({"weight": name, "shape": [m, n, k], "bf16_us": peer, "us": us, "picked": str(picked)})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
