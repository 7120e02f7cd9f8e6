# SPDX-License-Identifier: Apache-2.0
"""Figures over predictions, and how far they would move on other text of the kind: their bootstrap errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["with_error"]

_RUN = 32  # neighbouring predictions are drawn together: they are not independent
_DRAWS = 400

Array = np.ndarray[Any, Any]


def with_error(figure: Callable[[Array], Any], values: Array) -> dict[str, float | None]:
    """A figure of n predictions, "value", and its standard error, "error", by a bootstrap over runs of 32 neighbours
    (Künsch 1989) in the rows of values (R, T); None for fewer than two runs. The same for the same values: draws are
    seeded."""
    runs = [run for row in values for run in np.array_split(row, max(len(row) // _RUN, 1))]
    value = float(figure(np.concatenate(runs)))
    if len(runs) < 2:
        return {"value": value, "error": None}
    rng = np.random.default_rng(0)
    drawn = [figure(np.concatenate([runs[i] for i in rng.integers(0, len(runs), len(runs))])) for _ in range(_DRAWS)]
    return {"value": value, "error": float(np.std(drawn, ddof=1))}
