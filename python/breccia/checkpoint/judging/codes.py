# SPDX-License-Identifier: Apache-2.0
"""What codes tell of damage: codes of NaN, rows of one code, codes of zero alone."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from breccia import formats, verbs
from breccia.scaled_tensor import ScaledTensor

__all__ = ["damage"]

_ROWS = 1 << 20  # bytes looked at together
_FEWEST = 64  # elements in a row of one code that is no chance


def damage(scaled: ScaledTensor, name: str) -> list[str]:
    """What is wrong with the codes of a tensor, all of which are read."""
    data = np.asarray(scaled.data)
    if not data.size or data.dtype.itemsize != 1:
        return []
    rows = np.ascontiguousarray(data.view(np.uint8)).reshape(-1, data.shape[-1])
    step = max(_ROWS // rows.shape[1], 1)
    least, most = _not_finite(scaled.recipe.element)
    bad, constant, zero = 0, list[int](), True
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step]
        if least:
            magnitude = piece & np.uint8(0x7F)
            bad += int(np.count_nonzero(magnitude >= least)) if magnitude.max() >= least else 0
        elif most:
            bad += int(np.count_nonzero(piece == most))
        same = np.flatnonzero((piece[:, :8] == piece[:, :1]).all(axis=1))  # few rows get any further
        constant += [start + int(i) for i in same if (piece[i] == piece[i, 0]).all()]
        zero = zero and len(constant) == start + len(piece)
    said = [f"{bad} codes are NaN or infinite"] if bad else []
    if zero and name.endswith("weight") and math.prod(scaled.shape) > 1 and not _any(scaled):
        return [*said, "every code is zero: never written?"]
    return said if bad else said + _of_constant(scaled, rows, constant)


def _of_constant(scaled: ScaledTensor, rows: Any, constant: list[int]) -> list[str]:
    """Rows of one code that rounding does not give: a row of one number has the code of the largest magnitude, by
    which its scale was chosen, or of half of that where scales are powers of two. Pairs of 4-bit codes are one where
    both halves are."""
    codes = rows.shape[1] * (2 if scaled.is_packed else 1)
    if codes < _FEWEST or len(scaled.shape) != 2 or rows.shape[0] != scaled.shape[0]:
        return []
    odd = [i for i in constant if not scaled.is_packed or rows[i, 0] >> 4 == rows[i, 0] & 15]
    odd = [i for i in odd if _share(int(rows[i, 0]) & (15 if scaled.is_packed else 255), scaled.recipe.element) < 0.45]
    tile = scaled.layout.block.rows or 1
    count = sum(_any(scaled[i // tile * tile : (i // tile + 1) * tile][i % tile : i % tile + 1]) for i in odd[:1000])
    return [f"{count} rows hold one code alone: damaged?"] if count else []


def _share(code: int, element: str) -> float:
    """A code's number, as a share of the largest; of codes without a sign, from the middle of them."""
    said, number = formats.finfo(element), float(formats.decode(np.array([code], np.uint8), element)[0])
    return abs(number / said.max if said.min < 0 else 2 * number / said.max - 1)


def _any(scaled: ScaledTensor) -> bool:
    """Whether an element is other than zero."""
    return bool(np.any(np.asarray(verbs.dequantize(scaled))))


@functools.cache
def _not_finite(element: str) -> tuple[int, int]:
    """The least magnitude of a code that is no number, and the largest such code; magnitude 0 where that is one code
    alone, and (0, 0) where every code is a number."""
    if not element.startswith("float8"):
        return 0, 0
    every = np.arange(256, dtype=np.uint8)
    bad = every[~np.isfinite(formats.decode(every, element))]
    if not bad.size:
        return 0, 0
    return (0, int(bad[0])) if bad.size == 1 else (int((bad & 0x7F).min()), int(bad.max()))
