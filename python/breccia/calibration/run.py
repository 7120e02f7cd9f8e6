# SPDX-License-Identifier: Apache-2.0
"""`breccia.calibrate`: batches through the model, sums of what its layers are given."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from breccia.calibration.fused import FusedExperts, fused_experts, products_of, untouched
from breccia.calibration.inputs import (
    Watch,
    evaluating,
    linear_layers,
    rows_of,
    run_batch,
    shared,
    tied_layers,
    watching,
)
from breccia.calibration.levels import LEVELS, Choice, StackedSums, Sums, choose, is_expert
from breccia.checkpoint.arguments import count_of, path_of
from breccia.checkpoint.files.safetensors_file import SafetensorsFile, save_arrays
from breccia.checkpoint.files.sums import checksum
from breccia.moments import Moments

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_ROWS_A_COLUMN = 4  # fewer rows than so many times K leave the smallest directions of H to chance
_CACHED = ("k_proj", "v_proj")
Result = tuple[dict[str, Moments], dict[str, float], dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """What `breccia.calibrate` was asked for."""

    level: str
    memory: int | None
    block: int
    dtype: torch.dtype
    state: Path | None
    state_seconds: float

    @classmethod
    def checked(cls, level: str, memory: Any, block: Any, dtype: str, state: Any, state_seconds: float) -> Options:
        """The options. Raises TypeError where one is of a wrong type, ValueError where one has a value it cannot
        have."""
        if level not in LEVELS:
            raise ValueError(f"level must be 'diag', 'block' or 'full', got {level!r}")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
        bound = None if memory is None else count_of(memory, "memory")
        path = None if state is None else path_of(state, "state")
        return cls(level, bound, count_of(block, "block"), _DTYPES[dtype], path, state_seconds)


class Record:
    """The sums of a model's inputs, batch after batch. ``first``: layer → the first layer that has the same input;
    ``experts``: parameter of fused experts → what it is, of those that were multiplied with something."""

    def __init__(
        self,
        model: torch.nn.Module,
        first: Mapping[str, str],
        options: Options,
        experts: dict[str, FusedExperts],
        columns: Mapping[str, int],
    ) -> None:
        self._model, self.first, self._options = model, dict(first), options
        self.experts = {name: experts[name] for name in columns}
        self.widths = {**linear_layers(model), **columns}
        inputs = {leader: self.widths[leader] for leader in (*dict.fromkeys(first.values()), *columns)}
        counts = {name: one.count for name, one in self.experts.items()}
        itemsize = options.dtype.itemsize
        self.choice: Choice = choose(inputs, options.level, options.memory, options.block, itemsize, counts)
        self.sums = {name: Sums(inputs[name], *self._kept(name)) for name in inputs if name not in counts}
        self.stacks = {name: StackedSums(count, inputs[name], *self._kept(name)) for name, count in counts.items()}
        self.output_amax = {name: 0.0 for name in first if name.rpartition(".")[2] in _CACHED}
        self.batches = self.tokens = 0
        self.seen = hashlib.sha256()  # of the batches
        self._expected = ""

    def _kept(self, name: str) -> tuple[str, int, torch.dtype]:
        return self.choice.levels[name], self._options.block, self._options.dtype

    def skip(self, batch: Any, last: bool) -> None:
        """Pass one batch that the sums have, perhaps the last of them. Raises ValueError where they were of other
        batches."""
        _digest(self.seen, batch)
        if last and self.seen.hexdigest() != self._expected:
            raise ValueError(f"{self._options.state}: state must be of these batches, it is of others: remove the file")

    def add(self, batch: Any) -> None:
        """Run the model over one batch."""
        _digest(self.seen, batch)
        mask = _mask(batch)
        watch = Watch()

        def seen(name: str, x: torch.Tensor) -> None:
            given, leader = watch.first(name, x), self.first[name]
            if given == name == leader:
                self.sums[leader].add(rows_of(x, mask, name))
            elif self.first[given] != leader or given == name:
                raise ValueError(
                    f"batches must take one way through the model: {name} and {leader} had one input in the first, and "
                    f"have not in batch {self.batches}"
                )

        amax: dict[str, torch.Tensor] = {}

        def after(name: str, y: torch.Tensor) -> None:
            if len(rows := rows_of(y, mask, name)):
                amax[name] = rows.abs().amax()

        def multiplied(name: str, expert: int, rows: torch.Tensor) -> None:
            if mask is not None:
                raise ValueError(
                    f"batches must have no padding where {name} is given rows of tokens that a router chose: which of "
                    f"them are padding cannot be told; let all texts of a batch have one length"
                )
            self.stacks[name].add(expert, rows)

        layers = watching(self._model, list(self.first), seen, after, list(self.output_amax))
        with layers, products_of(self._model, self.experts, multiplied):
            run_batch(self._model, batch)
        for name, value in amax.items():
            self.output_amax[name] = max(self.output_amax[name], float(value))
        self.batches += 1
        self.tokens += _tokens(batch, mask)

    def _key(self) -> str:
        """What another run must have in common to go on from this one's sums."""
        said = [self.first, self.choice.levels, self.widths, self._options.block, str(self._options.dtype)]
        return hashlib.sha256(json.dumps([*said, self._of_model]).encode()).hexdigest()

    @functools.cached_property
    def _of_model(self) -> list[Any]:
        """What tells one model from another: every parameter and buffer."""
        every = (*self._model.named_parameters(), *self._model.named_buffers())
        return [[name, list(value.shape), str(value.dtype), _checksum(value)] for name, value in every]

    def save(self, path: Path) -> None:
        """Write the sums to a file, which appears when it is complete."""
        every: dict[str, Sums | StackedSums] = {**self.sums, **self.stacks}
        arrays = {f"{name}/{part}": array for name, s in every.items() for part, array in s.arrays().items()}
        said = {"batches": self.batches, "tokens": self.tokens, "output_amax": self.output_amax, "key": self._key()}
        said["seen"] = self.seen.hexdigest()
        save_arrays(arrays, path, {"breccia.calibration.state": json.dumps(said)})

    def load(self, path: Path) -> None:
        """Go on from the sums of a file. Raises ValueError where it is of another model or of other options, or no such
        file."""
        with SafetensorsFile(path) as file:
            said = json.loads(file.metadata.get("breccia.calibration.state", "{}"))
            if said.get("key") != self._key():
                raise ValueError(f"{path}: state must be of the same model, level, memory and dtype: remove the file")
            parts: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
            for key in file:
                name, _, part = key.rpartition("/")
                parts.setdefault(name, {})[part] = file[key]
            for name, sums in self.sums.items():
                sums.put(parts[name])
            for name, stack in self.stacks.items():
                stack.put(parts[name])
        self.batches, self.tokens = said["batches"], said["tokens"]
        self.output_amax, self._expected = said["output_amax"], said["seen"]


def _checksum(value: torch.Tensor) -> int:
    """Of a tensor's bytes; 0 where they are not in memory."""
    if value.is_meta or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    rows = value.detach().reshape(-1)
    found, step = 0, 1 << 24
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].cpu().contiguous().view(torch.uint8).numpy()
        found += checksum(piece, start * value.element_size())
    return found % 2**64


def _mask(batch: Any) -> torch.Tensor | None:
    """Where a batch has tokens, bool (batch, tokens); None where it has no padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(f"attention_mask must be (batch, tokens), got shape {tuple(mask.shape)}")
    return None if bool((mask != 0).all()) else mask != 0


def _tokens(batch: Any, mask: torch.Tensor | None) -> int:
    if mask is not None:
        return int(mask.sum())
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else (batch,)
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return 0 if first is None else math.prod(first.shape[:2])


def _digest(into: Any, value: Any) -> None:
    """Add a tensor, or all that a batch has, to a hash."""
    if isinstance(value, torch.Tensor):
        into.update(f"{tuple(value.shape)}{value.dtype}".encode())
        into.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            into.update(repr(key).encode())
            _digest(into, item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _digest(into, item)
    else:
        into.update(repr(value).encode())


def run(model: torch.nn.Module, batches: Iterable[Any], options: Options, keep: bool = False) -> Result:
    """The parts of a `Calibration`, see `breccia.calibrate`; ``keep``: leave the state, which the caller removes when
    it has written the result."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    names = list(linear_layers(model))
    if not names:
        raise ValueError(f"model must have a torch.nn.Linear, {type(model).__name__} has none")
    with evaluating(model):
        record = _recorded(model, names, batches, options)
    found = _result(record, names, tied_layers(model))
    if options.state is not None and not keep:
        options.state.unlink(missing_ok=True)
    return found


def _recorded(model: torch.nn.Module, names: list[str], batches: Iterable[Any], options: Options) -> Record:
    record, done, state = None, 0, options.state
    saved = time.monotonic()
    for number, batch in enumerate(batches):
        if record is None:
            experts = fused_experts(model)
            first, columns = shared(model, names, batch, experts)
            record = Record(model, first, options, experts, columns)
            if state is not None and os.path.exists(state):
                record.load(state)
            done = record.batches
        if number < done:
            record.skip(batch, number + 1 == done)
            continue
        record.add(batch)
        if state is not None and time.monotonic() - saved >= options.state_seconds:
            record.save(state)
            saved = time.monotonic()
    if record is None:
        raise ValueError("batches must have at least one, got none")
    if record.batches > number + 1:
        raise ValueError(f"{state}: state must be of these batches, of which there are {number + 1}: remove the file")
    return record


def _result(record: Record, names: list[str], tied: Mapping[str, str]) -> Result:
    """``tied``: layer → the embedding whose weight it has, under whose name its moments stand."""
    made: dict[str, Moments] = {leader: sums.moments() for leader, sums in record.sums.items()}
    stacks = {name: stack.moments() for name, stack in record.stacks.items()}
    for leader, moments in (made | stacks).items():
        if not np.isfinite(moments.arrays()["amax"]).all() or not np.isfinite(moments.diag).all():
            raise ValueError(f"inputs of {leader} must be finite, and their squares in float32, they are not")
    apart = {f"{name} {i}": m.expert(i) for name, m in stacks.items() for i in range(m.experts or 0)}
    notes = list(record.choice.notes)
    if unused := [name for name in names if name not in record.first]:
        why = "not run in the first batch and"
        notes.append(_said(unused, f"layer was {why} has", f"layers were {why} have"))
    if modules := untouched(fused_experts(record._model), set(stacks)):
        why = "experts in one tensor and"
        notes.append(_said(modules, f"module keeps {why} has", f"modules keep {why} have"))
    idle = [name for name, m in (made | apart).items() if (name in apart or is_expert(name)) and not m.count]
    made |= apart
    if idle:
        notes.append(f"{len(idle)} inputs of experts have seen no token, the first: {idle[0]}")
    short = {leader: int(m.count) for leader, m in made.items() if m.count < _ROWS_A_COLUMN * m.columns}
    if short:
        worst = min(short, key=lambda leader: short[leader] / made[leader].columns)
        few = f"the least has {short[worst]:,} for K = {made[worst].columns:,} ({worst})"
        notes.append(f"{len(short)} of {len(made)} inputs have seen fewer than 4 K rows, {few}")
        warnings.warn(f"more data is needed: {notes[-1]}", stacklevel=4)
    levels = {level: sum(m.level == level for m in made.values()) for level in LEVELS}
    report = {"batches": record.batches, "tokens": record.tokens, "inputs": levels, "notes": notes}
    by_name = {tied.get(name, name): made[record.first[name]] for name in names if name in record.first} | stacks
    return by_name, record.output_amax, report


def _said(names: list[str], one: str, many: str) -> str:
    """Who has no moments, and the first of them."""
    return f"{len(names)} {many if names[1:] else one} no moments: {names[0]}"
