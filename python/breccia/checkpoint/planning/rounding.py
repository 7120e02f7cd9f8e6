# SPDX-License-Identifier: Apache-2.0
"""How a conversion rounds weights: by what data, and by which method."""

from __future__ import annotations

from collections.abc import Sequence

from breccia import recipes
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.remarks import Remark
from breccia.checkpoint.planning.shared_scales import is_wide
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.models import is_embedding

FEWEST = 0.25  # rows a column, below which moments say too little
_NONE = "there are no moments of it"


def rounding_notes(target: Target, choices: Sequence[Choice]) -> list[str]:
    """Tensors that are quantized without the data, or not by the method, that was asked for. Raises ValueError where
    the method is none for the target's format."""
    importance = target.importance
    if importance is None:
        return []
    casts = [choice for choice in choices if choice.action in ("cast", "encode")]
    others = [choice for choice in choices if choice.action == "requantize"]
    if not casts and not others:
        return ["importance has no part in what is written: no tensor is quantized anew"]
    _check_exponents(target, casts if target.feedback is None else [*casts, *others])
    if target.feedback is not None:
        return _notes_of_nearest(target, [*casts, *others])
    missing = [choice.found.name for choice in casts if importance.of_found(choice.found) is None]
    notes = _of_another_model(target, casts, missing)
    if missing:
        notes.append(
            f"{len(missing)} of {len(casts)} tensors are quantized without importance, of which {importance.path} "
            f"has none for them; the first is {missing[0]}"
        )
    if others:
        notes.append(f"{len(others)} tensors are requantized from other codes, in which importance has no part")
    return notes


def _check_exponents(target: Target, quantized: Sequence[Choice]) -> None:
    """Refuse data for groups with exponents before anything is written: a cast to them takes none."""
    importance, feedback = target.importance, target.feedback is not None
    assert importance is not None
    for choice in quantized:
        if not recipes.has_exponents(choice.recipe):
            continue
        weighted = choice.action != "requantize" and importance.of_found(choice.found) is not None
        if weighted or (feedback and not why_nearest(choice, target)):
            what, given = ("method gptq", "it") if feedback else ("importance (imatrix, moments)", "the data")
            raise ValueError(
                f"{what} must be left out for tensor {choice.found.name!r}, which becomes {choice.recipe.name}: groups "
                f"with exponents take none; give the tensor another recipe (rules, scheme), or convert without {given}"
            )


def _notes_of_nearest(target: Target, choices: Sequence[Choice]) -> list[str]:
    """Tensors that GPTQ does not round, and why."""
    importance = target.importance
    assert importance is not None
    linear = [choice for choice in choices if len(choice.found.shape) > 1 and not is_embedding(choice.found.name)]
    missing = [choice.found.name for choice in linear if why_nearest(choice, target) == _NONE]
    notes = _of_another_model(target, linear, missing)
    if missing[1:]:
        notes.append(
            f"{len(missing)} of {len(linear)} tensors are rounded to nearest, not by GPTQ: {importance.path} has no "
            f"moments of them; the first is {missing[0]}"
        )
    for choice in choices:
        if (why := why_nearest(choice, target)) and not (missing[1:] and choice.found.name in missing):
            weighted = choice.action != "requantize" and importance.of_found(choice.found) is not None
            notes.append(f"{choice.found.name}: rounded to nearest{', by importance' if weighted else ''}: {why}")
    return notes


def _of_another_model(target: Target, choices: Sequence[Choice], missing: Sequence[str]) -> list[str]:
    """What moments say of the model that they were measured in. Raises ValueError where they fit no tensor."""
    importance = target.importance
    if importance is None or not importance.of_model:
        return []
    if choices and len(missing) == len(choices):
        raise ValueError(
            f"moments must be of the source's layers: {importance.path} has none of any of {len(choices)} tensors that "
            f"are quantized, such as {missing[0]}: calibrate this model"
        )
    if importance.of_other_weights:
        return [Remark(f"{importance.path} was measured in a model of other weights or another config.json")]
    return []


def why_nearest(choice: Choice, target: Target) -> str:
    """Why a tensor that is quantized anew cannot be rounded by GPTQ; "" where it can."""
    found, importance = choice.found, target.importance
    assert importance is not None
    if len(found.shape) not in (2, 3):
        return f"its shape {found.shape} is not that of a linear weight"
    if choice.action == "requantize" and not is_wide(found.recipe):
        return "it is requantized from codes of 4 bits, whose scales may lose nothing"
    experts = found.shape[0] if len(found.shape) == 3 else None
    own = importance.moments(found, None if experts is None else 0)
    if own is None:
        return "it is an embedding, not a linear weight" if is_embedding(found.name) else _NONE
    if own.level == "diag":
        return "its moments are a diagonal, with which GPTQ is rounding to nearest by importance"
    if experts is not None and choice.recipe is not None and choice.recipe.layout.one_scale:
        return f"{choice.recipe.name} has one scale for all experts"
    seen = importance.pool(found) or own
    if seen.count < FEWEST * own.columns:
        return f"too few tokens: {int(seen.count):,} for K = {own.columns:,}"
    return ""
