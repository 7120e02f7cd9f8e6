# SPDX-License-Identifier: Apache-2.0
"""What a conversion can write, and how each logical tensor gets there: decided from headers alone."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from functools import cached_property
from typing import Any, NamedTuple

from breccia import bridges, recipe_names, recipes
from breccia.bridges.contract import Bridge, Kind, Place
from breccia.bridges.parts import Found, Part, ghost
from breccia.bridges.written import same_grid
from breccia.checkpoint.arguments import patterns_of
from breccia.checkpoint.planning.asked import Asked, fitted
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.target_list import FLOATS, meant
from breccia.checkpoint.reading.models import is_embedding, is_one_expert, is_stored_turned, is_turned
from breccia.checkpoint.reading.source import is_float
from breccia.gguf.models import ModelMap
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.value import UNSAID, Activations, ModelScheme

__all__ = [
    "AUTO",
    "FLOATS",
    "LEFT",
    "QUANTIZED",
    "Choice",
    "Feedback",
    "Target",
    "has_one_level",
    "largest_group",
    "names_of",
    "parse_target",
    "requantized",
    "target_names",
    "unread_embedding",
]

# Weights that quantized checkpoints leave alone; patterns of names, matched as in a shell.
EXCLUDED = (
    "*embed*",
    "*wte.weight",
    "*wpe.weight",
    "shared.weight",
    "*.shared.weight",
    "*relative_attention_bias*",
    "*position*",
    "token_embd*",
    "*rotary*",
    "*norm*",
    "*conv*",
    # routers and what chooses among tokens
    "*router*",
    "*.gate.weight",
    "*.gate.e_score*",
    "*shared_expert_gate*",
    "*indexer*",
    # outputs
    "*lm_head*",
    "*shared_head*",
    "head.weight",
    "output.weight",
    "*output_layer.weight",
    "*score.weight",
    "*classifier*",
    "*qa_outputs*",
    "cls.*",
    # eyes and ears of language models
    "*vision_tower*",
    "visual.*",
    "*.visual.*",
    "model.vision_model.*",
    "*audio_tower*",
    "*multi_modal_projector*",
    "*mm_projector*",
)
_EXCLUDED = re.compile("|".join(map(translate, EXCLUDED)))

QUANTIZED = ("repack", "requantize", "cast", "encode", "keep", "same")  # actions that write codes
AUTO = "auto"  # the size of groups that is looked for
_GROUP_SIZES = (128, 64, 32)  # that programs have kernels for
NO_KIND = "none"  # stands for a float type where a rule asks for high precision
LEFT = "left as it is"  # how a note begins on a tensor that has no place in the target


class Feedback(NamedTuple):
    """GPTQ: see `breccia.gptq`."""

    order: str
    damp: float


@dataclass(frozen=True)
class Target:
    """What to write: a float dtype, or a bridge's format with a recipe.

    ``names`` are those of a model that the format spells in its own way. ``left_alone`` says that the source is
    quantized: what its maker left in high precision stays so. ``inputs`` are modules with a scale of their
    activations, ``outputs`` those with one of what they give, ``cache`` says whether the KV cache is of FP8.
    ``model`` is the source's config.json. ``recipe`` is None where the format was named without one: what the
    source has is kept if the format can hold it, and the format's first recipe is used if not. ``kind`` is what the
    format has that no recipe makes. ``with_inputs`` takes its place for modules with a scale of their activations.
    ``group_size`` is the one that was asked for. ``importance`` is that of columns. ``asked`` is what a scheme asks
    of layers, see `of`; ``named`` says that it means a tensor by itself. ``source`` is the source's own scheme.
    ``together`` has a module for each of those that are written as one, by the name of this one. ``feedback`` is
    given where weights are rounded by GPTQ. ``bare`` says that the format was named without a recipe, ``options`` are
    for recipes of rules.
    """

    spelled: str
    float_dtype: str = ""
    format: str = ""
    recipe: ScalingRecipe | None = None
    with_inputs: ScalingRecipe | None = None
    default: ScalingRecipe | None = None
    kind: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    names: ModelMap | None = None
    left_alone: bool = False
    inputs: frozenset[str] = frozenset()
    cache: bool = False
    outputs: frozenset[str] = frozenset()
    model: Mapping[str, Any] = field(default_factory=dict)
    group_size: int | str | None = None
    importance: Importance | None = None
    feedback: Feedback | None = None
    asked: Asked | None = None
    named: bool = False
    bare: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    source: ModelScheme | None = field(default=None, repr=False)
    together: Mapping[str, str] = field(default_factory=dict, repr=False)

    def of(self, found: Found) -> Target:
        """What to write one tensor in, by the rule that matches it; without one, or where its rule keeps weights, the
        recipe of ``--to``, and without that what the source has.

        Raises:
            ValueError: the format has not what the rule asks for.
        """
        if self.asked is None:
            return self
        rules = ((name, self.asked.rule(name)) for name in names_of(found))  # those of all experts in one, too
        name, rule = next(((name, rule) for name, rule in rules if rule is not None), (found.name, None))
        if rule is None or rule.weights is UNSAID:
            alone = bool(self.asked.scheme.rules) and self.bare and found.format == "plain"
            return dataclasses.replace(self, recipe=None, with_inputs=None, default=None) if alone else self
        own = dataclasses.replace(self, with_inputs=None, left_alone=False, named=self.asked.names(name))
        if isinstance(rule.weights, ScalingRecipe):
            recipe = _with(fitted(rule.weights, self.bridge), self.options, known_alone=True)
            size = self.group_size if isinstance(recipe, recipes.INT4Scaling) else None
            return dataclasses.replace(own, kind="", recipe=recipe, group_size=size)
        if rule.weights is None:
            return dataclasses.replace(own, kind=NO_KIND)
        kind = str(rule.weights).lower()
        if kind in self.bridge.kinds:
            return dataclasses.replace(own, kind=kind, recipe=self.bridge.kinds[kind].otherwise)
        if kind in self.bridge.recipes:
            return dataclasses.replace(own, kind="", recipe=self.bridge.recipes[kind])
        known = recipe_names.suggestion(kind, [*recipe_names.names(), *self.bridge.kinds, *self.bridge.recipes])
        raise ValueError(
            f"weights of a rule must be a recipe or a type of {self.format}, got {rule.weights!r}: {known}"
        )

    def inputs_of(self, module: str, recipe: ScalingRecipe) -> Activations | None:
        """How the inputs of a layer are to be quantized: as a scheme asks, else as the source does.

        Args:
            module: its name.
            recipe: that its weight is written in.

        Returns:
            None where they stay in high precision, or nothing says it.
        """
        module = self.together.get(module, module)
        said = UNSAID if self.asked is None else self.asked.inputs(module, recipe, strict=False)
        if said is UNSAID:
            rule = None if self.source is None else self.source.rule(module)
            said = None if rule is None else rule.inputs
        return said if isinstance(said, Activations) else None

    def spell(self, name: str) -> str:
        """The name a tensor is stored under."""
        return (self.names.inside(name) if self.names else None) or name

    @property
    def quantizes_nothing(self) -> bool:
        """Whether all that is written is floats."""
        rules = self.asked.scheme.rules if self.asked is not None and self.recipe is None else ()
        if rules and all(rule.weights is None for rule in rules):
            return True
        kind = self.bridge.kinds.get(self.kind)
        return bool(self.float_dtype) or (kind is not None and kind.encode is None)

    @cached_property
    def bridge(self) -> Bridge:
        """What the format is; that of plain tensors where a float dtype is written."""
        return bridges.bridge(self.format)


@dataclass(frozen=True)
class Choice:
    """What happens to one tensor: "copy", "float", "repack", "requantize", "cast", "encode" (values as a format's own
    kind), "keep" (the blocks of one), "same" (all that is stored of one), "multiply" (a scale by the number in
    ``values``), "divide" (that number by it) or "make" (``values``, which no tensor of the source has), and what it
    gives.

    ``turned``: its matrices are written transposed. ``shared``: what it has in common with other tensors (`Shared`).
    """

    found: Found
    action: str
    outputs: dict[str, tuple[str, tuple[int, ...]]]
    recipe: ScalingRecipe | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    note: str = ""
    turned: bool = False
    shared: Any = None
    values: tuple[float, ...] = ()


def target_names() -> list[str]:
    """Everything `parse_target` understands, formats with their recipes."""
    names = [*FLOATS, *recipe_names.names()]
    for name, bridge in bridges.registry().items():
        if bridge.writes and name != bridges.OWN:  # whose recipes are spelled alone
            names += [name, *(f"{name}:{key}" for key in (*bridge.recipes, *bridge.kinds))]
    return names


def parse_target(
    spelled: str,
    *,
    scale_search: str | None = None,
    group_size: int | str | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    by_rules: bool = False,
) -> Target:
    """A target as the command line spells it: ``bf16``, ``nvfp4:mse``, ``modelopt`` or ``modelopt:fp8``. Where rules
    say what layers become, options are for their recipes, as far as these have them.

    Raises:
        TypeError: it is no string, or patterns are no list of strings.
        ValueError: there is none of that name, or it has no such option.
    """
    if not isinstance(spelled, str):
        raise TypeError(f"to must be the name of a recipe or a format, such as 'nvfp4', got {spelled!r}")
    patterns: dict[str, Any] = {
        "include": patterns_of(include, "include"),
        "exclude": patterns_of(exclude, "exclude"),
    }
    spelled = spelled.strip().lower()
    options = {"scale_search": scale_search, "group_size": group_size}
    if spelled in FLOATS:
        for name in (name for name, value in options.items() if value is not None):
            raise ValueError(f"--{name.replace('_', '-')} must be left out: {spelled} has no {name}")
        return Target(spelled, float_dtype=FLOATS[spelled], **patterns)
    name, *keys = spelled.split(":")
    size = next((int(key) for key in reversed(keys) if key.isdecimal()), None)
    patterns["group_size"] = size if group_size is None else group_size
    if name in recipe_names.names():
        base = recipe_names.recipe_of(spelled)
        return Target(spelled, format=bridges.OWN, recipe=_with(base, options), **patterns)
    bridge = bridges.registry().get(name)
    if bridge is None or not bridge.writes:
        if said := meant(spelled):
            raise ValueError(f"--to must be a recipe or a format, got {spelled!r}: {said}")
        names = recipe_names.suggestion(spelled, target_names())
        every = "" if names.endswith("?") else " ('breccia convert --to list' has all)"
        raise ValueError(f"--to must be a recipe or a format, got {spelled!r}: {names}{every}")
    if keys and keys[0] in bridge.kinds:
        return _of_kind(spelled, bridge, keys, options, patterns)
    if keys and keys[0] not in bridge.recipes:
        names = ", ".join((*bridge.recipes, *bridge.kinds)) or "nothing"
        raise ValueError(f"the recipe after '--to {name}:' must be one of {names}, got {keys[0]!r}")
    default = next(iter(bridge.recipes.values()), recipes.NVFP4BlockScaling())
    asked = [table.get(keys[0]) if keys else None for table in (bridge.recipes, bridge.recipes_with_inputs)]
    if not keys and any(v is not None for v in options.values()):
        asked[0] = default if not by_rules else None
    recipe, with_inputs = (one and _optional(one, keys, options, name) for one in asked)
    patterns |= {"bare": not keys, "options": options if by_rules else {}}
    return Target(spelled, format=name, recipe=recipe, with_inputs=with_inputs, default=default, **patterns)


def _optional(recipe: ScalingRecipe, keys: list[str], options: Mapping[str, Any], name: str) -> ScalingRecipe:
    """A recipe with the options behind its key and those of the command line."""
    if keys:
        recipe = recipe_names.with_options(recipe, keys[1:], f"--to {name}:{keys[0]}")
    return _with(recipe, options)


def _of_kind(
    spelled: str, bridge: Bridge, keys: list[str], options: Mapping[str, Any], patterns: dict[str, Any]
) -> Target:
    if keys[1:]:
        raise ValueError(f"the option after '--to {bridge.name}:{keys[0]}:' must be left out, got {keys[1]!r}")
    for name in (name for name, value in options.items() if value is not None):
        raise ValueError(f"--{name.replace('_', '-')} must be left out: {bridge.name}:{keys[0]} has no {name}")
    kind = bridge.kinds[keys[0]]
    return Target(spelled, format=bridge.name, recipe=kind.otherwise, kind=keys[0], **patterns)


def _with(recipe: ScalingRecipe, options: Mapping[str, Any], known_alone: bool = False) -> ScalingRecipe:
    given = {k: v for k, v in options.items() if v is not None}
    if isinstance(size := given.get("group_size"), str) and size != AUTO:
        raise ValueError(f"--group-size must be a number or '{AUTO}', got {size!r}")
    known = {f.name for f in dataclasses.fields(recipe)}
    if known_alone:
        given = {name: value for name, value in given.items() if name in known and getattr(recipe, name) is not None}
    for name in given:
        if name not in known:
            raise ValueError(f"--{name.replace('_', '-')} must be left out: {type(recipe).__name__} has no {name}")
    return dataclasses.replace(recipe, **{k: v for k, v in given.items() if v != AUTO})


def largest_group(columns: int, most: int) -> int | None:
    """The largest size of groups that readers know, up to ``most``, that divides the columns."""
    return next((size for size in _GROUP_SIZES if size <= most and columns % size == 0), None)


def names_of(found: Found) -> list[str]:
    """What patterns may call a tensor: its name, those of what it is made of, and that of what it is a part of."""
    return [found.name, *(other.name for other in found.origin.sources)]


def wanted(found: Found, target: Target) -> bool:
    """Whether patterns and shape let a tensor be quantized."""
    names = names_of(found)
    if target.include and not any(fnmatchcase(name, p) for name in names for p in target.include):
        return False
    if target.left_alone and not target.include:
        return False
    if target.names is not None and target.names.wide(found.name):
        return False
    if any(fnmatchcase(name, p) for name in names for p in target.exclude):
        return False
    if not (target.include or target.named) and _EXCLUDED.match(found.name.lower()):
        return False
    weight = found.name.endswith("weight") or len(found.shape) > 2
    return weight and len(found.shape) >= 2 and min(found.shape[-2:]) >= 16


def _recipe(found: Found, target: Target) -> ScalingRecipe | None:
    """What to quantize to: NVFP4 in one level where the model's program would not apply the second."""
    recipe = target.recipe or target.default
    if (
        target.recipe is None
        and target.bridge.readers.one_level
        and isinstance(found.recipe, recipes.NVFP4BlockScaling)
    ):
        recipe = found.recipe
    if target.with_inputs is not None and found.name.removesuffix(".weight") in target.inputs:
        recipe = target.with_inputs
    if isinstance(recipe, recipes.NVFP4BlockScaling) and has_one_level(found, target):
        return dataclasses.replace(recipe, two_level=False, global_scale_form="multiplier")
    if target.group_size == AUTO:
        recipe = _of_largest_groups(recipe, found.shape[-1])
    return recipe


def _of_largest_groups(recipe: ScalingRecipe | None, columns: int) -> ScalingRecipe | None:
    if not isinstance(recipe, (recipes.INT4Scaling, recipes.INT8Scaling)):
        return recipe
    best = largest_group(columns, recipe.group_size or _GROUP_SIZES[0])
    return dataclasses.replace(recipe, group_size=best) if best else recipe


def has_one_level(found: Found, target: Target) -> bool:
    """Whether a program applies no second scale to a tensor: in whole models, or to all experts in one."""
    if target.bridge.readers.one_level:
        return True
    return target.names is not None and (len(found.shape) > 2 or not target.names.second_scales)


def choose(found: Found, target: Target) -> Choice:
    """What to do with one tensor.

    Raises:
        ValueError: its name cannot be written in the target's format.
    """
    if found.format == "plain" and not is_float(found):
        return _copy(found, target)
    if target.float_dtype:
        dtype = target.float_dtype
        if not _named(found, target):
            return _left_out(found, target)
        if found.dtype == dtype and not _turns(found, target):
            return _copy(found, target)
        if found.format == "plain" and found.dtype == "F64":
            return _copy(found, target)
        return _float(found, target, found.name, dtype)
    if target.kind == NO_KIND:
        return _copy(found, target) if found.format == "plain" else _as_bfloat16(found, target, "")
    if why := _without_a_place(found, target):
        if found.format == "plain":
            return dataclasses.replace(_copy(found, target), note=f"{LEFT}: {why}" if wanted(found, target) else "")
        return _as_bfloat16(found, target, why)
    if found.format != "plain" and not _named(found, target):
        return _left_out(found, target)
    as_it_is = not target.kind and target.recipe is None and found.recipe is None
    if as_it_is and found.format == target.format and "blocks" in found.parts:
        return Choice(found, "keep", {target.spell(found.name): (found.kind, found.shape)})
    if target.kind:
        return _choose_kind(found, target, target.bridge.kinds[target.kind])
    if found.format == "plain":
        recipe = _recipe(found, target)
        if not wanted(found, target) or recipe is None or not target.bridge.takes(found.name, found.shape):
            return _copy(found, target)
        choice = _quantize(found, "cast", recipe, target)
        why = unread_embedding(found.name, target)  # which somebody asked for by name
        return dataclasses.replace(choice, note=f"quantized as asked, but {why}") if why and not choice.note else choice
    if found.recipe is not None and _holds(found, target):
        return _outputs(found, "repack", found.ghost(), target)
    recipe = _recipe(found, target)
    assert recipe is not None
    return _quantize(found, "requantize" if found.recipe is not None else "cast", recipe, target)


def _choose_kind(found: Found, target: Target, kind: Kind) -> Choice:
    """What to do with one tensor where the target is a kind of the format's own."""
    output = {target.spell(found.name): (kind.name, found.shape)}
    if found.format == target.format and found.kind == kind.name:
        return Choice(found, "keep", output)
    if kind.encode is None:
        wide = target.names is not None and target.names.wide(found.name)
        if len(found.shape) < 2 or wide or found.dtype == kind.name or not _named(found, target):
            return _copy(found, target) if found.format == "plain" else _as_bfloat16(found, target, "it is left out")
        return Choice(found, "float", output)
    if found.format == "plain" and not wanted(found, target):
        return _copy(found, target)
    if found.shape[-1] % kind.block == 0:
        return Choice(found, "encode", output)
    other = choose(found, dataclasses.replace(target, kind=""))  # to `kind.otherwise`, which is the target's recipe
    (written, _), *_ = other.outputs.values()
    note = f"written as {written}: {kind.name} takes {kind.block} columns at a time, there are {found.shape[-1]}"
    return dataclasses.replace(other, note=other.note or note)


def _named(found: Found, target: Target) -> bool:
    """Whether the patterns let a tensor be written in another type."""
    names = names_of(found)
    if target.include and not any(fnmatchcase(name, pattern) for name in names for pattern in target.include):
        return False
    return not any(fnmatchcase(name, pattern) for name in names for pattern in target.exclude)


def _left_out(found: Found, target: Target) -> Choice:
    """What the patterns leave out keeps its numbers: its codes where the target's format holds them, else bfloat16."""
    if found.format == "plain":
        return _copy(found, target)
    if target.float_dtype:
        note = f"written as {target.spelled} though it is left out: its codes have no place beside floats"
        return dataclasses.replace(_float(found, target, found.name, target.float_dtype), note=note)
    if found.format == target.format and "blocks" in found.parts:
        return Choice(found, "keep", {target.spell(found.name): (found.kind, found.shape)})
    if found.recipe is not None and _holds(found, dataclasses.replace(target, recipe=None)):
        return _outputs(found, "repack", found.ghost(), target)
    return _as_bfloat16(found, target, "it is left out")


def _holds(found: Found, target: Target) -> bool:
    recipe = found.recipe
    assert recipe is not None
    asked = [one for one in (target.recipe, target.with_inputs) if one is not None]
    if target.group_size == AUTO and asked:
        asked = [one for one in (_recipe(found, target),) if one is not None]
    if target.recipe is not None and not any(same_grid(recipe, one) for one in asked):
        return False
    if not target.bridge.carries(recipe):
        return False
    if "global_scale" in found.parts and has_one_level(found, target):
        return False
    if not target.bridge.model_knows(recipe, target.model):
        return False
    try:
        target_parts(target, found.name, found.ghost())
    except ValueError:
        return False
    return True


def unread_embedding(name: str, target: Target) -> str:
    """Why a quantized tensor is of no use in the format, which has no form for embeddings; "" where it is."""
    if is_embedding(name) and not target.bridge.readers.embeddings:
        return f"embeddings have no form in {target.format} that a program loads"
    return ""


def _without_a_place(found: Found, target: Target) -> str:
    """Why no program loads a quantized tensor from the format though the bytes have a form in it; "" where one does."""
    bridge = target.bridge
    if is_turned(found.name, found.shape, target.model):
        if len(found.shape) == 2 and not bridge.readers.turned_weights:
            return f"weights with inputs before outputs have no form in {target.format} that a program loads"
        if len(found.shape) == 3 and not bridge.readers.fused_experts:
            return f"experts of a layer in one tensor have no form in {target.format} that a program loads"
    if found.format != "plain" and not bridge.takes(found.name, found.shape):
        return f"{target.format} has no place for it"
    if why := bridge.why_not(found.name):
        return why
    if found.format != "plain" and (why := unread_embedding(found.name, target)):
        return why
    if is_one_expert(found.name) and not bridge.readers.single_experts:
        return f"experts in tensors of their own have no form in {target.format} that a program loads"
    return ""


def _as_bfloat16(found: Found, target: Target, why: str) -> Choice:
    """What cannot be written in the new format must not stay in the old one, which nothing would read; it is noted
    with the reason, "" for one that was asked for."""
    name, metadata = target.spell(found.name), target.bridge.plain_metadata(found.name)
    return _float(found, target, name, "BF16", metadata=metadata, note=why and f"written as bf16: {why}")


def _turns(found: Found, target: Target) -> bool:
    """Whether the model's files have the tensor's rows as columns, and those that it was found in have not."""
    return not found.origin.turned and is_stored_turned(found.name, found.shape, target.model)


def _float(found: Found, target: Target, name: str, dtype: str, **more: Any) -> Choice:
    """Values as the model's float checkpoints keep them."""
    # A kind of file without config.json, which would say it, has outputs first.
    turned = is_turned(found.name, found.shape, target.model) and not target.bridge.container.whole
    shape = found.shape
    shape = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    return Choice(found, "float", {name: (dtype, shape)}, turned=turned, **more)


def _copy(found: Found, target: Target) -> Choice:
    if found.origin.numbers:  # bfloat16 holds all of FP8, and every program reads it
        wide = target.names is not None and (len(found.shape) < 2 or target.names.wide(found.name))
        return _float(found, target, target.spell(found.name), "F32" if wide else "BF16")
    wide = target.names is not None and (len(found.shape) < 2 or target.names.wide(found.name))
    if wide and found.dtype in ("BF16", "F16"):
        # Programs add and multiply by vectors in float32 only.
        return Choice(found, "float", {target.spell(found.name): ("F32", found.shape)})
    name = target.spell(found.name)
    metadata = target.bridge.plain_metadata(name)
    if found.origin.turned and target.bridge.container.whole:
        return Choice(found, "float", {name: (found.dtype, found.shape)})
    shape = (*found.shape[:-2], found.shape[-1], found.shape[-2]) if found.origin.turned else found.shape
    return Choice(found, "copy", {name: (found.dtype, shape)}, metadata=metadata)


def _quantize(found: Found, action: str, recipe: ScalingRecipe, target: Target) -> Choice:
    try:
        return _outputs(found, action, ghost(found.shape, recipe), target, recipe)
    except ValueError as error:
        if found.format == "plain":
            return dataclasses.replace(_copy(found, target), note=f"{LEFT}: {error}")
        return _as_bfloat16(found, target, str(error))


def requantized(found: Found, action: str, recipe: ScalingRecipe, target: Target) -> Choice:
    """A tensor that is quantized again to its own recipe.

    Raises:
        ValueError: its shape or name does not suit them.
    """
    return _outputs(found, action, ghost(found.shape, recipe), target, recipe)


def _outputs(
    found: Found, action: str, scaled: ScaledTensor, target: Target, recipe: ScalingRecipe | None = None
) -> Choice:
    parts, metadata = target_parts(target, found.name, scaled)
    outputs = {name: (p.dtype, p.shape) for name, p in parts.items()}
    return Choice(found, action, outputs, recipe or found.recipe, metadata)


def target_parts(target: Target, name: str, scaled: ScaledTensor) -> tuple[dict[str, Part], dict[str, str]]:
    """Stored tensors by full name, and entries of the header's metadata.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    bridge = target.bridge
    inputs = bridge.input_scales and name.removesuffix(".weight") in target.inputs
    inputs = inputs and bridge.input_scale(scaled.recipe, {}) is not None
    said = target.inputs_of(name.removesuffix(".weight"), scaled.recipe) if isinstance(scaled, ScaledTensor) else None
    said = said if inputs or said is None or said.when == "dynamic" else None
    return bridge.stored(name, scaled, Place(inputs, target.model, target.spell, said))
