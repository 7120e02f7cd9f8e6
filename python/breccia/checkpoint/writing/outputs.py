# SPDX-License-Identifier: Apache-2.0
"""What goes beside the weights: index, config.json, and the rest of a model's directory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia.bridges.parts import Found
from breccia.bridges.written import Written
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.bounded_json import loads
from breccia.checkpoint.files.dtypes import DTYPES, nbytes_of
from breccia.checkpoint.files.input_file import read_bounded
from breccia.checkpoint.planning.asked import grouped
from breccia.checkpoint.planning.targets import Choice, Target
from breccia.checkpoint.reading.folder import MAX_JSON, config_files
from breccia.checkpoint.reading.models import other_names, tied_heads
from breccia.checkpoint.reading.source import Checkpoint
from breccia.recipes import ScalingRecipe
from breccia.schemes import UNSAID, Activations, ModelScheme, differences
from breccia.schemes.dialects import Said, scheme_of
from breccia.schemes.inputs import inputs_for
from breccia.schemes.matching import Match
from breccia.schemes.value import Unsaid

__all__ = ["made_anew", "modules_of", "stored_bytes", "write_companions"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an output; ``dtype`` is safetensors' name or a type of another container."""
    if dtype in DTYPES:
        return nbytes_of(dtype, shape)
    block, nbytes = next(one.types[dtype] for one in bridges.containers() if dtype in one.types)
    return -(-math.prod(shape) // block) * nbytes


def write_companions(
    checkpoint: Checkpoint,
    work: Path,
    target: Target,
    choices: list[Choice],
    files: dict[str, list[Choice]],
    *,
    as_it_is: bool = False,
) -> None:
    """Write the index and config.json, which may stay ``as_it_is``, and copy tokenizer and the like."""
    whole = checkpoint.path.is_dir()  # else config.json is what a file says of its model
    if whole:
        _copy_others(checkpoint.path, work, set(files))
    if checkpoint.index is not None:
        weights = {name: file for file, kept in files.items() for c in kept for name in c.outputs}
        total = sum(stored_bytes(d, s) for c in choices for d, s in c.outputs.values())
        _write(work / checkpoint.index.name, {"metadata": {"total_size": total}, "weight_map": weights})
    if as_it_is:
        for name in config_files():
            if (checkpoint.path / name).is_file():
                disk.copy_file(checkpoint.path / name, work / name)
    elif (checkpoint.path / "config.json").is_file() if whole else checkpoint.config:
        config, others = _config(checkpoint, target, choices)
        _write(work / "config.json", config)
        for name, value in others.items():
            _write(work / f"{name}.json", value)


def _copy_others(source: Path, work: Path, files: set[str]) -> None:
    """Copy what is not the model's weights: files beside them, and folders, in which sentence-transformers keeps how
    it pools and further layers, weights included."""
    parts, others = _modules(source / "modules.json"), config_files()
    for path in sorted(source.iterdir()):
        skip = path.name.startswith(".") or path.name in others or path.name.endswith(".index.json")
        skip = skip or path.name in files
        if path.is_file() and not skip and path.suffix not in _WEIGHTS:
            disk.copy_file(path, work / path.name)
        if path.is_dir() and not path.is_symlink() and not skip:
            _copy_folder(path, work / path.name, weights=path.name in parts)


def _copy_folder(source: Path, target: Path, weights: bool) -> None:
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        hidden = any(part.startswith(".") for part in inside.parts)
        linked = any((source / parent).is_symlink() for parent in inside.parents)
        if path.is_file() and not hidden and not linked and (weights or path.suffix not in _WEIGHTS):
            for folder in [target, *reversed((target / inside).parents)]:
                if folder.is_relative_to(target):
                    disk.make_directory(folder)
            disk.copy_file(path, target / inside)


def _modules(path: Path) -> set[str]:
    """Folders of the modules of a sentence-transformers model."""
    try:
        said = loads(read_bounded(path, MAX_JSON)[0])
    except (OSError, ValueError, RecursionError):
        return set()
    modules = said if isinstance(said, list) else []
    return {str(module.get("path")) for module in modules if isinstance(module, dict)} - {""}


def _config(checkpoint: Checkpoint, target: Target, choices: list[Choice]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = json.loads(json.dumps(checkpoint.config))
    for place in (config, config.get("text_config"), config.get("language_config")):
        if isinstance(place, dict):
            for key in ("quantization_config", "compression_config", "quantization"):
                place.pop(key, None)
    if target.float_dtype:
        name = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[target.float_dtype]
        config["dtype" if "dtype" in config else "torch_dtype"] = name
        return config, {}
    recipes = modules_of(choices)
    kept = frozenset(_module(next(iter(c.outputs))) for c in choices if c.action == "same")
    if not recipes and not kept:
        return config, {}
    inputs = target.inputs.intersection(recipes)
    ignored = _ignored(checkpoint, choices)
    activations = {m: one for m, recipe in recipes.items() if (one := target.inputs_of(m, recipe))}
    patterns = _patterns_left(target.source, (*recipes, *kept))
    rules = {} if target.source is None else {module: target.source.rule(module) for module in target.outputs}
    given = {m: one.outputs for m, one in rules.items() if one is not None and isinstance(one.outputs, Activations)}
    said = target.bridge.config(
        Written(recipes, ignored, inputs, checkpoint.config, target.cache, activations, kept, patterns, given)
    )
    if target.source is not None and target.source.source == target.format and "quantization_config" in said:
        _add(said["quantization_config"], _opaque(target.source, target.cache))
    beside = target.bridge.beside
    others = {beside: said.pop(beside)} if beside in said else {}
    return {**config, **said}, others


def _patterns_left(source: ModelScheme | None, quantized: Iterable[str]) -> tuple[Match, ...]:
    """The patterns by which a source names modules that it left alone, those of other files of the model included;
    without such as match what is quantized here."""
    left = (rule for rule in source.rules if rule.weights is None and not rule.has_activations) if source else ()
    patterns = [one for rule in left for one in rule.match if one.kind != "name"]
    modules = list(quantized)
    return tuple(one for one in patterns if not any(one.matches(module, ("Linear",)) for module in modules))


def changed_meaning(checkpoint: Checkpoint, target: Target, choices: list[Choice]) -> list[str]:
    """Notes of what programs do with activations and KV caches of the output and should not, as a scheme asks or the
    source has it, or the other way round."""
    if target.asked is None and target.source is None and all(one.format == "plain" for one in checkpoint.found):
        return []
    try:
        source = checkpoint.scheme
    except ValueError as error:
        return [f"what the source says of activations and KV cache is not carried over: {error}"]
    recipes = modules_of(choices)
    config: dict[str, Any] = {} if target.bridge.container.whole else _config(checkpoint, target, choices)[0]
    said = config.get("quantization_config") or config.get("quantization") or {}
    after = scheme_of(Said(said, config, dict(recipes), {}, checkpoint.array, _beside(target, recipes)))
    transforms = "transform_config"
    lost = [f"{transforms} of the source is left out: programs do not transform inputs by it"]
    lost = lost if transforms in _opaque(source) and recipes and transforms not in said else []
    return [*lost, *differences(_wanted(target, source, recipes), after, recipes)]


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
    keys = ("transform_config", "config_groups", *(["kv_cache_scheme"] if cache else []))
    return {key: said[key] for key in keys if said.get(key)}


def _add(said: dict[str, Any], more: dict[str, Any]) -> None:
    """Add to an object of JSON; groups beside those that are there."""
    groups = more.pop("config_groups", {})
    said.update(more)
    there = said.get("config_groups", {})
    there.update({name if name not in there else f"{name}_of_no_weights": group for name, group in groups.items()})


def _wanted(target: Target, source: ModelScheme, recipes: dict[str, ScalingRecipe]) -> ModelScheme:
    """What a scheme asks of quantized layers, else what the source has."""
    meanings: dict[str, tuple[Any, ...]] = {}
    for module, recipe in recipes.items():
        rule = source.rule(module)
        meanings[module] = None, target.inputs_of(module, recipe), rule and rule.outputs
    asked = None if target.asked is None else target.asked.scheme
    cache = source.kv_cache if asked is None or asked.kv_cache is UNSAID else asked.kv_cache
    apart = [rule for rule in source.rules if rule.weights is None and rule.has_activations]
    return ModelScheme((*apart, *grouped(meanings)), cache)


def modules_of(choices: list[Choice]) -> dict[str, ScalingRecipe]:
    """The recipes of quantized modules, by their names."""
    quantized = [c for c in choices if c.action not in ("copy", "float")]
    return {_module(c.found.name): c.recipe for c in quantized if c.recipe is not None}


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def quantization_config(checkpoint: Checkpoint, target: Target, choices: list[Choice]) -> dict[str, Any]:
    """What config.json would say of quantization, for the header of a file that stands alone."""
    config, _ = _config(checkpoint, target, choices)
    return dict(config.get("quantization_config", {}))


def _ignored(checkpoint: Checkpoint, choices: list[Choice]) -> list[str]:
    """Modules whose weight stays in high precision; loaders that go by names know "…norm" themselves."""
    plain = [c for c in choices if c.action in ("copy", "float") or (c.action == "merge" and c.recipe is None)]
    kept = [c.found.name for c in plain if c.found.name.endswith(".weight")]
    names = {_module(name) for name in kept if not name.endswith("norm.weight")}
    names |= tied_heads(found.name for found in checkpoint.found)
    names |= _named_high(checkpoint) - modules_of(choices).keys()
    return sorted(names | other_names(names))


def _named_high(checkpoint: Checkpoint) -> set[str]:
    """Modules that the source names as left in high precision, those without tensors in its files included."""
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


def _write(path: Path, value: dict[str, Any]) -> None:
    disk.write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def made_anew(checkpoint: Checkpoint, target: Target) -> list[Choice]:
    """Tensors that the target's files have beside those of the source."""
    made = []
    for name, values in target.bridge.container.made_anew(checkpoint, target.names).items():
        found = Found(name, "plain", "f32", {}, values.shape, dtype="F32")
        made.append(Choice(found, "make", {name: ("F32", values.shape)}, values=tuple(values.tolist())))
    return made
