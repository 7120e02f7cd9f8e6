# SPDX-License-Identifier: Apache-2.0
"""The scheme of a checkpoint, from its configuration, its headers and the few numbers that are scales of activations;
and how two schemes differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from breccia import bridges
from breccia.recipes import ScalingRecipe
from breccia.schemes.dialects import Said, scheme_of
from breccia.schemes.rules import role_of
from breccia.schemes.value import UNSAID, Activations, KVCache, ModelScheme, Rule, Unsaid


class Opened(Protocol):
    """What is asked of a checkpoint: see `breccia.checkpoint.Checkpoint`."""

    config: dict[str, Any]
    found: Any
    entries: Any

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of quantization."""

    def array(self, name: str) -> Any:
        """A stored tensor."""

    def refined(self, found: Any) -> Any:
        """What only small tensors tell."""


def of_checkpoint(checkpoint: Opened) -> ModelScheme:
    """What a quantized model is stored and computed in, as the checkpoint's own format means it. Raises ValueError
    where its configuration is not of its method's form."""
    said = checkpoint.quantization or checkpoint.config.get("quantization") or {}
    found = list(checkpoint.found)
    plain = {one.parts["weight"]: one.name for one in found if one.format == "plain" and "weight" in one.parts}
    quantized = [one for one in found if one.format != "plain"]
    entries = {plain.get(name, name): entry for name, entry in checkpoint.entries.items()}
    stored = {own: name for name, own in plain.items() if own != name}
    parts = (said, checkpoint.config, _modules(checkpoint, quantized), entries, checkpoint.array)
    return scheme_of(Said(*parts, _beside(checkpoint, quantized), stored))


def _beside(checkpoint: Opened, quantized: Iterable[Any]) -> dict[str, Activations | None]:
    """See `FileFormat.inputs_beside`."""
    said = {one.name: bridges.bridge(one.format).inputs_beside(one, checkpoint.entries) for one in quantized}
    return {name.removesuffix(".weight"): one for name, one in said.items() if not isinstance(one, Unsaid)}


def modules_of(checkpoint: Opened) -> dict[str, ScalingRecipe | str]:
    """Quantized modules by name: a recipe, or the name of a format that no recipe makes."""
    return _modules(checkpoint, checkpoint.found)


def _modules(checkpoint: Opened, found: Iterable[Any]) -> dict[str, ScalingRecipe | str]:
    return {
        one.name.removesuffix(".weight"): one.kind if one.recipe is None else one.recipe
        for one in (one if one.recipe is not None else checkpoint.refined(one) for one in found)
        if one.format != "plain"
    }


def _rule(scheme: ModelScheme, name: str) -> Rule | None:
    return scheme.rule(name, ("Embedding",) if role_of(name) == "embeddings" else ("Linear",))


def folded(scheme: ModelScheme, names: Iterable[str]) -> list[str]:
    """A line per role of layers, such as "attention: FP8 × FP8 static".

    Args:
        scheme: of the model.
        names: of its modules with weights.

    Returns:
        The lines; the last is of the KV cache.
    """
    kinds: dict[str, Counter[str]] = {}
    for name in names:
        role, rule = role_of(name), _rule(scheme, name)
        if role != "norms":
            kinds.setdefault(role, Counter())[str(rule) if rule else "high precision"] += 1
    order = ("attention", "mlp", "experts", "router", "head", "embeddings", "others")
    lines = [f"{role}: {_counted(kinds[role])}" for role in order if role in kinds]
    return [*lines, f"KV cache: {_said(scheme.kv_cache)}"]


def _counted(kinds: Counter[str]) -> str:
    if len(kinds) == 1:
        return next(iter(kinds))
    return " · ".join(f"{text} ({count})" for text, count in kinds.most_common())


def _said(part: Activations | KVCache | Unsaid | None) -> str:
    return "left to the program" if part is UNSAID else str(part or "high precision")


def differences(before: ModelScheme, after: ModelScheme, names: Iterable[str]) -> list[str]:
    """What of a model's activations and KV cache is not the same in two schemes. Weights are compared by their values,
    and high precision is not told from what is left to the program.

    Args:
        before: of the reference.
        after: of the other.
        names: modules with quantized weights.

    Returns:
        Lines such as "inputs of 32 layers: NVFP4 local → high precision".
    """
    names = list(names)
    counts: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], str] = {}
    for name in names:
        old, new = _rule(before, name), _rule(after, name)
        for part in ("inputs", "outputs"):
            was, now = getattr(old, part, None), getattr(new, part, None)
            if was != now and (isinstance(was, Activations) or isinstance(now, Activations)):
                key = (part, _said(was), _said(now))
                counts[key] += 1
                first.setdefault(key, name)
    lines = [
        f"{part} of {_layers(count, first[part, was, now])}: {was} → {now}"
        for (part, was, now), count in counts.items()
    ]
    lines += _of_no_weights(before, after, names)
    was, now = before.kv_cache, after.kv_cache
    if was != now and (isinstance(was, KVCache) or isinstance(now, KVCache)):
        lines.append(f"KV cache: {_said(was)} → {_said(now)}")
    return lines


def _of_no_weights(before: ModelScheme, after: ModelScheme, names: list[str]) -> list[str]:
    """What is said of activations of modules without quantized weights, such as attention by its class."""
    said: list[dict[tuple[str, str], str]] = []
    for scheme in (before, after):
        rules = (one for one in scheme.rules if one.weights is None and one.has_activations)
        parts = [
            (one, part)
            for one in rules
            if not any(one.matches(name, ("Linear",)) for name in names)
            for part in ("inputs", "outputs")
            if isinstance(getattr(one, part), Activations)
        ]
        said.append({(part, ", ".join(map(str, one.match))): _said(getattr(one, part)) for one, part in parts})
    old, new = said
    every = (key for key in {**old, **new} if old.get(key) != new.get(key))
    return [f"{key[0]} of {key[1]}: {old.get(key, _said(None))} → {new.get(key, _said(None))}" for key in every]


def _layers(count: int, name: str) -> str:
    return name if count == 1 else f"{count} layers"
