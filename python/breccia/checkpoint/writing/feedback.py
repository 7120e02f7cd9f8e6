# SPDX-License-Identifier: Apache-2.0
"""Rounding a checkpoint's weights by GPTQ, one matrix at a time: with which moments, and how wrong outputs become."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from breccia import verbs
from breccia.bridges.common import float32
from breccia.bridges.outside import OutsideTensor
from breccia.calibration.error_feedback import GptqReport, gptq_reported
from breccia.checkpoint.judging.output_error import energy
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.layer_moments import smoothed
from breccia.checkpoint.planning.shared_scales import Cast, amax_of
from breccia.checkpoint.planning.targets import Choice, Feedback, Target
from breccia.checkpoint.reading.models import is_embedding
from breccia.checkpoint.writing.repack import cut, matrix_of
from breccia.layouts import PerTensor
from breccia.moments import Moments
from breccia.recipes import NVFP4BlockScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

__all__ = ["rounded", "why_nearest"]

_FEWEST = 0.25  # rows a column, below which moments say too little
_ROWS = 1024  # of a weight whose errors are looked at together
# How a matrix is cast by a recipe, with the amax that it shares or None, and by which function or None: to nearest.
Make = Callable[[Any, ScalingRecipe, Any, "Cast | None"], ScaledTensor]


def why_nearest(choice: Choice, target: Target) -> str:
    """Why a tensor that is quantized anew cannot be rounded by GPTQ; "" where it can.

    Args:
        choice: what happens to it.
        target: with the moments.
    """
    found, importance = choice.found, target.importance
    assert importance is not None
    if choice.recipe is None:
        return "its format fits scales and codes together"
    if len(found.shape) not in (2, 3):
        return f"its shape {found.shape} is not that of a linear weight"
    if choice.action == "requantize" and not _is_wide(found.recipe):
        return "it is requantized from codes of 4 bits, whose scales may lose nothing"
    experts = found.shape[0] if len(found.shape) == 3 else None
    own = importance.moments(found, None if experts is None else 0)
    if own is None:
        return "it is an embedding, not a linear weight" if is_embedding(found.name) else "there are no moments of it"
    if own.level == "diag":
        return "its moments are a diagonal, with which GPTQ is rounding to nearest by importance"
    if experts is not None and _has_one_scale(choice.recipe):
        return f"{choice.recipe.name} has one scale for all experts"
    seen = importance.pool(found) or own
    if seen.count < _FEWEST * own.columns:
        return f"too few tokens: {int(seen.count):,} for K = {own.columns:,}"
    return ""


def rounded(choice: Choice, target: Target, values: Any, amax: Any, make: Make) -> tuple[ScaledTensor, dict[str, Any]]:
    """Quantize a tensor by GPTQ, an expert after the other.

    Args:
        choice: what happens to it.
        target: with the moments, the order and the damping.
        values: a ScaledTensor or numbers, (N, K) or (E, N, K).
        amax: the largest magnitude of all that shares a global scale; None where nothing does.
        make: how a matrix is cast.

    Returns:
        The tensor; and what a report has of it: "output_error", that of rounding to "nearest" without data, both None
        where there is none, "level" of the moments, "damp", and a "note" where there is something to say.

    Raises:
        ValueError: the moments are not finite, or of another shape.
    """
    recipe, shape = choice.recipe, choice.found.shape
    assert target.feedback is not None
    assert recipe is not None
    if isinstance(values, OutsideTensor):
        values = values.dequantize()
    count = shape[0] if len(shape) == 3 else None
    if count is not None and isinstance(recipe, NVFP4BlockScaling) and recipe.two_level and amax is None:
        amax = max((amax_of(matrix_of(values, (i,))) for i in range(count)), default=np.float32(0))
    layer = _Layer(choice, target.importance, target.feedback)
    made = []
    for expert in range(1 if count is None else count):
        matrix = _floats(values if count is None else matrix_of(values, (expert,)))
        made.append(layer.round(matrix, None if count is None else expert, amax, make))
    return made[0] if count is None else _batch(made, shape), layer.report()


class _Layer:
    """What becomes of the matrices of one tensor."""

    def __init__(self, choice: Choice, importance: Importance | None, feedback: Feedback) -> None:
        assert importance is not None
        assert choice.recipe is not None
        self.found, self.recipe, self.importance, self.feedback = choice.found, choice.recipe, importance, feedback
        self.pool = importance.pool(choice.found)
        self.reports: list[GptqReport] = []
        self.rare = 0
        self.energies = np.zeros(3)  # of what GPTQ loses, of what rounding to nearest loses, of the weight

    def round(self, matrix: Any, expert: int | None, amax: Any, make: Make) -> ScaledTensor:
        own = self.importance.moments(self.found, expert)
        assert own is not None
        moments = own if self.pool is None else smoothed(own, self.pool)
        self.rare += self.pool is not None and bool(own.count < _FEWEST * own.columns)

        def cast(values: Any, recipe: ScalingRecipe) -> ScaledTensor:
            order, damp = self.feedback
            made, report = gptq_reported(values, moments, recipe, order=order, damp=damp)
            self.reports.append(report)
            return made

        made = make(matrix, self.recipe, amax, cast)
        self._measure(matrix, made, make(matrix, self.recipe, amax, None), own)
        return made

    def _measure(self, matrix: Any, made: ScaledTensor, nearest: ScaledTensor, moments: Moments) -> None:
        for start in range(0, matrix.shape[0], _ROWS):
            stop = min(start + _ROWS, matrix.shape[0])
            rows = np.asarray(matrix[start:stop], np.float32)
            lost = (rows - verbs.dequantize(cut(one, start, stop)) for one in (made, nearest))
            with np.errstate(invalid="ignore", over="ignore"):
                self.energies += [*(energy(one, moments) for one in lost), energy(rows, moments)]

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


def _floats(matrix: Any) -> Any:
    if isinstance(matrix, ScaledTensor):
        return verbs.dequantize(matrix)
    return float32(matrix) if matrix.dtype == np.uint16 else matrix


def _batch(made: list[ScaledTensor], shape: tuple[int, ...]) -> ScaledTensor:
    """Matrices as one tensor, whose global scale is theirs."""
    first = made[0]
    return ScaledTensor(
        np.stack([one.data for one in made]),
        np.stack([one.scale for one in made]),
        first.recipe,
        first.layout,
        None if first.zero_point is None else np.stack([one.zero_point for one in made]),
        global_scale=first.global_scale,
        shape=shape,
    )


def _is_wide(recipe: ScalingRecipe | None) -> bool:
    return recipe is None or recipe.element.startswith(("float8", "int8"))


def _has_one_scale(recipe: ScalingRecipe) -> bool:
    """Whether a whole tensor has one scale, which no matrix of it can choose."""
    return isinstance(recipe.layout, PerTensor)
