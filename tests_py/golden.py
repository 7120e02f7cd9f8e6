# SPDX-License-Identifier: Apache-2.0
"""What every recipe makes of every class of input, as SHA-256 of all its bytes: `python golden.py` writes
data/golden.json. Inputs are made of bits alone, so that they are the same on every machine and with every NumPy."""

import hashlib
import json
from pathlib import Path

import breccia
import cases
import numpy as np

FILE = Path(__file__).with_name("data") / "golden.json"
CLASSES = ("ordinary", "every exponent", "subnormal", "ties", "powers", "zeros", "outliers", "specials", "bf16", "f64",
           "drawn", "weighted")  # fmt: skip


def bits(count, seed):
    return np.frombuffer(hashlib.shake_256(seed.encode()).digest(4 * count), "<u4")


def floats(random, low, high):
    """Signs and significands of those bits, exponents from low to high."""
    exponents = low + (random >> 23) % (high - low + 1)
    return (random & 0x807F_FFFF | exponents.astype(np.uint32) << 23).view(np.float32)


def tensor(kind, shape):
    random = bits(int(np.prod(shape)), kind).reshape(shape)
    x = floats(random, 120, 127)
    if kind == "every exponent":
        x = floats(random, 0, 254)
    elif kind == "subnormal":
        x = (random & 0x807F_FFFF).view(np.float32)
    elif kind == "ties":
        x = ((random % 57).astype(np.float32) - 28) / 4
    elif kind == "powers":
        x = (random & 0x8000_0000 | 100 + (random >> 8) % 50 << 23).view(np.float32)
    elif kind == "zeros":
        x = (random & 0x8000_0000).view(np.float32)
    elif kind == "outliers":
        x = np.where(random % 37 == 0, x * np.float32(2**17), x)
    elif kind == "specials":
        odd = np.array([np.nan, np.inf, -np.inf], np.float32)
        x = np.where(random % 61 == 0, odd[random % 3], x)
    elif kind == "bf16":
        x = (x.view(np.uint32) & 0xFFFF_0000).view(np.float32)
    elif kind == "f64":
        return x.astype(np.float64) * (1 + 2.0**-30)
    return x


def digest(recipe, kind):
    sha = hashlib.sha256()

    def add(array):
        if array is not None:
            array = np.ascontiguousarray(array)
            sha.update(f"{array.dtype.name}{array.shape}".encode() + array.tobytes())

    x = tensor(kind, cases.shape_for(recipe, rows=5, blocks=3, at_least=96))
    scaled = breccia.cast(x, recipe, **options(kind, recipe, x))
    for part in (scaled.data, scaled.scale, scaled.zero_point, scaled.global_scale):
        add(part)
    for dtype in ("float32", "float16"):
        values = breccia.dequantize(scaled, out_dtype=dtype)
        add(np.where(np.isnan(values), np.asarray(np.nan, values.dtype), values))  # which NaN is the processor's choice
    return sha.hexdigest()


def options(kind, recipe, x):
    """Of the cast: rounded at random, or with columns that count by importance, which groups with exponents refuse."""
    if kind == "drawn":
        return {"rounding": "stochastic", "seed": 2**40 - 3}
    if kind != "weighted" or "Expanded" in type(recipe).__name__:
        return {}
    return {"importance": (bits(x.shape[1], "importance") % 1000).astype(np.float32)}


def digests(recipe):
    return {kind: digest(recipe, kind) for kind in CLASSES}


if __name__ == "__main__":
    FILE.write_text(json.dumps({key: digests(recipe) for key, recipe in cases.RECIPES.items()}, indent=1) + "\n")
