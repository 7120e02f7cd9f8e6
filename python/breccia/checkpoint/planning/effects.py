# SPDX-License-Identifier: Apache-2.0
"""Options of a conversion that have no part in what is written: each is a note, so that nobody takes them for done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from breccia import recipe_names
from breccia.checkpoint.planning.activations import Activations
from breccia.checkpoint.planning.asked import Asked
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.targets import Target, parse_target
from breccia.checkpoint.reading.source import Checkpoint
from breccia.recipes import ScalingRecipe
from breccia.schemes.value import UNSAID, Rule

__all__ = ["without_effect"]

Held = tuple[Choice, Rule | None]  # what becomes of a tensor, and the rule that says so
_ANEW = ("cast", "encode", "requantize")
_OF_SCALES = ("scale_search", "scale_rule", "scale_rounding")  # fields that count where scales are made


def without_effect(
    target: Target, choices: Sequence[Choice], activations: Activations, checkpoint: Checkpoint
) -> list[str]:
    """Notes on options that change nothing here; patterns and data are looked at elsewhere. ``activations`` has made
    its `choices`."""
    held = [] if target.asked is None else [(one, target.asked.rule(one.found.name)) for one in choices]
    notes = list(_of_scales(target, choices, held))
    notes += () if target.asked is None else _of_a_scheme(target.asked, held)
    if target.asked is not None and target.asked.amax is not None and not activations.made_of_amax:
        notes.append(
            f"magnitudes of {target.asked.amax.path} (--amax) have no part in what is written: no static scale of "
            "inputs is made of them"
        )
    if checkpoint.unmarked is not None and checkpoint.unmarked not in checkpoint.found.formats:
        text = f"--unmarked {checkpoint.unmarked} has no part in what is written: no tensor is read as of that format"
        notes.append(text)
    elif checkpoint.unmarked is not None and checkpoint.quantization != {"quant_method": checkpoint.unmarked}:
        notes.append(f"--unmarked {checkpoint.unmarked} has no part in what is written: the source says its format")
    return notes


def _of_scales(target: Target, choices: Sequence[Choice], held: Sequence[Held]) -> Iterator[str]:
    """How scales are found, where codes are copied; sizes of groups where no recipe has them."""
    made = [one for one in choices if one.recipe is not None and one.action in _ANEW]
    for name in _OF_SCALES:
        given = target.options.get(name) if target.recipe is None else getattr(target.recipe, name, None)
        used = given is None or given in [getattr(one.recipe, name, None) for one in made]
        if not used and (target.recipe is None or given != getattr(_without_options(target), name, None)):
            yield f"{name} {given} has no part in what is written: no tensor is quantized anew by it"
        for rule in () if target.asked is None else target.asked.scheme.rules:
            value = _given(rule, name)
            layers = [one for one, its in held if its is rule] if value is not None else []
            if layers and not any(one.action in _ANEW and getattr(one.recipe, name, None) == value for one in layers):
                text = f"{name} {value} of the rule of {_patterns(rule)}"
                yield f"{text} has no part in what is written: its layers have such codes, which stay"
    size = target.options.get("group_size")
    if size is not None and not any(getattr(one.recipe, "group_size", None) for one in choices):
        yield f"group size {size} has no part in what is written: no recipe of the rules has groups of any size"


def _given(rule: Rule, name: str) -> Any:
    """What a rule's recipe says of how scales are found, where that is not the usual way."""
    if not isinstance(rule.weights, ScalingRecipe):
        return None
    value = getattr(rule.weights, name, None)
    return None if value == getattr(type(rule.weights)(), name, None) else value


def _without_options(target: Target) -> ScalingRecipe | None:
    """The recipe that a target would have had without options."""
    name, *keys = target.spelled.split(":")
    if name in recipe_names.names():
        return parse_target(name).recipe
    bare = parse_target(":".join([name, *keys[:1]]))
    return bare.recipe or bare.default


def _of_a_scheme(asked: Asked, held: Sequence[Held]) -> Iterator[str]:
    rules = [rule for one, rule in held if one.recipe is not None]
    if asked.activations and not any(rule is None or rule.inputs is UNSAID for rule in rules):
        why = "no layer is quantized" if not rules else "the rules say how the inputs of every layer are"
        yield f"--activations {asked.activations} has no part in what is written: {why}"
    names = [one.found.name.removesuffix(".weight") for one, _ in held]
    holding = {id(rule) for _, rule in held}
    for rule in asked.scheme.rules:
        if id(rule) not in holding and any(rule.matches(name, ("Linear",)) for name in names):
            yield f"the rule of {_patterns(rule)} has no part in what is written: earlier rules hold for all its layers"


def _patterns(rule: Rule) -> str:
    return ", ".join(map(str, rule.match[:3])) + (", …" if rule.match[3:] else "")
