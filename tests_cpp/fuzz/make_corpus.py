# SPDX-License-Identifier: Apache-2.0
"""Inputs that a fuzzer begins with: `python make_corpus.py FOLDER` fills FOLDER/codecs, FOLDER/tensors and
FOLDER/c_abi, the same bytes every time. input.hpp says what is made of them."""

import random
import sys
from pathlib import Path

FORMATS = range(11)
RECIPES = range(10)
FLOATS = bytes.fromhex("0000000000000080000080bf0000c07f0000807f000080ff0000803f00000001ffff7f7f0000e043")

# Inputs that broke a target once: a batch of tensors without elements, whose memory is null.
BROKE_TENSORS = (
    "01085b5861072a28a185efaf5a0bdd79ac30c664635e897a8214edc6a735c4ffffffffffffff4fe6b4dec1964686bbe38258"
    "1cae1230b3b158d6f5789d3388b1534044f633acac72a1ba",
)


def codecs() -> list[bytes]:
    """A format, then every code or numbers at the edges of formats."""
    return [bytes([f]) + rest for f in FORMATS for rest in (bytes(range(256)), FLOATS, FLOATS[::-1], b"")]


def tensors() -> list[bytes]:
    """From numbers (0) or parts (1), a recipe, then anything."""
    return [*_recipes(random.Random(0), (8, 64, 256)), *map(bytes.fromhex, BROKE_TENSORS)]


def c_abi() -> list[bytes]:
    """Conversions (0) or products (1), a recipe, then anything."""
    return _recipes(random.Random(1), (32, 128, 384))


def _recipes(pick: random.Random, sizes: tuple[int, ...]) -> list[bytes]:
    return [bytes([way, recipe]) + pick.randbytes(size) for way in (0, 1) for recipe in RECIPES for size in sizes]


if __name__ == "__main__":
    for target in (codecs, tensors, c_abi):
        folder = Path(sys.argv[1]) / target.__name__
        folder.mkdir(parents=True, exist_ok=True)
        for i, raw in enumerate(target()):
            (folder / f"seed-{i:03}").write_bytes(raw)
