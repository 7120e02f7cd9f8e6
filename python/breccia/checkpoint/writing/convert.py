# SPDX-License-Identifier: Apache-2.0
"""Converting a whole checkpoint: planned from headers, one tensor at a time, there when complete.

All work is done in ``.NAME.partial`` beside the output (`Work`), with a journal of what is on disk: a killed
conversion goes on where it was when the same command runs again. An error removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia.bridges.file_kinds import Output
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.sums import Sums
from breccia.checkpoint.planning.activations import Activations
from breccia.checkpoint.planning.asked import Asked, asked_of
from breccia.checkpoint.planning.effects import without_effect
from breccia.checkpoint.planning.identity import beside, identity_of
from breccia.checkpoint.planning.name_patterns import check_effects, check_names
from breccia.checkpoint.planning.remarks import Remark
from breccia.checkpoint.planning.shared_scales import share, unlike
from breccia.checkpoint.planning.targets import (
    AUTO,
    LEFT,
    QUANTIZED,
    Choice,
    Target,
    choose,
    has_one_level,
    largest_group,
    parse_target,
)
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.experts import gathered
from breccia.checkpoint.reading.folder import absent
from breccia.checkpoint.reading.logical import AS_NUMBERS
from breccia.checkpoint.reading.models import is_one_expert
from breccia.checkpoint.reading.naming import naming
from breccia.checkpoint.reading.source import Checkpoint, is_float
from breccia.checkpoint.reading.unread import check_all_is_read
from breccia.checkpoint.workers import Workers, thread_count
from breccia.checkpoint.writing import outputs
from breccia.checkpoint.writing.execute import execute
from breccia.checkpoint.writing.losses import Loss, errors, lost
from breccia.checkpoint.writing.rounding import Rounding, rounding_notes
from breccia.checkpoint.writing.work import Done, Work, check_replaceable, partial_of
from breccia.schemes.value import ModelScheme, Rule

__all__ = ["Job", "check_destination", "convert", "nbytes_of_choice", "some", "target_of"]

_SYNC_EVERY = 256 << 20  # bytes between two entries of the journal


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    scale_search: str | None = None,
    group_size: int | str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    scheme: ModelScheme | str | os.PathLike[str] | None = None,
    rules: Sequence[str | Rule] = (),
    kv: str | None = None,
    activations: str | None = None,
    amax: str | os.PathLike[str] | None = None,
    moments: str | os.PathLike[str] | None = None,
    method: str = "nearest",
    order: str | None = None,
    damp: float | None = None,
    progress: bool = False,
    threads: int | None = None,
    force: bool = False,
    strict: bool = False,
    checksums: bool = True,
    unmarked: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Convert a checkpoint. Peak memory is below twice the largest tensor plus 256 MiB.

    Args:
        source: a safetensors file, a directory of them (with index and config.json), or a GGUF file.
        destination: a file, or a directory where the source is one or the destination ends in ``/``; must not be
            there without ``force``. A directory made of a GGUF file gets the config.json and the tokenizer's files that
            transformers makes of it.
        to: a float dtype, recipe, or format, perhaps with a recipe; see `target_names`.
        include: patterns of names to quantize, instead of all weights but embeddings, norms and routers.
        exclude: patterns of names to leave alone.
        scale_search: "mse" searches block scales for the least error.
        group_size: of INT4; "auto" is, for each tensor, the largest of 128, 64 and 32 that divides its columns.
        imatrix: a file of what errors of each column count: llama.cpp's importance matrix (GGUF or .dat), or moments.
        scheme: a `breccia.ModelScheme`, or a TOML file of one: what layers become, by rules. A layer that no rule
            matches becomes what ``to`` names, and without a recipe there stays as the source has it. Embeddings, norms,
            routers and output layers stay as they are where a rule does not name them.
        rules: rules that come first, each ``"PATTERN=RECIPE"`` or ``"PATTERN=RECIPE,inputs=dynamic"``, or a `Rule`.
        kv: the KV cache: "fp8", "none", or what else a scheme's file may say.
        activations: inputs of layers of which no rule says it: "dynamic", "static", "local" or "none".
        amax: a file of moments that `breccia.calibrate` wrote, whose amax gives the static scales of inputs that the
            source has not.
        moments: a file that `breccia.calibrate` wrote: its diagonals are such an importance.
        method: "nearest", or "gptq", which rounds by ``moments`` what has some; see `breccia.gptq`. One layer's weight
            is then in memory a few times in float32, and its moments of K columns little more than once.
        order: of "gptq": "act" (the default), columns by falling diagonal of the moments, or "natural".
        damp: of "gptq": what is added to the diagonal, in its mean; 0.02 by default.
        progress: draw a line on a terminal.
        threads: how many to use (default: one per core).
        force: replace a file or a checkpoint's directory at ``destination``, when the new one is complete and not
            before; never the source.
        strict: refuse what would be a note in the report, but for remarks on what is not lost.
        checksums: keep checksums of what is written, by which an interrupted conversion sees whether it is still there.
        unmarked: "comfyui" or "modelopt": whose order the block scales of a file have that does not say it.
        dry_run: plan alone; nothing is written, and the destination may be there. The report has ``plan``, what becomes
            of each tensor, and no figures of what is lost.

    Returns:
        What was done, of JSON types. "output_errors" has of each tensor that GPTQ rounded its "output_error", that of
        rounding to "nearest" without data, "level" of the moments and "damp"; see `breccia.checkpoint.verify`.

    Raises:
        ValueError: the source is not valid, the target unknown, an option does not go with others, the destination
            inside of the source or the source itself, a pattern matches no tensor, there is a note where it is
            ``strict``, or another program changes the source, or what is made, meanwhile.
        FileExistsError: the destination is there, and ``force`` is not given.
        BlockingIOError: another conversion to the destination is at work.
        ImportError: a GGUF file is to become a directory, and transformers is not installed.
        OSError: the disk is full or the like; nothing is left behind.
    """
    asked = asked_of(scheme, rules, kv, activations, amax)
    target = target_of(to, include, exclude, scale_search, group_size, asked)
    rounding = Rounding(imatrix, moments, method, order, damp)
    place = path_of(destination, "destination")
    source = path_of(source, "source")
    folder = names_folder(destination)
    if not dry_run:
        check_destination(place, source, force=force)
    checkpoint = Checkpoint(source, mapped=False, unmarked=unmarked)
    try:
        target = rounding.on(target, checkpoint)
        force, progress = force and not dry_run, progress and not dry_run
        job = Job(checkpoint, place, target, progress, threads, force, folder, strict, checksums)
        return job.plan() if dry_run else job.run()
    finally:
        if target.importance is not None:
            target.importance.close()
        checkpoint.close()


def target_of(
    to: str,
    include: Sequence[str],
    exclude: Sequence[str],
    scale_search: str | None,
    group_size: int | str | None,
    asked: Asked | None,
) -> Target:
    """A target with what a scheme asks.

    Args:
        to: as `convert` has it, like those that follow.
        include: patterns of names to quantize.
        exclude: patterns of names to leave alone.
        scale_search: how scales are chosen.
        group_size: of INT4.
        asked: by a scheme or its like; None: nothing.

    Raises:
        TypeError, ValueError: the target is unknown, or no format of quantized layers.
    """
    target = parse_target(
        to,
        scale_search=scale_search,
        group_size=group_size,
        include=include,
        exclude=exclude,
        by_rules=asked is not None and bool(asked.scheme.rules),
    )
    if asked is not None and target.float_dtype:
        said = "scheme, rules (--set), kv and activations"
        raise ValueError(f"{said} must be left out with --to {target.spelled}, which has no quantized layers")
    return dataclasses.replace(target, asked=asked)


def names_folder(destination: str | os.PathLike[str]) -> bool:
    """Whether a destination is a directory by its spelling, whatever the source is."""
    return os.fspath(destination).endswith(("/", os.sep))


def check_destination(destination: Path, *sources: str | os.PathLike[str], force: bool | None = None) -> None:
    """Whether something may be written there.

    Args:
        destination: where.
        sources: what is read meanwhile.
        force: whether what is there gives way; None where that cannot be asked for.

    Raises:
        ValueError: it is inside of a source, or would replace one.
        FileExistsError: it is there.
        FileNotFoundError: it is there, and a source is not.
    """
    place = destination.resolve()
    for source in map(Path, sources):
        if source.is_dir() and source.resolve() in place.parents:
            raise ValueError(f"destination must not be inside of the source {source}, got {destination}")
        if not source.exists():
            continue
        same = place.exists() and place.samefile(source)
        if same or place in source.resolve().parents:
            raise ValueError(f"destination must not replace the source {source}, got {destination}")
    if not force and os.path.lexists(destination) and not os.path.lexists(partial_of(destination)):
        if missing := [source for source in map(Path, sources) if not source.exists()]:
            raise absent(missing[0])  # which is the first thing to know
        hint = "" if force is None else ": --force replaces it"
        raise FileExistsError(f"destination must not be there, {destination} is{hint}")


class Job:
    """One conversion: what becomes of each tensor, and the work."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        destination: Path,
        target: Target,
        show: bool,
        threads: int | None,
        force: bool = False,
        folder: bool = False,
        strict: bool = False,
        checksums: bool = True,
    ) -> None:
        self.strict, self.checksums = strict, checksums
        self.checkpoint, self.destination, self.force = checkpoint, destination, force
        if folder and target.bridge.container.whole:
            raise ValueError(f"destination must be a file for {target.spelled}, got {destination}/")
        self.into_directory = (checkpoint.path.is_dir() or folder) and not target.bridge.container.whole
        self.from_whole = checkpoint.container.whole
        if folder and self.from_whole:
            checkpoint.config = checkpoint.container.config_of(checkpoint.files[0])
        found = list(checkpoint.found)
        check_all_is_read(checkpoint, found)
        check_names(found, target)
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self.losses: dict[str, Loss] = {}
        self.not_finite: dict[str, int] = {}
        self.rounded: dict[str, dict[str, Any]] = {}
        self._quantized = {one.name for one in found if one.format != "plain"}
        formats = {one.format for one in found} - {"plain"}
        self._marks = [mark for name in sorted(formats) for mark in bridges.bridge(name).marks]
        self._folds = not target.bridge.readers.pre_scales
        self.activations = Activations(checkpoint, found, target)
        self.target = self._settled(target)
        to_convert = self._to_convert(found)
        self.target = dataclasses.replace(self.target, together=_together(to_convert))
        self._check_patterns(to_convert)
        self.choices = [self._choose(one, self.target) for one in to_convert]
        self._add_activations()
        self.choices += outputs.made_anew(checkpoint, self.target)
        if not target.float_dtype:
            self.choices, notes = self._share()
            self.notes += notes
            outputs.quantization_config(checkpoint, self.target, self.choices)  # may refuse, before any work
        self._check_group_size()
        self.notes += outputs.changed_meaning(checkpoint, self.target, self.choices)
        self.notes += self._note_nothing()
        self.notes += self._note_rules(found)
        self.notes += self._note_group_size()
        self.notes += self._note_levels()
        self.notes += self._note_experts()
        self.notes += rounding_notes(self.target, self.choices)
        self.notes += without_effect(self.target, self.choices, self.activations, checkpoint)
        if checkpoint.container is not target.bridge.container and not target.bridge.container.whole:
            lost = checkpoint.container.left_behind(checkpoint.files, destination, self.into_directory)
            self.notes += [Remark(lost)] if lost else []
        self._check_names()
        self.files = self._files()
        total = sum(nbytes_of_choice(c) for c in self.choices)
        self.progress = Progress(total, show)
        self.threads = thread_count(threads)
        if force:
            check_replaceable(destination, self.into_directory)

    def _settled(self, target: Target) -> Target:
        """The target with what the source says."""
        checkpoint = self.checkpoint
        factors = {name for name in checkpoint.entries if name.endswith(".pre_quant_scale")}
        names, self.left_out, notes = target.bridge.container.names(checkpoint, self.activations.names | factors)
        target = dataclasses.replace(target, names=names)
        self.notes += notes
        alone, inputs = bool(self._quantized), self.activations.inputs
        source = checkpoint.scheme_or_none if alone or inputs else None
        return dataclasses.replace(target, left_alone=alone, model=checkpoint.config, inputs=inputs, source=source)

    def _add_activations(self) -> None:
        """What becomes of scales of activations, each behind its weight; the target is told which are written."""
        written = self.activations.choices(self.choices, self.target.spell)
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
        found = self._refined([one for one in found if not self._dropped(one.name)])
        if self._folds:
            found = [self.checkpoint.folded(one) for one in found]
            self._note_folded(found)
        return gathered(found, self.target)

    def _refined(self, found: list[Found]) -> list[Found]:
        """The tensors with all that is known of them; what is found out to be odd is noted."""
        refined = [self.checkpoint.refined(one) for one in found]
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
        with naming(self.checkpoint.path, found.name):
            target = target.of(found)
            return self._as_stored(found, target) or choose(found, target)

    def _check_patterns(self, found: list[Found]) -> None:
        check_effects(found, self.target, self._choose)

    def _as_stored(self, found: Found, target: Target) -> Choice | None:
        """A tensor whose own form no recipe says, where none is asked for and the format stays."""
        others = target.recipe is not None or target.kind or target.float_dtype or found.recipe is not None
        if others or found.format != target.format or not target.bridge.keeps(found):
            return None
        names = dict.fromkeys(found.parts.values())
        entries = (self.checkpoint.entries[name] for name in names)
        return Choice(found, "same", {entry.name: (entry.dtype, entry.shape) for entry in entries})

    def _note_folded(self, found: list[Found]) -> None:
        count = sum(bool(one.origin.factor) for one in found)
        if count:
            text = f"scales of the inputs of {count} layers (pre_quant_scale) are multiplied into their weights"
            self.notes.append(Remark(text))

    def _share(self) -> tuple[list[Choice], list[str]]:
        return share(self.choices, self.target, self.checkpoint)

    def _check_group_size(self) -> None:
        size = self.target.group_size
        if not isinstance(size, int) or any(choice.action in QUANTIZED for choice in self.choices):
            return
        left = [choice.found for choice in self.choices if choice.note.startswith(LEFT) and choice.found.shape]
        left = [found for found in left if found.shape[-1] % size]
        if left:
            raise ValueError(
                f"group size must divide the columns of a tensor, {size} divides those of none: {left[0].name!r} has "
                f"{left[0].shape[-1]}"
            )

    def _note_nothing(self) -> list[str]:
        if self.target.quantizes_nothing or any(c.action in QUANTIZED for c in self.choices):
            return []
        return [f"no tensor is quantized: none of the source has a place in {self.target.spelled}"]

    def _note_rules(self, found: list[Found]) -> list[str]:
        """Patterns of a scheme that match nothing, and parts of a fused layer that have not one recipe."""
        if self.target.asked is None:
            return []
        unmatched = [str(one) for one in self.target.asked.unmatched(one.name for one in found)]
        for module, recipe in outputs.modules_of(self.choices).items():
            self.target.asked.inputs(module, recipe)  # may refuse
        notes = [f"patterns of the scheme match no layer: {some(unmatched)}"] if unmatched else []
        notes += self.target.asked.not_written()
        apart = unlike(self.choices, self.target)
        if apart:
            said = "parts of a layer that servers fuse have different recipes, which vLLM and SGLang refuse"
            notes.append(f"{some(apart)}: {said}")
        return notes

    def _note_group_size(self) -> list[str]:
        """What to ask for where groups do not divide the columns of some tensors."""
        recipe = self.target.recipe or self.target.default
        size = int(getattr(recipe, "group_size", None) or 0)
        left = [c.found for c in self.choices if c.note.startswith(LEFT) and size and c.found.shape[-1] % size]
        best = largest_group(math.gcd(*(found.shape[-1] for found in left)), size) if left else None
        if not best:
            return []
        names = some([found.name for found in left])
        return [
            f"{names}: groups of {size} do not divide their columns: --group-size {best} divides them all, "
            f"--group-size {AUTO} takes the largest that divides, for each"
        ]

    def _identity(self) -> bytes:
        return identity_of(self.checkpoint, self.target)

    def _companions(self, work: Work) -> None:
        outputs.write_companions(self.checkpoint, work.out, self.target, self.choices, dict(self.files))
        if self.from_whole:
            trouble = self.checkpoint.container.write_companions(self.checkpoint.path, work.out)
            self.notes += [trouble] if trouble else []

    def _execute(self, choice: Choice, writer: PlannedWriter, workers: Workers, losses: dict[str, Loss]) -> int:
        """Write a tensor, and add what it lost; how many of its numbers are infinite or NaN."""
        lists = (losses, self.rounded)
        return execute(self.checkpoint, choice, self.target, writer, workers, self.progress.add, *lists)

    def _note_levels(self) -> list[str]:
        names = self.target.names
        nvfp4 = [c.found for c in self.choices if getattr(c.recipe, "name", "") == "nvfp4"]
        if (why := self.target.bridge.readers.one_level) and any("global_scale" in found.parts for found in nvfp4):
            return [f"NVFP4 has one level: {why}"]
        if names is None or not any(has_one_level(found, self.target) for found in nvfp4):
            return []
        return [f"NVFP4 has one level: programs do not apply all second scales of a {names.architecture} model"]

    def _note_experts(self) -> list[str]:
        """What programs do wrong with experts, and others, that are written."""
        said = self.target.bridge.readers.misread_experts
        names = {c.recipe.name for c in self.choices if c.recipe is not None and is_one_expert(c.found.name)}
        notes: list[str] = [Remark(f"experts in {name}: {said[name]}") for name in sorted(names & said.keys())]
        wrong: dict[str, list[str]] = {}
        for choice in self.choices:
            if choice.recipe and (text := self.target.bridge.readers.misread(choice.found.shape, choice.recipe)):
                wrong.setdefault(text, []).append(choice.found.name)
        return notes + [f"{some(names)}: {text}" for text, names in wrong.items()]

    def _kept(self) -> dict[str, Any] | None:
        """The weights that stay as they were beside quantized ones: their bytes, and the largest of them."""
        if not any(c.action in QUANTIZED for c in self.choices):
            return None
        kept = [c for c in self.choices if c.action == "copy" and is_float(c.found) and len(c.found.shape) > 1]
        return {
            "tensors": len(kept),
            "bytes": sum(nbytes_of_choice(c) for c in kept),
            "largest": max(kept, key=nbytes_of_choice).found.name if kept else None,
        }

    def _dropped(self, name: str) -> bool:
        """Whether a tensor is not converted, or with its weight; scales of activations are `Activations`'s."""
        if name in self.left_out or name in self.activations.names:
            return True
        if any(fnmatchcase(name, mark) for mark in self._marks):
            return True
        if self.into_directory and name in self.checkpoint.container.said_by_config:
            return True  # config.json says what the factors say
        weight = name.rpartition(".")[0] + ".weight"
        if name.endswith(".pre_quant_scale") and self._folds:
            if weight not in self._quantized:
                raise ValueError(
                    f"tensor {name!r} must be absent, or --to modelopt: it scales the input of its layer, "
                    f"for which no other format has a place"
                )
            return True
        return False

    def _check_names(self) -> None:
        seen: set[str] = set()
        for choice in self.choices:
            for name in choice.outputs:
                if name in seen:
                    raise ValueError(f"tensor {name!r} must be written once: {choice.found.name!r} gives it too")
                seen.add(name)

    def _files(self) -> list[tuple[str, list[Choice]]]:
        """Output files and what goes into each: as the source's, where it has several."""
        if not self.checkpoint.path.is_dir() or self.target.bridge.container.whole:
            return [("model.safetensors" if self.into_directory else self.destination.name, self.choices)]
        by_file: dict[str, list[Choice]] = {f.path.name: [] for f in self.checkpoint.files}
        for choice in self.choices:
            main = next(iter(choice.found.parts.values()))
            by_file[self.checkpoint.home[main].path.name].append(choice)
        return [(name, choices) for name, choices in by_file.items() if choices]

    def plan(self) -> dict[str, Any]:
        """What would be done."""
        self._check_strict()
        return {**self._report(0.0), "plan": [planned(choice) for choice in self.choices]}

    def run(self) -> dict[str, Any]:
        begin, others = time.monotonic(), beside(self.checkpoint)
        self._check_strict()
        work = Work(self.destination, self._identity(), directory=self.into_directory, replace=self.force)
        with work.kept_when_interrupted():
            if not work.finished:
                self._make(work)
                if self.into_directory:
                    with work.noting():
                        self._companions(work)
                self._check_unchanged()
                self._check_beside(others)
                self._check_strict()
            self.notes += work.finish()
        self.progress.finish()
        return self._report(time.monotonic() - begin)

    def _check_unchanged(self) -> None:
        """Whether the source and the data are what they were when they were opened."""
        self.checkpoint.check_unchanged()
        if self.target.importance is not None:
            self.target.importance.check_unchanged()

    def _check_beside(self, before: dict[Path, disk.Stamp]) -> None:
        """Whether what lies beside the weights, and is copied, is as it was."""
        now = beside(self.checkpoint)
        changed = next((path for path in {**before, **now} if before.get(path) != now.get(path)), None)
        if changed is not None:
            raise ValueError(f"{changed}: must not change while its folder is read, it did")

    def _all_notes(self) -> list[str]:
        finite = [
            f"{name}: {count} {'element is' if count == 1 else 'elements are'} not finite"
            for name, count in self.not_finite.items()
        ]
        told = [f"{name}: {said['note']}" for name, said in self.rounded.items() if "note" in said]
        return [*self.notes, *finite, *told, *(f"{c.found.name}: {c.note}" for c in self.choices if c.note)]

    def _check_strict(self) -> None:
        notes = [one for one in self._all_notes() if not isinstance(one, Remark)] if self.strict else []
        if notes:
            more = f", and {len(notes) - 1} more" if len(notes) > 1 else ""
            raise ValueError(f"strict: there must be nothing to note, there is: {notes[0]}{more}")

    def _make(self, work: Work) -> None:
        """Make the weight files."""
        self._write_files(self.files, work)

    def _write_files(self, files: list[tuple[str, list[Choice]]], work: Work) -> None:
        with contextlib.closing(Workers(self.threads)) as workers:
            for name, choices in files:
                self._write(name, choices, work, workers)

    def _write(self, name: str, choices: list[Choice], work: Work, workers: Workers) -> None:
        writer = self._writer(work.out / name, choices)
        if writer.complete and not self._is_as_written(writer, name, choices, work):
            disk.remove(work.out / name)
            writer = self._writer(work.out / name, choices)
        try:
            if writer.complete:
                self.progress.skip(sum(nbytes_of_choice(c) for c in choices))
            else:
                if not writer.resumed:
                    work.restart(name)
                self._fill(writer, name, choices, work, workers)
                writer.commit()
        finally:
            writer.close()
        work.note(name)

    def _is_as_written(self, writer: PlannedWriter, name: str, choices: list[Choice], work: Work) -> bool:
        """Whether a file that is there has the bytes that an earlier run wrote."""
        done = work.done(name)
        for choice in choices if self.checksums else ():
            of_it = done.get(next(iter(choice.outputs)))
            if of_it is None or not self._is_there(choice, writer, of_it):
                return False
        for of_it in done.values():
            self._keep(name, of_it)
        return True

    def _keep(self, file: str, done: Done) -> None:
        """Take note of a tensor of an output file that is on disk."""
        self.not_finite |= done.not_finite
        self.losses |= done.losses
        self.rounded |= done.rounded

    def _fill(self, writer: PlannedWriter, name: str, choices: list[Choice], work: Work, workers: Workers) -> None:
        """Write tensors, and say now and then which are on disk."""
        done = work.done(name)
        writer.sums = Sums() if self.checksums else None
        pending: dict[str, Done] = {}
        written = 0
        for choice in choices:
            name_of = next(iter(choice.outputs))  # of which there is one in a file
            if name_of in done and self._is_there(choice, writer, done[name_of]):
                for output in choice.outputs:
                    writer.skip(output)
                self.progress.skip(nbytes_of_choice(choice))
                self._keep(name, done[name_of])
                continue
            losses: dict[str, Loss] = {}
            with naming(self.checkpoint.path, choice.found.name):
                bad = self._execute(choice, writer, workers, losses)
            counts = {choice.found.name: bad} if bad else {}
            rounded = {name: self.rounded[name] for name in (choice.found.name,) if name in self.rounded}
            pending[name_of] = Done(_taken(self.checkpoint.sums), _taken(writer.sums), counts, losses, rounded)
            self._keep(name, pending[name_of])
            written += nbytes_of_choice(choice)
            if written >= _SYNC_EVERY:
                writer.sync()
                work.record(name, pending)
                pending, written = {}, 0
        if pending:
            writer.sync()
            work.record(name, pending)

    def _is_there(self, choice: Choice, writer: PlannedWriter, done: Done) -> bool:
        """Whether a tensor's bytes are those that an earlier run wrote."""
        return not self.checksums or all(writer.has(output, done.wrote) for output in choice.outputs)

    def _writer(self, path: Path, choices: list[Choice]) -> PlannedWriter:
        bridge, metadata = self.target.bridge, dict[str, str]()
        told = self.choices if bridge.container.header_of_all else choices
        for choice in told:
            metadata |= choice.metadata
        metadata |= bridge.header([c.found.name for c in told], outputs.modules_of(told), self.target.inputs)
        if not self.into_directory and not bridge.container.whole:
            said = outputs.quantization_config(self.checkpoint, self.target, self.choices)
            if said:
                metadata["quantization_config"] = json.dumps(said)
        tensors = [(choice.found, choice.outputs) for choice in choices]
        output = Output(self.checkpoint, tensors, metadata, self.target.names, self.left_out)
        writer, notes = bridge.container.writer(path, output)
        self.notes += [note for note in notes if note not in self.notes]
        return writer

    def _report(self, seconds: float) -> dict[str, Any]:
        actions: dict[str, int] = {}
        for choice in self.choices:
            actions[choice.action] = actions.get(choice.action, 0) + 1
        return {
            "source": str(self.checkpoint.path),
            "destination": str(self.destination),
            "to": self.target.spelled,
            "tensors": actions,
            "bytes_read": sum(entry.nbytes for entry in self.checkpoint.entries.values()),
            "bytes_written": self.progress.total,
            "seconds": round(seconds, 3),
            **sizes(self.choices),
            "kept": self._kept(),
            "requantized": lost(self.losses),
            "errors": errors(self.losses),
            "not_finite": self.not_finite,
            "output_errors": self.rounded,
            "notes": self._all_notes(),
        }


def planned(choice: Choice) -> dict[str, Any]:
    """What becomes of a tensor, of JSON types."""
    found = choice.found
    return {
        "name": found.name,
        "shape": list(found.shape),
        "action": choice.action,
        "from": found.kind if found.format == "plain" else f"{found.format} {found.kind}",
        "stored": {name: dtype for name, (dtype, _) in choice.outputs.items()},
        "nbytes": nbytes_of_choice(choice),
    }


def sizes(choices: list[Choice]) -> dict[str, Any]:
    """How many weights there are, and the bits that each takes in the output: of all, and of those that are codes."""
    listed = [(math.prod(c.found.shape), nbytes_of_choice(c), c.action in QUANTIZED) for c in choices]
    weights, codes = sum(n for n, _, _ in listed), sum(n for n, _, of_codes in listed if of_codes)
    bits, bits_of_codes = (8 * sum(size for _, size, q in listed if q or not of) for of in (False, True))
    return {
        "weights": weights,
        "bits_per_weight": round(bits / weights, 3) if weights else None,
        "bits_per_quantized_weight": round(bits_of_codes / codes, 3) if codes else None,
    }


def _together(found: list[Found]) -> dict[str, str]:
    """The first of the modules that become one, by the name of this one."""
    every = ((one.name, members[0].name) for one in found if (members := one.origin.members))
    return {name.removesuffix(".weight"): first.removesuffix(".weight") for name, first in every}


def _taken(sums: Sums | None) -> Sums:
    return Sums() if sums is None else sums.take()


def some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]


def nbytes_of_choice(choice: Choice) -> int:
    """Bytes that a tensor takes in the output."""
    return sum(outputs.stored_bytes(dtype, shape) for dtype, shape in choice.outputs.values())
