# SPDX-License-Identifier: Apache-2.0
"""The merge of a LoRA adapter into a checkpoint of any format that can be written, one tensor at a time.

What the adapter changes is dequantized, added to and quantized again to the recipe it had; all else is copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges, recipes, verbs
from breccia.bridges.common import float32
from breccia.bridges.outside import values
from breccia.bridges.parts import Found
from breccia.bridges.scales import global_scale
from breccia.checkpoint.arguments import existing, path_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.lora.adapters import Adapter, Change, open_adapter
from breccia.checkpoint.lora.feedback import How, MergeRounding
from breccia.checkpoint.planning.choices import Choice, requantized
from breccia.checkpoint.planning.identity import Identity, digest
from breccia.checkpoint.planning.plan import Plan, Planner
from breccia.checkpoint.planning.remarks import some
from breccia.checkpoint.planning.rotations import KEYS, rotations_of
from breccia.checkpoint.planning.shared_scales import fused
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.models import is_stored_turned
from breccia.checkpoint.reading.source import FLOATS, Checkpoint
from breccia.checkpoint.reports import MergeReport
from breccia.checkpoint.workers import runs
from breccia.checkpoint.writing import outputs
from breccia.checkpoint.writing.convert import Job, RunOptions
from breccia.checkpoint.writing.execute import as_dtype, cast_for
from breccia.checkpoint.writing.losses import Loss, counted
from breccia.checkpoint.writing.repack import Sink, repack
from breccia.checkpoint.writing.work import Work, check_destination
from breccia.recipes import choices
from breccia.scaled_tensor import ScaledTensor


class Group:
    """Parts of a layer that servers fuse, which keep one global scale."""

    def __init__(self, parts: list[Found], changed: list[Found]) -> None:
        self.parts, self.changed = parts, changed
        self._lock = threading.Lock()
        self._second: np.float32 | None = None

    def second(self, checkpoint: Checkpoint, values: Callable[[Found], Any]) -> np.float32:
        """The global scale, as a multiplier: the one there is, or a larger one where a part needs it; ``values`` makes
        a part's numbers with its change."""
        with self._lock:
            if self._second is None:
                there = max(_global_scale(checkpoint.load(part)) for part in self.parts)
                needed = max(np.float32(np.abs(values(part)).max(initial=0)) for part in self.changed)
                needed /= np.float32(448 * 6)
                # Scales of blocks up to 464 round to 448.
                self._second = there if needed * np.float32(448) <= there * np.float32(464) else needed
            return self._second


def _global_scale(loaded: Any) -> np.float32:
    """A tensor's, as a multiplier; 0 where there is none."""
    found = global_scale(loaded, "multiplier") if isinstance(loaded, ScaledTensor) else None
    return np.float32(0 if found is None else found.reshape(-1)[0])


class MergePlanner(Planner):
    """Decides which tensors an adapter changes, and in what they are written. Raises ValueError where adapter and base
    do not fit."""

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter, rounding: MergeRounding, device: Device) -> None:
        self.adapter, self.rounding = adapter, rounding
        known = {found.name: found for found in checkpoint.found}
        for name, change in adapter.changes.items():
            _check(name, change, known, checkpoint)
        super().__init__(checkpoint, dataclasses.replace(self._target_of(checkpoint), device=device))

    def plan(self, destination: Path, folder: bool = False) -> Plan:
        plan = super().plan(destination, folder)
        return dataclasses.replace(plan, notes=[*plan.notes, *self._note_moments()])

    def _target_of(self, checkpoint: Checkpoint) -> Target:
        """The base's own format."""
        formats = sorted(checkpoint.found.formats)
        if not formats:
            return Target("merge-lora", exclude=("*",))
        bridge = bridges.bridge(formats[0])
        if len(formats) > 1 or not bridge.writes:
            raise ValueError(f"base must be in one format that is written here, it is in {', '.join(formats)}")
        default = next(iter(bridge.recipes.values()), None)
        return Target("merge-lora", format=formats[0], default=default)

    def _note_moments(self) -> list[str]:
        """Tensors that "feedback" rounds without moments, though there are some; it must not be all."""
        if self.rounding.moments is None:
            return []
        codes = [c.found.name for c in self.choices if c.action == "merge" and c.recipe is not None]
        changed = [name for name in codes if name in self.adapter.changes]
        without = [name for name in changed if not self.rounding.has_moments(name)]
        path = self.rounding.moments.path
        if without and without == changed:
            raise ValueError(f"moments must be of the base's layers: {path} has none of any, such as {without[0]}")
        said = f"{len(without)} of {len(changed)} tensors are rounded by the adapter's own matrices"
        return [f"{said}: {path} has no moments of {some(without)}"] if without else []

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
            return choice.but(action="merge")
        if found.recipe is None:
            raise ValueError(f"tensor {found.name!r} must have a recipe to be quantized again, {found.kind} has none")
        if self.rounding.rounding == "feedback" and recipes.has_exponents(found.recipe):
            kind = type(found.recipe).__name__
            raise ValueError(f"rounding 'feedback' needs a recipe without exponents, tensor {found.name!r} has {kind}")
        return requantized(found, "merge", found.recipe, self.target)

    def _dropped(self, name: str) -> bool:
        return False

    def _add_activations(self) -> None:
        """Scales of activations stay, as config.json does."""

    def _share(self) -> tuple[list[Choice], list[str]]:
        """Parts that share a global scale, where one of them changes."""
        listed = list(self.choices)
        if self.target.bridge.readers.shared_global_scale:
            for members in fused(listed):
                if any(listed[i].action == "merge" for i in members):
                    parts = [listed[i].found for i in members]
                    group = Group(parts, [part for part in parts if part.name in self.adapter.changes])
                    for i in members:
                        listed[i] = self._merged(listed[i]).but(shared=group)
        return listed, []

    def _note_nothing(self) -> list[str]:
        return []


def _check(name: str, change: Change, known: dict[str, Found], checkpoint: Checkpoint) -> None:
    found = known.get(name)
    if found is None:
        raise ValueError(
            f"adapter's tensor of {name!r} must have its place in the base, {checkpoint.path} has none of that name"
        )
    module = name.rpartition(".")[0]
    if any(map(checkpoint.quantization.get, KEYS)) and module in rotations_of(checkpoint).layers:
        raise ValueError(f"tensor {name!r} must be without rotations of its layer's inputs to be merged into")
    if f"{module}.pre_quant_scale" in checkpoint.entries:
        raise ValueError(f"tensor {name!r} must be without pre_quant_scale, which scales its inputs, to be merged into")
    if found.format == "plain" and found.dtype not in FLOATS:
        raise ValueError(f"tensor {name!r} must be of numbers, it is {found.dtype}")
    whole = change.whole is not None and is_stored_turned(name, change.whole.shape, checkpoint.config)
    shape = change.of(found).shape
    if (shape[::-1] if whole else shape) != found.shape:
        raise ValueError(f"adapter's change of {name!r} must have shape {found.shape}, it has {shape}")


def merge_lora(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    rounding: How | None = None,
    seed: int | None = None,
    moments: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    progress: bool = False,
    threads: int | None = None,
    force: bool = False,
    strict: bool = False,
) -> MergeReport:
    """Merge a LoRA adapter of PEFT or llama.cpp into a checkpoint, which keeps its format.

    Args:
        base: a safetensors file or a directory of them, quantized or not; or a GGUF file.
        adapter: a folder with adapter_config.json and adapter_model.safetensors, or a GGUF file as llama.cpp's
            convert_lora_to_gguf.py makes it.
        destination: a file, or a directory where the base is one; must not be there without ``force``.
        rounding: of quantized weights: "nearest"; "stochastic", up or down by chance, so that small changes are kept on
            average; or "feedback", by chance, where later columns make good what one loses, and blocks whose scales
            reach the new values keep them. None: "stochastic" if a seed is given, else "nearest".
        seed: of what is drawn; None is 0.
        moments: of "feedback", a file that `breccia.calibrate` wrote: remainders are fed by the inputs that layers
            meet. None, and layers that it has not: by the inputs that the adapter's own matrices look at.
        device: where weights are quantized again: "cpu", or "cuda", "cuda:N" by torch, with the same bytes. The second
            pass of "feedback" and K-quants of GGUF run on the CPU.
        progress: draw a line on a terminal.
        threads: how many to use (default: one per core).
        force: replace what is at ``destination``, as `convert` does.
        strict: refuse what would be a note in the report, such as a tensor that keeps less than 90 % of its change.

    Returns:
        What was done, of JSON types. "change" has the "rounding", how much of the adapter's change is "kept", by
        `breccia.comparison.kept`, None where no matrix has one, and the same of each of "tensors".

    Raises:
        ValueError: base or adapter is not valid, they do not fit, or the base's format cannot be written.
        FileExistsError: the destination is there, and ``force`` is not given.
        ImportError: the device is a GPU, and torch is not installed.
        OSError: the disk is full or the like. What is done is kept, and the same call goes on from there.
    """
    destination = path_of(destination, "destination")
    adapter = path_of(adapter, "adapter")
    base, adapter = existing(base, "base"), existing(adapter, "adapter")
    run = RunOptions(progress, threads, force, strict, device=Device.of(device))
    check_destination(destination, base, adapter, force=force)
    with (
        contextlib.closing(MergeRounding.of(rounding, seed, moments)) as how,
        Checkpoint(base, mapped=False) as read,
        contextlib.closing(open_adapter(adapter, read)) as opened,
    ):
        kind: type[Merge] = read.container.merging or Merge
        report: MergeReport = kind(read, destination, opened, how, run).run()
        return report


_ENOUGH = 0.9  # of a change: less is noted


class Merge(Job):
    """A merge at work; `planner` decides what it does."""

    planner: type[MergePlanner] = MergePlanner

    def __init__(
        self,
        checkpoint: Checkpoint,
        destination: Path,
        adapter: Adapter,
        rounding: MergeRounding,
        how: RunOptions,
    ) -> None:
        self.adapter, self.rounding = adapter, rounding
        self.bad: dict[str, int] = {}
        plan = self.planner(checkpoint, adapter, rounding, how.device).plan(destination)
        super().__init__(plan, how)

    def _identity(self) -> Identity:
        adapter = {
            "adapter": digest([self.adapter.sha256, self.adapter.config]),
            "rounding": digest(self.rounding.said),
        }
        return super()._identity() | adapter

    def _make(self, work: Work) -> None:
        super()._make(work)
        self.adapter.file.file.check_unchanged()

    def _companions(self, work: Work) -> None:
        plan = self.plan
        self.notes += outputs.write_companions(self.checkpoint, work.out, None, plan.choices, dict(plan.files))

    def _execute(self, choice: Choice, sink: Sink, losses: dict[str, Loss]) -> int:
        if choice.action != "merge":
            return super()._execute(choice, sink, losses)
        found = choice.found
        if found.format == "plain":
            self._write_floats(choice, sink)
        else:
            repack(self._made(choice), choice, self.target, sink)
        self.checkpoint.release(found)
        return self.bad.get(found.name, 0)

    def values(self, found: Found) -> Any:
        """A tensor with its change, float32, in the logical order of its axes."""
        change = self.adapter.changes.get(found.name)
        if change is not None and change.whole is not None:
            return float32(change.whole.read())
        whole = np.array(float32(values(self.checkpoint.load(found))))
        if change is not None:
            for rows in runs(whole.shape[0]):
                whole[rows] += change.of(found).rows(rows)
        self.bad[found.name] = counted(whole)
        return whole

    def takes_rounding(self, choice: Choice) -> bool:
        """Whether a tensor is rounded as it was asked for, and not always to nearest."""
        return choice.found.format != "plain"

    def _made(self, choice: Choice) -> ScaledTensor:
        found, recipe = choice.found, choice.recipe
        assert recipe is not None
        loaded = self.checkpoint.load(found)
        group = choice.shared or (Group([found], [found]) if choices(recipe).two_level else None)
        options = self.rounding.options(found.name)
        if group is None:
            values = self.values(found)
            return self._second_pass(choice, loaded, values, cast_for(self.target, values, recipe, **options))
        second = group.second(self.checkpoint, self.values)
        own = global_scale(loaded, "multiplier") if isinstance(loaded, ScaledTensor) else None
        stays = own is not None and np.float32(own.reshape(-1)[0]) == second
        if stays and found.name not in self.adapter.changes:
            assert isinstance(loaded, ScaledTensor)
            return loaded
        values = self.values(found)
        made = self.target.device.cast(values, recipe, amax=second * np.float32(448 * 6), **options)
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
        self.note_kept(found, values, lambda rows: verbs.dequantize(made[rows]))
        return made

    def note_kept(self, found: Found, values: Any, made: Callable[[slice], Any]) -> None:
        """Take note of how much of a low-rank change is in what was made. ``values`` are float32 with the change, in
        the logical order of axes; ``made`` gives rows of what is written in their place, likewise."""
        change = self.adapter.changes.get(found.name)
        if change is None or change.whole is not None:
            return
        asked = lost = 0.0
        for rows in runs(values.shape[0]):
            part = change.of(found).rows(rows).astype(np.float64)
            asked += float((part * part).sum())
            lost += float((part * (values[rows] - made(rows))).sum())
        if asked > 0 and np.isfinite(lost):
            self.rounded[found.name] = {"asked": asked, "kept": 1 - lost / asked}

    def _all_notes(self) -> list[str]:
        short = {name: said["kept"] for name, said in self.rounded.items() if said["kept"] < _ENOUGH}
        if not short:
            return super()._all_notes()
        least = min(short, key=lambda name: short[name])
        draws = any(self.takes_rounding(choice) for choice in self.plan.choices if choice.found.name in short)
        better = ": --rounding feedback keeps more" if draws and self.rounding.rounding != "feedback" else ""
        text = (
            f"{len(short)} of {len(self.rounded)} tensors keep less than {_ENOUGH:.0%} of the adapter's change when "
            f"they are rounded, {least} the least, {round(short[least], 3) + 0.0:.1%}{better}"
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

    def _write_floats(self, choice: Choice, sink: Sink) -> None:
        ((name, (dtype, _)),) = choice.outputs.items()
        values = self.values(choice.found)
        if choice.found.origin.turned:
            values = np.swapaxes(values, -1, -2)
        array = as_dtype(values, dtype)
        if not choice.found.origin.turned:
            self.note_kept(choice.found, values, lambda rows: float32(array[rows]))
        sink.put(name, np.ascontiguousarray(array))
