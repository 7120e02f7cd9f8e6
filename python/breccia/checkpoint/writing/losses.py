# SPDX-License-Identifier: Apache-2.0
"""What tensors lost in a conversion: how far the new codes are from what was read, and how many numbers are infinite or
NaN."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from breccia.bridges.outside import comparable
from breccia.checkpoint.workers import PIECE, Workers
from breccia.comparison import Comparison, magnitudes
from breccia.scaled_tensor import ScaledTensor


class Loss(NamedTuple):
    """Sums of a tensor, of which JSON holds each: of squares of what was read and of what changed, whether every value
    is the same, and whether codes were read, which were quantized again."""

    signal: float
    noise: float
    equal: bool
    again: bool

    @property
    def sqnr_db(self) -> float:
        """Signal to noise: infinite where nothing changed, -infinite where the noise is not finite, NaN of zeros."""
        if self.equal:
            return math.inf
        if not self.signal > 0:
            return math.nan
        return 10 * math.log10(self.signal / self.noise) if 0 < self.noise < math.inf else -math.inf


def summed(sums: Sequence[Comparison], again: bool = False) -> Loss:
    """The loss of a tensor of which pieces were compared; ``again``: see `Loss`."""
    signal, noise = math.fsum(map(attrgetter("signal"), sums)), math.fsum(map(attrgetter("noise"), sums))
    return Loss(signal, noise, all(map(attrgetter("equal"), sums)), again)


class Losses:
    """What tensors lost that got new codes, taken together.

    Attributes:
        infinite: names of those whose noise is not finite.
    """

    def __init__(self) -> None:
        self.infinite: list[str] = []
        self._decibels = array("d")
        self._worst = math.inf, ""
        self._again = self._equal = 0  # tensors whose codes were read, and those of them that hold every value
        self._signal = self._noise = 0.0  # of the others of them

    def add(self, name: str, loss: Loss) -> None:
        """Take in that of a tensor."""
        decibels = loss.sqnr_db
        if not math.isnan(decibels):
            self._decibels.append(decibels)
            self._worst = self._worst if self._worst[0] <= decibels and self._worst[1] else (decibels, name)
        if loss.noise == math.inf:
            self.infinite.append(name)
        if loss.again:
            self._again, self._equal = self._again + 1, self._equal + loss.equal
        if loss.again and not loss.equal:
            self._signal, self._noise = self._signal + loss.signal, self._noise + loss.noise

    def requantized(self) -> dict[str, Any] | None:
        """What requantizing changed: how many tensors there are, how many hold every value that they held, and the
        signal to noise of the others, None where it is no number. None of no tensors."""
        there = self._signal > 0 and 0 < self._noise < math.inf
        sqnr_db = round(10 * math.log10(self._signal / self._noise), 2) if there else None
        return {"tensors": self._again, "lossless": self._equal, "sqnr_db": sqnr_db} if self._again else None

    def errors(self) -> dict[str, Any] | None:
        """What all tensors lost that got new codes: how many, the worst and its name, and the median, in dB; "inf"
        of all lossless. None of none."""
        if not self._decibels:
            return None
        return {
            "tensors": len(self._decibels),
            "worst": self._worst[1],
            "worst_db": _json(self._worst[0]),
            "median_db": _json(statistics.median(self._decibels)),
        }


def _json(decibels: float) -> float | str:
    return round(decibels, 2) if math.isfinite(decibels) else str(decibels)


# Bits of the exponent, which are all set in infinities and NaN.
FLOATS: dict[str, Any] = {
    "F16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "F32": np.uint32(0x7F800000),
    "F64": np.uint64(0x7FF0000000000000),
}
_SIGNS = {size: np.dtype(f"u{size}").type(1 << (8 * size - 1)) for size in (2, 4, 8)}
_FEW = 8192  # numbers that are looked at once
_DTYPES = {"e": "F16", "E": "BF16", "H": "BF16", "f": "F32", "d": "F64"}  # by NumPy's letters, E is ml_dtypes'


def in_piece(piece: Any, dtype: str) -> int:
    """Those of a contiguous array of some type, as safetensors spells it; of others than floats there are none."""
    exponent = FLOATS.get(dtype)
    if exponent is None or not piece.size:
        return 0
    bits = piece.reshape(-1).view(np.uint8).view(exponent.dtype)
    if bits.size > _FEW:
        signed = bits.view(bits.dtype.str.replace("u", "i"))
        if signed.max() < exponent and bits.max() < exponent | _SIGNS[bits.itemsize]:
            return 0  # neither of the positive numbers, nor of the negative ones
    return int(np.count_nonzero(bits & exponent == exponent))


def counted(values: Any, workers: Workers | None = None) -> int:
    """Those of a ScaledTensor, or of an array of numbers, of which ``uint16`` is bfloat16."""
    values = comparable(values)
    if isinstance(values, ScaledTensor):
        return magnitudes(values).not_finite
    flat = np.ascontiguousarray(values).reshape(-1)
    dtype, found = _DTYPES.get(flat.dtype.char, ""), [0]
    step = PIECE // flat.itemsize
    if flat.size <= step:
        return in_piece(flat, dtype)

    def count(at: int, _: Any) -> None:
        found.append(in_piece(flat[at : at + step], dtype))

    starts = range(0, flat.size if dtype else 0, step)
    if workers is not None:
        workers.each(count, iter(starts))
    else:
        for at in starts:
            count(at, None)
    return sum(found)
