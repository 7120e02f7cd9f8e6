# SPDX-License-Identifier: Apache-2.0
"""How wrong a layer's output is when its weight is: √(tr RHRᵀ / tr WHWᵀ), with H the second moment of its input."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia.checkpoint.arguments import existing
from breccia.checkpoint.planning.layer_moments import LayerMoments, energy
from breccia.checkpoint.planning.smoothing import moments_of_smoothed
from breccia.checkpoint.reports import OutputErrorReport
from breccia.checkpoint.workers import runs
from breccia.screen import one_line, wrapped

if TYPE_CHECKING:
    from breccia.bridges.parts import Found
    from breccia.moments import Moments, MomentsFile


def output_error(reference: Any, tensor: Any, moments: Moments) -> float:
    """The root of the mean square of x @ (W - V).T over that of x @ W.T, for inputs x of these moments: of all that the
    moments keep, the full ones before those of runs before the diagonal. W is ``reference``, floats (N, K), or (E, N,
    K) with moments of E experts or of all, V ``tensor``. 0 where equal; NaN where the reference's output is zero."""
    shape = tuple(reference.shape)
    if len(shape) not in (2, 3) or shape[-1] != moments.columns:
        raise ValueError(f"moments must be of K = {shape[-1]}, got {moments.columns}")
    if moments.experts not in (None, shape[0]) or (moments.experts and len(shape) == 2):
        raise ValueError(f"moments must be of as many experts as {shape} has, got {moments.experts}")
    return _error(reference, tensor, lambda expert: moments if moments.experts is None else moments.expert(expert or 0))


def _error(reference: Any, tensor: Any, of: Callable[[int | None], Moments]) -> float:
    """The same, with the moments of each expert, or of None."""
    wrong = right = 0.0
    for expert in range(len(reference)) if len(reference.shape) == 3 else (None,):
        w, v = (reference, tensor) if expert is None else (reference[expert], tensor[expert])
        for rows in runs(w.shape[0]):  # that are in memory in double precision
            exact = np.asarray(w[rows], np.float64)
            wrong += energy(exact - np.asarray(v[rows], np.float64), of(expert))
            right += energy(exact, of(expert))
    return math.sqrt(max(wrong, 0.0) / right) if right > 0 else math.nan


class OutputErrors:
    """Output errors of the tensors of a checkpoint that have moments: of a mapping of layers' names, or a file of
    them."""

    def __init__(self, moments: str | os.PathLike[str] | Mapping[str, Moments]) -> None:
        from breccia.moments import load_moments  # which imports this package

        self._file: MomentsFile | None = None
        if not isinstance(moments, Mapping):
            moments = self._file = load_moments(existing(moments, "moments"))
        self._moments, self._layers = moments, LayerMoments(moments, what="moments")
        self.found: dict[str, float] = {}

    def add(self, weight: Found, reference: Any, tensor: Any) -> None:
        """Measure one weight, of functions that give the values of both, if there are moments of it; those of experts
        in any form, see `LayerMoments`. Raises ValueError where its moments are of another shape."""
        name, shape = weight.name, weight.shape
        first = 0 if len(shape) == 3 else None

        def of(expert: int | None) -> Moments:
            found = self._layers.of(name, shape, expert)
            assert found is not None
            return moments_of_smoothed(found, weight)

        if self._layers.of(name, shape, first) is not None:
            self.found[name] = _error(reference(), tensor(), of)

    def of(self, name: str) -> dict[str, float | str]:
        """What a report has of one tensor."""
        error = self.found.get(name)
        return {} if error is None else {"output_error": error if math.isfinite(error) else str(error)}

    def finish(self) -> OutputErrorReport:
        """What a report has of all: how many were measured, the mean of their errors, layers that fit no tensor."""
        unused = [name for name in self._moments if name not in self._layers.used]
        if self._file is not None:
            self._file.close()
        if not self.found:
            raise ValueError(f"moments must be of layers that the reference has, got those of {next(iter(unused), '')}")
        errors = [error for error in self.found.values() if math.isfinite(error)]
        mean = sum(errors) / len(errors) if errors else None
        return {"tensors": len(self.found), "mean": mean, "unused": unused}


def lines_of(report: OutputErrorReport) -> list[str]:
    """What is said of `OutputErrors.finish` on a terminal."""
    mean = "" if report["mean"] is None else f"{report['mean']:.2%} on average, "
    lines = [f"output error {mean}of {report['tensors']} tensors that have moments"]
    if unused := report["unused"]:
        lines += wrapped(f"! {len(unused)} layers with moments fit no tensor, the first: {one_line(unused[0])}")
    return lines
