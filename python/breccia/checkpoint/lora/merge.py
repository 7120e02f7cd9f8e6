# SPDX-License-Identifier: Apache-2.0
"""The merge of a LoRA adapter into a checkpoint of any format that can be written, one tensor at a time.

What the adapter changes is dequantized, added to and quantized again to the recipe it had; all else is copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from breccia import verbs
from breccia.bridges.common import float32
from breccia.bridges.outside import values
from breccia.bridges.parts import Found
from breccia.bridges.scales import global_scale
from breccia.checkpoint.arguments import existing, path_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.lora.adapters import Adapter, open_adapter
from breccia.checkpoint.lora.feedback import How, MergeRounding
from breccia.checkpoint.lora.plan import Group, MergePlanner
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.identity import Identity, digest
from breccia.checkpoint.reading.source import Checkpoint
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
