# SPDX-License-Identifier: Apache-2.0
"""What tensors lost in a conversion: how far the new codes are from what was read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from breccia.comparison import Comparison

__all__ = ["Loss", "errors", "lost", "summed"]


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


def lost(losses: Mapping[str, Loss]) -> dict[str, Any] | None:
    """What requantizing changed: how many tensors there are, how many hold every value that they held, and the signal
    to noise of the others, None where it is no number. None of no tensors."""
    requantized = [one for one in losses.values() if one.again]
    if not requantized:
        return None
    others = [one for one in requantized if not one.equal]
    signal, noise = sum(one.signal for one in others), sum(one.noise for one in others)
    return {
        "tensors": len(requantized),
        "lossless": len(requantized) - len(others),
        "sqnr_db": round(10 * math.log10(signal / noise), 2) if signal > 0 and 0 < noise < math.inf else None,
    }


def errors(losses: Mapping[str, Loss]) -> dict[str, Any] | None:
    """What all tensors lost that got new codes: how many, the worst and its name, and the median, in dB; "inf"
    of all lossless. None of none."""
    known = {name: decibels for name, one in losses.items() if not math.isnan(decibels := one.sqnr_db)}
    if not known:
        return None
    worst = min(known, key=known.__getitem__)
    return {
        "tensors": len(known),
        "worst": worst,
        "worst_db": _json(known[worst]),
        "median_db": _json(statistics.median(known.values())),
    }


def _json(decibels: float) -> float | str:
    return round(decibels, 2) if math.isfinite(decibels) else str(decibels)
