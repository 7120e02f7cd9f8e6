# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model has, by its config.json: names and shapes, from transformers or diffusers on no device.

Only classes of those packages are made, of the JSON in the folder and without the network: no code that comes with a
checkpoint, or that it names, runs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from breccia.bridges.parts import Found
from breccia.bridges.written import PLACES
from breccia.checkpoint.reading.models import is_turned
from breccia.screen import one_line

_MOST = 20_000  # heads or experts: more would take minutes to build
_MOST_LAYERS = 1_000
_LAYERS = re.compile("layer|depth|stage|repeat")
# Keys that would make a package fetch weights, or code that it runs, by a name in the file.
_NAMES_CODE = re.compile(r"implementation(_internal)?$|^auto_map$|^use_kernels$|^use_pretrained_backbone$|^backbone$")
_EXPERTS = re.compile(r"\.(experts|switch_mlp)\.")


@dataclass(frozen=True)
class Architecture:
    """What a model consists of.

    Attributes:
        name: the package and class.
        shapes: of its tensors, by the names of its checkpoints.
        shared: names that files may lack, because they share another tensor.
        unread: patterns of names that files may have though the model reads them not.
        config: config.json.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    shared: frozenset[str]
    unread: tuple[str, ...]
    config: Mapping[str, Any]

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[int, ...]]:
        return {_canonical(name): shape for name, shape in self.shapes.items()}

    def missing(self, there: Iterable[str]) -> list[str]:
        """Tensors that a checkpoint must have and has not."""
        names = set(map(_canonical, there))
        return sorted(name for name in self.shapes if _canonical(name) not in names and name not in self.shared)

    def extra(self, there: Iterable[str]) -> list[str]:
        """Tensors of a checkpoint that the model does not read."""
        found = (name for name in there if _canonical(name) not in self._by_name)
        return sorted(name for name in found if not any(re.search(pattern, name) for pattern in self.unread))

    def has(self, prefix: str) -> bool:
        """Whether a tensor has this name, or one that starts with it."""
        return any(name == prefix or name.startswith(f"{prefix}.") for name in self.shapes)

    def problem(self, found: Found) -> str:
        """What is wrong with a tensor's shape, "" where nothing is."""
        wanted = self._by_name.get(_canonical(found.name))
        if wanted is None:
            return ""
        turned = (*wanted[:-2], *reversed(wanted[-2:]))  # as such weights are found
        if tuple(found.shape) in ((wanted, turned) if is_turned(found.name, wanted, self.config) else (wanted,)):
            return ""
        return f"shape must be {wanted} by config.json, it is {tuple(found.shape)}"


def architecture(config: Mapping[str, Any], names: Iterable[str]) -> Architecture | str:
    """The model of a config.json by the names that the checkpoint has, or in words why it is not known. Names of
    tensors tell whether a prefix is left out, and how experts are kept."""
    if many := _too_many(config):
        return f"{many}, which is too many to build"
    if isinstance(config.get("backbone_config"), Mapping) or config.get("use_timm_backbone"):
        return "it is built around another model"
    try:
        if isinstance(config.get("_class_name"), str):
            made = _of_diffusers(config)
        elif isinstance(config.get("model_type"), str):
            made = _of_transformers(config)
        else:
            return "config.json names no model"
    except Exception as error:  # a package of others, on a file of others
        return f"the model cannot be built: {one_line(str(error))[:200]}"
    return made if isinstance(made, str) else _as_named(made, set(names))


def _too_many(config: Mapping[str, Any]) -> str:
    """A number of modules that would take long to make, "" where there is none."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (found := _too_many(value)):
            return found
        most = _MOST_LAYERS if _LAYERS.search(key) else _MOST if re.search("num|head|expert|block", key) else math.inf
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping) and (found := _too_many(one)):
                return found
            if isinstance(one, int) and one > most:
                return f"{key} is {str(value)[:80]}"
    return ""


def _plain(value: Any) -> Any:
    """A part of config.json without what names code, and without quantization."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if not _NAMES_CODE.search(str(k)) and k not in PLACES}
        return {key: _plain(one) for key, one in kept.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


@contextmanager
def _without_memory(module: Any) -> Iterator[None]:
    """Weights on no device, no network, and nothing printed."""
    import torch

    hub: Any = importlib.import_module("huggingface_hub.constants")
    offline, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    quiet = module.utils.logging
    before = quiet.get_verbosity()
    quiet.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            yield
    finally:
        quiet.set_verbosity(before)
        hub.HF_HUB_OFFLINE = offline


def _package(name: str) -> Any:
    """A package if it is installed, with torch; else None."""
    if any(importlib.util.find_spec(one) is None for one in ("torch", name)):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _class(module: Any, name: str, base: type) -> Any:
    """A package's class of models of that name, None where it has none."""
    if not name.isidentifier():
        return None
    try:
        kind = operator.attrgetter(name)(module)
    except AttributeError:
        return None
    return kind if isinstance(kind, type) and issubclass(kind, base) else None


def _of_transformers(config: Mapping[str, Any]) -> Architecture | str:
    transformers = _package("transformers")
    if transformers is None:
        return "transformers is not installed"
    kinds = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if config["model_type"] not in kinds:
        return f"transformers has no model_type {config['model_type']!r}"
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    kind = _class(transformers, name, transformers.PreTrainedModel)
    if kind is None:
        return f"transformers has no class {name!r}"
    loading = importlib.import_module("transformers.core_model_loading")
    with _without_memory(transformers):
        model = kind._from_config(kinds[config["model_type"]].from_dict(_plain(config)))
        state = loading.revert_weight_conversion(model, model.state_dict())
    shared = frozenset(getattr(model, "_tied_weights_keys", None) or ()) if _ties(config) else frozenset()
    unread = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    return Architecture(f"transformers' {name}", shapes, shared, (*unread, *_BUFFERS), config)


_BUFFERS = (r"rotary_emb\.inv_freq$", r"\.position_ids$", r"attn\.(masked_)?bias$")


def _ties(config: Mapping[str, Any]) -> bool:
    places = (config, config.get("text_config"))
    return any(isinstance(place, Mapping) and place.get("tie_word_embeddings", True) for place in places)


def _of_diffusers(config: Mapping[str, Any]) -> Architecture | str:
    diffusers = _package("diffusers")
    if diffusers is None:
        return "diffusers is not installed"
    name = config["_class_name"]
    kind = _class(diffusers, name, diffusers.ModelMixin)
    if kind is None:
        return f"diffusers has no model {name!r}"
    with _without_memory(diffusers):
        state = kind.from_config(_plain(config)).state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    return Architecture(f"diffusers' {name}", shapes, frozenset(), (), config)


def _canonical(name: str) -> str:
    """Experts' matrices have ``.weight`` in some formats and not in others."""
    return name.removesuffix(".weight")


def _as_named(made: Architecture, names: set[str]) -> Architecture | str:
    """The architecture by the names of a checkpoint, which may keep the base model alone, or experts in another way."""
    there = {_canonical(name) for name in names}
    heads = sorted({name.partition(".")[0] for name in made.shapes if "." in name})
    renamed = [{name.removeprefix(f"{head}."): shape for name, shape in made.shapes.items()} for head in ("", *heads)]
    shapes = max(renamed, key=lambda one: sum(_canonical(name) in there for name in one))
    known = sum(_canonical(name) in there for name in shapes)
    if 2 * known < len(shapes):
        return f"most of its tensors have other names than {made.name} has"
    unread = made.unread
    if any(map(_EXPERTS.search, shapes)) and not any(_canonical(n) in there for n in shapes if _EXPERTS.search(n)):
        shapes = {name: shape for name, shape in shapes.items() if not _EXPERTS.search(name)}
        unread = (*unread, _EXPERTS.pattern)
    return Architecture(made.name, shapes, made.shared, unread, made.config)
