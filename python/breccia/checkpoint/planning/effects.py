# SPDX-License-Identifier: Apache-2.0
"""Options of a conversion that have no part in what is written: each is a note, so that nobody takes them for done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from breccia import recipe_names
from breccia.checkpoint.planning.activations import Activations
from breccia.checkpoint.planning.targets import Choice, Target, parse_target
from breccia.checkpoint.reading.source import Checkpoint
from breccia.recipes import ScalingRecipe
from breccia.schemes.value import UNSAID, Rule

__all__ = ["without_effect"]

_ANEW = ("cast", "encode", "requantize")
_OF_SCALES = ("scale_search", "scale_rule", "scale_rounding")  # fields that count where scales are made


def without_effect(
    target: Target, choices: Sequence[Choice], activations: Activations, checkpoint: Checkpoint
) -> list[str]:
    """Notes on options that change nothing here.

    Args:
        target: what was asked for.
        choices: what becomes of each tensor.
        activations: what becomes of scales of activations, after its `choices`.
        checkpoint: the source.

    Returns:
        A line for each option; patterns and data are looked at elsewhere.
    """
    notes = [*_of_scales(target, choices), *_of_a_scheme(target, choices)]
    if target.asked is not None and target.asked.amax is not None and not activations.made_of_amax:
        notes.append(
            f"magnitudes of {target.asked.amax.path} (--amax) have no part in what is written: no static scale of "
            "inputs is made of them"
        )
    if checkpoint.unmarked is not None and not any(one.format == checkpoint.unmarked for one in checkpoint.found):
        text = f"--unmarked {checkpoint.unmarked} has no part in what is written: no tensor is read as of that format"
        notes.append(text)
    elif checkpoint.unmarked is not None and checkpoint.quantization != {"quant_method": checkpoint.unmarked}:
        notes.append(f"--unmarked {checkpoint.unmarked} has no part in what is written: the source says its format")
    return notes


def _of_scales(target: Target, choices: Sequence[Choice]) -> Iterator[str]:
    """How scales are found, where codes are copied; sizes of groups where no recipe has them."""
    made = [one for one in choices if one.recipe is not None and one.action in _ANEW]
    plain = None if target.recipe is None else _without_options(target)
    for name in _OF_SCALES:
        value, usual = (getattr(one, name, None) for one in (target.recipe, plain))
        given = target.options.get(name) if target.recipe is None else value if value != usual else None
        if given is not None and not any(getattr(one.recipe, name, None) == given for one in made):
            yield f"{name} {given} has no part in what is written: no tensor is quantized anew by it"
        for rule in () if target.asked is None else target.asked.scheme.rules:
            value = _given(rule, name)
            if value is None or target.asked is None:
                continue
            layers = [one for one in choices if target.asked.rule(one.found.name) is rule]
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


def _of_a_scheme(target: Target, choices: Sequence[Choice]) -> Iterator[str]:
    asked = target.asked
    if asked is None:
        return
    layers = [one.found.name.removesuffix(".weight") for one in choices if one.recipe is not None]
    rules: list[Any] = [asked.rule(layer) for layer in layers]
    if asked.activations and not any(rule is None or rule.inputs is UNSAID for rule in rules):
        why = "no layer is quantized" if not layers else "the rules say how the inputs of every layer are"
        yield f"--activations {asked.activations} has no part in what is written: {why}"
    names = [one.found.name.removesuffix(".weight") for one in choices]
    held = {id(rule) for rule in map(asked.rule, names)}
    for rule in asked.scheme.rules:
        if id(rule) not in held and any(rule.matches(name, ("Linear",)) for name in names):
            yield f"the rule of {_patterns(rule)} has no part in what is written: earlier rules hold for all its layers"


def _patterns(rule: Rule) -> str:
    return ", ".join(map(str, rule.match[:3])) + (", …" if rule.match[3:] else "")
