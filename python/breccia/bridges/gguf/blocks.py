# SPDX-License-Identifier: Apache-2.0
"""How ggml lays blocks out in bytes: the types' sizes, fields of a block, and tensors as blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from breccia.bridges.common import Array, as_numpy, codes
from breccia.bridges.integers import offset_codes
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import packed_codes, unpack_nibbles
from breccia.bridges.parts import Part
from breccia.scaled_tensor import ScaledTensor

# Type name -> (number, elements per block, bytes per block): ggml.h.
TYPES: dict[str, tuple[int, int, int]] = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "Q8_K": (15, 256, 292),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "I8": (24, 1, 1),
    "I16": (25, 1, 2),
    "I32": (26, 1, 4),
    "I64": (27, 1, 8),
    "F64": (28, 1, 8),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36),
    "Q1_0": (41, 128, 18),
}
NUMBERS = {number: name for name, (number, _, _) in TYPES.items()}


def blocks_of(raw: Any, kind: str) -> Array:
    """Rows of bytes as blocks, bytes of a block along a new last axis. Raises TypeError where they are no bytes,
    ValueError where the type is unknown, or its blocks do not fill the rows."""
    data = codes(raw, "raw")
    if kind not in TYPES:
        raise ValueError(f"kind must be one of {', '.join(TYPES)}, got {kind!r}")
    _, _, size = TYPES[kind]
    if data.ndim == 0 or data.shape[-1] % size:
        raise ValueError(f"raw must have rows of whole {kind} blocks of {size} bytes, got shape {data.shape}")
    return data.reshape(*data.shape[:-1], data.shape[-1] // size, size)


def half(blocks: Array, name: str) -> Array:
    """A little-endian float16 field."""
    at = {"d": 0, "m": 2}[name]
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def flat(per_block: Array) -> Array:
    """What each block has, along its row."""
    return per_block.reshape(*per_block.shape[:-2], -1)


def split_to_pairs(halves: Array) -> Array:
    """Nibbles split in halves of a block to neighbours in a byte."""
    n = halves.shape[-1]
    both = np.concatenate([halves & 15, halves >> 4], axis=-1)
    pairs: Array = (both[..., ::2] | (both[..., 1::2] << 4)).reshape(*halves.shape[:-1], n)
    return pairs


def _pairs_to_split(pairs: Array) -> Array:
    n = pairs.shape[-1]
    both = unpack_nibbles(pairs, 2 * n)
    halves: Array = both[..., :n] | (both[..., n:] << 4)
    return halves


def _join(*columns: Array) -> Array:
    return np.concatenate([c.view(np.uint8) for c in columns], axis=-1)


def _scale16(scaled: ScaledTensor) -> Array:
    return np.ascontiguousarray(as_numpy(scaled.scale, "scale").astype("<f2"))[..., None]


def _q8_0(scaled: ScaledTensor) -> Array:
    data = codes(scaled.data, "data").reshape(*scaled.scale.shape, 32)
    return _join(_scale16(scaled), np.ascontiguousarray(data))


def _q4_0(scaled: ScaledTensor) -> Array:
    return _join(_scale16(scaled), _pairs_to_split(offset_codes(scaled).reshape(*scaled.scale.shape, 16)))


def q4_1(outside: OutsideTensor) -> Part:
    """Codes with a scale and a minimum, as blocks. Raises ValueError where the tensor has no such form."""
    scaled, bias = outside.scaled, outside.bias
    if bias is None or outside.columns is not None or scaled.scale.shape[-1] * 32 != scaled.shape[-1]:
        raise ValueError(f"scaled must have a bias for 32 elements and its columns in order for Q4_1, got {outside}")
    if bias.dtype != np.float16 or scaled.scale.dtype != np.float16:
        raise ValueError(f"scale and bias must be float16 for Q4_1, got {scaled.scale.dtype} and {bias.dtype}")

    def make() -> Array:
        pairs = _pairs_to_split(packed_codes(scaled).reshape(*scaled.scale.shape, 16))
        blocks = _join(_scale16(scaled), np.ascontiguousarray(bias.astype("<f2"))[..., None], pairs)
        return blocks.reshape(*scaled.shape[:-1], -1)

    return Part("U8", (*scaled.shape[:-1], scaled.shape[-1] // 32 * 20), make)


def _mxfp4(scaled: ScaledTensor) -> Array:
    pairs = packed_codes(scaled).reshape(*scaled.scale.shape, 16)
    return _join(codes(scaled.scale, "scale")[..., None], _pairs_to_split(pairs))


def _nvfp4(scaled: ScaledTensor) -> Array:
    scale = codes(scaled.scale, "scale")
    lead = (*scale.shape[:-1], scale.shape[-1] // 4)
    pairs = _pairs_to_split(packed_codes(scaled).reshape(*lead, 4, 8)).reshape(*lead, 32)
    return _join(np.ascontiguousarray(scale).reshape(*lead, 4), pairs)


# How the types that are ScaledTensors are made.
MAKE: dict[str, Callable[[ScaledTensor], Array]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
