# SPDX-License-Identifier: Apache-2.0
"""What becomes of each tensor when a LoRA adapter is merged: what it changes keeps its recipe, all else is copied."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from breccia import bridges, recipes
from breccia.bridges.parts import Found
from breccia.bridges.scales import global_scale
from breccia.checkpoint.device import Device
from breccia.checkpoint.lora.adapters import Adapter, Change
from breccia.checkpoint.lora.feedback import MergeRounding
from breccia.checkpoint.planning.choices import Choice, requantized
from breccia.checkpoint.planning.plan import Plan, Planner
from breccia.checkpoint.planning.remarks import some
from breccia.checkpoint.planning.rotations import KEYS, rotations_of
from breccia.checkpoint.planning.shared_scales import fused
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.models import is_stored_turned
from breccia.checkpoint.reading.source import Checkpoint
from breccia.scaled_tensor import ScaledTensor

FLOATS = ("F64", "F32", "F16", "BF16")


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
        return _target(checkpoint)

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


def _target(checkpoint: Checkpoint) -> Target:
    """The base's own format."""
    formats = sorted(checkpoint.found.formats)
    if not formats:
        return Target("merge-lora", exclude=("*",))
    bridge = bridges.bridge(formats[0])
    if len(formats) > 1 or not bridge.writes:
        raise ValueError(f"base must be in one format that is written here, it is in {', '.join(formats)}")
    default = next(iter(bridge.recipes.values()), None)
    return Target("merge-lora", format=formats[0], default=default)


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
