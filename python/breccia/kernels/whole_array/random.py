# SPDX-License-Identifier: Apache-2.0
"""Random numbers as a function of a seed and a position, the same in every framework, and the random Hadamard
transform."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from breccia.kernels.whole_array.namespace import Namespace, wrapped

_STREAM = {"rounding": 0x9E3779B9, "signs": 0x7F4A7C15}


def _shift(x: Any, n: int) -> Any:
    """Logical shift to the right of int32."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def _mix(x: Any) -> Any:
    """A bijection of 32-bit integers in which every input bit moves every output bit: two rounds of multiply and
    xor-shift with the constants of Wellons' "lowbias32" (https://github.com/skeeto/hash-prospector)."""
    x = x ^ _shift(x, 16)
    x = x * wrapped(0x7FEB352D)
    x = x ^ _shift(x, 15)
    x = x * wrapped(0x846CA68B)
    return x ^ _shift(x, 16)


def _random_bits(xp: Namespace, seed: Any, positions: Any, stream: str, like: Any) -> Any:
    # A pair has the low and the high 32 bits. Reshaped, because NumPy warns of wrapping scalars.
    low, high = seed if isinstance(seed, tuple) else (seed, seed >> 32)
    key, high = (xp.integer(_wrapped(x), like).reshape(1) for x in (low, high))
    key = _mix(key + wrapped(_STREAM[stream]))
    return _mix(_mix(positions ^ key) + _mix(high ^ key))


def key_words(seed: int) -> tuple[int, int]:
    """The words of `RandomKey` (cpp/src/contract/random.hpp) for rounding, as int32."""
    low, high = (np.array([wrapped(x)], np.int32) for x in (seed, seed >> 32))
    key = _mix(low + wrapped(_STREAM["rounding"]))
    return int(key[0]), int(_mix(high ^ key)[0])


def uniform_of(xp: Namespace, seed: Any, shape: tuple[int, ...], offset: tuple[Any, Any], like: Any) -> Any:
    """float32 in [0, 1), multiples of 2^-24, for the elements of a part of a larger tensor: ``offset`` is the position
    of its first element and the length of the larger tensor's rows, 0 for those of ``shape``."""
    cols = shape[-1]
    positions = xp.arange(math.prod(shape), like)
    if not isinstance(offset[1], int) or offset[1] not in (0, cols):
        row = positions // cols
        positions = positions - row * cols + row * _wrapped(offset[1])
    bits = _random_bits(xp, seed, positions + _wrapped(offset[0]), "rounding", like)
    return (xp.astype(_shift(bits, 8), "float32") * 2.0**-24).reshape(shape)


def _wrapped(x: Any) -> Any:
    return wrapped(x) if isinstance(x, int) else x


def hadamard(xp: Namespace, x: Any, block: int, seed: int, inverse: bool = False) -> Any:
    """The transform of `breccia.Hadamard` along the last axis of a float32 array, and its inverse."""
    shape = tuple(x.shape)
    if not shape or shape[-1] % block:
        raise ValueError(f"Hadamard requires x.shape[-1] to be divisible by {block}, got x.shape {shape}")
    positive = _random_bits(xp, seed, xp.arange(block, x), "signs", x) >= 0
    signs = xp.where(positive, xp.number(1.0, x), xp.number(-1.0, x))
    y = x.reshape(-1, block)
    if not inverse:
        y = y * signs
    half = 1
    while half < block:
        pairs = y.reshape(-1, block // (2 * half), 2, half)
        low, high = pairs[:, :, :1], pairs[:, :, 1:]
        y = xp.concatenate([low + high, low - high], 2).reshape(-1, block)
        half *= 2
    y = y * (1 / math.sqrt(block))
    if inverse:
        y = y * signs
    return y.reshape(shape)
