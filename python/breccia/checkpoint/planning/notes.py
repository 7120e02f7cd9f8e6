# SPDX-License-Identifier: Apache-2.0
"""What is to be known of a plan: what it loses or changes, and what might be asked for instead."""

from __future__ import annotations

import math
from operator import attrgetter

from breccia.bridges.parts import Found
from breccia.checkpoint.planning.asked import Asked
from breccia.checkpoint.planning.choices import LEFT, QUANTIZED, Choice, has_one_level, largest_group
from breccia.checkpoint.planning.model_config import modules_of
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.planning.shared_scales import unlike
from breccia.checkpoint.planning.targets import AUTO, Target
from breccia.checkpoint.reading.models import is_one_expert

__all__ = ["check_group_size", "of_class", "of_experts", "of_group_size", "of_levels", "of_nothing", "of_rules"]


def check_group_size(target: Target, choices: list[Choice]) -> None:
    """Whether a size of groups that was asked for divides anything. Raises ValueError where tensors are left as they
    are, all for its sake."""
    size = target.group_size
    if not isinstance(size, int) or any(choice.action in QUANTIZED for choice in choices):
        return
    left = [choice.found for choice in choices if choice.note.startswith(LEFT) and choice.found.shape]
    left = [found for found in left if found.shape[-1] % size]
    if left:
        raise ValueError(
            f"group size must divide the columns of a tensor, {size} divides those of none: {left[0].name!r} has "
            f"{left[0].shape[-1]}"
        )


def of_nothing(target: Target, choices: list[Choice]) -> list[str]:
    """Whether no tensor is quantized where some should be."""
    if target.quantizes_nothing or not QUANTIZED.isdisjoint(map(attrgetter("action"), choices)):
        return []
    return [f"no tensor is quantized: none of the source has a place in {target.spelled}"]


def of_rules(asked: Asked, target: Target, choices: list[Choice], found: list[Found]) -> list[str]:
    """Patterns of a scheme that match nothing, and parts of a fused layer that have not one recipe."""
    unmatched = [str(one) for one in asked.unmatched(one.name for one in found)]
    for module, recipe in modules_of(choices).items():
        asked.inputs(module, recipe)  # may refuse
    notes = [f"patterns of the scheme match no layer: {some(unmatched)}"] if unmatched else []
    notes += asked.not_written()
    apart = unlike(choices, target)
    if apart:
        said = "parts of a layer that servers fuse have different recipes, which vLLM and SGLang refuse"
        notes.append(f"{some(apart)}: {said}")
    return notes


def of_group_size(target: Target, choices: list[Choice]) -> list[str]:
    """What to ask for where groups do not divide the columns of some tensors."""
    recipe = target.recipe or target.default
    size = int(getattr(recipe, "group_size", None) or 0)
    if not size:
        return []
    left = [c.found for c in choices if c.note.startswith(LEFT) and c.found.shape[-1] % size]
    best = largest_group(math.gcd(*(found.shape[-1] for found in left)), size) if left else None
    if not best:
        return []
    names = some([found.name for found in left])
    return [
        f"{names}: groups of {size} do not divide their columns: --group-size {best} divides them all, "
        f"--group-size {AUTO} takes the largest that divides, for each"
    ]


def of_levels(target: Target, choices: list[Choice]) -> list[str]:
    """Why NVFP4 is written in one level."""
    names = target.names
    nvfp4 = [c.found for c in choices if getattr(c.recipe, "name", "") == "nvfp4"]
    if (why := target.bridge.readers.one_level) and any("global_scale" in found.parts for found in nvfp4):
        return [f"NVFP4 has one level: {why}"]
    if names is None or not any(has_one_level(found, target) for found in nvfp4):
        return []
    return [f"NVFP4 has one level: programs do not apply all second scales of a {names.architecture} model"]


def of_class(target: Target, choices: list[Choice]) -> list[str]:
    """Which weights are quantized by their names alone, of a model of whose class nothing is known."""
    names = {c.found.name.removesuffix(".weight").rpartition(".")[2] for c in choices if c.action in QUANTIZED}
    if not names:
        return []
    said = f"{target.alone.unknown} is not a class that is known here: its weights are told by their names alone"
    return [Remark(f"{said}, quantized are those called {', '.join(sorted(names)[:12])}")]


def of_experts(target: Target, choices: list[Choice]) -> list[str]:
    """What programs do wrong with experts, and others, that are written."""
    said = target.bridge.readers.misread_experts
    names = {c.recipe.name for c in choices if c.recipe is not None and is_one_expert(c.found.name)} if said else set()
    notes: list[str] = [Remark(f"experts in {name}: {said[name]}") for name in sorted(names & said.keys())]
    wrong: dict[str, list[str]] = {}
    for choice in choices:
        if choice.recipe and (text := target.bridge.readers.misread(choice.found.shape, choice.recipe)):
            wrong.setdefault(text, []).append(choice.found.name)
    return notes + [f"{some(names)}: {text}" for text, names in wrong.items()]
