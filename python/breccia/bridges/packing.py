# SPDX-License-Identifier: Apache-2.0
"""Codes of less than a byte in bytes and in 32-bit words, from the low bit on, as formats of others store them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from breccia.bridges.checks import StoredTypeError
from breccia.bridges.common import Array, as_numpy, codes
from breccia.bridges.fp8 import fp8_stored
from breccia.bridges.parts import Part, part
from breccia.bridges.scales import STORED_SCALES
from breccia.scaled_tensor import ScaledTensor
from breccia.value import sixes


def word_matrix(x: Any, argument: str) -> NDArray[np.uint32]:
    """32-bit words as the core reads them. Raises StoredTypeError where its items are not of 32 bits."""
    array = as_numpy(x, argument)
    if array.dtype.kind not in "iu" or array.dtype.itemsize != 4:
        raise StoredTypeError(f"{argument} must be an int32 or uint32 array, got dtype {array.dtype}")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).view("<u4")


def words(x: Any, argument: str) -> Array:
    """An array of 32-bit words as little-endian bytes, four per word along the last axis."""
    return word_matrix(x, argument).view(np.uint8)


def from_words(packed: Array, dtype: str = "<i4") -> Array:
    """The inverse of `words`: rows are filled up with zeros to whole words."""
    missing = -packed.shape[-1] % 4
    if missing:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(packed).view(dtype)


def unpack_nibbles(packed: Array, n: int) -> Array:
    """``n`` codes per row, one per byte."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)[..., :n]


def unpack_bits(packed: Array, bits: int) -> Array:
    """Codes of ``bits`` bits, one after another from the low bit of the first byte on, one per byte."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    padded = np.zeros((*stream.shape[:-1], 8), np.uint8)
    padded[..., :bits] = stream
    return np.packbits(padded, axis=-1, bitorder="little")[..., 0]


def code_part(scaled: ScaledTensor) -> Part:
    """The codes of an upright tensor: two of 4 bits share a byte, four of 6 bits three, others have a byte each."""
    bits = scaled.recipe._traits[0]
    if bits == 4:
        return part(packed_codes(scaled), "U8")
    if bits == 6:
        return packed_sixes(scaled)
    return part(codes(scaled.data, "data"), "I8" if scaled.recipe.element == "int8" else fp8_stored(scaled.recipe))


def float_part(array: Array) -> Part:
    """Scales of 16 or 32 bits as they are."""
    return part(array, STORED_SCALES[array.dtype.name])


def scale_part(scaled: ScaledTensor, byte: str = "U8") -> Part:
    """The scales as they are; ``byte`` is the header's dtype of those that take one."""
    scale = as_numpy(scaled.scale, "scale")
    if scale.dtype.itemsize == 1:
        return Part(byte, tuple(scale.shape), lambda: codes(scale, "scale"))
    return float_part(scale)


def packed_sixes(scaled: ScaledTensor) -> Part:
    """6-bit data of an upright tensor, four codes in three bytes; those of a `breccia.PackedWeight` as they are."""
    held = codes(scaled._held[0], "data")
    if scaled._unit != (1, 1):
        return part(held, "U8")
    return Part("U8", (*held.shape[:-1], held.shape[-1] // 4 * 3), lambda: sixes.pack(held))


def pack_nibbles(values: Array) -> Array:
    """Two codes per byte, the even element low; an odd row's last high nibble is zero."""
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    packed: Array = values[..., ::2] | (values[..., 1::2] << 4)
    return packed


def packed_codes(scaled: ScaledTensor) -> Array:
    """4-bit data of an upright tensor as packed bytes, whichever way the tensor stores it."""
    data = codes(scaled.data, "data")
    return np.ascontiguousarray(data) if scaled.is_packed else pack_nibbles(data & 15)
