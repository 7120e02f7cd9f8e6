# SPDX-License-Identifier: Apache-2.0
"""Tuned configurations, keyed by kernel and shape. Measured on an H200; nothing is searched at run time unless asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One configuration of the Hopper FP8 kernel. `swap` puts the weights on the 64-row side of the instruction."""

    swap: bool
    rows: int
    cols: int
    consumers: int
    waves: int
    stages: int
    group: int = 8

    @property
    def maxnreg(self) -> int | None:
        return 168 if self.consumers == 2 else None


LARGE = {"fast": Tile(False, 256, 128, 2, 2, 4), "precise": Tile(False, 256, 128, 2, 2, 4), "block": Tile(False, 256, 128, 2, 2, 3)}
MEDIUM = Tile(False, 128, 128, 2, 1, 4)


def fp8_tile(m: int, n: int, k: int, mode: str, sms: int = 132) -> Tile:
    """Configuration for an (m, k) by (n, k) product; mode is fast, precise or block."""
    if m <= 16:
        return Tile(True, 64, 16, 1, 1, 8)
    if m <= 32:
        return Tile(True, 64, 32, 1, 1, 8)
    if m <= 64:
        return Tile(True, 64, 64, 1, 1, 8)
    if m <= 128:
        return Tile(True, 64, 128, 1, 1, 6)
    tiles = -(-m // 256) * -(-n // 128)
    if tiles < sms // 2:
        return MEDIUM
    return LARGE[mode]
