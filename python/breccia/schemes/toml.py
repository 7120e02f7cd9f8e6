# SPDX-License-Identifier: Apache-2.0
"""Schemes as people write them: TOML with a table for each rule, in which the first that matches holds.

kv_cache = "fp8"

[[rule]]
match = "*.self_attn.*"
weights = "fp8-row"
inputs = "dynamic"
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeAlias, TypeVar

from breccia import recipe_names, recipes
from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import inputs_for
from breccia.schemes.matching import KINDS, Match
from breccia.schemes.rules import UNSAID, Activations, KVCache, Rule, StoredScale, Unsaid

_WHEN = ("dynamic", "static", "local")
_CACHES = {
    "fp8": KVCache("float8_e4m3fn"),
    "int8": KVCache("int8"),
    "nvfp4": KVCache("float4_e2m1fn", "group", "local", 16),
}
_WORDS = {"none": None, "unsaid": UNSAID}
_OPTIONS = ("mse", "asym", "e5m2", "16", "32", "64", "128", "256")
_WILD = frozenset("*?[")
Part = TypeVar("Part")


def match_of(text: str) -> Match:
    """A pattern as it is written: ``*`` is every layer, with ``*``, ``?`` or ``[`` it is one of a shell, ``re:`` begins
    an expression that matches the whole name, ``KIND:`` a pattern of that kind (see `Match`), and else it is a name.
    Raises TypeError where it is no text, ValueError where an expression is none."""
    if not isinstance(text, str):
        raise TypeError(f"match must be a pattern or a list of patterns, got {text!r}")
    kind, colon, rest = text.partition(":")
    if text in ("*", "all:"):
        return Match("all")
    if colon and (kind == "re" or kind in KINDS):
        return Match("regex" if kind == "re" else kind, rest)
    return Match("glob" if _WILD & set(text) else "name", text)


def _match_text(match: Match) -> str:
    if match.kind == "regex":
        return f"re:{match.pattern}"
    for text in ("*" if match.kind == "all" else match.pattern, f"{match.kind}:{match.pattern}"):
        if match_of(text) == match:
            return text
    raise AssertionError(match)


def weights_of(said: Any) -> ScalingRecipe | str | Unsaid | None:
    """Weights as they are written: the name of a recipe, "none" (high precision), "kept" (as they are), the name of a
    type that no recipe makes, such as "q4_k", or a table of a recipe's fields."""
    if isinstance(said, Mapping):
        if said.keys() == {"format"} and isinstance(said["format"], str):
            return said["format"]
        return recipes.known(recipes.from_dict(dict(said)))
    if not isinstance(said, str):
        raise ValueError(f"weights must be the name of a recipe, or a table, got {said!r}")
    if said in ("none", "kept"):
        return None if said == "none" else UNSAID
    base = said.strip().lower().partition(":")[0]
    if base in recipe_names.names() or ":" in said:
        return recipe_names.recipe_of(said, "weights")
    return said


@functools.lru_cache(256)
def _recipe_text(recipe: ScalingRecipe) -> str:
    """The name of a recipe with its options, or an inline table."""
    for count in range(3):
        for name, options in itertools.product(recipe_names.names(), itertools.combinations(_OPTIONS, count)):
            with contextlib.suppress(ValueError):
                if recipe_names.recipe_of(":".join((name, *options))) == recipe:
                    return _text(":".join((name, *options)))
    return _text({"name": recipe.name, **_changed(recipe)})


def _weights_text(weights: ScalingRecipe | str | Unsaid | None) -> str:
    if isinstance(weights, ScalingRecipe):
        return _recipe_text(weights)
    if isinstance(weights, str):
        try:
            plain = weights_of(weights) == weights
        except ValueError:
            plain = False
        return _text(weights if plain else {"format": weights})
    return _text("none" if weights is None else "kept")


def _activations_of(said: Any, weights: Any, what: str) -> Activations | Unsaid | None:
    if isinstance(said, Mapping):
        return _of_table(Activations, said, what)
    if isinstance(said, str) and said in _WORDS:
        return _WORDS[said]
    if said not in _WHEN:
        raise ValueError(f"{what} must be one of {', '.join(_WHEN)}, none, unsaid, or a table, got {said!r}")
    if not isinstance(weights, (ScalingRecipe, str)):
        raise ValueError(f"{what} must be none or a table where weights are not quantized by the rule, got {said!r}")
    return inputs_for(weights, str(said))


def _activations_text(said: Activations | Unsaid | None, weights: Any) -> str:
    if not isinstance(said, Activations):
        return _text("none" if said is None else "unsaid")
    for when in _WHEN:
        with contextlib.suppress(ValueError):
            if _activations_of(when, weights, "") == said:
                return _text(when)
    return _text(_changed(said))


def _of_table(kind: type[Part], said: Mapping[str, Any], argument: str) -> Part:
    """A dataclass of its fields."""
    try:
        return kind(**said)
    except TypeError as error:
        raise ValueError(f"{argument} must be a table with the fields of {kind.__name__}: {error}") from None


def _changed(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are by default."""
    every = ((one, getattr(value, one.name)) for one in fields(value))
    return {one.name: item for one, item in every if one.default is MISSING or item != one.default}


def cache_of(said: Any, argument: str = "kv_cache") -> KVCache | Unsaid | None:
    """The KV cache as it is written: "fp8", "int8", "none", "unsaid", or a table of its fields."""
    if isinstance(said, Mapping):
        return _of_table(KVCache, said, argument)
    if isinstance(said, str) and said in _WORDS:
        return _WORDS[said]
    if not isinstance(said, str) or said not in _CACHES:
        raise ValueError(f"{argument} must be one of {', '.join(_CACHES)}, none, unsaid, or a table, got {said!r}")
    return _CACHES[said]


def _cache_text(cache: KVCache | Unsaid | None) -> str:
    if not isinstance(cache, KVCache):
        return _text("none" if cache is None else "unsaid")
    return _text(next((name for name, one in _CACHES.items() if one == cache), _changed(cache)))


def rule_of(said: Mapping[str, Any], number: int = 1) -> Rule:
    """A rule of its table, with ``match``, ``weights`` (kept where they are not said) and perhaps ``inputs``,
    ``outputs``, ``input_factor``, ``low_rank``; ``number`` is its place, for messages. Raises TypeError or ValueError
    where it has another form; the message names the rule."""
    known = {one.name for one in fields(Rule)}
    if not isinstance(said, Mapping) or "match" not in said or said.keys() - known:
        text = f"with match and others of {', '.join(sorted(known))}, got {str(said)[:80]}"
        raise ValueError(f"rule {number} must be a table {text}")
    patterns = said["match"] if isinstance(said["match"], (list, tuple)) else [said["match"]]
    try:
        weights = weights_of(said.get("weights", "kept"))
        return Rule(
            tuple(match_of(one) for one in patterns),
            weights,
            _activations_of(said.get("inputs", "unsaid"), weights, "inputs"),
            _activations_of(said.get("outputs", "none"), weights, "outputs"),
            bool(said.get("input_factor", False)),
            said.get("low_rank"),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule {number} ({str(said['match'])[:60]}): {error}") from None


_Parts: TypeAlias = "tuple[tuple[Rule, ...], KVCache | Unsaid | None, tuple[StoredScale, ...]]"


def parts_of_toml(text: str) -> _Parts:
    """The rules, KV cache and scales of a scheme's text: see `ModelScheme.from_toml`."""
    said = _loads(text)
    if more := sorted(said.keys() - {"rule", "kv_cache", "scale"}):
        raise ValueError(f"a scheme must have kv_cache, [[rule]] and [[scale]] alone, got {more[0]!r}")
    tables = {key: said.get(key, []) for key in ("rule", "scale")}
    for key, value in tables.items():
        if not isinstance(value, list):
            raise ValueError(f"a scheme must have tables [[{key}]], got {str(value)[:80]}")
    try:
        scales = tuple(map(StoredScale.from_dict, tables["scale"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"[[scale]] must have the fields of StoredScale: {error}") from None
    rules = tuple(rule_of(one, number) for number, one in enumerate(tables["rule"], 1))
    return rules, cache_of(said.get("kv_cache", "unsaid")), scales


def _loads(text: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TypeError(f"text must be that of a scheme's file, got {type(text).__name__}")
    try:
        tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ImportError("a scheme in TOML needs Python 3.11 or newer, or: pip install tomli") from None
    try:
        said: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"a scheme must be TOML: {error}") from None
    return said


def toml_of(rules: Iterable[Rule], cache: KVCache | Unsaid | None, scales: Iterable[StoredScale]) -> str:
    """See `ModelScheme.to_toml`."""
    blocks = [] if cache is UNSAID else [f"kv_cache = {_cache_text(cache)}\n"]
    for rule in rules:
        patterns = [_match_text(one) for one in rule.match]
        lines = {"match": _text(patterns[0] if len(patterns) == 1 else patterns)}
        lines["weights"] = _weights_text(rule.weights)
        lines["inputs"] = _activations_text(rule.inputs, rule.weights) if rule.inputs is not UNSAID else ""
        lines["outputs"] = _activations_text(rule.outputs, rule.weights) if rule.outputs is not None else ""
        lines["input_factor"] = "true" if rule.input_factor else ""
        lines["low_rank"] = "" if rule.low_rank is None else str(rule.low_rank)
        blocks.append(_table("rule", lines))
    blocks += [table_of("scale", {one.name: getattr(s, one.name) for one in fields(s)}) for s in scales]
    return "\n".join(blocks)


def table_of(name: str, values: Mapping[str, Any]) -> str:
    """A table of an array, as files of schemes have it, of text, numbers, lists and tables, in TOML."""
    return _table(name, {key: _text(value) for key, value in values.items()})


def _table(name: str, lines: Mapping[str, str]) -> str:
    return f"[[{name}]]\n" + "".join(f"{key} = {text}\n" for key, text in lines.items() if text)


def _text(value: Any) -> str:
    """A value in TOML, which has no null."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else f"{value:+}"
        case Mapping():
            return "{ " + ", ".join(f"{key} = {_text(item)}" for key, item in value.items()) + " }"
        case list() | tuple():
            inside = ", ".join(map(_text, value))
            long = len(value) > 1 and len(inside) > 100
            return "[\n" + "".join(f"  {_text(one)},\n" for one in value) + "]" if long else f"[{inside}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
