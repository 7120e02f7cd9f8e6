# SPDX-License-Identifier: Apache-2.0
"""What is to be known of a plan: what it loses or changes, what might be asked for instead, and options that
have no part in what is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

from breccia import bridges, recipe_names
from breccia.bridges.parts import Found
from breccia.checkpoint.planning.activations import Activations
from breccia.checkpoint.planning.asked import Asked
from breccia.checkpoint.planning.choices import LEFT, QUANTIZED, Choice, has_one_level, largest_group
from breccia.checkpoint.planning.model_config import modules_of
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.planning.shared_scales import unlike
from breccia.checkpoint.planning.targets import AUTO, Target, names_of, parse_target
from breccia.checkpoint.reading.models import is_one_expert
from breccia.checkpoint.reading.source import Checkpoint
from breccia.recipes import ScalingRecipe
from breccia.schemes.value import UNSAID, Rule


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
    notes += () if target.asked is None else _of_a_scheme(target.asked, target.format == bridges.OWN, held)
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


def _of_a_scheme(asked: Asked, own: bool, held: Sequence[Held]) -> Iterator[str]:
    for option in ("embeddings", "head"):
        table = getattr(asked, option)
        if table is not None and not any(rule is table for _, rule in held):
            why = "there is no such tensor (a head may have the embeddings' weight)"
            yield f"--{option} has no part in what is written: {why}"
    if own and any(rule and rule is asked.embeddings and rule.weights for _, rule in held):
        yield "embeddings are quantized as asked: breccia.load reads them, breccia.transformers wants floats"
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


_NO_NAME = ""  # a pattern that matches nothing


def check_names(found: Iterable[Found], target: Target) -> None:
    """Whether each of the target's patterns matches a tensor's name. Raises ValueError where one matches none."""
    names = [one.name for one in found] if target.include or target.exclude else []
    for option, patterns in (("include", target.include), ("exclude", target.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                example = f", such as {names[0]!r}" if names else ""
                raise ValueError(
                    f"--{option} {pattern!r} must match the name of a tensor, it matches none of {len(names)}{example}"
                )


def check_effects(found: list[Found], target: Target, choose: Callable[[Found, Target], Choice]) -> None:
    """Whether each of the target's patterns, without the others, changes what is written. Raises ValueError where one
    changes nothing."""
    for pattern in target.include:
        one, none = (replace(target, include=(some,), exclude=()) for some in (pattern, _NO_NAME))
        _check(found, "include", pattern, one, none, choose)
    for pattern in target.exclude:
        one, none = (replace(target, exclude=some) for some in ((pattern,), ()))
        _check(found, "exclude", pattern, one, none, choose)


def _check(
    found: list[Found],
    option: str,
    pattern: str,
    one: Target,
    none: Target,
    choose: Callable[[Found, Target], Choice],
) -> None:
    matched = [each for each in found if any(fnmatchcase(name, pattern) for name in names_of(each))]
    if any(_written(each, one, choose) != _written(each, none, choose) for each in matched):
        return
    names = [each.name for each in matched]
    more = f" and {len(names) - 1} more that it matches are" if names[1:] else ", which it matches, is"
    same = f": {names[0]}{more} written the same without it" if names else ""
    raise ValueError(f"--{option} {pattern!r} must change what is written, and changes nothing{same}")


def _written(found: Found, target: Target, choose: Callable[[Found, Target], Choice]) -> Any:
    try:
        choice = choose(found, target)
    except ValueError as error:  # a tensor that has to be left out, as it is with the pattern
        return str(error)
    return choice.action, choice.outputs, choice.recipe, choice.note  # what is said of it is a part of the report
