# SPDX-License-Identifier: Apache-2.0
"""The merge of a LoRA adapter, one tensor at a time.

What the adapter changes is dequantized, added to and quantized again to the recipe it had; all else is copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges, verbs
from breccia.bridges.common import float32, global_scale
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.lora.adapters import Adapter, Change
from breccia.checkpoint.lora.rounding import MergeRounding
from breccia.checkpoint.planning import shared_scales
from breccia.checkpoint.planning.targets import Choice, Target, requantized
from breccia.checkpoint.reading.models import is_stored_turned
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.workers import Workers
from breccia.checkpoint.writing import outputs
from breccia.checkpoint.writing.convert import Job, some
from breccia.checkpoint.writing.execute import as_dtype, cast_for
from breccia.checkpoint.writing.finite import counted
from breccia.checkpoint.writing.losses import Loss
from breccia.checkpoint.writing.repack import cut, repack
from breccia.checkpoint.writing.work import Work
from breccia.recipes import choices
from breccia.scaled_tensor import ScaledTensor

__all__ = ["FLOATS", "Merge"]

_ROWS = 1024  # at a time
_ENOUGH = 0.9  # of a change: less is noted
FLOATS = ("F64", "F32", "F16", "BF16")


def _target(checkpoint: Checkpoint) -> Target:
    """The base's own format."""
    formats = sorted({found.format for found in checkpoint.found} - {"plain"})
    if not formats:
        return Target("merge-lora", exclude=("*",))
    bridge = bridges.bridge(formats[0])
    if len(formats) > 1 or not bridge.writes:
        raise ValueError(f"base must be in one format that is written here, it is in {', '.join(formats)}")
    default = next(iter(bridge.recipes.values()), None)
    return Target("merge-lora", format=formats[0], default=default)


class _Group:
    """Parts of a layer that servers fuse, which keep one global scale."""

    def __init__(self, job: Merge, parts: list[Found]) -> None:
        self.job, self.parts = job, parts
        self._lock = threading.Lock()
        self._second: np.float32 | None = None

    def second(self) -> np.float32:
        """The global scale, as a multiplier: the one there is, or a larger one where a part needs it."""
        with self._lock:
            if self._second is None:
                there = max(self._there(part) for part in self.parts)
                changed = [part for part in self.parts if part.name in self.job.adapter.changes]
                needed = max(np.float32(np.abs(self.job.values(part)).max(initial=0)) for part in changed)
                needed /= np.float32(448 * 6)
                # Scales of blocks up to 464 round to 448.
                self._second = there if needed * np.float32(448) <= there * np.float32(464) else needed
            return self._second

    def _there(self, part: Found) -> np.float32:
        loaded = self.job.checkpoint.load(part)
        found = global_scale(loaded, "multiplier") if isinstance(loaded, ScaledTensor) else None
        return np.float32(0 if found is None else found.reshape(-1)[0])


class Merge(Job):
    def __init__(
        self,
        checkpoint: Checkpoint,
        destination: Path,
        adapter: Adapter,
        rounding: MergeRounding,
        show: bool,
        threads: int | None,
        force: bool,
        strict: bool,
    ) -> None:
        self.adapter, self.rounding = adapter, rounding
        self.bad: dict[str, int] = {}
        known = {found.name: found for found in checkpoint.found}
        for name, change in adapter.changes.items():
            _check(name, change, known, checkpoint)
        target = self._target_of(checkpoint)
        super().__init__(checkpoint, destination, target, show, threads, force, strict=strict)
        self.notes += self._note_moments()

    def _target_of(self, checkpoint: Checkpoint) -> Target:
        return _target(checkpoint)

    def _note_moments(self) -> list[str]:
        """Tensors that "feedback" rounds without moments, though there are some."""
        if self.rounding.moments is None:
            return []
        codes = [c.found.name for c in self.choices if c.action == "merge" and c.recipe is not None]
        without = [name for name in codes if name in self.adapter.changes and not self.rounding.has_moments(name)]
        path = self.rounding.moments.path
        return [f"{some(without)}: {path} has no moments of them: the adapter's own matrices serve"] if without else []

    def _choose(self, found: Found, target: Target) -> Choice:
        choice = super()._choose(found, target)
        if choice.action not in ("copy", "repack"):
            raise ValueError(f"tensor {found.name!r} must be one that {self.target.format} can write as it is")
        return self._merged(choice) if found.name in self.adapter.changes else choice

    def _check_patterns(self, found: list[Found]) -> None:
        """The target's are no user's."""

    def _merged(self, choice: Choice) -> Choice:
        found = choice.found
        if found.format == "plain":
            return dataclasses.replace(choice, action="merge")
        if found.recipe is None:
            raise ValueError(f"tensor {found.name!r} must have a recipe to be quantized again, {found.kind} has none")
        return requantized(found, "merge", found.recipe, self.target)

    def _dropped(self, name: str) -> bool:
        return False

    def _add_activations(self) -> None:
        """Scales of activations stay, as config.json does."""

    def _share(self) -> tuple[list[Choice], list[str]]:
        """Parts that share a global scale, where one of them changes."""
        listed = list(self.choices)
        if self.target.bridge.readers.shared_global_scale:
            for members in shared_scales.fused(listed):
                if any(listed[i].action == "merge" for i in members):
                    group = _Group(self, [listed[i].found for i in members])
                    for i in members:
                        listed[i] = dataclasses.replace(self._merged(listed[i]), shared=group)
        return listed, []

    def _note_nothing(self) -> list[str]:
        return []

    def _identity(self) -> bytes:
        said = [super()._identity().hex(), repr(self.adapter.stamps), *self.rounding.said]
        return hashlib.sha256(json.dumps(said).encode()).digest()

    def _make(self, work: Work) -> None:
        super()._make(work)
        self.adapter.file.file.check_unchanged()

    def _companions(self, work: Work) -> None:
        outputs.write_companions(self.checkpoint, work.out, self.target, self.choices, dict(self.files), as_it_is=True)

    def _execute(self, choice: Choice, writer: PlannedWriter, workers: Workers, losses: dict[str, Loss]) -> int:
        if choice.action != "merge":
            return super()._execute(choice, writer, workers, losses)
        found = choice.found
        if found.format == "plain":
            self._write_floats(choice, writer)
        else:
            repack(self._made(choice), choice, self.target, writer, workers, self.progress.add)
        self.checkpoint.release(found)
        return self.bad.get(found.name, 0)

    def values(self, found: Found) -> Any:
        """A tensor with its change, float32, in the logical order of its axes."""
        change = self.adapter.changes.get(found.name)
        if change is not None and change.whole is not None:
            return float32(change.whole.read())
        loaded = self.checkpoint.load(found)
        loaded = loaded.dequantize() if isinstance(loaded, (ScaledTensor, OutsideTensor)) else loaded
        values = np.array(float32(loaded))
        if change is not None:
            for start in range(0, values.shape[0], _ROWS):
                stop = min(start + _ROWS, values.shape[0])
                values[start:stop] += change.of(found).rows(start, stop)
        self.bad[found.name] = counted(values)
        return values

    def _made(self, choice: Choice) -> ScaledTensor:
        found, recipe = choice.found, choice.recipe
        assert recipe is not None
        loaded = self.checkpoint.load(found)
        group = choice.shared or (_Group(self, [found]) if choices(recipe).two_level else None)
        options = self.rounding.options(found.name)
        if group is None:
            values = self.values(found)
            return self._second_pass(choice, loaded, values, cast_for(self.target, values, recipe, **options))
        second = group.second()
        own = global_scale(loaded, "multiplier") if isinstance(loaded, ScaledTensor) else None
        stays = own is not None and np.float32(own.reshape(-1)[0]) == second
        if stays and found.name not in self.adapter.changes:
            assert isinstance(loaded, ScaledTensor)
            return loaded
        values = self.values(found)
        made = verbs.cast(values, recipe, amax=second * np.float32(448 * 6), **options)
        if stays:
            assert isinstance(loaded, ScaledTensor)
            made = made._with(global_scale=loaded.global_scale)
        return self._second_pass(choice, loaded, values, made)

    def _second_pass(self, choice: Choice, old: Any, values: Any, nearest: ScaledTensor) -> ScaledTensor:
        """What the way to round makes of codes; takes note of how much of the change is in them."""
        found = choice.found
        change = self.adapter.changes.get(found.name)
        if change is None:
            return nearest
        made = self.rounding.again(found.name, old, values, nearest, change.of(found))
        self.note_kept(found, values, lambda start, stop: verbs.dequantize(cut(made, start, stop)))
        return made

    def note_kept(self, found: Found, values: Any, made: Callable[[int, int], Any]) -> None:
        """Take note of how much of a low-rank change is in what was made.

        Args:
            found: the tensor.
            values: with the change, float32, in the logical order of its axes.
            made: rows of what is written in its place, from one to another, likewise.
        """
        change = self.adapter.changes.get(found.name)
        if change is None or change.whole is not None:
            return
        asked = lost = 0.0
        for start in range(0, values.shape[0], _ROWS):
            stop = min(start + _ROWS, values.shape[0])
            part = change.of(found).rows(start, stop).astype(np.float64)
            asked += float((part * part).sum())
            lost += float((part * (values[start:stop] - made(start, stop))).sum())
        if asked > 0 and np.isfinite(lost):
            self.rounded[found.name] = {"asked": asked, "kept": 1 - lost / asked}

    def _all_notes(self) -> list[str]:
        short = {name: said["kept"] for name, said in self.rounded.items() if said["kept"] < _ENOUGH}
        if not short:
            return super()._all_notes()
        least = min(short, key=lambda name: short[name])
        better = "" if self.rounding.rounding == "feedback" else ": --rounding feedback keeps more"
        text = (
            f"{len(short)} of {len(self.rounded)} tensors keep less than {_ENOUGH:.0%} of the adapter's change when "
            f"they are rounded, {least} the least, {short[least]:.1%}{better}"
        )
        return [*super()._all_notes(), text]

    def _report(self, seconds: float) -> dict[str, Any]:
        asked = sum(said["asked"] for said in self.rounded.values())
        kept = sum(said["asked"] * said["kept"] for said in self.rounded.values())
        change = {
            "rounding": self.rounding.rounding,
            "kept": kept / asked if asked else None,
            "tensors": {name: said["kept"] for name, said in self.rounded.items()},
        }
        return {**super()._report(seconds), "output_errors": {}, "change": change}

    def _write_floats(self, choice: Choice, writer: PlannedWriter) -> None:
        ((name, (dtype, _)),) = choice.outputs.items()
        values = self.values(choice.found)
        if choice.found.origin.turned:
            values = np.swapaxes(values, -1, -2)
        array = as_dtype(values, dtype)
        if not choice.found.origin.turned:
            self.note_kept(choice.found, values, lambda start, stop: float32(array[start:stop]))
        array = np.ascontiguousarray(array)
        writer.write(name, array)
        self.progress.add(array.nbytes)


def _check(name: str, change: Change, known: dict[str, Found], checkpoint: Checkpoint) -> None:
    found = known.get(name)
    if found is None:
        raise ValueError(
            f"adapter's tensor of {name!r} must have its place in the base, {checkpoint.path} has none of that name"
        )
    module = name.rpartition(".")[0]
    if f"{module}.pre_quant_scale" in checkpoint.entries:
        raise ValueError(f"tensor {name!r} must be without pre_quant_scale, which scales its inputs, to be merged into")
    if found.format == "plain" and found.dtype not in FLOATS:
        raise ValueError(f"tensor {name!r} must be of numbers, it is {found.dtype}")
    whole = change.whole is not None and is_stored_turned(name, change.whole.shape, checkpoint.config)
    shape = change.of(found).shape
    if (shape[::-1] if whole else shape) != found.shape:
        raise ValueError(f"adapter's change of {name!r} must have shape {found.shape}, it has {shape}")
