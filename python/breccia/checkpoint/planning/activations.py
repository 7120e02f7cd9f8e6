# SPDX-License-Identifier: Apache-2.0
"""Scales of activations and of the KV cache that a quantized checkpoint has beside its weights: each goes where the
target's files say the same by it, in the target's own number, or it is left out with a note."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from breccia import bridges
from breccia.bridges.common import float32
from breccia.bridges.extra_state import ENDING
from breccia.bridges.parts import Found
from breccia.bridges.written import FP8_INPUTS, INT8_INPUTS, InputScale
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.remarks import Remark
from breccia.checkpoint.planning.shared_scales import fused
from breccia.checkpoint.planning.smoothing import Smoothing
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.account import OF_CACHE, OF_LAYERS
from breccia.checkpoint.reading.source import Checkpoint, is_float
from breccia.schemes.value import UNSAID, KVCache, Unsaid
from breccia.schemes.value import Activations as Of

_FP8 = KVCache("float8_e4m3fn")
# What a scale of each kind of cache is the largest magnitude divided by; NVFP4's blocks have scales of up to 448.
_NVFP4 = KVCache("float4_e2m1fn", "group", "local", 16)
_TOPS = {_FP8: 448.0, KVCache("int8"): 127.0, _NVFP4: 448.0}
_OF_QUERIES = re.compile(r".+\.(q_scale|q_zero_point)")
_KEYS_AND_VALUES = re.compile(r"(.+?)\.(?:([kv])_proj\.output_scale|(?:[kv]_proj\.)?(k|v|kv)_scale)")


class Activations:
    """What becomes of these tensors.

    Args:
        checkpoint: the source.
        found: its tensors.
        target: what is written.

    Attributes:
        names: of the tensors that are taken care of here; others are no scales of activations.
        inputs: modules with a scale of their inputs whose meaning is known.
        outputs: module → its static scale of outputs, which is kept, once `choices` knows.
        made_of_amax: whether a scale of inputs is made of a file of moments, once `choices` knows.
        cache: what the target says of the KV cache, of which scales are written where the source has such.
        smoothings: of inputs that are smoothed, by the module that reads them.
        notes: what is left out, and what is another number, once `choices` knows.
    """

    def __init__(self, checkpoint: Checkpoint, found: Sequence[Found], target: Target) -> None:
        self.checkpoint, self.target = checkpoint, target
        self.cache: KVCache | None = None
        self.made_of_amax, self.notes = False, list[str]()
        self.smoothings: Mapping[str, Smoothing] = {}
        self._spell: Callable[[str], str] = str
        self.outputs: dict[str, Choice] = {}
        weights = {one.name: one for one in found if one.format != "plain"}
        some = bool(weights or checkpoint.quantization)
        self._scales = {one.name: one for one in found if one.format == "plain"} if some else {}
        self._layers: dict[str, Found] = {}
        scheme = checkpoint.scheme_or_none if some else None
        self._cache_said, self._source = (UNSAID, "") if scheme is None else (scheme.kv_cache, scheme.source)
        for name in self._scales:
            of_cache = name.endswith("_proj.output_scale") and isinstance(self._cache_said, KVCache)
            if not of_cache and (match := OF_LAYERS.fullmatch(name)):
                weight = weights.get(f"{match[1]}.weight") or weights.get(match[1])
                if weight is not None:
                    self._layers[name] = weight if weight.recipe is not None else checkpoint.refined(weight)
        self._caches = [name for name in self._scales if OF_CACHE.fullmatch(name) and name not in self._layers]
        self._states, self._seen = [], dict[str, float]()  # of TransformerEngine, and multipliers of inputs in them
        if not target.float_dtype:
            self._states = [one.name for one in found if one.name.endswith(ENDING) and one.dtype == "U8"]
        if self._states:
            said = checkpoint.scheme_or_none
            scales = said.scales if said is not None else ()
            self._seen = {one.module: one.multiplier[0] for one in scales if one.name.endswith(ENDING)}
        self.names = frozenset((*self._layers, *self._caches, *self._states))
        self.inputs = frozenset(self._with_scales(found))
        self.has_cache = bool(self._caches) or isinstance(self._cache_said, KVCache)

    def _with_scales(self, found: Sequence[Found]) -> Iterable[str]:
        """Modules whose inputs may have a static scale: as the source has it, or as a scheme asks and moments tell."""
        for name, weight in self._layers.items():
            module = weight.name.removesuffix(".weight")
            if self._asked(module) != "other" and self._meaning(name):
                yield module
        asked = self.target.asked
        if self._seen or (asked is not None and (asked.amax is not None or asked.scheme.scales)):
            modules = (one.name.removesuffix(".weight") for one in found)
            yield from (one for one in modules if self._asked(one) == "static" and self._amax(one))

    def _asked(self, module: str) -> str:
        """See `Asked.when`. What TransformerEngine keeps of a layer is asked for where nothing else is."""
        said = "" if self.target.asked is None else self.target.asked.when(module)
        return said or ("static" if module in self._seen else "")

    def _amax(self, module: str) -> float | None:
        """The largest magnitude of a layer's inputs, of moments, else of a state of TransformerEngine."""
        amax = self._of_file(module)
        return FP8_INPUTS * self._seen[module] if amax is None and module in self._seen else amax

    def _of_file(self, module: str) -> float | None:
        asked = self.target.asked
        smoothing = self.smoothings.get(module)
        return None if asked is None else asked.amax_of(module, None if smoothing is None else smoothing.columns)

    def _meaning(self, name: str) -> InputScale | None:
        """What the source says by a scale of inputs; None where that is not known."""
        weight, (module, role) = self._layers[name], _layer_of(name)
        if weight.recipe is None or not is_float(self._scales[name]):
            return None
        if not self.target.bridge.readers.pre_scales and f"{module}.pre_quant_scale" in self.checkpoint.entries:
            return None  # of inputs that were multiplied first, which the weight will be instead
        said = bridges.bridge(weight.format).input_scale(weight.recipe, self.checkpoint.quantization)
        return said if said is not None and role in (said.role, *said.other_roles) else None

    def choices(self, weights: Iterable[Choice], spell: Callable[[str], str]) -> dict[str, list[Choice]]:
        """The tensors to write by the name of the weight that each goes with, of the KV cache by "": with the action
        "copy", "multiply", "divide" or "make". ``weights`` are what becomes of the weights; ``spell`` turns the model's
        own name of one into the target's. {} where neither source nor scheme says anything of activations."""
        if not self.names and not self.has_cache and self.target.asked is None:
            return {}
        weights, self._spell = list(weights), spell
        quantized = {choice.found.name: choice for choice in weights if choice.recipe is not None}
        same = {choice.found.name for choice in weights if choice.action == "same"}
        written: dict[str, list[Choice]] = {}
        lost: Counter[str] = Counter()
        rescaled = 0
        for name, weight in self._layers.items():
            if weight.name in same:
                written.setdefault(weight.name, []).append(self._as_it_is(name))
                continue
            role = _layer_of(name)[1]
            of_inputs = not role.startswith("output")
            if of_inputs and self._asked(weight.name.removesuffix(".weight")) == "other":
                continue  # the scheme says that there is none
            if kept := self._of_outputs(name, quantized.get(weight.name)):
                self.outputs[weight.name.removesuffix(".weight")] = kept
                continue
            choice = self._of_inputs(name, quantized.get(weight.name))
            if choice is None:
                lost[role] += 1
                continue
            written.setdefault(weight.name, []).append(choice)
            rescaled += choice.action != "copy" and choice.values != (1.0,)
        written |= self._of_moments(written, quantized)
        self._note_states(written)
        written |= self._equal_in_fused(written, weights)
        self.notes += [
            f"scales of the activations of {count} layers ({role}) are left out: there is no place for what they say "
            f"in {self.target.spelled}, so that programs do not quantize by them"
            for role, count in lost.items()
        ]
        if written and (said := self.target.bridge.readers.static_inputs):
            self.notes.append(Remark(f"static scales of the inputs of {len(written)} layers are written: {said}"))
        if rescaled:
            self.notes.append(
                f"scales of the inputs of {rescaled} layers are rescaled: {self.target.spelled} quantizes inputs to "
                "another format than the source did"
            )
        written[""] = [*self.outputs.values(), *self._of_cache(bool(quantized or same))]
        return written

    def _of_moments(
        self, written: Mapping[str, list[Choice]], quantized: Mapping[str, Choice]
    ) -> dict[str, list[Choice]]:
        """Static scales of inputs that a scheme asks for and the source has not."""
        made: dict[str, list[Choice]] = {}
        missing = []
        for name, weight in quantized.items():
            module = name.removesuffix(".weight")
            if self._asked(module) != "static" or name in written or weight.recipe is None:
                continue
            if module in self._seen and not self._explicit(module) and weight.recipe.name not in ("current", "delayed"):
                continue  # these inputs are FP8 of one scale, which other weights have none of
            new, amax = self.target.bridge.input_scale(weight.recipe, {}), self._amax(module)
            if amax is None:
                missing.append(module)
            elif new is not None and self.target.bridge.input_scales:
                stored = self._stored(name, new)
                number = new.amax / amax if new.divides else amax / new.amax
                found = Found(stored, "plain", "f32", weight.found.parts, new.shape, dtype="F32")
                values = (number,) * math.prod(new.shape)
                made[name] = [Choice(found, "make", {stored: ("F32", new.shape)}, values=values)]
                self.made_of_amax = self.made_of_amax or self._of_file(module) is not None
        if not self.target.bridge.input_scales:
            missing = []
        if missing and not made and not written:
            raise ValueError(
                f"static scales of inputs need their largest magnitudes, of the source or of moments that calibrate "
                f"wrote: {missing[0]} has none, nor have {len(missing) - 1} others"
            )
        if missing:
            self.notes.append(
                f"inputs of {len(missing)} layers, such as {missing[0]}, have no static scale: neither source nor "
                "moments have their largest magnitude"
            )
        return made

    def _note_states(self, written: Mapping[str, list[Choice]]) -> None:
        """What becomes of states of TransformerEngine, which no other program reads."""
        if not self._states:
            return
        kept = [module for module in self._seen if f"{module}.weight" in written]
        text = f"states of TransformerEngine ({len(self._states)}, such as {self._states[0]}) are left out"
        if kept:
            text += f"; {len(kept)} static scales of inputs in them are written in the form of {self.target.spelled}"
        self.notes.append(Remark(text) if len(kept) == len(self._seen) else text)

    def _equal_in_fused(self, written: Mapping[str, list[Choice]], weights: list[Choice]) -> dict[str, list[Choice]]:
        """The inputs' scales of layers that servers fuse, made one number. A server takes the largest of what is
        stored; of numbers that divide, that would be the one of the smallest inputs, which cuts off the others."""
        made: dict[str, list[Choice]] = {}
        for members in fused(weights) if written else ():
            parts = {weights[i].found.name: written.get(weights[i].found.name, []) for i in members}
            one_each = all(len(choices) == 1 for choices in parts.values())
            divide = all(self._divides(weights[i]) for i in members)
            if len(parts) < 2 or not one_each or not divide:
                continue
            choices = [choices[0] for choices in parts.values()]
            numbers = {self._number(choice) for choice in choices}
            if len(numbers) < 2 or not all(len(choice.found.shape) < 2 for choice in choices):
                continue
            for name, choice in zip(parts, choices, strict=True):
                ((role, stored),) = choice.outputs.items()
                found = Found(role, "plain", "f32", choice.found.parts, stored[1], dtype="F32")
                values = (float(min(numbers)),) * math.prod(stored[1])
                made[name] = [Choice(found, "make", {role: ("F32", stored[1])}, values=values)]
        if made:
            self.notes.append(
                f"scales of the inputs of {len(made)} layers that servers fuse are made one number for all parts of "
                "a layer, that of the largest inputs"
            )
        return made

    def _explicit(self, module: str) -> bool:
        """Whether a scheme says how the inputs of a layer are."""
        return self.target.asked is not None and bool(self.target.asked.when(module))

    def _divides(self, weight: Choice) -> bool:
        """Whether the target's scale of inputs divides."""
        said = None if weight.recipe is None else self.target.bridge.input_scale(weight.recipe, {})
        return said is not None and said.divides

    def _number(self, choice: Choice) -> float:
        """The number that is written."""
        if choice.action == "make":
            return choice.values[0]
        stored = float(float32(self.checkpoint.array(choice.found.parts["weight"])).reshape(-1)[0])
        if choice.action == "copy":
            return stored
        return stored * choice.values[0] if choice.action == "multiply" else choice.values[0] / stored

    def _of_outputs(self, name: str, weight: Choice | None) -> Choice | None:
        """A static scale of a layer's outputs, where source and target are of one format that keeps it."""
        found, bridge = self._scales[name], self.target.bridge
        same = weight is not None and weight.found.format == bridge.name and bridge.output_scales
        if not same or not name.endswith(".output_scale") or not _is_number(found):
            return None
        scheme = self.checkpoint.scheme_or_none
        rule = None if scheme is None else scheme.rule(name.rpartition(".")[0])
        one = None if rule is None else rule.outputs
        if not isinstance(one, Of) or (one.when, one.per, one.symmetric) != ("static", "tensor", True):
            return None
        return Choice(found, "copy", {name: (found.dtype, found.shape)})

    def _of_inputs(self, name: str, weight: Choice | None) -> Choice | None:
        """A scale of inputs as the target has it; None where it has no place for it."""
        old, bridge = self._meaning(name), self.target.bridge
        if weight is None or weight.recipe is None or old is None or not bridge.input_scales:
            return None
        new = bridge.input_scale(weight.recipe, {})
        if new is None:
            return None
        found, (module, role), stored = self._scales[name], _layer_of(name), self._stored(weight.found.name, new)
        if INT8_INPUTS in (new.amax, old.amax) and new.amax != old.amax and not self._asked(module):
            return None  # few values of integers, or none, where the source had those of floats
        if (new.amax, new.divides, new.role) == (old.amax, old.divides, role) and weight.found.format == bridge.name:
            return Choice(found, "copy", {stored: (found.dtype, found.shape)})
        shape = new.shape if math.prod(found.shape) == 1 else found.shape
        factor = new.amax / old.amax if new.divides else old.amax / new.amax
        action = "multiply" if new.divides == old.divides else "divide"
        if (action, factor, found.dtype, found.shape) == ("multiply", 1.0, "F32", shape):
            action = "copy"
        return Choice(found, action, {stored: ("F32", shape)}, values=(factor,))

    def _stored(self, weight: str, scale: InputScale) -> str:
        """The name of a scale in the target's files."""
        return self.target.bridge.role_name(self._spell(weight), scale.role)

    def _of_cache(self, quantized: bool) -> list[Choice]:
        """The scales of the KV cache as the target has them."""
        said, bridge = self._cache_said, self.target.bridge
        asked = UNSAID if self.target.asked is None else self.target.asked.scheme.kv_cache
        if quantized and asked is UNSAID and self._same_format():
            self.cache = said if isinstance(said, KVCache) else None
            return [self._as_it_is(name) for name in self._caches]
        if (not self.has_cache and asked is UNSAID) or asked is None:
            return []
        queries = [name for name in self._caches if _OF_QUERIES.fullmatch(name)]
        matches = {name: _KEYS_AND_VALUES.fullmatch(name) for name in self._caches if name not in queries}
        wanted = said if asked is UNSAID else asked
        has_place = quantized and bool(bridge.cache_scales) and wanted in bridge.caches
        fit = all(match and _is_number(self._scales[name]) for name, match in matches.items())
        fit = fit and (said == wanted or (said in _TOPS and wanted in _TOPS))
        if said == _NVFP4 and self._source != self.target.format:
            fit = False  # of whose scales several conventions are in use
        if has_place and asked is not UNSAID and not (fit and self._caches):
            self._without_scales(asked)
            return []
        self.cache = wanted if has_place and fit and isinstance(wanted, KVCache) else None
        if self.cache is None and self.has_cache:
            some = f" ({len(self._caches)}, such as {self._caches[0]})" if self._caches else ""
            self.notes.append(
                f"what the source says of its KV cache{some} is left out: there is no place for it in "
                f"{self.target.spelled}, so that programs do not quantize the cache by it"
            )
        if self.cache is None or not isinstance(said, KVCache):
            return []
        if queries:
            self.notes.append(
                f"scales of queries of {len(queries)} layers are left out: there is no place for them in "
                f"{self.target.spelled}, so that programs do not quantize attention by them"
            )
        factor = 1.0 if said == wanted else _TOPS[said] / _TOPS[self.cache]
        made = []
        for name, match in matches.items():
            assert match is not None
            for which in match[2] or match[3]:
                to, shape = bridge.cache_scales[which]
                as_it_is = to.format(match[1]) == name and self._scales[name].shape == shape and said == wanted
                if as_it_is and self.checkpoint.found.formats == {self.target.format}:
                    made.append(self._as_it_is(name))
                else:
                    outputs = {to.format(match[1]): ("F32", shape)}
                    made.append(Choice(self._scales[name], "multiply", outputs, values=(factor,)))
        return made

    def _without_scales(self, asked: KVCache | Unsaid) -> None:
        """A cache that is asked for and of which the source has no scales. Raises ValueError where it needs them."""
        assert isinstance(asked, KVCache)
        if asked.element.startswith("int") and asked.when == "static":
            raise ValueError(f"kv: a cache of {asked} needs scales of keys and values, of which the source has none")
        self.cache = asked
        kind = "FP8" if asked == _FP8 else str(asked)
        text = f"the KV cache is of {kind} without scales, of which the source has none: programs take 1"
        self.notes.append(Remark(text))

    def _same_format(self) -> bool:
        """Whether all that the source says of its attention stays in its own words."""
        if self.checkpoint.found.formats != {self.target.format}:
            return False
        scheme = self.checkpoint.scheme_or_none
        said = {} if scheme is None else json.loads(scheme.raw)
        other = self._cache_said != _FP8 and self._cache_said in self.target.bridge.caches
        return other or bool(said.get("config_groups") or said.get("kv_cache_scheme"))

    def _as_it_is(self, name: str) -> Choice:
        found = self._scales[name]
        return Choice(found, "copy", {name: (found.dtype, found.shape)})


def _layer_of(name: str) -> tuple[str, str]:
    """The module that a scale of activations is of, and its role."""
    match = OF_LAYERS.fullmatch(name)
    assert match is not None
    return match[1], match[2]


def _is_number(found: Found) -> bool:
    return is_float(found) and math.prod(found.shape) == 1
