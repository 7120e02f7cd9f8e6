# SPDX-License-Identifier: Apache-2.0
"""What the readers of schemes share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breccia.recipes import ScalingRecipe
from breccia.schemes.matching import Match
from breccia.schemes.rules import rules_of
from breccia.schemes.value import Activations, Rule, StoredScale, Unsaid

LINEAR = (Match("class", "Linear"),)
_MOST_SCALES = 1 << 20  # numbers of one stored scale


@dataclass(frozen=True)
class Said:
    """What a checkpoint says.

    Attributes:
        quantization: ``quantization_config``, or what stands for it.
        config: config.json.
        weights: quantized modules by name: a recipe, or the name of a format that no recipe makes.
        entries: stored tensors by name, with ``dtype`` and ``shape``.
        array: reads a stored tensor.
        beside: modules of whose inputs not ``quantization`` but what is stored beside the weight says something.
        stored: names as the file spells them, of entries that it spells otherwise.
    """

    quantization: Mapping[str, Any]
    config: Mapping[str, Any]
    weights: Mapping[str, ScalingRecipe | str]
    entries: Mapping[str, Any]
    array: Callable[[str], Any]
    beside: Mapping[str, Activations | None] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)


def names(value: Any, what: str) -> list[str]:
    """A list of strings of JSON; none where there is nothing. Raises ValueError where it is another value."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{what} must be a list of names, got {str(value)[:80]}")
    return list(value)


def skipped(matches: Iterable[Match]) -> list[Rule]:
    """The rule of modules that stay in high precision; none where there are none."""
    found = tuple(matches)
    return [Rule(found, None, None)] if found else []


def component(name: str) -> Match:
    """A module by its full name or the last parts of it, and all inside of it, as FP8's readers match."""
    return Match("regex", rf"(.*\.)?{re.escape(name)}(\..*)?")


def fp8(per: str, when: str, **more: Any) -> Activations:
    """FP8 E4M3 of activations."""
    return Activations("float8_e4m3fn", per, when, **more)


def weights_as_stored(
    said: Said, inputs: Activations | Unsaid | None, only: Callable[[str], bool] = lambda module: True
) -> list[Rule]:
    """A rule for each kind of stored weights, by the modules' full names."""
    return rules_of({m: (recipe, said.beside.get(m, inputs)) for m, recipe in said.weights.items() if only(m)})


def scales_of(said: Said, endings: Mapping[str, tuple[str, str]]) -> tuple[StoredScale, ...]:
    """The static scales of activations that are stored, in the order of the files; ``endings``: end of a stored name →
    what it is of, see `StoredScale`, and its form."""
    every, found = tuple(endings), []
    for name, entry in said.entries.items():
        if not name.endswith(every) or entry.dtype not in ("F32", "F16", "BF16", "F64"):
            continue
        ending = max((one for one in every if name.endswith(one)), key=len)
        of, form = endings[ending]
        stored = said.stored.get(name, name)
        values = np.asarray(said.array(stored), np.float32).reshape(-1)
        if values.size > _MOST_SCALES:
            continue
        with np.errstate(divide="ignore"):
            numbers = values if form == "multiplier" else np.float32(1) / values
        module = name.removesuffix(ending)
        found.append(StoredScale(module, of, tuple(numbers.tolist()), form, stored, entry.dtype, tuple(entry.shape)))
    return tuple(found)
