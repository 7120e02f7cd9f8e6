# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' integers: INT4 packed in 32-bit words, INT8 plain or packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia.bridges._common import (
    STORED_SCALES,
    Array,
    as_numpy,
    codes,
    from_words,
    get,
    group_size_of,
    made,
    pack_nibbles,
    row_blocks,
    scale_name,
    unpack_nibbles,
    words,
)
from breccia.bridges._integers import int4_from_offset, integer_zero_point, offset_codes
from breccia.bridges._parts import Part, part
from breccia.layouts import Layout, PerChannel, PerTensor
from breccia.recipes import INT8Scaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

NAME = "compressed-tensors"


def packed_integers(parts: Mapping[str, Any], weight: Array, scale: Array, kind: str) -> ScaledTensor:
    if "weight_shape" in parts:
        shape = stored_shape(get(parts, "weight_shape", NAME))
    else:
        shape = (*weight.shape[:-1], weight.shape[-1] * (8 if kind == "int4" else 4))
    bits = 4 if kind == "int4" and -(-shape[-1] * 4 // 32) == weight.shape[-1] else 8
    if shape[:-1] != weight.shape[:-1] or -(-shape[-1] * bits // 32) != weight.shape[-1]:
        raise ValueError(
            f"{NAME}: weight_packed must be {shape[:-1]} by {-(-shape[-1] * 4 // 32)} (4 bits) or "
            f"{-(-shape[-1] // 4)} (8 bits) words for weight_shape {shape}, got {weight.shape}"
        )
    stored = words(weight, "weight_packed")
    zero = None
    if "weight_zero_point" in parts:
        if len(shape) < 2:
            raise ValueError(f"{NAME}: weight_zero_point must be of a weight with rows, got weight_shape {shape}")
        rows = words(np.swapaxes(get(parts, "weight_zero_point", NAME), -1, -2), "weight_zero_point")
        rows = unpack_nibbles(rows, shape[-2]) if bits == 4 else rows[..., : shape[-2]]
        zero = np.ascontiguousarray(np.swapaxes(rows, -1, -2))
    if bits == 4:
        return int4_from_offset(stored, scale, zero, shape)
    data = stored[..., : shape[-1]] ^ np.uint8(0x80)
    return int8(data, scale, None if zero is None else (zero ^ np.uint8(0x80)).view(np.int8))


def stored_shape(stored: Array) -> tuple[int, ...]:
    """The shape that ``weight_shape`` says.

    Raises:
        ValueError: its numbers are not whole, or there are none.
    """
    if stored.dtype.kind not in "iu" or not 0 < stored.size <= 8:
        raise ValueError(
            f"{NAME}: 'weight_shape' must hold a whole number per axis, got dtype {stored.dtype}, shape {stored.shape}"
        )
    return tuple(int(n) for n in stored.reshape(-1))


def int8(data: Array, scale: Array, zero_point: Any) -> ScaledTensor:
    recipe, layout = int8_recipe(data.shape, scale.shape, scale.dtype.name, zero_point is None)
    if isinstance(layout, PerTensor):
        scale = scale.reshape(())
    zero = None if zero_point is None else as_numpy(zero_point, "weight_zero_point").reshape(scale.shape)
    return made(data, scale, recipe, layout, zero)


def int8_recipe(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: str, symmetric: bool
) -> tuple[ScalingRecipe, Layout]:
    name = scale_name(dtype)
    if scale_shape in ((), (1,)):
        return INT8Scaling(scale_dtype=name, symmetric=symmetric), PerTensor()
    if scale_shape[-1] == 1 or len(scale_shape) < len(shape):
        return INT8Scaling(scale_dtype=name, symmetric=symmetric), PerChannel()
    size = group_size_of(shape[-1], scale_shape[-1], "weight_scale")
    return INT8Scaling(group_size=size, scale_dtype=name, symmetric=symmetric), row_blocks(size, shape[-1])


def pack_int4(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    shape = scaled.shape
    result = {
        "weight_packed": Part("I32", (*shape[:-1], -(-shape[-1] // 8)), lambda: from_words(offset_codes(scaled))),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
        "weight_shape": part(np.array(shape, np.int64), "I64"),
    }
    if scaled.zero_point is not None:

        def zeros() -> Array:
            zero = integer_zero_point(scaled)
            assert zero is not None
            return np.swapaxes(from_words(pack_nibbles(np.swapaxes(zero & 15, -1, -2))), -1, -2)

        result["weight_zero_point"] = Part("I32", (*shape[:-2], -(-shape[-2] // 8), scaled.scale.shape[-1]), zeros)
    return result


def pack_int8(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    """INT8 of weights alone, which loaders expect in words, offset by 128."""
    shape, zero_point = scaled.shape, scaled.zero_point
    scale = scale.reshape(1) if isinstance(scaled.layout, PerTensor) else scale
    scale = scale[..., None] if isinstance(scaled.layout, PerChannel) and scale.ndim < scaled.ndim else scale
    result = {
        "weight_packed": Part(
            "I32", (*shape[:-1], -(-shape[-1] // 4)), lambda: from_words(codes(scaled.data, "data") ^ np.uint8(0x80))
        ),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
        "weight_shape": part(np.array(shape, np.int64), "I64"),
    }
    if zero_point is not None and isinstance(scaled.layout, PerTensor):
        raise ValueError(f"zero_point must be that of a row or a group for {NAME}, got one for the tensor")
    if zero_point is not None:

        def zeros() -> Array:
            offset = codes(zero_point, "zero_point").reshape(scale.shape) ^ np.uint8(0x80)
            return np.swapaxes(from_words(np.ascontiguousarray(np.swapaxes(offset, -1, -2))), -1, -2)

        result["weight_zero_point"] = Part("I32", (*shape[:-2], -(-shape[-2] // 4), scale.shape[-1]), zeros)
    return result


def store_int8(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    """INT8 of weights and activations: the bytes as they are."""
    if isinstance(scaled.layout, PerTensor):
        scale = scale.reshape(1)
    result = {
        "weight": part(codes(scaled.data, "data"), "I8"),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
    }
    if scaled.zero_point is not None:
        result["weight_zero_point"] = part(codes(scaled.zero_point, "zero_point").reshape(scale.shape), "I8")
    return result
