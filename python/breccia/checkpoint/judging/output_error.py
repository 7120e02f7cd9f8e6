# SPDX-License-Identifier: Apache-2.0
"""How wrong a layer's output is when its weight is: √(tr RHRᵀ / tr WHWᵀ), with H the second moment of its input."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia.cli.errors import one_line
from breccia.cli.terminal import wrapped

if TYPE_CHECKING:
    from breccia.moments import Moments, MomentsFile

__all__ = ["OutputErrors", "energy", "lines_of", "output_error"]

_ROWS = 1024  # of a weight that are in memory in double precision


def output_error(reference: Any, tensor: Any, moments: Moments) -> float:
    """The root of the mean square of x @ (W - V).T over that of x @ W.T, for inputs x of these moments: of all that the
    moments keep, the full ones before those of runs before the diagonal.

    Args:
        reference: W, floats (N, K), or (E, N, K) with moments of E experts or of all.
        tensor: V, of that shape.
        moments: of the input, K columns.

    Returns:
        0 where equal; NaN where the reference's output is zero.

    Raises:
        ValueError: the moments are of another K or another number of experts.
    """
    shape = tuple(reference.shape)
    if len(shape) not in (2, 3) or shape[-1] != moments.columns:
        raise ValueError(f"moments must be of K = {shape[-1]}, got {moments.columns}")
    if moments.experts not in (None, shape[0]) or (moments.experts and len(shape) == 2):
        raise ValueError(f"moments must be of as many experts as {shape} has, got {moments.experts}")
    wrong = right = 0.0
    for expert in range(shape[0] if len(shape) == 3 else 1):
        own = moments if moments.experts is None else moments.expert(expert)
        w, v = (reference[expert], tensor[expert]) if len(shape) == 3 else (reference, tensor)
        for start in range(0, shape[-2], _ROWS):
            rows = np.asarray(w[start : start + _ROWS], np.float64)
            wrong += energy(rows - np.asarray(v[start : start + _ROWS], np.float64), own)
            right += energy(rows, own)
    return math.sqrt(max(wrong, 0.0) / right) if right > 0 else math.nan


def energy(rows: np.ndarray[Any, Any], moments: Moments) -> float:
    """tr RHRᵀ, with products in the rows' type.

    Args:
        rows: R, float32 or float64 (N, K).
        moments: of K columns.
    """
    if moments.full is not None:
        product = rows @ moments.full.astype(rows.dtype, copy=False)
    elif moments.block is not None:
        runs = rows.reshape(len(rows), *moments.block.shape[:2]).transpose(1, 0, 2)
        rows, product = runs, runs @ moments.block.astype(rows.dtype, copy=False)
    else:
        product = rows * moments.diag.astype(rows.dtype, copy=False)
    return float(np.sum(product * rows, dtype=np.float64))


class OutputErrors:
    """Output errors of the tensors of a checkpoint that have moments.

    Args:
        moments: name of a layer → its moments, or the file that has them.

    Raises:
        TypeError: it is neither.
        ValueError: the file is not valid.
    """

    def __init__(self, moments: str | os.PathLike[str] | Mapping[str, Moments]) -> None:
        from breccia.moments import load_moments  # which imports this package

        self._file: MomentsFile | None = None
        if not isinstance(moments, Mapping):
            moments = self._file = load_moments(moments)
        self._moments, self.found = moments, dict[str, float]()

    def add(self, name: str, reference: Any, tensor: Any) -> None:
        """Measure one tensor, if there are moments of it.

        Args:
            name: of the weight.
            reference: a function that gives its values.
            tensor: the same for what is judged.

        Raises:
            ValueError: its moments are of another shape.
        """
        layer = name.removesuffix(".weight")
        if layer not in self._moments:
            return
        try:
            self.found[name] = output_error(reference(), tensor(), self._moments[layer])
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None

    def of(self, name: str) -> dict[str, float | str]:
        """What a report has of one tensor."""
        error = self.found.get(name)
        return {} if error is None else {"output_error": error if math.isfinite(error) else str(error)}

    def finish(self) -> dict[str, Any]:
        """What a report has of all: how many were measured, the mean of their errors, layers that fit no tensor.

        Raises:
            ValueError: no tensor has moments.
        """
        layers = {name.removesuffix(".weight") for name in self.found}
        unused = [name for name in self._moments if name not in layers]
        if self._file is not None:
            self._file.close()
        if not layers:
            raise ValueError(f"moments must be of layers that the reference has, got those of {next(iter(unused), '')}")
        errors = [error for error in self.found.values() if math.isfinite(error)]
        mean = sum(errors) / len(errors) if errors else None
        return {"tensors": len(layers), "mean": mean, "unused": unused}


def lines_of(report: dict[str, Any]) -> list[str]:
    """What is said of `OutputErrors.finish` on a terminal."""
    mean = "" if report["mean"] is None else f"{report['mean']:.2%} on average, "
    lines = [f"output error {mean}of {report['tensors']} tensors that have moments"]
    if unused := report["unused"]:
        lines += wrapped(f"! {len(unused)} layers with moments fit no tensor, the first: {one_line(unused[0])}")
    return lines
