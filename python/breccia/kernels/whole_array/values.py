# SPDX-License-Identifier: Apache-2.0
"""Values of a ScaledTensor: (decode(data) - zero_point) · scale · global_scale over whole arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from breccia.kernels.whole_array.expansion import contract
from breccia.kernels.whole_array.namespace import Namespace
from breccia.kernels.whole_array.rules import decode_table
from breccia.kernels.whole_array.spec import Element
from breccia.layouts import Layout
from breccia.layouts import _spec as _layout_spec
from breccia.recipes import choices, global_divides, scale_format
from breccia.scaled_tensor import ScaledTensor


def dequantize(xp: Namespace, scaled: ScaledTensor, raw: Any) -> Any:
    """float32 values in the logical shape. ``raw(array)`` is the array with codes as uint8."""
    scale, zero_point = scales(xp, scaled, raw), zero_points(xp, scaled)
    values = xp.take(decode_table(xp, scaled.recipe.element, scaled.data), codes(xp, scaled, raw))
    if zero_point is not None and choices(scaled.recipe).expanded:
        exponent, scale = spread(xp, zero_point, scaled), spread(xp, scale, scaled)
        return contract(xp, values, scale, exponent, Element.of(scaled.recipe.element))
    if zero_point is not None:
        values = values - spread(xp, zero_point, scaled)
    return values * spread(xp, scale, scaled)


def codes(xp: Namespace, scaled: ScaledTensor, raw: Any) -> Any:
    """int32 codes in the logical shape."""
    data = xp.astype(raw(scaled.data), "int32")
    if not scaled.is_packed:
        return data & 0xFF
    axis: int = scaled.layout.axis
    n, rank = scaled.shape[axis], len(scaled.shape)
    shape = list(data.shape)
    pairs = xp.concatenate([x.reshape(*_split(shape, axis)) for x in (data & 15, (data >> 4) & 15)], rank + axis + 1)
    shape[axis] *= 2
    both = pairs.reshape(shape)
    return both[..., :n] if axis == -1 else both[..., :n, :]


def _split(shape: list[int], axis: int) -> list[int]:
    at = len(shape) + axis + 1
    return [*shape[:at], 1, *shape[at:]]


def scales(xp: Namespace, scaled: ScaledTensor, raw: Any) -> Any:
    """float32 scales, the global one included, in the shape of ``scale``."""
    scale, fmt = scaled.scale, scale_format(scaled.recipe)
    name = str(scale.dtype).rpartition(".")[2]
    if name == "uint16":  # bfloat16 bit patterns, as NumPy has them
        values = xp.floats(xp.astype(scale, "int32") << 16)
    elif name in ("float32", "float64", "float16", "bfloat16"):
        values = xp.astype(scale, "float32")
    else:
        fmt = "float8_e8m0fnu" if "e8m0" in name else fmt
        values = xp.take(decode_table(xp, str(fmt), scale), xp.astype(raw(scale), "int32") & 0xFF)
    level = scaled.global_scale
    if level is None:
        return values
    level = level.reshape(()) if math.prod(level.shape) == 1 else level
    return xp.divide(values, level) if global_divides(scaled.recipe) else values * level


def zero_points(xp: Namespace, scaled: ScaledTensor) -> Any:
    return None if scaled.zero_point is None else xp.astype(scaled.zero_point, "float32")


def spread(xp: Namespace, values: Any, scaled: ScaledTensor) -> Any:
    """Per-block values as an array that broadcasts against the logical shape."""
    if math.prod(values.shape) == 1 and scaled.layout.one_scale:
        return values.reshape(())
    axis: int = scaled.layout.axis
    if len(values.shape) < len(scaled.shape):  # one per row, without the constant axis
        values = values[..., None] if axis == -1 else values[..., None, :]
    if values.shape[axis] == 1 and scaled.layout.name == "per_channel":
        return values
    for at, block in block_sizes(scaled.layout):
        n = scaled.shape[at] if len(scaled.shape) >= -at else 1
        if block > 1 and values.shape[at] != n:
            values = xp.index(values, len(values.shape) + at, np.arange(n) // block)
    return values


def block_sizes(layout: Layout) -> list[tuple[int, int]]:
    """(axis, elements of a block along it), of the last two axes."""
    core = _layout_spec(layout)
    if core.kind == "PerBlockK":
        return [(core.axis, core.block_n)]
    if core.kind == "PerBlockMN":
        return [(-1, core.block_n), (-2, core.block_m)]
    return []


def saturation(xp: Namespace, scaled: ScaledTensor, raw: Any) -> tuple[Any, Any]:
    """The least and greatest values that do not saturate, to broadcast against the logical shape: beyond them a
    value would round to a code the format does not have."""
    element = Element.of(scaled.recipe.element)
    # Half a unit in the last place past the largest code.
    half = 0.5 if element.is_integer else 2.0 ** (element.max_exponent - element.mantissa_bits - 1)
    low, high = element.lowest - half, element.max + half
    scale, zero_point = spread(xp, scales(xp, scaled, raw), scaled), zero_points(xp, scaled)
    if zero_point is not None and not choices(scaled.recipe).expanded:
        zero = spread(xp, zero_point, scaled)
        ends = (low - zero) * scale, (high - zero) * scale
    else:
        ends = low * scale, high * scale
    return xp.minimum(*ends), xp.maximum(*ends)  # a scale may be negative
