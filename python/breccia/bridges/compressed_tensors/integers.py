# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' integers: codes of 2, 3, 4 and 8 bits in 32-bit words, INT8 plain, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from breccia.bridges.common import Array, as_numpy, codes, get
from breccia.bridges.integers import int4, int4_from_offset, integer_zero_point, offset_codes, order_of_columns
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import (
    code_part,
    float_part,
    from_words,
    pack_nibbles,
    scale_part,
    unpack_bits,
    unpack_nibbles,
    words,
)
from breccia.bridges.parts import Part, part
from breccia.bridges.scales import group_size_of, made, row_blocks, scale_name
from breccia.layouts import Layout, PerChannel, PerTensor
from breccia.recipes import INT4Scaling, INT8Scaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

NAME = "compressed-tensors"


def packed_integers(
    parts: Mapping[str, Any], weight: Array, scale: Array, bits: int, symmetric: bool = False
) -> ScaledTensor | OutsideTensor:
    """Codes of 2, 3, 4 or 8 bits in words, offset by half of their range; those of 2 and 3 become INT4. ``bits`` are
    the codes' where ``weight_shape`` leaves them open; ``symmetric`` says that zero points must be the middle."""
    if "weight_shape" in parts:
        shape = stored_shape(get(parts, "weight_shape", NAME))
    else:
        shape = (*weight.shape[:-1], weight.shape[-1] * 32 // bits)
    bits = bits_of(shape, weight.shape, bits)
    raw = words(weight, "weight_packed")
    if "weight_zero_point" in parts and len(shape) < 2:
        raise ValueError(f"{NAME}: weight_zero_point must be of a weight with rows, got weight_shape {shape}")
    zero = zero_point_of(parts, shape, bits, scale.shape, symmetric)
    order = None
    if bits != 8:
        scale = spread(scale, shape)
        zero = None if zero is None else spread(zero, shape)
        order, _ = order_of_columns(given_order(parts), shape[-1], scale.shape[-1], f"{NAME}: weight_g_idx")
    elif given_order(parts) is not None:
        order, _ = order_of_columns(parts["weight_g_idx"], shape[-1], scale.shape[-1], f"{NAME}: weight_g_idx")
    if bits == 4 and order is None:
        return int4_from_offset(raw, scale, zero, shape)
    data = unpack_bits(raw, bits)[..., : shape[-1]]
    data = data if order is None else data[..., order]
    if bits == 8:
        made8 = int8(data ^ np.uint8(0x80), scale, None if zero is None else (zero ^ np.uint8(0x80)).view(np.int8))
        return made8 if order is None else OutsideTensor(made8, columns=np.argsort(order, kind="stable"))
    if zero is None:
        data = (data - np.uint8(1 << (bits - 1))) & np.uint8(15)
    size = group_size_of(shape[-1], scale.shape[-1], "weight_scale")
    made4 = int4(pack_nibbles(data), scale, zero, shape, size)
    return made4 if order is None else OutsideTensor(made4, columns=np.argsort(order, kind="stable"))


def given_order(parts: Mapping[str, Any]) -> Any:
    """The group of each column, None where there are none: a file may keep the place with -1."""
    order = parts.get("weight_g_idx")
    return None if order is None or bool((as_numpy(order, "weight_g_idx") == -1).all()) else order


def bits_of(shape: tuple[int, ...], stored: tuple[int, ...], bits: int) -> int:
    """How many bits a code has: ``bits``, or what the shape of the words tells."""
    for width in dict.fromkeys((bits, 4, 8, 2, 3)):
        if shape[:-1] == stored[:-1] and -(-shape[-1] * width // 32) == stored[-1]:
            return width
    raise ValueError(
        f"{NAME}: weight_packed must be {shape[:-1]} by {-(-shape[-1] * 4 // 32)} (4 bits) or "
        f"{-(-shape[-1] // 4)} (8 bits) words for weight_shape {shape}, or as many as codes of 2 or 3 bits take, got "
        f"{stored}"
    )


def zero_point_of(
    parts: Mapping[str, Any], shape: tuple[int, ...], bits: int, scale_shape: tuple[int, ...], symmetric: bool
) -> Array | None:
    """Zero points on the scale of codes that count from 0: packed along the rows, or one of the tensor as it is."""
    if "weight_zero_point" not in parts:
        return None
    stored, middle = get(parts, "weight_zero_point", NAME), 1 << (bits - 1)
    if stored.dtype.itemsize == 1:
        zero = (codes(stored, "weight_zero_point") + np.uint8(middle)).reshape(scale_shape)
    elif stored.ndim < 2 or len(shape) < 2:
        raise ValueError(f"weight_zero_point must have at least 2 axes where it is packed, got shape {stored.shape}")
    else:
        rows = words(np.swapaxes(stored, -1, -2), "weight_zero_point")
        rows = unpack_nibbles(rows, shape[-2]) if bits == 4 else unpack_bits(rows, bits)[..., : shape[-2]]
        zero = np.ascontiguousarray(np.swapaxes(rows, -1, -2))
    return checked_zero_point(zero, middle, symmetric)


def checked_zero_point(zero: Array, middle: int, symmetric: bool) -> Array | None:
    """Zero points that are not those of symmetric codes."""
    if symmetric and (zero != middle).any():
        raise ValueError(
            f"{NAME}: weight_zero_point must be 0 everywhere where config.json says symmetric, it is from "
            f"{int(zero.min()) - middle} to {int(zero.max()) - middle}: programs that believe one compute other values "
            "than those that believe the other"
        )
    return None if symmetric else zero


def spread(scale: Array, shape: tuple[int, ...]) -> Array:
    """Scales with an entry or more for each row, of those of the tensor, of rows, of groups or of square tiles."""
    *batch, rows, columns = shape if len(shape) > 1 else (1, *shape)
    if scale.size == 1:
        return np.ascontiguousarray(np.broadcast_to(scale.reshape(()), (*batch, rows, 1)))
    if scale.shape == (*batch, rows):
        return scale[..., None]
    if scale.shape[:-1] == (*batch, rows) or len(shape) < 2:
        return scale
    for size in (128, 64, 256, 32, 16, 512):
        if scale.shape == (*batch, -(-rows // size), -(-columns // size)):
            return np.repeat(scale, size, axis=-2)[..., :rows, :]
    raise ValueError(
        f"{NAME}: weight_scale must be of the tensor, rows, groups or square tiles of {shape}, got {scale.shape}"
    )


def stored_shape(stored: Array) -> tuple[int, ...]:
    """The shape that ``weight_shape`` says. Raises ValueError where its numbers are not whole, or there are none."""
    if stored.dtype.kind not in "iu" or not 0 < stored.size <= 8:
        raise ValueError(
            f"{NAME}: 'weight_shape' must hold a whole number per axis, got dtype {stored.dtype}, shape {stored.shape}"
        )
    return tuple(int(n) for n in stored.reshape(-1))


def int8(data: Array, scale: Array, zero_point: Any) -> ScaledTensor:
    recipe, layout = int8_recipe(data.shape, scale.shape, scale.dtype.name, zero_point is None)
    zero = None if zero_point is None else as_numpy(zero_point, "weight_zero_point").reshape(scale.shape)
    if layout.one_scale:
        scale, zero = scale.reshape(()), None if zero is None else zero.reshape(())
    elif layout.block != (1, 0):
        scale, zero = spread(scale, data.shape), None if zero is None else spread(zero, data.shape)
    return made(data, scale, recipe, layout, zero)


def integer_recipe(
    bits: int, shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: str, symmetric: bool
) -> tuple[ScalingRecipe, Layout]:
    """What codes of so many bits are here: those of 2 and 3 are INT4."""
    if bits == 8:
        return int8_recipe(shape, scale_shape, dtype, symmetric)
    groups = spread(np.broadcast_to(np.uint8(0), scale_shape), shape).shape[-1]
    size = group_size_of(shape[-1], groups, "weight_scale")
    recipe = INT4Scaling(group_size=size, signed=symmetric, symmetric=symmetric, scale_dtype=scale_name(dtype))
    return recipe, row_blocks(size, shape[-1])


def int8_recipe(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: str, symmetric: bool
) -> tuple[ScalingRecipe, Layout]:
    name = scale_name(dtype)
    if scale_shape in ((), (1,)):
        return INT8Scaling(scale_dtype=name, symmetric=symmetric), PerTensor()
    of_rows = scale_shape in ((*shape[:-1], 1), shape[:-1])
    if of_rows or len(scale_shape) < len(shape):
        return INT8Scaling(scale_dtype=name, symmetric=symmetric), PerChannel()
    spread(np.broadcast_to(np.uint8(0), scale_shape), shape)  # raises where they are of nothing that is known
    size = group_size_of(shape[-1], scale_shape[-1], "weight_scale")
    return INT8Scaling(group_size=size, scale_dtype=name, symmetric=symmetric), row_blocks(size, shape[-1])


def int4_in_bytes(data: Array, scale: Array, zero_point: Any) -> ScaledTensor:
    """INT4 of codes that take a byte each."""
    zero = None if zero_point is None else as_numpy(zero_point, "weight_zero_point").view(np.int8)
    for what, some in (("weight", data.view(np.int8)), ("weight_zero_point", zero)):
        if some is not None and some.size and (some.min() < -8 or some.max() > 7):
            raise ValueError(f"{NAME}: {what} of 4 bits must be from -8 to 7, it is from {some.min()} to {some.max()}")
    size = group_size_of(data.shape[-1], spread(scale, data.shape).shape[-1], "weight_scale")
    if zero is None:
        return int4(pack_nibbles(data & 15), spread(scale, data.shape), None, data.shape, size)
    zeros = spread((zero.view(np.uint8) + np.uint8(8)).reshape(scale.shape), data.shape)
    return int4(pack_nibbles((data + np.uint8(8)) & 15), spread(scale, data.shape), zeros, data.shape, size)


def store_int4(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    """INT4 of weights and activations: a code to a byte."""

    def data() -> Array:
        return unpack_nibbles(offset_codes(scaled), scaled.shape[-1]) - np.uint8(8)

    def zeros() -> Array:
        return integer_zero_point(scaled, 15).reshape(scale.shape) - np.uint8(8)

    parts = {"weight": Part("I8", scaled.shape, data), "weight_scale": scale_part(scaled)}
    return parts | ({} if scaled.zero_point is None else {"weight_zero_point": Part("I8", scale.shape, zeros)})


def pack_int4(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    """Codes of 4 bits, and zero points packed along the rows."""

    def zeros() -> Array:
        return pack_nibbles(np.swapaxes(integer_zero_point(scaled) & 15, -1, -2))

    return _in_words(scaled, scale, 8, lambda: offset_codes(scaled), zeros)


def pack_int8(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    """INT8 of weights alone, which loaders expect in words, offset by 128; a tensor's own zero point is given to every
    row, for zero points are packed along the rows."""
    shape, zero_point = scaled.shape, scaled.zero_point
    if scaled.layout.one_scale:
        scale = scale.reshape(1) if zero_point is None else spread(scale, shape)
    scale = scale[..., None] if scaled.layout.block == (1, 0) and scale.ndim < scaled.ndim else scale

    def zeros() -> Array:
        stored = codes(zero_point, "zero_point")
        stored = spread(stored, shape) if stored.size == 1 else stored
        return np.swapaxes(stored.reshape(scale.shape) ^ np.uint8(0x80), -1, -2)

    return _in_words(scaled, scale, 4, lambda: codes(scaled.data, "data") ^ np.uint8(0x80), zeros)


def _in_words(
    scaled: ScaledTensor, scale: Array, each: int, data: Callable[[], Array], zeros: Callable[[], Array]
) -> dict[str, Part]:
    """The parts of integers of which a word has ``each``; ``zeros`` are turned, (…, groups, rows)."""
    shape = scaled.shape
    result = {
        "weight_packed": Part("I32", (*shape[:-1], -(-shape[-1] // each)), lambda: from_words(data())),
        "weight_scale": float_part(scale),
        "weight_shape": part(np.array(shape, np.int64), "I64"),
    }
    if scaled.zero_point is not None:
        words_shape = (*shape[:-2], -(-shape[-2] // each), scale.shape[-1])
        result["weight_zero_point"] = Part("I32", words_shape, lambda: np.swapaxes(from_words(zeros()), -1, -2))
    return result


def store_int8(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    """INT8 of weights and activations: the bytes as they are."""
    if scaled.layout.one_scale:
        scale = scale.reshape(1)
    result = {
        "weight": code_part(scaled),
        "weight_scale": float_part(scale),
    }
    if scaled.zero_point is not None:
        result["weight_zero_point"] = part(codes(scaled.zero_point, "zero_point").reshape(scale.shape), "I8")
    return result
