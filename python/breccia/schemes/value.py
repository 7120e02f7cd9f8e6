# SPDX-License-Identifier: Apache-2.0
"""What a quantized model is stored and computed in, layer by layer, independent of any file format.

A `ModelScheme` is to a model what a ScaledTensor is to a tensor: ordered rules, of which the first that matches a
module's name says what its weight, inputs and outputs are; one entry for the KV cache; and every scale of activations
as a multiplier, beside the form it is stored in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from breccia import recipes
from breccia.recipes import ScalingRecipe
from breccia.schemes.matching import Match
from breccia.schemes.rules import UNSAID, Activations, KVCache, Rule, StoredScale, Unsaid
from breccia.schemes.toml import parts_of_toml, toml_of

__all__ = ["UNSAID", "Activations", "KVCache", "ModelScheme", "Rule", "StoredScale", "Unsaid"]

_VERSION = 1


@dataclass(frozen=True)
class ModelScheme:
    """What a quantized model is: see the module.

    Attributes:
        rules: the first that matches a module holds; a module that none matches is in high precision.
        kv_cache: None for high precision; `UNSAID` where the format leaves it to its reader.
        scales: static scales of activations and KV caches.
        source: the format that was read, "" where the scheme was made by hand. It does not count in comparisons.
        raw: what was read and has no place here, as JSON; for the same format alone. It does not count either.
    """

    rules: tuple[Rule, ...]
    kv_cache: KVCache | Unsaid | None = UNSAID
    scales: tuple[StoredScale, ...] = ()
    source: str = field(default="", compare=False)
    raw: str = field(default="{}", compare=False)

    def rule(self, name: str, kinds: Iterable[str] = ("Linear",)) -> Rule | None:
        """The rule of a module; None where none matches it, which is then in high precision.

        Args:
            name: of the module.
            kinds: names of its classes.

        Returns:
            The first rule that matches.
        """
        kinds = tuple(kinds)
        return next((rule for rule in self.rules if rule.matches(name, kinds)), None)

    def resolved(
        self, names: Iterable[str], kinds: Mapping[str, Iterable[str]] | None = None
    ) -> dict[str, Rule | None]:
        """The rule of each module.

        Args:
            names: of modules.
            kinds: classes of some; others are "Linear".

        Returns:
            Name → rule, in the order of the names.
        """
        known = kinds or {}
        return {name: self.rule(name, known.get(name, ("Linear",))) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON types.

        Returns:
            What `from_dict` takes.
        """
        return {
            "version": _VERSION,
            "rules": _to(self.rules),
            "kv_cache": _to(self.kv_cache),
            "scales": _to(self.scales),
            "source": self.source,
            "raw": json.loads(self.raw),
        }

    @staticmethod
    def from_dict(said: Mapping[str, Any]) -> ModelScheme:
        """The inverse of `to_dict`.

        Args:
            said: the object.

        Returns:
            The scheme.

        Raises:
            ValueError: it is not of that form.
        """
        if not isinstance(said, Mapping) or said.get("version") != _VERSION:
            raise ValueError(f"a scheme must be an object of version {_VERSION}, got {str(said)[:80]}")
        try:
            return ModelScheme(
                tuple(_rule_of(rule) for rule in said["rules"]),
                _of(KVCache, said["kv_cache"]),
                tuple(map(StoredScale.from_dict, said["scales"])),
                said["source"],
                json.dumps(said["raw"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a scheme must have the fields that to_dict writes: {error}") from None

    @staticmethod
    def from_toml(text: str) -> ModelScheme:
        """A scheme as people write it: docs/schemes.md has the form.

        Args:
            text: TOML; ``Path.read_text()`` of a file.

        Returns:
            The scheme.

        Raises:
            ValueError: it is not of that form; the message names the rule.
        """
        return ModelScheme(*parts_of_toml(text))

    def to_toml(self) -> str:
        """The inverse of `from_toml`: all that counts in comparisons.

        Returns:
            The text of a file.
        """
        return toml_of(self.rules, self.kv_cache, self.scales)

    def __repr__(self) -> str:
        lines = [f"  {', '.join(map(str, rule.match))}: {rule}" for rule in self.rules]
        kv = "unsaid" if self.kv_cache is UNSAID else str(self.kv_cache or "high precision")
        scales = f"  scales: {len(self.scales)}" if self.scales else ""
        return "\n".join(filter(None, ["ModelScheme(", *lines, f"  KV cache: {kv}", scales, ")"]))


def _to(value: Any) -> Any:
    """A part of a scheme as JSON types."""
    if isinstance(value, Unsaid):
        return "unsaid"
    if isinstance(value, ScalingRecipe):
        return value.to_dict()
    if isinstance(value, (Activations, KVCache, StoredScale, Match, Rule)):
        return {one.name: _to(getattr(value, one.name)) for one in fields(value)}
    return [_to(one) for one in value] if isinstance(value, tuple) else value


def _of(kind: type[Any], said: Any) -> Any:
    if said == "unsaid":
        return UNSAID
    return None if said is None else kind(**said)


def _weights_of(said: Any) -> ScalingRecipe | str | Unsaid | None:
    """Weights of JSON: "unsaid" is no format's name."""
    if isinstance(said, Mapping):
        return recipes.from_dict(said)
    return UNSAID if said == "unsaid" else said


def _rule_of(said: Mapping[str, Any]) -> Rule:
    weights = said["weights"]
    return Rule(
        tuple(Match(**one) for one in said["match"]),
        _weights_of(weights),
        _of(Activations, said["inputs"]),
        _of(Activations, said["outputs"]),
        said["input_factor"],
        said["low_rank"],
    )
