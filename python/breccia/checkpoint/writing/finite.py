# SPDX-License-Identifier: Apache-2.0
"""How many numbers of a tensor are infinite or NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia.bridges.outside import comparable
from breccia.checkpoint.workers import PIECE, Workers
from breccia.comparison import magnitudes
from breccia.scaled_tensor import ScaledTensor

__all__ = ["FLOATS", "counted", "in_piece"]

# Bits of the exponent, which are all set in infinities and NaN.
FLOATS: dict[str, Any] = {
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F32": np.uint32(0x7F800000),
    "F64": np.uint64(0x7FF0000000000000),
}
_SIGNS = {size: np.dtype(f"u{size}").type(1 << (8 * size - 1)) for size in (2, 4, 8)}
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "uint16": "BF16", "float32": "F32", "float64": "F64"}


def in_piece(piece: Any, dtype: str) -> int:
    """Those of a contiguous array of some type, as safetensors spells it; of others than floats there are none."""
    exponent = FLOATS.get(dtype)
    if exponent is None or not piece.size:
        return 0
    bits = piece.reshape(-1).view(np.uint8).view(exponent.dtype)
    if bits.view(bits.dtype.str.replace("u", "i")).max() < exponent and bits.max() < exponent | _SIGNS[bits.itemsize]:
        return 0  # neither of the positive numbers, nor of the negative ones
    return int(np.count_nonzero(bits & exponent == exponent))


def counted(values: Any, workers: Workers | None = None) -> int:
    """Those of a ScaledTensor, or of an array of numbers, of which ``uint16`` is bfloat16."""
    values = comparable(values)
    if isinstance(values, ScaledTensor):
        return magnitudes(values).not_finite
    flat = np.ascontiguousarray(values).reshape(-1)
    dtype, found = _DTYPES.get(flat.dtype.name, ""), [0]
    step = PIECE // flat.itemsize

    def count(at: int, _: Any) -> None:
        found.append(in_piece(flat[at : at + step], dtype))

    starts = range(0, flat.size if dtype else 0, step)
    if workers is not None:
        workers.each(count, iter(starts))
    else:
        for at in starts:
            count(at, None)
    return sum(found)
