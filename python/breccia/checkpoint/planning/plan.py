# SPDX-License-Identifier: Apache-2.0
"""What a conversion will do, decided from headers alone, in one value that all others read."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import translate
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia.bridges.file_kinds import Container
from breccia.bridges.parts import STORED, Found
from breccia.checkpoint.planning import notes
from breccia.checkpoint.planning.activations import Activations
from breccia.checkpoint.planning.choices import LATER, QUANTIZED, Choice, as_bfloat16, choose, upright
from breccia.checkpoint.planning.left_alone import NUMBERS, left_alone
from breccia.checkpoint.planning.model_config import (
    Config,
    changed_meaning,
    check_is_read,
    config_of,
    made_anew,
    words_of,
)
from breccia.checkpoint.planning.notes import check_effects, check_names, without_effect
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.planning.rotations import KEYS, rotations_of
from breccia.checkpoint.planning.rounding import rounding_notes
from breccia.checkpoint.planning.shared_scales import share
from breccia.checkpoint.planning.smoothing import smoothings
from breccia.checkpoint.planning.targets import KEEP, NO_KIND, Target
from breccia.checkpoint.reading.account import STRAY, STRAYS, Account, check_all_is_read, fates, keys_of
from breccia.checkpoint.reading.experts import gathered
from breccia.checkpoint.reading.logical import AS_NUMBERS
from breccia.checkpoint.reading.naming import naming
from breccia.checkpoint.reading.source import Checkpoint, is_float

Files = list[tuple[str, list[Choice]]]  # output files and what goes into each


@dataclass(frozen=True)
class Plan:
    """What a conversion does.

    Attributes:
        checkpoint: the source.
        destination: where the output is to appear.
        into_directory: whether that is a directory.
        target: what is written, with what source and scheme say of it.
        choices: what becomes of each tensor, in the order of the output.
        files: the output's files and what goes into each, as the source's, where it has several.
        config: what is said beside the weights.
        words: what the source's headers say beside the form of its tensors, which the output's say, too.
        left_out: names of the source's tensors that are not written.
        notes: what is lost or changed, and remarks.
        account: what becomes of all that the source has.
    """

    checkpoint: Checkpoint
    destination: Path
    into_directory: bool
    target: Target
    choices: list[Choice]
    files: Files
    config: Config
    words: dict[str, str]
    left_out: list[str]
    notes: list[str]
    account: Account

    @property
    def nbytes(self) -> int:
        """Bytes of all that is written."""
        return sum(map(attrgetter("nbytes"), self.choices))

    def described(self) -> list[dict[str, Any]]:
        """What becomes of each tensor, of JSON types."""
        return [
            {
                "name": one.found.name,
                "shape": list(one.found.shape),
                "action": one.action,
                "from": one.found.kind if one.found.format == "plain" else f"{one.found.format} {one.found.kind}",
                "stored": {name: dtype for name, (dtype, _) in one.outputs.items()},
                "nbytes": one.nbytes,
            }
            for one in self.choices
        ]

    def sizes(self) -> dict[str, Any]:
        """How many weights there are, and the bits that each takes in the output, of all and of those that are codes;
        and of the weights that stay as they were beside quantized ones their number, bytes, and the largest."""
        weights = codes = bits = bits_of_codes = 0
        kept = []
        for choice in self.choices:
            count = math.prod(choice.found.shape)
            weights, bits = weights + count, bits + 8 * choice.nbytes
            if choice.action in QUANTIZED:
                codes, bits_of_codes = codes + count, bits_of_codes + 8 * choice.nbytes
            elif choice.action == "copy" and len(choice.found.shape) > 1 and is_float(choice.found):
                kept.append(choice)
        largest = max(kept, key=attrgetter("nbytes")) if kept else None
        name, nbytes = (None, 0) if largest is None else (largest.found.name, largest.nbytes)
        total = sum(map(attrgetter("nbytes"), kept))
        beside = {"tensors": len(kept), "bytes": total, "largest": name, "largest_bytes": nbytes}
        return {
            "weights": weights,
            "bits_per_weight": round(bits / weights, 3) if weights else None,
            "bits_per_quantized_weight": round(bits_of_codes / codes, 3) if codes else None,
            "kept": None if QUANTIZED.isdisjoint(map(attrgetter("action"), self.choices)) else beside,
        }


class Planner:
    """Decides what becomes of a checkpoint. A merge takes some of the steps in its own way."""

    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        self.checkpoint, self.target = checkpoint, target
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self.choices: list[Choice] = []
        self._kept: frozenset[str] = frozenset()
        self._of: Target | None = None  # for which `_known` has what becomes of tensors
        self._known: dict[Any, Choice] = {}

    def plan(self, destination: Path, folder: bool = False) -> Plan:
        """What is to be done; ``folder``: the destination's spelling says that it is a directory."""
        checkpoint, target = self.checkpoint, self.target
        container = target.bridge.container
        if folder and container.whole:
            raise ValueError(f"destination must be a file for {target.spelled}, got {destination}/")
        self.into_directory = (checkpoint.path.is_dir() or folder) and not container.whole
        if folder and checkpoint.container.whole:
            checkpoint.config = checkpoint.container.config_of(checkpoint.files[0])
        found = list(checkpoint.found)
        check_all_is_read(checkpoint, found)
        check_names(found, target)
        self._quantized = {one.name for one in found if one.format != "plain"}
        marks = [translate(mark) for name in checkpoint.found.formats for mark in bridges.bridge(name).marks]
        self._marks = re.compile("|".join(marks)) if marks else None
        self._folds = not target.bridge.readers.pre_scales
        said = checkpoint.quantization
        self._rotations = rotations_of(checkpoint) if any(map(said.get, KEYS)) else None
        self.activations = Activations(checkpoint, found, target)
        self.target = self._settled(target)
        to_convert = self._to_convert(found)
        if together := _together(to_convert):
            self.target = dataclasses.replace(self.target, together=together)
        if target.include or target.exclude:
            self._check_patterns(to_convert)
        self.choices = [self._choose(one, self.target) for one in to_convert]
        if self._quantized:
            self.choices = self._with_whole_heads(self.choices)
        self._add_activations()
        self.choices += made_anew(checkpoint, self.target)
        if not target.float_dtype:
            self.choices, apart = self._share()
            self.notes += apart
        config = config_of(checkpoint, self.target, self.choices)
        check_is_read(self.target, self.choices, config)
        notes.check_group_size(self.target, self.choices)
        words, lost_words = words_of(checkpoint, target)
        self.notes += [*self._what_to_know(found, config), *lost_words]
        if checkpoint.container is not container and not container.whole:
            lost = checkpoint.container.left_behind(checkpoint.files, destination, self.into_directory)
            self.notes += [Remark(lost)] if lost else []
        _check_outputs(self.choices, container if checkpoint.container is not container else None)
        account = self._account(config)
        return Plan(
            checkpoint,
            destination,
            self.into_directory,
            self.target,
            self.choices,
            self._files(destination),
            config,
            words,
            self.left_out,
            self.notes,
            account,
        )

    def _account(self, config: Config) -> Account:
        """What becomes of all that the source has; what nobody reads is noted."""
        checkpoint, said = self.checkpoint, self.checkpoint.quantization
        written = config.quantization if said else {}
        same = written.get("quant_method") == said.get("quant_method")
        keys = keys_of(said, written if same else {}) if said else {}
        account = Account(fates(self.choices, checkpoint.entries), keys)
        strays = [
            c.found.name
            for c in self.choices
            if c.found.format == "plain" and c.action in ("copy", "float") and STRAYS.fullmatch(c.found.name)
        ]
        strays = strays and [name for name in strays if name not in self.activations.names]
        self.notes += [f"{some(strays)}: {STRAY}"] if strays else []
        if unread := keys and [key for key, fate in keys.items() if fate == "unread"]:
            self.notes.append(f"what the source says by {', '.join(unread)} is left out: nobody here reads it")
        if "left out" in account.tensors.values():
            known = self._without | {name for one in self.choices for name in one.found.parts.values()}
            lost = [name for name, fate in account.tensors.items() if fate == "left out" and name not in known]
            lost = [name for name in lost if not self._dropped(name)]
            self.notes += [f"{some(lost)}: left out, for nobody reads it"] if lost else []
        return account

    def _what_to_know(self, found: list[Found], config: Config) -> list[str]:
        """Notes on what becomes of all tensors."""
        checkpoint, target, choices = self.checkpoint, self.target, self.choices
        return [
            *changed_meaning(checkpoint, target, choices, config),
            *self._note_nothing(),
            *(() if target.asked is None else notes.of_rules(target.asked, target, choices, found)),
            *notes.of_group_size(target, choices),
            *self._note_levels(),
            *(notes.of_class(target, choices) if target.alone.unknown else ()),
            *notes.of_experts(target, choices),
            *rounding_notes(target, choices),
            *without_effect(target, choices, self.activations, checkpoint),
        ]

    def _settled(self, target: Target) -> Target:
        """The target with what the source says."""
        checkpoint = self.checkpoint
        self._factors = {name for name in checkpoint.entries if name.endswith(".pre_quant_scale")}
        names, self.left_out, said = target.bridge.container.names(checkpoint, self.activations.names | self._factors)
        self.notes += said
        alone, inputs = bool(self._quantized), self.activations.inputs
        source = checkpoint.scheme_or_none if alone or inputs or self.activations.has_cache else None
        if self._rotations is not None and source is not None and source.source == target.format:
            self._kept, self._rotations = self._rotations.stored, None  # programs of the format apply them
        elif self._rotations is not None:
            inputs = inputs.difference(self._rotations.layers)
            if lost := sorted(self.activations.inputs - inputs):
                self.notes.append(f"{some(lost)}: the scale of rotated inputs is left out")
        container = checkpoint.container  # whose graph stays
        products = container.products(checkpoint.files) if container is target.bridge.container else {}
        rest = target.rest
        if rest == KEEP and (container.whole or not alone):  # whose floats have the dtype of the file, or of the model
            rest = ""
        target = dataclasses.replace(target, names=names, left_alone=alone, products=products, rest=rest)
        target = dataclasses.replace(target, model=checkpoint.config, alone=left_alone(checkpoint.config))
        return dataclasses.replace(target, inputs=inputs, source=source)

    def _add_activations(self) -> None:
        """What becomes of scales of activations, each behind its weight; the target is told which are written."""
        written = self.activations.choices(self.choices, self.target.spell)
        if not written:
            return
        cache = written.pop("", [])
        inputs = frozenset(name.removesuffix(".weight") for name in written)
        outputs = frozenset(self.activations.outputs)
        without = self.target.inputs - inputs
        self.target = dataclasses.replace(self.target, inputs=inputs, outputs=outputs, cache=self.activations.cache)
        if without:  # what was planned with a scale of inputs that is not written
            self.choices = [
                self._choose(c.found, self.target)
                if c.recipe is not None and c.found.name.removesuffix(".weight") in without
                else c
                for c in self.choices
            ]
        self.choices = [one for c in self.choices for one in (c, *written.get(c.found.name, ()))] + cache
        self.notes += self.activations.notes

    def _to_convert(self, found: list[Found]) -> list[Found]:
        """The tensors to convert, as they are converted."""
        says = self.checkpoint.container.said_by_config if self.into_directory else ()  # what config.json says, too
        self._without = {*self.left_out, *self.activations.names, *says}
        if self._rotations is not None:
            self._without |= self._rotations.stored
        found = self._refined([one for one in found if not self._dropped(one.name)])
        if self._rotations is not None:
            found = [self._rotations.undone(one) for one in found]
            self.notes.append(self._rotations.note())
        branches = self._quantized and any(n.endswith(".svdquant_lora_a") for n in self.checkpoint.entries)
        if (self._folds and self._factors) or branches:
            stays = [bool(self._as_stored(one, self.target.of(one))) for one in found]
            found = [f if s else self.checkpoint.folded(f, self._folds) for f, s in zip(found, stays, strict=True)]
            self._note_folded(found)
        if self.target.smooth:
            made, said = smoothings(self.checkpoint, found, self.target, lambda one: self._choose(one, self.target))
            self.notes += said
            for place in made:
                found = [place.folded(one) for one in found]
            self.activations.smoothings = {f"{one.at}{r}": one for one in made for r in one.place.readers}
        return gathered(found, self.target)

    def _refined(self, found: list[Found]) -> list[Found]:
        """The tensors with all that is known of them; what is found out to be odd is noted."""
        refined = [one if one.format == "plain" else self.checkpoint.refined(one) for one in found]
        odd: dict[str, list[str]] = {}
        for before, after in zip(found, refined, strict=True):
            for text in after.findings if after is not before else ():
                if text not in before.findings:
                    odd.setdefault(text, []).append(after.name)
        as_numbers = [one.name for one in refined if one.origin.numbers]
        odd |= {AS_NUMBERS: as_numbers} if as_numbers else {}
        for text, names in odd.items():
            self.notes.append(f"{some(names)}: {text}")
        return refined

    def _choose(self, found: Found, target: Target) -> Choice:
        """What becomes of a tensor: of one whose name differs by its numbers alone from that of another, the same."""
        if target is not self._of:
            self._remember_for(target)
        if not self._alike or found.format != "plain" or found.origin is not STORED or found.findings:
            return self._chosen(found, target)
        alike = NUMBERS.sub(".0.", found.name), found.dtype, found.shape, target.alone.past(found.name)
        known = self._known.get(alike)
        if known is not None:
            return known.of(found)
        choice = self._chosen(found, target)
        if choice.form.inside and not choice.note:
            self._known[alike] = choice
        return choice

    def _with_whole_heads(self, choices: list[Choice]) -> list[Choice]:
        """Heads for later tokens in codes or in floats, each layer that the source has in codes: programs load them in
        one form. Patterns and rules may ask for another."""
        target = self.target
        if target.include or target.exclude or target.asked is not None:
            return choices
        heads = {id(c): c for c in choices if c.found.format != "plain" and target.alone.later(c.found.name)}
        if QUANTIZED.issuperset(c.action for c in heads.values()):
            return choices
        return [as_bfloat16(c.found, target, LATER) if id(c) in heads and c.action in QUANTIZED else c for c in choices]

    def _remember_for(self, target: Target) -> None:
        """Look whether what becomes of tensors depends on numbers in their names, beside that of a layer."""
        said = target.include, target.exclude, target.asked, target.names, target.products, target.inputs
        self._of, self._known = target, {}
        self._alike = not (any(said) or target.source or self._kept or self._rotations)

    def _chosen(self, found: Found, target: Target) -> Choice:
        with naming(self.checkpoint.path, found.name):
            target = target.of(found)
            if found.name in self._kept:  # a matrix, of no layer
                return choose(found, dataclasses.replace(target, kind=NO_KIND))
            choice = self._as_stored(found, target) or choose(upright(found, target), target)
            made = choice.action == "copy" and found.origin.rotations  # of other numbers than the source's
            return choice.but(action="float") if made else choice

    def _check_patterns(self, found: list[Found]) -> None:
        check_effects(found, self.target, self._choose)

    def _as_stored(self, found: Found, target: Target) -> Choice | None:
        """A tensor whose own form no recipe says, where none is asked for and the format stays."""
        others = target.recipe is not None or target.kind or target.float_dtype
        if others or found.format != target.format or not target.bridge.keeps(found):
            return None
        names = dict.fromkeys(found.parts.values())
        entries = (self.checkpoint.entries[name] for name in names)
        return Choice(found, "same", {entry.name: (entry.dtype, entry.shape) for entry in entries})

    def _note_folded(self, found: list[Found]) -> None:
        folded = [one for one in found if one.origin.factor]
        if folded:
            text = f"scales of the inputs of {len(folded)} layers (pre_quant_scale) are multiplied into their weights"
            self.notes.append(Remark(text))
        if branches := [one for one in found if one.origin.low_rank]:
            names = "svdquant_lora_a, svdquant_lora_b"
            self.notes.append(Remark(f"low-rank branches ({names}) beside {len(branches)} weights are added to them"))

    def _share(self) -> tuple[list[Choice], list[str]]:
        return share(self.choices, self.target, self.checkpoint)

    def _note_nothing(self) -> list[str]:
        return notes.of_nothing(self.target, self.choices)

    def _note_levels(self) -> list[str]:
        return notes.of_levels(self.target, self.choices)

    def _dropped(self, name: str) -> bool:
        """Whether a tensor is not converted, or with its weight; scales of activations are `Activations`'s."""
        if name in self._without or (self._marks and self._marks.fullmatch(name)):
            return True
        weight = name.rpartition(".")[0] + ".weight"
        if name.endswith(".pre_quant_scale") and self._folds:
            if weight not in self._quantized:
                raise ValueError(
                    f"tensor {name!r} must be absent, or --to modelopt: it scales the input of its layer, "
                    f"for which no other format has a place"
                )
            return True
        return False

    def _files(self, destination: Path) -> Files:
        if not self.checkpoint.path.is_dir() or self.target.bridge.container.whole:
            return [("model.safetensors" if self.into_directory else destination.name, self.choices)]
        home: dict[int, list[Choice]] = {id(file): [] for file in self.checkpoint.files}
        for choice in self.choices:
            main = next(iter(choice.found.parts.values()))
            home[id(self.checkpoint.home[main])].append(choice)
        return [(file.path.name, home[id(file)]) for file in self.checkpoint.files if home[id(file)]]


def _check_outputs(choices: list[Choice], other: Container | None) -> None:
    """Each name once, and of types that a container has which is not the source's."""
    if other is not None and other.types_alone:
        specs = ((name, dtype) for choice in choices for name, (dtype, _) in choice.outputs.items())
        for name, dtype in specs:
            if dtype not in other.types:
                raise ValueError(f"tensor {name!r} must be of a type that {other.title} has, it is {dtype}")
    names = list(chain.from_iterable(map(attrgetter("outputs"), choices)))
    if len(set(names)) < len(names):
        name, _ = Counter(names).most_common(1)[0]
        twice = [choice.found.name for choice in choices if name in choice.outputs]
        raise ValueError(f"tensor {name!r} must be written once: {twice[-1]!r} gives it too")


def _together(found: list[Found]) -> dict[str, str]:
    """The first of the modules that become one, by the name of this one."""
    return {
        one.name.removesuffix(".weight"): members[0].name.removesuffix(".weight")
        for one in found
        if (members := one.origin.members)
    }
