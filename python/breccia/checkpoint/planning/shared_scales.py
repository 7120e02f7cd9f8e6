# SPDX-License-Identifier: Apache-2.0
"""One global scale for the layers that servers fuse: they keep one number for all of a fused layer's parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from breccia import verbs
from breccia.bridges import outside
from breccia.bridges.parts import Found
from breccia.bridges.written import fused_layer, same_grid
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.rows import piece_of, pieces_of
from breccia.checkpoint.reading.source import Checkpoint
from breccia.comparison import magnitudes
from breccia.recipes import NVFP4BlockScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

Cast = Callable[[Any, ScalingRecipe], ScaledTensor]


class Shared:
    """The largest magnitude of all parts of one fused layer, looked for once."""

    def __init__(self, parts: list[Found]) -> None:
        self.parts = parts
        self._lock = threading.Lock()
        self._amax: np.float32 | None = None

    def amax(self, checkpoint: Checkpoint) -> np.float32:
        with self._lock:
            if self._amax is None:
                self._amax = max((amax_of_all(checkpoint, part) for part in self.parts), default=np.float32(0))
            return self._amax


def amax_of_all(checkpoint: Checkpoint, found: Found) -> np.float32:
    """The largest magnitude of a tensor, but for what is not finite."""
    return max(amax_of(piece_of(checkpoint, found, *run)) for run in pieces_of(checkpoint, found))


def amax_of(values: Any) -> np.float32:
    """The same of what was loaded."""
    return np.float32(magnitudes(outside.comparable(values)).largest)


def share(choices: list[Choice], target: Target, checkpoint: Checkpoint) -> tuple[list[Choice], list[str]]:
    """The same choices, those of a fused layer's parts with what they share; and what cannot be shared."""
    if not target.bridge.readers.shared_global_scale:
        return choices, []
    result, apart = list(choices), []
    for members in fused(choices):
        parts = [choices[i] for i in members]
        if len(parts) > 1 and all(_may_choose(part) for part in parts):
            shared = Shared([part.found for part in parts])
            for i in members:
                result[i] = choices[i].but(shared=shared)
        elif len(parts) > 1 and not _are_equal(parts, checkpoint):
            apart.append(parts[0].found.name)
    if not apart:
        return result, []
    note = f"{apart[0]} and {len(apart) - 1} more: parts of a layer that servers fuse keep global scales that differ"
    return result, [f"{note}; a server takes the largest for all of them"]


def fused(choices: list[Choice]) -> list[list[int]]:
    """Places of the matrices in two levels that make one layer of a server."""
    groups: dict[str, list[int]] = {}
    for i, choice in enumerate(choices):
        key = fused_layer(choice.found.name)
        if key is not None and _two_levels(choice.recipe) and len(choice.found.shape) == 2:
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def unlike(choices: list[Choice], target: Target) -> list[str]:
    """The first weights of layers that servers make of several, of which not all have one recipe."""
    if not target.bridge.readers.shared_global_scale:
        return []
    first: dict[str, Choice] = {}
    found: dict[str, None] = {}
    for choice in choices:
        key = fused_layer(choice.found.name)
        if key is None:
            continue
        other = first.setdefault(key, choice)
        if not _alike(other.recipe, choice.recipe):
            found[other.found.name] = None
    return list(found)


def _alike(one: ScalingRecipe | None, other: ScalingRecipe | None) -> bool:
    return one is other if one is None or other is None else same_grid(one, other)


def _are_equal(parts: list[Choice], checkpoint: Checkpoint) -> bool:
    """Whether the source's own global scales, which are kept, are one number."""
    names = [part.found.parts.get("global_scale") for part in parts if part.action == "repack"]
    numbers = {float(checkpoint.array(name).reshape(-1)[0]) for name in names if name is not None}
    return len(names) == len(parts) and len(numbers) < 2


def _two_levels(recipe: ScalingRecipe | None) -> bool:
    return isinstance(recipe, NVFP4BlockScaling) and recipe.two_level


def _may_choose(choice: Choice) -> bool:
    """Whether scales are found anew: 4-bit values of another format may keep scales that lose nothing."""
    return choice.action == "cast" or (choice.action == "requantize" and is_wide(choice.found.recipe))


def is_wide(recipe: ScalingRecipe | None) -> bool:
    """Whether values have 8 bits or more, of which 4 bits keep no scale that loses nothing."""
    return recipe is None or recipe.element.startswith(("float8", "int8"))


def cast_shared(values: Any, recipe: ScalingRecipe, amax: np.float32, cast: Cast = verbs.cast) -> ScaledTensor:
    """Quantize as if the largest magnitude were ``amax``: with one more row, which holds it and is left out."""
    values = outside.values(values)
    rows, columns = values.shape
    fits = np.float32(np.asarray(amax).astype(values.dtype)) == amax
    more = np.zeros((rows + 1, columns), values.dtype if fits else np.float32)
    more[:rows] = values
    more[rows, 0] = amax
    return cast(more, recipe)[:rows]
