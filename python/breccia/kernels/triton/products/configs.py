# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations, keyed by kernel and shape. Measured on an H200; nothing is searched at run time unless asked
for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True)
class Tile:
    """One configuration of the Hopper FP8 kernel. `swap` puts the weights on the 64-row side of the instruction.

    `parts`: into how many parts K is divided, each summed by a program of its own; `pairs`: two slices of K are
    multiplied at a time.
    """

    swap: bool
    rows: int
    cols: int
    consumers: int
    waves: int
    stages: int
    group: int = 8
    parts: int = 1
    pairs: bool = False

    @property
    def maxnreg(self) -> int | None:
        return 168 if self.consumers == 2 else None

    @property
    def out_bufs(self) -> int:
        """Buffers of results to a consumer: one for each wave where shared memory has room, else waves wait."""
        operands = self.stages * (self.rows + self.cols) * 128
        return self.waves if operands + self.rows * self.cols * 2 <= 220_000 else 1


LARGE = {
    "fast": Tile(False, 128, 256, 2, 1, 3),
    "precise": Tile(False, 256, 128, 2, 2, 4),
    "block": Tile(False, 256, 128, 2, 2, 3),
}
MEDIUM = Tile(False, 128, 128, 2, 1, 4)

# For up to 1,024 rows: the microseconds that a program takes to begin and end, and those of a slice of K.
# Measured on an H100; benchmarks/tune_fp8.py times them again.
TIMED = (
    (2.9, 0.112, Tile(True, 64, 16, 1, 1, 8, pairs=True)),
    (2.2, 0.150, Tile(True, 64, 32, 1, 1, 8, pairs=True)),
    (2.1, 0.151, Tile(False, 64, 64, 1, 1, 6, pairs=True)),
    (1.9, 0.247, Tile(False, 64, 128, 1, 1, 6, pairs=True)),
    (1.4, 0.275, Tile(False, 128, 64, 2, 1, 6, pairs=True)),
    (1.4, 0.394, Tile(False, 128, 128, 2, 1, 4, pairs=True)),
    (1.4, 0.620, LARGE["block"]),
)
PARTS = (1, 2, 4, 8)
ADDING = 0.3  # microseconds to add up the parts of K, and those for each MB of them
ADDING_MB = 0.75


def divides(parts: int, k: int) -> bool:
    """Whether each of `parts` parts of K gets a slice of it: parts are as long as the first, but for the last."""
    slices = -(-k // 128)
    return (parts - 1) * -(-slices // parts) < slices


def adding(parts: int, m: int, n: int) -> float:
    """The microseconds to add up so many parts of K."""
    return ADDING + ADDING_MB * 4e-6 * parts * m * n if parts > 1 else 0.0


@lru_cache(4096)
def fp8_tile(m: int, n: int, k: int, mode: str, sms: int = 132) -> Tile:
    """Configuration for an (m, k) by (n, k) product; mode is fast, precise or block."""
    if mode != "fast" and m <= 1024:
        return quickest(m, n, k, mode, sms)
    if m <= 16:
        return Tile(True, 64, 16, 1, 1, 8)
    if m <= 32:
        return Tile(True, 64, 32, 1, 1, 8)
    if m <= 64:
        return Tile(False, 64, 64, 1, 1, 6)
    if m <= 128:
        return Tile(False, 128, 64, 2, 1, 6)
    tiles = -(-m // 256) * -(-n // 128)
    if tiles < sms // 2:
        return MEDIUM
    return large(k, mode)


def dense_tile(m: int, n: int, k: int, element: str, block: bool, sms: int = 132) -> Tile:
    """Configuration for (m, k) by (n, k) of int8 or bf16: that of FP8 codes of as many bytes, but that sums without
    scales along K leave the tensor cores once, where wide tiles pay. Triton has int8 products of up to 224 columns."""
    row_bytes = 2 * k if element == "bf16" else k
    if block:
        return fp8_tile(m, n, row_bytes, "block", sms)
    if m <= 1024:
        return quickest(m, n, row_bytes, "precise", sms)
    if -(-m // 128) * -(-n // 256) < sms // 2:
        return MEDIUM
    return replace(LARGE["precise" if element == "int8" else "fast"], group=16 if k <= 4096 else 8)


def experts_tile(activations: int, experts: int, fine: bool = False) -> Tile:
    """Configuration for FP8 activations of experts by block-scaled weights, by how many each has on average; fine:
    every row of the weights has scales of its own, which leaves no registers for two slices of K at a time. Measured on
    an H100, with as many activations for each expert and with very different numbers of them."""
    each = -(-activations // experts)
    if each <= 64:
        return Tile(False, 64, 128, 1, 1, 6, pairs=not fine)
    if each <= 384 or fine:
        return Tile(False, 128, 128, 2, 1, 4 if each <= 160 else 5, pairs=not fine)
    return LARGE["block"]


def large(k: int, mode: str) -> Tile:
    """Bands twice as high read less of the columns' operand; with long rows they no longer fit the L2 cache."""
    return replace(LARGE[mode], group=16) if mode != "fast" and k <= 4096 else LARGE[mode]


def suits(m: int, tile: Tile) -> bool:
    """Whether a tile is about as high as m rows. Of those for more than 64, the one of 64 is for an m that would leave
    half of the last tile of 128 empty."""
    if m <= 32:
        return tile.swap and (m <= 16) == (tile.cols == 16)
    if m <= 64:
        return (tile.rows, tile.cols) == (64, 64)
    return tile.rows > 64 or (tile.cols == 128 and 0 < m % 128 <= 64)


def quickest(m: int, n: int, k: int, mode: str, sms: int) -> Tile:
    """Of TIMED, with K in one or more parts, the tile that should take the least time."""
    slices = -(-k // 128)
    best, found = float("inf"), MEDIUM
    for ends, each, tile in TIMED:
        if not suits(m, tile):
            continue
        tiles = -(-m // tile.rows) * -(-n // tile.cols) if not tile.swap else -(-n // tile.rows)
        for parts in PARTS if tile.pairs else PARTS[:1]:
            if not divides(parts, k):
                continue
            time = ends + -(-tiles * parts // sms) * -(-slices // parts) * each + adding(parts, m, n)
            if time < best:
                best, found = time, replace(tile, parts=parts)
    if found.waves == 2:
        return large(k, mode)
    # Where narrow tiles fill the machine, the rate of the L2 cache bounds them, and pairs only wait for each other.
    crowded = found.swap and found.parts == 1 and -(-n // found.rows) > 96
    return replace(found, pairs=False) if crowded else found


def prefers_cublas(m: int, n: int, k: int, mode: str) -> bool:
    """Where torch._scaled_mm was measured ahead of the Hopper kernel by more than the noise: see
    docs/design/0006-gpu-kernel-log.md."""
    if mode == "fast" or m <= 128:
        return False
    return min(m, n, k) >= 8192 or (mode == "precise" and min(m, n) >= 2048 and k >= 4096)


_ONE_WAVE, _MANY = 4224, 8192
UNPACKED_ROWS = 512  # from here on it pays to make 4-bit integers INT8 for the integer tensor cores
FUSED_ROWS = 4096  # up to so many, products decode weights themselves


def weight_only(m: int, n: int, k: int, element: str) -> str:
    """How a 16-bit float product by a quantized weight runs: rows (kernels for a few, bound by reading the weights),
    fused, or decode (to 16-bit floats, then cuBLAS)."""
    # Programs have two rows of 8 bits: more than 4224 are a second wave, which is worth it for many (sweep of 15 shapes
    # on an H100, docs/design/0006-gpu-kernel-log.md).
    few_bytes = m * n <= _ONE_WAVE or (m == 1 and n > _MANY)
    if m <= 8 if element in ("e2m1", "int4") else few_bytes:
        return "rows"
    return "fused" if m <= FUSED_ROWS else "decode"


def candidates(m: int, n: int, k: int, mode: str) -> list[Tile]:
    """What `autotune=True` times."""
    stages = 4 if mode == "fast" else 3
    wide = [Tile(False, 256, 128, 2, 2, stages, group) for group in (4, 8, 16)]
    medium = [Tile(False, 128, 128, 2, 1, 4), Tile(False, 128, 64, 2, 1, 6), Tile(False, 64, 128, 1, 1, 6)]
    parts = [count for count in PARTS if divides(count, k)]
    if mode != "fast":
        medium += [replace(tile, pairs=True, parts=count) for tile in medium for count in parts if m <= 1024]
    if m > 256:
        return wide + medium
    width = max(16, min(128, 1 << (m - 1).bit_length()))
    small = [Tile(True, 64, width, 1, 1, s) for s in (4, 6, 8) if s * (64 + width) * 132 < 220_000]
    if mode != "fast":
        small += [replace(small[-1], pairs=True, parts=count) for count in parts]
    return small + medium + wide


@dataclass(frozen=True)
class WeightTile:
    """One configuration of the Hopper kernel of packed weights. `split`: the two consumers divide K instead of the
    weight's rows. Activations wait in `x_stages` buffers of `x_units` times 64 of K, weights in `w_stages` of 128.
    `order`: what two warps of the product bring into the order of the other, "x" or "w"; "" is for a kernel before.
    `parts`: into how many parts K is divided, each summed by a program of its own (with `order` "")."""

    cols: int
    split: bool
    x_stages: int
    x_units: int
    w_stages: int
    order: str = ""
    consumers: int = 2
    group: int = 8
    parts: int = 1

    @property
    def rows(self) -> int:
        """Of the weights."""
        return 64 if self.split else 64 * self.consumers

    @property
    def step(self) -> int:
        """Slices of 128 of K in a round: four for each consumer that divides K."""
        return 4 * (self.consumers if self.split else 1)

    def slices(self, k: int, parts: int) -> int:
        """Slices of 128 of K in each of the parts, in whole rounds."""
        return -(-k // (128 * self.step * parts)) * self.step

    def rounds(self, kind: str, experts: int = 0) -> bool:
        """Whether float scales go into the weights, which rounds them to bf16: elsewhere they multiply the sum of each
        slice, which wants as many registers as the sum of all."""
        return not experts and self.cols > {"block": 128, "int4": 64}.get(kind, self.cols)


FOUR_BITS = ("nvfp4", "mxfp4", "int4")


# The microseconds that a program takes to begin and end, and those of a slice of K, by whether codes have 4 bits. Large
# tiles decode less, of small ones there are more for the multiprocessors. Measured on an H200 with six weights from
# 2112 x 7168 to 28672 x 4096, and fitted: of what was measured, the tile chosen is at most 8 % slower than the best.
WEIGHT_TILES = {
    True: (
        (1.7, 0.255, WeightTile(16, True, 8, 2, 8, "x")),
        (4.1, 0.244, WeightTile(16, True, 4, 2, 8)),
        (5.3, 0.410, WeightTile(16, False, 6, 2, 6)),
        (5.0, 0.250, WeightTile(32, True, 4, 2, 8)),
        (4.6, 0.455, WeightTile(32, False, 4, 2, 6)),
        (4.0, 0.319, WeightTile(64, True, 4, 2, 8)),
        (3.2, 0.563, WeightTile(64, False, 4, 2, 6)),
        (5.3, 0.443, WeightTile(128, True, 4, 2, 8)),
        (2.4, 0.806, WeightTile(128, False, 4, 2, 6)),
        (1.0, 0.885, WeightTile(128, False, 4, 2, 6, "w")),
        (5.4, 1.249, WeightTile(256, False, 6, 1, 4, "w")),
    ),
    False: (
        (3.0, 0.298, WeightTile(16, True, 8, 2, 8, "x")),
        (8.0, 0.240, WeightTile(16, True, 4, 2, 8)),
        (9.5, 0.408, WeightTile(16, False, 6, 2, 5)),
        (9.1, 0.286, WeightTile(32, True, 4, 2, 8)),
        (8.4, 0.463, WeightTile(32, False, 4, 2, 4)),
        (5.1, 0.375, WeightTile(64, True, 4, 2, 6)),
        (5.4, 0.595, WeightTile(64, False, 4, 2, 4)),
        (6.1, 0.484, WeightTile(128, True, 4, 2, 6)),
        (3.8, 0.875, WeightTile(128, False, 8, 1, 4)),
        (2.6, 0.951, WeightTile(128, False, 8, 1, 4, "w")),
        (5.4, 1.330, WeightTile(256, False, 5, 1, 4, "w")),
    ),
}
WEIGHT_PARTS = (1, 2, 3, 4, 6, 8)


@lru_cache(4096)
def weight_tile(m: int, n: int, k: int, kind: str, experts: int = 0, sms: int = 132) -> WeightTile:
    """The configuration for m rows by weights (n, k): the tile and the parts of K that should take the least time."""
    four = kind in FOUR_BITS
    if experts:
        return WeightTile(128, False, 8, 1, 6 if four else 4)
    width = max(16, min(128, 1 << (m - 1).bit_length()))
    best, found = float("inf"), WEIGHT_TILES[four][0][2]
    for ends, each, tile in WEIGHT_TILES[four]:
        if tile.cols != width and (m <= 128 or tile.cols != 256):
            continue
        tiles = -(-m // tile.cols) * -(-n // tile.rows)
        for parts in WEIGHT_PARTS[: 1 if tile.order else None]:
            length = tile.slices(k, parts)
            time = ends + -(-tiles * parts // sms) * length * each + adding(parts, m, n)
            if (parts - 1) * length * 128 < k and time < best:
                best, found = time, replace(tile, parts=parts)
    return replace(found, cols=8) if m <= 8 else found
