# SPDX-License-Identifier: Apache-2.0
"""Rounding a checkpoint's weights by GPTQ, one matrix at a time: with which moments, and how wrong outputs become."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from breccia import verbs
from breccia.bridges import outside
from breccia.bridges.common import float32
from breccia.bridges.contract import Kind
from breccia.calibration.error_feedback import GptqReport, gptq_encoded
from breccia.checkpoint.device import Device
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.layer_moments import energy, smoothed
from breccia.checkpoint.planning.rounding import FEWEST
from breccia.checkpoint.planning.shared_scales import Cast, amax_of
from breccia.checkpoint.planning.smoothing import moments_of_smoothed
from breccia.checkpoint.planning.targets import Feedback, Target
from breccia.checkpoint.workers import runs
from breccia.moments import Moments
from breccia.recipes import ScalingRecipe, choices
from breccia.scaled_tensor import ScaledTensor
from breccia.value import joining

# How a matrix is cast by a recipe, with the amax that it shares or None, and by which function or None: to nearest.
Make = Callable[[Any, ScalingRecipe, Any, "Cast | None"], ScaledTensor]


def encoded(choice: Choice, target: Target, values: Any, kind: Kind) -> tuple[Any, dict[str, Any]]:
    """The bytes of a tensor in a kind of the format's own, and a report, as `rounded` gives them."""
    assert target.feedback is not None
    layer = _Layer(choice, target.importance, target.feedback, target.device)
    values = outside.comparable(values)
    if len(choice.found.shape) == 2:
        return layer.encode(outside.values(values), None, kind), layer.report()
    made = [layer.encode(outside.values(values[i]), i, kind) for i in range(choice.found.shape[0])]
    return np.stack(made), layer.report()


def rounded(choice: Choice, target: Target, values: Any, amax: Any, make: Make) -> tuple[ScaledTensor, dict[str, Any]]:
    """Quantize a tensor, a ScaledTensor or numbers, by GPTQ, an expert after the other; ``make`` casts a matrix,
    ``amax`` is the largest magnitude of all that shares a global scale. Raises ValueError where moments are not finite,
    or of another shape.

    With it comes what a report has of it: "output_error", that of rounding to "nearest" without data, both None where
    there is none, "level" of the moments, "damp", and a "note" where there is something to say."""
    recipe, shape = choice.recipe, choice.found.shape
    assert target.feedback is not None
    assert recipe is not None
    values = outside.comparable(values)
    count = shape[0] if len(shape) == 3 else None
    if count is not None and choices(recipe).two_level and amax is None:
        amax = max((amax_of(values[i]) for i in range(count)), default=np.float32(0))
    layer = _Layer(choice, target.importance, target.feedback, target.device)
    made = []
    for expert in range(1 if count is None else count):
        matrix = outside.values(values if count is None else values[expert])
        made.append(layer.round(matrix, None if count is None else expert, amax, make))
    return made[0] if count is None else _batch(made), layer.report()


class _Layer:
    """What becomes of the matrices of one tensor."""

    def __init__(self, choice: Choice, importance: Importance | None, feedback: Feedback, device: Device) -> None:
        assert importance is not None
        self.found, self.recipe, self.importance, self.feedback = choice.found, choice.recipe, importance, feedback
        self.pool, self.device = importance.pool(choice.found), device
        self.reports: list[GptqReport] = []
        self.rare = 0
        self.energies = np.zeros(3)  # of what GPTQ loses, of what rounding to nearest loses, of the weight

    def _moments(self, expert: int | None) -> tuple[Moments, Moments]:
        """Of a matrix, and these with what few tokens lean on."""
        own = self.importance.moments(self.found, expert)
        assert own is not None
        own = moments_of_smoothed(own, self.found)
        self.rare += self.pool is not None and bool(own.count < FEWEST * own.columns)
        return own, own if self.pool is None else smoothed(own, self.pool)

    def encode(self, matrix: Any, expert: int | None, kind: Kind) -> Any:
        own, moments = self._moments(expert)
        assert kind.encode is not None
        assert kind.decode is not None
        values = float32(matrix)
        made, report = gptq_encoded(values, moments, kind.encode, **self.feedback._asdict())
        self.reports.append(report)
        self._measure(values, (kind.decode(made), kind.decode(kind.encode(values))), own)
        return made

    def round(self, matrix: Any, expert: int | None, amax: Any, make: Make) -> ScaledTensor:
        own, moments = self._moments(expert)
        assert self.recipe is not None

        def cast(values: Any, recipe: ScalingRecipe) -> ScaledTensor:
            order, damp = self.feedback
            made, report = self.device.gptq(values, moments, recipe, order, damp)
            self.reports.append(report)
            return made

        made = make(matrix, self.recipe, amax, cast)
        self._measure(matrix, (made, make(matrix, self.recipe, amax, None)), own)
        return made

    def _measure(self, matrix: Any, both: tuple[Any, Any], moments: Moments) -> None:
        """Add what is lost by what was made, and by rounding to nearest: ScaledTensors, or their values."""
        of = _energy_of(moments, self.device)
        for rows in runs(matrix.shape[0]):
            exact, parts = np.asarray(matrix[rows], np.float32), (one[rows] for one in both)
            lost = (exact - (verbs.dequantize(one) if isinstance(one, ScaledTensor) else one) for one in parts)
            with np.errstate(invalid="ignore", over="ignore"):
                self.energies += [*map(of, lost), of(exact)]

    def report(self) -> dict[str, Any]:
        gptq, nearest, weight = self.energies.tolist()

        def share(lost: float) -> float | None:
            return math.sqrt(max(lost, 0.0) / weight) if weight > 0 and math.isfinite(lost / weight) else None

        damp = max(one.damp for one in self.reports)
        said = {"output_error": share(gptq), "nearest": share(nearest), "level": self.reports[0].level, "damp": damp}
        notes = []
        if fallen := sum(one.nearest for one in self.reports):
            of = "" if len(self.reports) == 1 else f" of {fallen} of {len(self.reports)} experts"
            notes.append(f"rounded to nearest, by importance: moments{of} are not positive definite")
        elif damp > self.feedback.damp:
            notes.append(f"damped by {damp:g}: with less its moments are not positive definite")
        if self.rare and len(self.reports) > 1:
            few = f"{self.rare} of {len(self.reports)} experts have seen fewer than K / 4 tokens"
            notes.append(f"{few}: the moments of all count more for them than their own")
        return {**said, "note": "; ".join(notes)} if notes else said


def _energy_of(moments: Moments, device: Device) -> Callable[[Any], float]:
    """`energy` of float32 rows, on the device; GPTQ takes no diagonals."""
    if device.place is None:
        return lambda rows: energy(rows, moments)
    known = device.tensor(moments.block if moments.full is None else moments.full)

    def there(rows: Any) -> float:
        moved = device.tensor(rows)
        if moments.full is None:
            moved = moved.reshape(len(rows), *known.shape[:2]).transpose(0, 1)
        return float(((moved @ known).double() * moved).sum())

    return there


def _batch(made: list[ScaledTensor]) -> ScaledTensor:
    """Matrices as one tensor, whose global scale is theirs."""
    return joining.stack(made)._with(global_scale=made[0].global_scale)
