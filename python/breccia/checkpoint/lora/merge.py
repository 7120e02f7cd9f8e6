# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter merged into a checkpoint of any format that can be written, one tensor at a time.

What the adapter changes is dequantized, added to and quantized again to the recipe it had; all else is copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges, verbs
from breccia.bridges.common import bfloat16_bits, float32, global_scale
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.lora.adapters import Adapter, Change
from breccia.checkpoint.planning import shared_scales
from breccia.checkpoint.planning.targets import Choice, Target, requantized
from breccia.checkpoint.reading.models import is_stored_turned
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.workers import Workers
from breccia.checkpoint.writing import outputs
from breccia.checkpoint.writing.convert import Job, check_destination
from breccia.checkpoint.writing.execute import cast_for
from breccia.checkpoint.writing.finite import counted
from breccia.checkpoint.writing.losses import Loss
from breccia.checkpoint.writing.repack import repack
from breccia.checkpoint.writing.work import Work
from breccia.scaled_tensor import ScaledTensor

__all__ = ["merge_lora"]

_ROWS = 1024  # at a time
_FLOATS = ("F64", "F32", "F16", "BF16")


def merge_lora(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    seed: int | None = None,
    progress: bool = False,
    threads: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Merge a LoRA adapter of PEFT into a checkpoint, which keeps its format.

    Args:
        base: a safetensors file or a directory of them, quantized or not.
        adapter: a folder with adapter_config.json and adapter_model.safetensors.
        destination: a file, or a directory where the base is one; must not be there without ``force``.
        seed: round quantized weights up or down by chance, drawn with this seed, so that small changes are kept on
            average; None rounds to nearest.
        progress: draw a line on a terminal.
        threads: how many to use (default: one per core).
        force: replace what is at ``destination``, as `convert` does.

    Returns:
        What was done, of JSON types.

    Raises:
        ValueError: base or adapter is not valid, they do not fit, or the base's format cannot be written.
        FileExistsError: the destination is there, and ``force`` is not given.
        OSError: the disk is full or the like; nothing is left behind.
    """
    destination = path_of(destination, "destination")
    base, adapter = path_of(base, "base"), path_of(adapter, "adapter")
    check_destination(destination, base, adapter, force=force)
    with (
        contextlib.closing(Adapter.open(adapter)) as opened,
        contextlib.closing(Checkpoint(base, mapped=False)) as read,
    ):
        return _Merge(read, destination, opened, seed, progress, threads, force).run()


def _target(checkpoint: Checkpoint) -> Target:
    """The base's own format."""
    if checkpoint.container.whole:
        title = checkpoint.container.title
        raise ValueError(
            f"base must be of safetensors files, {checkpoint.path} is {title}: merge before converting to it"
        )
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

    def __init__(self, job: _Merge, parts: list[Found]) -> None:
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


class _Merge(Job):
    def __init__(
        self,
        checkpoint: Checkpoint,
        destination: Path,
        adapter: Adapter,
        seed: int | None,
        show: bool,
        threads: int | None,
        force: bool,
    ) -> None:
        self.adapter, self.seed = adapter, seed
        self.bad: dict[str, int] = {}
        known = {found.name: found for found in checkpoint.found}
        for name, change in adapter.changes.items():
            _check(name, change, known, checkpoint)
        super().__init__(checkpoint, destination, _target(checkpoint), show, threads, force)

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
        choices = list(self.choices)
        if self.target.bridge.readers.shared_global_scale:
            for members in shared_scales.fused(choices):
                if any(choices[i].action == "merge" for i in members):
                    group = _Group(self, [choices[i].found for i in members])
                    for i in members:
                        choices[i] = dataclasses.replace(self._merged(choices[i]), shared=group)
        return choices, []

    def _note_nothing(self) -> list[str]:
        return []

    def _identity(self) -> bytes:
        said = [super()._identity().hex(), repr(self.adapter.stamps), self.seed]
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
        found, recipe, group = choice.found, choice.recipe, choice.shared
        assert recipe is not None
        options: dict[str, Any] = {}
        if self.seed is not None:
            options = {"rounding": "stochastic", "seed": (self.seed + zlib.crc32(found.name.encode())) & 0x7FFFFFFF}
        if group is None:
            return cast_for(self.target, self.values(found), recipe, **options)
        second = group.second()
        if found.name not in self.adapter.changes:
            loaded = self.checkpoint.load(found)
            assert isinstance(loaded, ScaledTensor)
            own = global_scale(loaded, "multiplier")
            if own is not None and np.float32(own.reshape(-1)[0]) == second:
                return loaded
        amax = second * np.float32(448 * 6)
        return verbs.cast(self.values(found), recipe, amax=amax, **options)

    def _write_floats(self, choice: Choice, writer: PlannedWriter) -> None:
        ((name, (dtype, _)),) = choice.outputs.items()
        values = self.values(choice.found)
        if choice.found.origin.turned:
            values = np.swapaxes(values, -1, -2)
        kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
        array = bfloat16_bits(values) if dtype == "BF16" else values.astype(kinds[dtype])
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
    if found.format == "plain" and found.dtype not in _FLOATS:
        raise ValueError(f"tensor {name!r} must be of numbers, it is {found.dtype}")
    whole = change.whole is not None and is_stored_turned(name, change.whole.shape, checkpoint.config)
    shape = change.of(found).shape
    if (shape[::-1] if whole else shape) != found.shape:
        raise ValueError(f"adapter's change of {name!r} must have shape {found.shape}, it has {shape}")
