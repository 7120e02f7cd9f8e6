# SPDX-License-Identifier: Apache-2.0
"""INT4 of the formats that store it in offset binary."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia.bridges.checks import StoredTypeError
from breccia.bridges.common import Array, as_numpy
from breccia.bridges.packing import packed_codes
from breccia.bridges.parts import Part
from breccia.bridges.scales import STORED_SCALES, group_size_of, made, row_blocks, scale_name
from breccia.recipes import INT4Scaling
from breccia.scaled_tensor import ScaledTensor


def int4_from_offset(packed: Array, scale: Array, zero_point: Array | None, shape: tuple[int, ...]) -> ScaledTensor:
    """INT4 stored in offset binary, value = (code - zero) · scale with zero = 8 where there is no
    ``zero_point``: signed codes without zero point, or unsigned ones with."""
    if scale.ndim == 0:
        raise ValueError("scale must have at least one axis, got shape ()")
    columns = shape[-1]
    data = packed[..., : (columns + 1) // 2]
    data = _flipped(data, columns) if zero_point is None else data
    return int4(data, scale, zero_point, shape, group_size_of(columns, scale.shape[-1], "scale"))


def int4(data: Array, scale: Array, zero_point: Array | None, shape: tuple[int, ...], group_size: int) -> ScaledTensor:
    """INT4 of packed codes: signed ones without a ``zero_point``, unsigned ones with one."""
    symmetric = zero_point is None
    name = scale_name(scale.dtype.name)
    recipe = INT4Scaling(group_size=group_size, signed=symmetric, scale_dtype=name, symmetric=symmetric)
    return made(data, scale, recipe, row_blocks(group_size, shape[-1]), zero_point, shape=shape)


def order_of_columns(g_idx: Any, columns: int, groups: int, argument: str) -> tuple[Array | None, int]:
    """Places of the columns sorted by the group of each, None where they are sorted, and the group size."""
    size = -(-columns // groups)
    if g_idx is None:
        return None, size
    order = as_numpy(g_idx, argument.rpartition(" ")[2])
    if order.dtype.kind not in "iu":
        raise StoredTypeError(f"{argument} must be of integers, got dtype {order.dtype}")
    if order.shape != (columns,) or (columns and (order.min() < 0 or order.max() >= groups)):
        raise ValueError(f"{argument} must be {columns} numbers below {groups}, got shape {order.shape}")
    if np.array_equal(order, np.arange(columns) // size):
        return None, size
    counts = np.bincount(order, minlength=groups)
    if (counts[:-1] != size).any():
        raise ValueError(f"{argument} must give every group {size} columns, got {counts.min()} to {counts.max()}")
    return np.argsort(order, kind="stable"), size


def offset_bits(scaled: ScaledTensor) -> int:
    """Bits of a word of eight 4-bit codes that differ in offset binary: of signed codes, the highest of each."""
    return 0x88888888 if scaled.recipe.element == "int4" else 0


def offset_codes(scaled: ScaledTensor) -> Array:
    """Packed offset-binary codes of an INT4 tensor: signed codes plus 8, unsigned ones as they are."""
    packed = packed_codes(scaled)
    return _flipped(packed, scaled.shape[-1]) if scaled.recipe.element == "int4" else packed


def _flipped(packed: Array, columns: int) -> Array:
    """Packed signed codes as those plus 8, or back; what pads an odd row stays zero."""
    result = packed ^ np.uint8(0x88)
    if columns % 2:
        result[..., -1] &= 15
    return result


def turned(array: Array) -> Part:
    """Floats (N, K / g) of a matrix's rows as formats store them whose words run down the columns: (K / g, N)."""
    return Part(STORED_SCALES[array.dtype.name], array.shape[::-1], lambda: np.ascontiguousarray(array.T))


def integer_zero_point(scaled: ScaledTensor, most: int = 16) -> Array:
    """The zero point as ``uint8``, on the scale of unsigned 4-bit codes, whose middle signed codes without one have;
    a format stores up to ``most``."""
    middle = 8 if scaled.recipe.element == "int4" else 0
    if scaled.zero_point is None:
        return np.full(tuple(scaled.scale.shape), middle, np.uint8)
    zero = as_numpy(scaled.zero_point, "zero_point")
    whole = zero if zero.dtype.kind in "iu" else zero.astype(np.float32)
    if zero.dtype.kind not in "iu" and not np.array_equal(whole, np.rint(whole)):
        raise ValueError("zero_point must be whole numbers for this format, got fractions")
    whole = whole.astype(np.int16) + middle
    if whole.size and (whole.min() < 0 or whole.max() > most):
        raise ValueError(f"zero_point must be from 0 to {most}, got {whole.min()} to {whole.max()}")
    result: Array = whole.astype(np.uint8)
    return result
