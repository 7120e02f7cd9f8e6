# SPDX-License-Identifier: Apache-2.0
"""What a scheme asks of a conversion: recipes of weights by rules, how inputs are quantized, and the KV cache."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges
from breccia.bridges.contract import FileFormat
from breccia.bridges.written import FP8_INPUTS, INT8_INPUTS, NVFP4_INPUTS, same_grid
from breccia.checkpoint.arguments import existing
from breccia.checkpoint.files.input_file import DataFile
from breccia.checkpoint.reading.models import is_embedding, is_head
from breccia.checkpoint.reading.source import Checkpoint
from breccia.moments import load_moments
from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import WORDS, inputs_for
from breccia.schemes.matching import Match
from breccia.schemes.toml import cache_of, rule_of
from breccia.schemes.value import UNSAID, Activations, ModelScheme, Rule, Unsaid

_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
# Parameters of transformers 5 that have the matrices of all experts, by the names of single ones.
_IN_ONE = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj") | dict.fromkeys(
    ("down_proj", "w2"), "down_proj"
)
_LARGEST = {"float8_e4m3fn": FP8_INPUTS, "int8": INT8_INPUTS, "float4_e2m1fn": NVFP4_INPUTS}
# Fields of a recipe that say how a format stores scales, which a scheme leaves to the format.
_FORMS = ("global_scale_form", "scale_dtype", "scale_format")


class Amax(DataFile):
    """The largest magnitudes of layers' inputs, of a file that `breccia.moments.save_moments` wrote."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "amax")
        with load_moments(self.path) as file:
            every = {name: np.array(one.amax) for name, one in file.items() if one.amax is not None}
            self._columns = {name: np.array(one.column_amax) for name, one in file.items()}
        self._amax = {name: float(np.max(amax, initial=0)) for name, amax in every.items()}
        self._stacks = {name: amax for name, amax in every.items() if amax.ndim == 1}
        self._experts: dict[tuple[str, str], float] = {}
        for name, amax in self._amax.items():
            if match := _EXPERT.fullmatch(name):
                key = match[1], match[3]
                self._experts[key] = max(amax, self._experts.get(key, 0.0))

    def of(self, module: str, factor: Any = None) -> float | None:
        """The largest magnitude of a layer's inputs, of the layer or of the parameter that all experts share; that of
        all experts for one that the text never chose. A number above 0; None where the file has none. With a factor for
        each column that of inputs times it: ValueError where the file has no magnitudes of columns."""
        if factor is not None:
            columns = self._columns.get(module)
            if columns is None or columns.shape != factor.shape:
                raise ValueError(f"amax must have magnitudes of the columns of {module} for smooth: calibrate it again")
            return float(np.max(columns * factor)) or None
        amax = self._amax.get(module, 0.0)
        if amax == 0 and (match := _EXPERT.fullmatch(module)):
            amax = self._experts.get((match[1], match[3]), 0.0) or self._of_stack(match)
        return amax if 0 < amax < float("inf") else None

    def _of_stack(self, match: re.Match[str]) -> float:
        name = match[1] + _IN_ONE.get(match[3].removeprefix("."), "")
        stack, number = self._stacks.get(name), int(match[2])
        if stack is None:
            return 0.0
        return float(stack[number]) if number < stack.size and stack[number] > 0 else self._amax[name]


@dataclass(frozen=True, repr=False)
class Asked:
    """What is asked.

    Attributes:
        scheme: its rules, of which the first that matches a layer holds, and KV cache.
        activations: "dynamic", "static", "local" or "none" for layers whose rule says nothing of inputs; "" leaves
            them as a conversion makes them.
        amax: of inputs, for static scales that the source has not.
        embeddings: the rule of tables of vectors, before all others; None where nothing is asked of them.
        head: that of output layers.
    """

    scheme: ModelScheme
    activations: str = ""
    amax: Amax | None = None
    embeddings: Rule | None = None
    head: Rule | None = None

    def __repr__(self) -> str:
        """All that an output depends on."""
        tables = f"{self.embeddings!r}, {self.head!r}"
        return f"Asked({self.scheme.to_toml()!r}, {self.activations!r}, {self.amax!r}, {tables})"

    def rule(self, name: str) -> Rule | None:
        """The rule for a weight, named with or without ".weight"; None where no rule matches it."""
        return self._table(name) or self.scheme.rule(name.removesuffix(".weight"))

    def _table(self, name: str) -> Rule | None:
        """The rule for an embedding or a head."""
        weight = f"{name.removesuffix('.weight')}.weight"
        return self.embeddings if is_embedding(weight) else self.head if is_head(weight) else None

    def names(self, name: str) -> bool:
        """Whether its rule means a weight by itself, and not among others: by its name, or by its last part."""
        module, rule = name.removesuffix(".weight"), self.rule(name)
        last = module.rpartition(".")[2]
        if rule is None or self._table(name) is not None or module in rule.names:
            return rule is not None
        return any(match.matches(module, ("Linear",)) and _last(match) == last for match in rule.patterns)

    def inputs(self, module: str, recipe: ScalingRecipe | str, strict: bool = True) -> Activations | Unsaid | None:
        """How the inputs of a layer whose weight is written in a recipe are to be quantized; `UNSAID` where nothing is
        asked, and where it cannot be unless ``strict``."""
        rule = self.rule(module)
        if rule is not None and rule.inputs is not UNSAID:
            return rule.inputs
        if not self.activations:
            return UNSAID
        if self.activations == "none":
            return None
        try:
            return inputs_for(recipe, self.activations)
        except ValueError as error:
            if strict:
                raise ValueError(f"{module}: {error}") from None
            return UNSAID

    def amax_of(self, module: str, factor: Any = None) -> float | None:
        """The largest magnitude of a layer's inputs: as `Amax.of` has it, else by the scheme's own scale."""
        found = None if self.amax is None else self.amax.of(module, factor)
        rule = self.rule(module)
        said = None if rule is None or factor is not None else rule.inputs
        most = _LARGEST.get(said.element) if isinstance(said, Activations) else None
        scale = self._scales.get(module)
        return found if found is not None or most is None or scale is None else most * scale

    @functools.cached_property
    def _scales(self) -> dict[str, float]:
        """Scales of inputs of one number, by layers."""
        return {one.module: max(one.multiplier) for one in self.scheme.scales if one.of == "input"}

    def when(self, module: str) -> str:
        """Whether static scales of a layer's inputs are asked for: "static", "other", or "" for nothing asked."""
        rule = self.rule(module)
        inputs = UNSAID if rule is None else rule.inputs
        word = inputs.when if isinstance(inputs, Activations) else "none" if inputs is None else self.activations
        return word and ("static" if word in ("static", "local") else "other")

    def not_written(self) -> list[str]:
        """Notes on what a scheme says that no format is written with."""
        said = {
            "outputs": any(rule.outputs not in (None, UNSAID) for rule in self.scheme.rules),
            "input_factor": any(rule.input_factor for rule in self.scheme.rules),
            "low_rank": any(rule.low_rank for rule in self.scheme.rules),
        }
        notes = [f"{name} of the scheme's rules: not written" for name, there in said.items() if there]
        if any(one.of != "input" for one in self.scheme.scales):
            notes.append("scales of the scheme: not written but for those of inputs")
        return notes

    def unmatched(self, names: Iterable[str]) -> list[Match]:
        """Patterns that match none of some weights."""
        modules = {name.removesuffix(".weight") for name in names}
        every = (match for rule in self.scheme.rules for match in rule.match)
        return [one for one in every if not _matches_any(one, modules)]


def _matches_any(match: Match, modules: set[str]) -> bool:
    if match.kind == "name":
        return match.pattern in modules
    return any(match.matches(module, ("Linear",)) for module in modules)


def _last(match: Match) -> str | None:
    """The last part of the names that a pattern matches, where it says that."""
    if match.kind not in ("name", "glob"):
        return None
    last = match.pattern.rpartition(".")[2].removeprefix("*")  # "*lm_head"
    return None if set("*?[") & set(last) else last


def fitted(recipe: ScalingRecipe, bridge: FileFormat) -> ScalingRecipe:
    """A recipe of a scheme as a format stores it: fields that say how scales are stored are those of the format's own
    recipes where it left them as they are."""
    alike = [one for one in bridge.recipes.values() if type(one) is type(recipe)]
    own = next((one for one in alike if same_grid(one, recipe)), alike[0] if alike else recipe)
    default = type(recipe)()
    forms: dict[str, Any] = {}
    for name in _FORMS:
        one = next((one for one in (own, *bridge.recipes.values()) if hasattr(one, name)), own)
        if hasattr(recipe, name) and getattr(recipe, name) == getattr(default, name):
            forms[name] = getattr(one if alike else recipe, name)
    return dataclasses.replace(recipe, **forms)


def asked_of(
    scheme: ModelScheme | str | os.PathLike[str] | None,
    rules: Sequence[str | Rule],
    kv: str | None,
    activations: str | None,
    amax: str | os.PathLike[str] | None,
    embeddings: str | None = None,
    head: str | None = None,
) -> Asked | None:
    """What arguments of `breccia.checkpoint.convert` ask; None where they ask nothing. ``rules`` come before those of
    the scheme. Raises TypeError or ValueError where an argument is not of its form; the message names it."""
    if (scheme, kv, activations, embeddings, head) == (None,) * 5 and not rules:
        if amax is not None:
            raise ValueError("amax must be left out where no static scales of inputs are asked for")
        return None
    if activations is not None and activations not in WORDS:
        raise ValueError(f"activations must be one of {', '.join(WORDS)}, got {activations!r}")
    if isinstance(rules, str):
        raise TypeError(f"rules must be a list, as ['*.mlp.*=nvfp4'], got {rules!r}")
    base = ModelScheme(()) if scheme is None else _scheme(scheme)
    first = tuple(one if isinstance(one, Rule) else _of_line(one) for one in rules)
    cache = base.kv_cache if kv is None else cache_of(kv, "kv")
    made = dataclasses.replace(base, rules=(*first, *base.rules), kv_cache=cache)
    if amax is not None and not made.rules and activations not in ("static", "local"):
        raise ValueError("amax must be left out where no static scales of inputs are asked for")
    tables = _rule_of_table(embeddings, "embeddings"), _rule_of_table(head, "head")
    return Asked(made, activations or "", None if amax is None else Amax(amax), *tables)


def _rule_of_table(word: str | None, argument: str) -> Rule | None:
    """What is asked of embeddings or heads, whose inputs stay."""
    if word is None:
        return None
    if not isinstance(word, str) or not word:
        raise TypeError(f"{argument} must be 'keep' or the name of a recipe or type, such as 'int8', got {word!r}")
    return Rule((Match("name", f"({argument})"),), None if word.lower() == "keep" else word, None)


def _scheme(given: ModelScheme | str | os.PathLike[str]) -> ModelScheme:
    if isinstance(given, ModelScheme):
        return given
    path = existing(given, "scheme")
    if path.is_dir() or path.suffix in (".safetensors", ".gguf", ".onnx"):
        return _as(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("a scheme's file must have rules or a KV cache, it is empty")
        return ModelScheme.from_toml(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _as(path: Path) -> ModelScheme:
    """The layers that a checkpoint has quantized, by their names, and its KV cache."""
    rules: dict[Any, list[Match]] = {}
    with Checkpoint(path) as opened:
        scheme = opened.scheme
        for found in map(opened.refined, (one for one in opened.found if one.format != "plain")):
            module = found.name.removesuffix(".weight")
            said, kind = scheme.rule(module), found.kind.lower()
            if found.recipe is None and kind not in bridges.bridge(found.format).kinds:
                why = f"in {path} {module} is {kind}, which no recipe makes: rules (--set) can name one"
                raise ValueError(f"scheme must be a checkpoint of forms that can be written, {why}")
            form = found.recipe or kind, UNSAID if said is None else said.inputs
            rules.setdefault(form, []).append(Match("name", module))
    if not rules:
        raise ValueError(f"scheme must be a quantized checkpoint, or a file of rules, {path} has no quantized layers")
    made = (Rule(tuple(names), weights, inputs) for (weights, inputs), names in rules.items())
    return ModelScheme(tuple(made), scheme.kv_cache, scheme.scales)


def _of_line(text: Any) -> Rule:
    """A rule of the command line: ``PATTERN=RECIPE[,inputs=WORD]``."""
    if not isinstance(text, str) or "=" not in text:
        raise ValueError(f"a rule must be PATTERN=RECIPE, perhaps with ,inputs=dynamic, got {text!r}")
    pattern, _, rest = text.partition("=")
    weights, *options = rest.split(",")
    said: dict[str, Any] = {"match": pattern.strip(), "weights": weights.strip()}
    for option in options:
        key, equals, value = option.partition("=")
        if key.strip() != "inputs" or not equals:
            raise ValueError(f"what follows the recipe of a rule must be inputs=…, got {option!r} in {text!r}")
        said["inputs"] = value.strip()
    try:
        return rule_of(said)
    except ValueError as error:
        raise ValueError(f"rule {text!r}: {str(error).partition('): ')[2] or error}") from None
