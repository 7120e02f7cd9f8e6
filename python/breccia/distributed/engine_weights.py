# SPDX-License-Identifier: Apache-2.0
"""The weights of a model that trains, as a serving engine loads them: the tensors that ``breccia convert`` would write
of the saved model, without the save."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from breccia.bridges.parts import STORED, Found
from breccia.checkpoint.files.dtypes import DTYPES, nbytes_of, torch_dtype
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.safetensors_header import Entry
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.plan import Planner
from breccia.checkpoint.planning.targets import Target, parse_target
from breccia.checkpoint.reading.logical import Plain, in_order
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.workers import Workers, thread_count
from breccia.checkpoint.writing.execute import cast_for, execute
from breccia.checkpoint.writing.repack import Sink, repack
from breccia.distributed.checkpoints.loading import stored_state
from breccia.distributed.checkpoints.reader import header_dtype
from breccia.distributed.gather import collectives, statistics
from breccia.distributed.sharding import Plan, deal, plan
from breccia.frameworks.torch.weights import LinearWeight
from breccia.nn import QuantizedLinear
from breccia.recipes import ScalingRecipe, choices
from breccia.scaled_tensor import ScaledTensor

__all__ = ["Refit", "refit"]

_ENGINES = ("vllm-", "sglang-")  # which load what compressed-tensors writes


def refit(
    model: torch.nn.Module,
    target: str,
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    threads: int | None = None,
) -> Refit:
    """The weights of a model, sharded or not, in the form that a serving engine's weight loader wants.

    Args:
        model: of floats; under ``fully_shard``, with DTensors, or whole.
        target: as of ``breccia convert --to``, such as ``"modelopt:nvfp4"``; ``"vllm-KEY"`` and ``"sglang-KEY"`` stand
            for ``"compressed-tensors:KEY"``.
        config: the model's config.json; ``model.config`` where that is None and the model has one.
        dtype: what to round float parameters to first, such as ``torch.bfloat16`` for float32 masters; None keeps
            theirs.
        include: as of `breccia.checkpoint.convert`.
        exclude: as of `breccia.checkpoint.convert`.
        threads: how many to use (default: one per core).

    Returns:
        An iterable of names and tensors. Nothing is gathered before it is iterated.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``, or a parameter has a dtype that no checkpoint has.
        ValueError: the target is unknown or a kind of file, or the model is quantized.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    engine = next((prefix for prefix in _ENGINES if isinstance(target, str) and target.startswith(prefix)), "")
    spelled = f"compressed-tensors:{target.removeprefix(engine)}" if engine else target
    parsed = parse_target(spelled, include=include, exclude=exclude)
    if parsed.bridge.container.whole:
        raise ValueError(f"target must be a format of tensors, got {target!r}, which is one of files")
    said = config
    if said is None:
        said = model.config.to_dict() if hasattr(getattr(model, "config", None), "to_dict") else {}
    return Refit(_Live(model, said, dtype), parsed, threads)


class Refit:
    """Names and tensors, in the order of the model's state dict. All ranks must iterate it alike: a sharded parameter
    is gathered when its turn comes, and let go of before the next. Where each rank holds whole blocks of what the
    target quantizes it to, it is cast there, and codes are gathered; otherwise its own numbers are.

    Attributes:
        expected: dtype and shape of every tensor, by name, known before any is made.
        quantization_config: what config.json says of them.
        notes: what was left as it is, and why.
    """

    def __init__(self, live: _Live, target: Target, threads: int | None) -> None:
        self._live, self._threads = live, thread_count(threads)
        plan = Planner(live, target).plan(Path("model.safetensors"))
        self._choices, self._target = plan.choices, plan.target
        self.notes = [*plan.notes, *(f"{one.found.name}: {one.note}" for one in plan.choices if one.note)]
        self.quantization_config = {} if target.float_dtype else plan.config.quantization
        self.expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for choice in self._choices:
            for name, (dtype, shape) in choice.outputs.items():
                self.expected[name] = torch_dtype(dtype), _shape_here(dtype, shape)
        self._given: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._given = {}
        with contextlib.closing(Workers(self._threads)) as workers:
            for choice in self._choices:
                memory = _Memory(choice.outputs)
                sink = Sink(memory, workers)
                scaled = self._live.codes(choice, self._target)
                if scaled is None:
                    self._live.hold(choice.found)
                    execute(self._live, choice, self._target, sink)
                else:
                    repack(scaled, choice, self._target, sink)
                for name, tensor in memory.tensors():
                    self._given[name] = _digest(tensor)
                    yield name, tensor

    def __len__(self) -> int:
        return len(self.expected)

    def check(self, written: Iterable[str] | Mapping[str, torch.Tensor] | None = None) -> None:
        """Check that every tensor was made, and that an engine wrote every one.

        Args:
            written: what the engine wrote: names as they were given, or tensors by these names, whose dtypes, shapes
                and bytes are compared. None checks only that the iteration came to its end.

        Raises:
            ValueError: a tensor is missing or too many, or differs; the message names it.
        """
        _same_names(self.expected, self._given, "the iteration must give")
        if written is None:
            return
        names = list(written)
        _same_names(self.expected, names, "the engine must have written")
        if not isinstance(written, Mapping):
            return
        for name, (dtype, shape) in self.expected.items():
            tensor = written[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"written[{name!r}] must be {dtype} of shape {shape}, got {tensor.dtype} of {tuple(tensor.shape)}"
                )
            if _digest(tensor) != self._given[name]:
                raise ValueError(f"written[{name!r}] must have the bytes that were given, it has others")


def _same_names(expected: Mapping[str, Any], names: Iterable[str], must: str) -> None:
    there = set(names)
    missing = [name for name in expected if name not in there]
    extra = sorted(there - expected.keys())
    if missing or extra:
        lacking = f"{len(missing)} of {len(expected)} tensors are missing, such as {missing[0]!r}" if missing else ""
        more = f"{len(extra)} are too many, such as {extra[0]!r}" if extra else ""
        raise ValueError(f"{must} every tensor once: {'; '.join(filter(None, (lacking, more)))}")


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return zlib.crc32(flat.numpy())


def _shape_here(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor that holds a stored one: elements below a byte are packed."""
    bits = DTYPES[dtype].bits
    return shape if bits >= 8 else (*shape[:-1], shape[-1] * bits // 8)


class _Memory(PlannedWriter):
    """Takes what a conversion writes to a file."""

    def __init__(self, plan: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.plan = plan
        self.memory = {name: np.empty(nbytes_of(dtype, shape), np.uint8) for name, (dtype, shape) in plan.items()}

    def write(self, name: str, array: np.ndarray[Any, Any], at: int = 0) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.memory[name][at : at + raw.size] = raw

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (dtype, shape) in self.plan.items():
            flat = torch.from_numpy(self.memory[name])
            yield name, flat.view(torch_dtype(dtype)).reshape(_shape_here(dtype, shape))


class _Live(Checkpoint):
    """A model's state dict as a checkpoint whose tensors are gathered when they are read."""

    def __init__(self, model: torch.nn.Module, config: Mapping[str, Any], dtype: torch.dtype | None) -> None:
        self.path, self.mapped, self.unmarked, self.sums = Path("model"), False, None, None
        self.files = [_NoFile()]  # type: ignore[list-item]
        self.config, self.index, self.stamps = dict(config), None, {}
        self.config.pop("quantization_config", None)
        self._held: dict[str, np.ndarray[Any, Any]] = {}
        self._dtype = dtype
        self._tensors = _tensors_of(model)
        self._apart = _Apart(model, self._tensors)
        self._tensors = self._apart.tensors
        self.entries = {name: self._entry(name, tensor) for name, tensor in self._tensors.items()}
        self.home = dict.fromkeys(self.entries, self.files[0])
        self.found = in_order((), set(), Plain(self.entries, self.home, self.config, {}))

    def _entry(self, name: str, tensor: torch.Tensor) -> Entry:
        try:
            dtype = header_dtype(self._rounded(tensor.dtype))
        except KeyError:
            raise TypeError(f"model: {name} must have a dtype that a checkpoint has, got {tensor.dtype}") from None
        shape = tuple(tensor.shape)
        return Entry(name, dtype, shape, 0, nbytes_of(dtype, shape))

    def _rounded(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    @property
    def quantization(self) -> dict[str, Any]:
        return {}

    def hold(self, found: Found) -> None:
        """Gather what a tensor is read from, on the thread that asks the other ranks."""
        for name in found.parts.values():
            self._whole(name)

    def codes(self, choice: Choice, target: Target) -> ScaledTensor | None:
        """What a parameter is cast to, of which each rank casts its rows; None where its floats must be gathered."""
        recipe = choice.recipe
        if choice.action != "cast" or recipe is None or choice.turned or not _may_be_cut(recipe, target):
            return None
        members = [choice.found] if choice.shared is None else [choice.found, *choice.shared.parts]
        dealt = [self._dealt(found, recipe) for found in members]
        if dealt[0] is None or any(one is None or one[1] != dealt[0][1] for one in dealt):
            return None
        dealt_out, group = dealt[0]
        parts = [self._part(found) for found in members]
        found = [one for one in statistics.amax(parts, recipe, group) if one is not None]
        made = cast_for(target, parts[0], recipe, amax=torch.stack(found).amax() if found else None)
        gathered: ScaledTensor = collectives.all_gather(made, group, plan=dealt_out)
        return gathered.map(torch.Tensor.cpu).to("numpy")

    def _dealt(self, found: Found, recipe: ScalingRecipe) -> tuple[Plan, Any] | None:
        """How a parameter's rows are dealt out, and the ranks; None where a block is, or it is cut in another way."""
        tensor = None if found.origin is not STORED else self._tensors[found.parts["weight"]]
        if not isinstance(tensor, DTensor) or tensor.ndim != 2:
            return None
        cuts = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if len(cuts) != 1 or not tensor.placements[cuts[0]].is_shard(0):
            return None
        group = tensor.device_mesh.get_group(cuts[0])
        world, shape = tensor.device_mesh.size(cuts[0]), tuple(tensor.shape)
        dealt = plan(shape, recipe, world)
        return (dealt, group) if dealt.ranges == deal(shape[0], 1, world) else None

    def _part(self, found: Found) -> torch.Tensor:
        """This rank's rows, as `breccia.checkpoint` reads them."""
        local = self._tensors[found.parts["weight"]].detach().to_local()
        local = local.mul(1) if isinstance(local, LinearWeight) else local  # the numbers alone
        local = local.to(self._rounded(local.dtype))
        return local.float() if local.dtype == torch.bfloat16 else local

    def _whole(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self._held:
            tensor = self._apart.tensor(name).detach()
            tensor = tensor.to(self._rounded(tensor.dtype))  # before it travels
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            tensor = tensor.cpu().contiguous()
            self._held[name] = tensor.reshape(-1).view(torch.uint8).numpy()
        return self._held[name]

    def span(self, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        return self._whole(name)[start:stop]

    def refined(self, found: Found) -> Found:
        return found

    def release(self, found: Found) -> None:
        self._held.clear()

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        self._held.clear()


def _may_be_cut(recipe: ScalingRecipe, target: Target) -> bool:
    """Whether rows may be cast on several ranks; not where one scale is looked for, or rounded, for all of them."""
    if not recipe.layout.one_scale:
        return True
    return not (
        choices(recipe).searches or target.bridge.readers.bfloat16_scales or not getattr(recipe, "symmetric", True)
    )


class _NoFile:
    """The file of tensors that are in none."""

    path, metadata, model = Path("model"), {}, None  # type: ignore[var-annotated]


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a checkpoint of the model has, each once."""
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            raise ValueError(f"model must have float weights, {path or 'it'} is quantized")
    first: dict[int, str] = {}
    twice = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }
    return {name: tensor for name, (own, tensor) in stored_state(model).items() if own not in twice}


class _Apart:
    """A model's tensors under the names that transformers saves: it has some of a layer as one, experts above all.
    These are cut when they are read, which a sharded one is gathered for once.

    Attributes:
        tensors: by these names; those that are cut have no numbers yet.
    """

    def __init__(self, model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
        self.tensors, self._state, self._model = state, state, model
        self._source: dict[str, str] = {}
        self._cut: tuple[str, dict[str, torch.Tensor]] = "", {}
        if not hasattr(model, "save_pretrained"):
            return
        shapes = {n: torch.empty(one.shape, dtype=one.dtype, device="meta") for n, one in state.items()}
        saved = self._saved(shapes)
        for name in state.keys() - saved.keys():
            self._source |= dict.fromkeys(self._saved({name: shapes[name]}), name)
        if saved.keys() != (state.keys() & saved.keys()) | self._source.keys():
            raise ValueError("model must have parameters that transformers saves one by one, some are saved together")
        self.tensors = {name: saved[name] if name in self._source else state[name] for name in saved}

    def _saved(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loading = importlib.import_module("transformers.core_model_loading")
        saved: dict[str, torch.Tensor] = loading.revert_weight_conversion(self._model, state)
        return saved

    def tensor(self, name: str) -> torch.Tensor:
        """One of them, with its numbers."""
        if name not in self._source:
            return self._state[name]
        source = self._source[name]
        if self._cut[0] != source:
            whole = self._state[source].detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            self._cut = source, self._saved({source: whole})
        return self._cut[1][name]
