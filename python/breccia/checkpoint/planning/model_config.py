# SPDX-License-Identifier: Apache-2.0
"""What is said of a model that is written, in config.json and its like, and how it differs from the source."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from breccia import bridges
from breccia.bridges.contract import registered
from breccia.bridges.file_kinds import SAFETENSORS
from breccia.bridges.parts import Found
from breccia.bridges.written import Written
from breccia.checkpoint.files.safetensors_header import Entry
from breccia.checkpoint.planning.choices import QUANTIZED, Choice
from breccia.checkpoint.planning.left_alone import LATER
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.planning.rotations import KEYS
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.models import other_names, tied_heads
from breccia.checkpoint.reading.source import Checkpoint
from breccia.recipes import INT4Scaling, ScalingRecipe
from breccia.schemes import UNSAID, Activations, ModelScheme, differences
from breccia.schemes.dialects import Said, scheme_of
from breccia.schemes.inputs import inputs_for
from breccia.schemes.matching import Match
from breccia.schemes.rules import Unsaid, rules_of

# Servers may call heads for later tokens otherwise than files do.
_LATER_HEADS = Match("glob", f"*{LATER}*")
# Entries of headers that formats write of their own tensors, and what is no longer true of other bytes.
_OF_FORMATS = frozenset({"format", "quantization_config", "_quantization_metadata", "tensor_names"})
_OF_BYTES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")


class Config(NamedTuple):
    """What is said of a model beside its weights: config.json, and other files by their names."""

    own: dict[str, Any]
    others: dict[str, Any]

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of quantization, which stands in the header of a file that stands alone."""
        return dict(self.own.get("quantization_config", {}))


def config_of(checkpoint: Checkpoint, target: Target, choices: list[Choice]) -> Config:
    """What is to be said of a model that is written. Raises ValueError where the format cannot say it."""
    config = json.loads(json.dumps(checkpoint.config))
    owned = bridges.owned()
    for name in checkpoint.found.formats & registered.keys():
        owned |= registered[name].owned
    for place in (config, config.get("text_config"), config.get("language_config")):
        if isinstance(place, dict):
            for key in owned:
                place.pop(key, None)
    if target.float_dtype:
        name = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[target.float_dtype]
        config["dtype" if "dtype" in config else "torch_dtype"] = name
        return Config(config, {})
    recipes = modules_of(choices)
    kept = frozenset(next(iter(c.outputs)).removesuffix(".weight") for c in choices if c.action == "same")
    if not recipes and not kept:
        return Config(config, {})
    inputs = target.inputs.intersection(recipes)
    ignored = _ignored(checkpoint, choices, recipes)
    activations = {m: one for m, recipe in recipes.items() if (one := target.inputs_of(m, recipe))}
    patterns = _patterns_left(target.source, (*recipes, *kept))
    if LATER in " ".join(ignored) and LATER not in " ".join((*recipes, *kept)):
        patterns += (_LATER_HEADS,)
    rules = {} if target.source is None else {module: target.source.rule(module) for module in target.outputs}
    given = {m: one.outputs for m, one in rules.items() if one is not None and isinstance(one.outputs, Activations)}
    rows = _of_rows(choices, recipes) if INT4Scaling in set(map(type, recipes.values())) else frozenset[str]()
    said = target.bridge.dialect.write(
        Written(recipes, ignored, inputs, checkpoint.config, target.cache, activations, kept, patterns, given, rows)
    )
    if target.source is not None and target.source.source == target.format and "quantization_config" in said:
        same = target.cache is not None and target.cache == target.source.kv_cache
        _add(said["quantization_config"], _opaque(target.source, same))
    beside = target.bridge.dialect.file
    others = {beside: said.pop(beside)} if beside in said else {}
    return Config({**config, **said}, others)


def words_of(checkpoint: Checkpoint, target: Target) -> tuple[dict[str, str], list[str]]:
    """What the headers of a checkpoint's files say beside the form of its tensors, which stays; and notes of what does
    not."""
    words: dict[str, str] = {}
    for file in checkpoint.files:
        words = {**file.metadata, **words}
    if not words.keys() - _OF_FORMATS:
        return {}, []
    names = {*checkpoint.entries, *checkpoint.found.names()}
    words = {k: v for k, v in words.items() if k not in _OF_FORMATS and not {k, k.removesuffix(".config")} & names}
    if target.bridge.container.title != SAFETENSORS.title:
        left, words = list(words), {}
        return {}, [f"metadata of the source has no place in {target.spelled}: {some(left)}"] if left else []
    stale = [key for key in words if "quant" in key.lower()]
    false = [key for key in _OF_BYTES if key in words]
    notes = [f"metadata of how the source was quantized is left out: {some(stale)}"] if stale else []
    notes += [Remark(f"metadata with checksums of the source's bytes is left out: {some(false)}")] if false else []
    return {key: value for key, value in words.items() if key not in (*stale, *false)}, notes


def _of_rows(choices: list[Choice], recipes: dict[str, ScalingRecipe]) -> frozenset[str]:
    """The modules of INT4 where each has one group to a row; none where one has more."""
    int4 = frozenset(module for module, recipe in recipes.items() if isinstance(recipe, INT4Scaling))
    of_rows = [c for c in choices if isinstance(c.recipe, INT4Scaling) and c.recipe.group_size == c.found.shape[-1]]
    return int4 if int4 <= modules_of(of_rows).keys() else frozenset()


def _patterns_left(source: ModelScheme | None, quantized: Iterable[str]) -> tuple[Match, ...]:
    """The patterns by which a source names modules that it left alone, those of other files of the model included;
    without such as match what is quantized here."""
    if source is None:
        return ()
    left = (rule for rule in source.rules if rule.weights is None and not rule.has_activations)
    patterns = [one for rule in left for one in rule.match if one.kind != "name"]
    modules = list(quantized)
    return tuple(one for one in patterns if not any(one.matches(module, ("Linear",)) for module in modules))


def changed_meaning(checkpoint: Checkpoint, target: Target, choices: list[Choice], config: Config) -> list[str]:
    """Notes of what programs do with activations and KV caches of the output and should not, as a scheme asks or the
    source has it, or the other way round."""
    if target.asked is None and target.source is None and not checkpoint.found.formats:
        return []
    try:
        source = checkpoint.scheme
    except ValueError as error:
        return [f"what the source says of activations and KV cache is not carried over: {error}"]
    recipes = modules_of(choices)
    encoded = () if target.quantizes_nothing else (c for c in choices if c.recipe is None and c.action in QUANTIZED)
    weights: dict[str, Any] = {c.found.name.removesuffix(".weight"): "of no recipe" for c in encoded} | recipes
    own: dict[str, Any] = {} if target.bridge.container.whole else config.own
    said = own.get("quantization_config") or own.get("quantization") or {}
    after = scheme_of(Said(said, own, weights, {}, checkpoint.array, _beside(target, recipes)))
    return list(differences(_wanted(target, source, weights), after, weights))


def _beside(target: Target, recipes: dict[str, ScalingRecipe]) -> dict[str, Activations | None]:
    """What is written beside weights of the inputs of their layers."""
    made: dict[str, Activations | None] = {}
    for module, recipe in recipes.items():
        asked = target.inputs_of(module, recipe)
        inputs = asked if asked is not None and asked.when == "dynamic" else None
        if module in target.inputs:  # a static scale is written, whatever the source's was of
            inputs = inputs_for(recipe, "static")
        said = target.bridge.inputs_written(recipe, inputs)
        made |= {} if isinstance(said, Unsaid) else {module: said}
    return made


def _opaque(source: ModelScheme, cache: bool = False) -> dict[str, Any]:
    """What a source says that the same format's own words keep: transforms of inputs, groups of what has no weights,
    and a cache of another kind than FP8's where its scales are kept."""
    said = json.loads(source.raw)
    keys = (*KEYS, "config_groups", *(["kv_cache_scheme"] if cache else []))
    return {key: said[key] for key in keys if said.get(key)}


def _add(said: dict[str, Any], more: dict[str, Any]) -> None:
    """Add to an object of JSON; groups beside those that are there."""
    groups = more.pop("config_groups", {})
    said.update(more)
    there = said.get("config_groups", {})
    there.update({name if name not in there else f"{name}_of_no_weights": group for name, group in groups.items()})


def _wanted(target: Target, source: ModelScheme, recipes: Mapping[str, ScalingRecipe | str]) -> ModelScheme:
    """What a scheme asks of quantized layers, else what the source has."""
    meanings: dict[str, tuple[Any, ...]] = {
        module: (None, target.inputs_of(module, recipe), rule and rule.outputs)
        for module, recipe in recipes.items()
        for rule in [source.rule(module)]
    }
    cache = UNSAID if target.asked is None else target.asked.scheme.kv_cache
    apart = [rule for rule in source.rules if rule.weights is None and rule.has_activations]
    return ModelScheme((*apart, *rules_of(meanings)), source.kv_cache if cache is UNSAID else cache)


def modules_of(choices: list[Choice]) -> dict[str, ScalingRecipe]:
    """The recipes of quantized modules, by their names."""
    return {
        one.found.name.removesuffix(".weight"): one.recipe
        for one in choices
        if one.recipe is not None and one.action not in ("copy", "float")
    }


def _ignored(checkpoint: Checkpoint, choices: list[Choice], quantized: Collection[str]) -> list[str]:
    """Modules whose weight stays in high precision; loaders that go by names know "…norm" themselves."""
    plain = [c for c in choices if c.action in ("copy", "float") or (c.action == "merge" and c.recipe is None)]
    weights = {c.found.name for c in plain if c.found.name.endswith(".weight")}
    names = {name.removesuffix(".weight") for name in weights if not name.endswith("norm.weight")}
    names |= tied_heads(checkpoint.found.names())
    names |= _named_high(checkpoint).difference(quantized)
    return sorted(names | other_names(names))


def _named_high(checkpoint: Checkpoint) -> set[str]:
    """Modules that the source names as left in high precision, those without tensors in its files included."""
    if not (checkpoint.quantization or checkpoint.config.get("quantization")):
        return set()
    try:
        rules = checkpoint.scheme.rules
    except ValueError:  # what it says is of no known form
        return set()
    return {
        one.pattern
        for rule in rules
        if rule.weights is None and not rule.has_activations
        for one in rule.match
        if one.kind == "name"
    }


def check_is_read(target: Target, choices: list[Choice], config: Config) -> None:
    """Check that the format's reader finds what is planned in the names, types, shapes and words that are written, of a
    tensor of each shape and recipe. Raises ValueError where it does not; the message names the tensor."""
    bridge, own = target.bridge, config.own
    if bridge.container.whole or bridge.find_all is not None:  # the header says what its tensors are
        return
    said = own.get("quantization_config", {})
    context = {"quantization_config": said, "quant_method": str(said.get("quant_method") or ""), "config": own}
    context["quantization"] = own.get("quantization")
    seen = set()
    for choice in choices:
        kind = id(choice.recipe), choice.found.shape, len(choice.outputs)
        if choice.action not in ("cast", "repack", "requantize") or kind in seen:
            continue
        seen.add(kind)
        entries = {name: Entry(name, *form, 0, 0) for name, form in choice.outputs.items()}
        found = None
        for name in entries:
            if found is None and name.endswith(bridge.anchors):
                found = bridge.find(name, entries, context)
        if found is None or (found.shape != choice.found.shape and bridge.shape_role not in found.parts):
            shape = None if found is None else found.shape
            raise ValueError(
                f"{target.spelled}: {choice.found.name!r} must be read as shape {choice.found.shape}, "
                f"its tensors and config.json say {shape}"
            )


def made_anew(checkpoint: Checkpoint, target: Target) -> list[Choice]:
    """Tensors that the target's files have beside those of the source."""
    made = []
    for name, values in target.bridge.container.made_anew(checkpoint, target.names).items():
        found = Found(name, "plain", "f32", {}, values.shape, dtype="F32")
        made.append(Choice(found, "make", {name: ("F32", values.shape)}, values=tuple(values.tolist())))
    return made
