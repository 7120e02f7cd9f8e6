# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format into models, sharded or not, without a whole model on any rank."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from breccia.bridges.parts import Found
from breccia.bridges.written import same_grid
from breccia.distributed.checkpoints.reader import CheckpointReader
from breccia.distributed.fsdp.modules import Codes, Floats, resting_in
from breccia.distributed.gather.agreement import on_all_ranks
from breccia.nn import QuantizedLinear, ScaledLinear
from breccia.nn.states import MEANING
from breccia.value.form import PARTS

__all__ = ["load", "quantize_as_"]

_AT_A_TIME = 1 << 30  # values, of all ranks together, from which codes at rest are made
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # of torch.compile and the like


def stored_name(name: str) -> str:
    """A tensor's or module's name without those of modules that only wrap another."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def stored_state(model: torch.nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    """Tensors by their names in a checkpoint, with those in the model; without histories of scales, which are a
    training run's own, and without texts about codes."""
    own = {
        f"{path}.{name}".lstrip(".")
        for path, layer in model.named_modules()
        if isinstance(layer, (ScaledLinear, QuantizedLinear))
        for name in (layer._buffers if isinstance(layer, ScaledLinear) else (MEANING,))
    }
    return {
        stored_name(name): (name, tensor)
        for name, tensor in model.state_dict().items()
        if name not in own and isinstance(tensor, torch.Tensor)
    }


def load(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    names: Callable[[str], str] | None = None,
    process_group: Any = None,
) -> torch.nn.Module:
    """Fill a model from a checkpoint of any format: float parameters with the values, quantized layers with the codes
    as they are. Each rank reads, and dequantizes, its own rows. A `ScaledParameter` of ``at_rest="codes"`` gets codes
    of its recipe as they are, and has other values quantized as the whole weight would be.

    Args:
        model: filled in place; under ``fully_shard``, with DTensors, or whole. All ranks must call.
        path: a safetensors file, a directory of them, or a GGUF file, which every rank can read.
        names: the model's name of each of the checkpoint's tensors, where it has another.
        process_group: the ranks; all of them by default.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
        ValueError: a quantized layer's recipe is not the checkpoint's, shapes differ, a parameter is in no file, or
            another rank sees one of these, or another checkpoint.
        OSError: a file cannot be read.
    """
    with contextlib.closing(CheckpointReader(path, names=names)) as reader:
        found, state = on_all_ranks(lambda: _checked(model, reader), process_group, lambda told: _key(told[0]))
        resting = {name: held for name, held in state.items() if resting_in(held) is not None}
        rest = {name: held for name, held in state.items() if name not in resting}
        _fill(rest, reader, process_group)
        for some in _at_a_time(resting):
            fillers = on_all_ranks(lambda some=some: _fillers(some, found), process_group)  # type: ignore[misc]
            parts = {name + end: part for name, one in fillers.items() for end, part in one.state.items()}
            _fill(parts, reader, process_group)
            with torch.no_grad():
                for one in fillers.values():
                    one.finish()
    return model


def _fillers(state: dict[str, torch.Tensor], found: dict[str, Found]) -> dict[str, Codes | Floats]:
    return {name: _filler(held, found.get(name)) for name, held in state.items()}


def _checked(model: Any, reader: CheckpointReader) -> tuple[dict[str, Found], dict[str, Any]]:
    """What the checkpoint has, and the tensors of the model to fill, which fit; no other rank is asked."""
    found = _found(model, reader)
    state = {name: tensor for name, (_, tensor) in stored_state(model).items()}
    _check_recipes(model, found)
    for layer_name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            for part in PARTS:
                name = stored_name(f"{layer_name}.weight_{part}" if layer_name else f"weight_{part}")
                held = state.get(name)
                if isinstance(held, torch.Tensor) and held.ndim and held.dtype != torch.uint8:
                    state[name] = held.view(torch.uint8)  # the same memory
    _check_all_are_there(state, reader)
    return found, state


def _key(found: dict[str, Found]) -> str:
    """What is the same of one checkpoint on all ranks."""
    said = [(name, one.format, one.kind, tuple(one.shape), one.dtype) for name, one in found.items()]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _fill(state: dict[str, Any], reader: CheckpointReader, group: Any) -> None:
    """Reads into tensors, on all ranks together, which all raise what one of them met."""
    try:
        dcp.load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # which is no Exception
        rank, (met, _) = min(error.failures.items(), key=lambda one: one[0])
        at = f"rank {rank}: " if len(error.failures) > 1 or rank else ""
        if isinstance(met, OSError):
            raise OSError(met.errno, f"{at}{met.strerror or met}") from error
        for kind in (MemoryError, KeyboardInterrupt):
            if isinstance(met, kind):
                raise kind(f"{at}{met}") from error
        kind_of = "" if isinstance(met, ValueError) else f"{type(met).__name__}: "
        raise ValueError(f"{at}{kind_of}{met}") from error


def _filler(parameter: torch.Tensor, found: Found | None) -> Codes | Floats:
    """What fills a weight of codes at rest from a checkpoint's tensor: codes as they are where both have the same."""
    weight = resting_in(parameter)
    assert weight is not None
    packing = weight._packing
    if found is None or found.recipe is None or packing.square_blocks or found.layout != packing.form.layout:
        return Floats(parameter)
    stored = found.ghost().to("torch")
    alike = (
        same_grid(found.recipe, packing.form.recipe)
        and tuple(found.shape) == packing.shape
        and stored._form.parts == packing.form.parts
        and all(getattr(stored, name).dtype == dtype for name, _, dtype in packing.parts)
    )
    return Codes(parameter) if alike else Floats(parameter)


def _at_a_time(state: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors whose values may be in memory together, on all ranks the same."""
    some: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if some and sum(one.numel() for one in some.values()) + tensor.numel() > _AT_A_TIME:
            yield some
            some = {}
        some[name] = tensor
    if some:
        yield some


def quantize_as_(
    model: torch.nn.Module, path: str | os.PathLike[str], *, names: Callable[[str], str] | None = None
) -> torch.nn.Module:
    """Put a `breccia.nn.QuantizedLinear` of the checkpoint's recipe in the place of each ``torch.nn.Linear`` whose
    weight is quantized there, for ``fully_shard`` to shard and `load` to fill. Headers alone are read, and memory for
    the codes is not touched before the model is filled, so that each rank takes what its shards need.

    Args:
        model: changed in place; its parameters may be on the meta device.
        path: as for `load`.
        names: as for `load`.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
        ValueError: a weight has another shape in the checkpoint, or no layer is quantized there.
    """
    reader = CheckpointReader(path, names=names)
    found = _found(model, reader)
    reader.close()
    made = 0
    for path_in_model, parent in list(model.named_modules()):
        for name, child in list(parent._modules.items()):
            full = f"{path_in_model}.{name}" if path_in_model else name
            one = found.get(stored_name(f"{full}.weight"))
            if type(child) is not torch.nn.Linear or one is None or one.recipe is None:
                continue
            shape = tuple(child.weight.shape)
            if shape != one.shape:
                raise ValueError(f"model: {full}.weight must have the checkpoint's shape {one.shape}, got {shape}")
            layer = QuantizedLinear(one.ghost().to("torch"))
            layer.bias = child.bias
            parent._modules[name] = layer.train(child.training).make_shardable_()
            made += 1
    if not made:
        raise ValueError(f"model must have a torch.nn.Linear that is quantized in {path}, it has none")
    return model


def _found(model: Any, reader: CheckpointReader) -> dict[str, Found]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return reader.found()


def _check_recipes(model: torch.nn.Module, found: dict[str, Found]) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        one = found.get(stored_name(f"{name}.weight" if name else "weight"))
        if one is None:
            continue  # `_check_all_are_there` names it
        if one.recipe is None or not same_grid(one.recipe, layer.recipe) or one.layout != layer._form.layout:
            stored = one.recipe or f"a {one.kind} tensor without a recipe"
            raise ValueError(
                f"model: {name} must have the checkpoint's recipe for its codes, {stored}, got {layer.recipe}: "
                f"make it with breccia.distributed.quantize_as_"
            )


def _check_all_are_there(state: dict[str, Any], reader: CheckpointReader) -> None:
    """Whether the checkpoint has every tensor, in its shape."""
    there = reader.read_metadata().state_dict_metadata
    missing = [name for name in state if name not in there]
    if missing:
        raise ValueError(
            f"model must have parameters that are in {reader.path}, {len(missing)} of {len(state)} are not, "
            f"such as {missing[0]!r}"
        )
    for name, held in state.items():
        size = getattr(there[name], "size", None)
        if isinstance(held, torch.Tensor) and size is not None and tuple(held.shape) != tuple(size):
            raise ValueError(f"model: {name} must have the checkpoint's shape {tuple(size)}, got {tuple(held.shape)}")
