# SPDX-License-Identifier: Apache-2.0
"""The values and the scales of GGUF's block types that no ScaledTensor can hold: Q5_0, Q5_1, the K-quants, IQ4
(ggml-quants.c)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from breccia.bridges.common import Array

# What the sixteen codes of IQ4_NL and IQ4_XS stand for (kvalues_iq4nl).
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _f16(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _halves(packed: Array) -> Array:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q5(blocks: Array, at: int) -> Array:
    high = np.unpackbits(np.ascontiguousarray(blocks[..., at : at + 4]), axis=-1, bitorder="little")
    values: Array = _halves(blocks[..., at + 4 :]) | (high << 4)
    return values


def _q5_0(blocks: Array) -> Array:
    return _f16(blocks, 0) * (_q5(blocks, 2).astype(np.float32) - 16)


def _q5_1(blocks: Array) -> Array:
    return _f16(blocks, 0) * _q5(blocks, 4).astype(np.float32) + _f16(blocks, 2)


def _planes(packed: Array, bits: int) -> Array:
    """``bits``-wide fields, 32 bytes at a time: field j of the 32 bytes is elements 32 j … 32 j + 31."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, 32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (runs >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _per(values: Array, count: int) -> Array:
    return np.repeat(values, count, axis=-1)


def _six_bit(blocks: Array) -> tuple[Array, Array]:
    """The eight 6-bit scales and minima of Q4_K and Q5_K."""
    s = blocks[..., 4:16]
    low, mid, high = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    least = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=-1)
    return scale.astype(np.float32), least.astype(np.float32)


def _scale_q45_k(blocks: Array) -> Array:
    return _f16(blocks, 0) * _six_bit(blocks)[0]


def _k45(blocks: Array, q: Array) -> Array:
    _, least = _six_bit(blocks)
    return _per(_scale_q45_k(blocks), 32) * q.astype(np.float32) - _per(_f16(blocks, 2) * least, 32)


def _q4_k(blocks: Array) -> Array:
    return _k45(blocks, _planes(blocks[..., 16:144], 4))


def _q5_k(blocks: Array) -> Array:
    return _k45(blocks, _planes(blocks[..., 48:176], 4) | (_planes(blocks[..., 16:48], 1) << 4))


def _scale_q6_k(blocks: Array) -> Array:
    return _f16(blocks, 208) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)


def _q6_k(blocks: Array) -> Array:
    low = blocks[..., 0:128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = ((low >> np.array([[0], [4]], np.uint8)) & 15).reshape(*blocks.shape[:-1], 256)
    q = (low | (_planes(blocks[..., 128:192], 2) << 4)).astype(np.float32) - 32
    return _per(_scale_q6_k(blocks), 16) * q


def _scale_q2_k(blocks: Array) -> Array:
    return _f16(blocks, 80) * (blocks[..., 0:16] & 15).astype(np.float32)


def _q2_k(blocks: Array) -> Array:
    least = _f16(blocks, 82) * (blocks[..., 0:16] >> 4).astype(np.float32)
    return _per(_scale_q2_k(blocks), 16) * _planes(blocks[..., 16:80], 2).astype(np.float32) - _per(least, 16)


def _scale_q3_k(blocks: Array) -> Array:
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scale: Array = _f16(blocks, 108) * ((_halves(low) | (upper << 4)).astype(np.float32) - 32)
    return scale


def _q3_k(blocks: Array) -> Array:
    q = _planes(blocks[..., 32:96], 2).astype(np.float32) - 4 * (1 - _planes(blocks[..., 0:32], 1).astype(np.float32))
    values: Array = _per(_scale_q3_k(blocks), 16) * q
    return values


def _iq4_nl(blocks: Array) -> Array:
    values: Array = _f16(blocks, 0) * IQ4[_halves(blocks[..., 2:18])]
    return values


def _scale_iq4_xs(blocks: Array) -> Array:
    """Of each run of 32, of six bits: the four low ones in a nibble, the two high ones in a word of 16 bits."""
    low, high = blocks[..., 4:8], blocks[..., 2:4]
    low = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:-1], 8)
    high = ((high[..., None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3).reshape(*high.shape[:-1], 8)
    scale: Array = _f16(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return scale


def _iq4_xs(blocks: Array) -> Array:
    """Eight runs of 32, each with a scale."""
    runs = blocks[..., 8:136].reshape(*blocks.shape[:-1], 8, 16)
    values: Array = _per(_scale_iq4_xs(blocks), 32) * IQ4[_halves(runs).reshape(*blocks.shape[:-1], 256)]
    return values


VALUES: dict[str, Callable[[Array], Array]] = {
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}

# What codes are multiplied by, one for each run of 16 or 32; a minimum that is added is none.
SCALES: dict[str, Callable[[Array], Array]] = {
    "Q5_0": partial(_f16, at=0),
    "Q5_1": partial(_f16, at=0),
    "Q2_K": _scale_q2_k,
    "Q3_K": _scale_q3_k,
    "Q4_K": _scale_q45_k,
    "Q5_K": _scale_q45_k,
    "Q6_K": _scale_q6_k,
    "IQ4_NL": partial(_f16, at=0),
    "IQ4_XS": _scale_iq4_xs,
}
