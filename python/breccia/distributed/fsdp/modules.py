# SPDX-License-Identifier: Apache-2.0
"""Quantized models under FSDP2; and weights of codes at rest from checkpoints: codes as they are stored, or floats,
quantized where they lie to the bytes that the whole weight has there."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from breccia.distributed.fsdp import shards
from breccia.distributed.fsdp.parameters import ScaledParameter
from breccia.distributed.fsdp.resting import RestingWeight, packed_rows
from breccia.distributed.fsdp.shards import Shard
from breccia.frameworks.torch.weights import LinearWeight
from breccia.nn import QuantizedLinear, ScaledLinear


def resting_in(parameter: Any) -> RestingWeight | None:
    """The weight of codes at rest that a parameter is, or has on this rank; None where it is another."""
    local = getattr(parameter, "_local_tensor", parameter)
    return local if isinstance(local, RestingWeight) else None


class Codes:
    """Fills a weight with the codes that a checkpoint has of it: `state` has uint8 tensors, or DTensors, to read into,
    by the ends of their names."""

    def __init__(self, parameter: Any) -> None:
        self._weight = weight = resting_in(parameter)
        assert weight is not None
        packing, at = weight._packing, 0
        self.state: dict[str, Any] = {f"_{name}": part for name, part in weight._shared.items()}
        self._wide: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, size, _ in packing.parts:
            here = weight._rows[:, at : at + size]
            at += size
            if name == "data" or packing.rows_of_scale == 1:
                self.state[f"_{name}"] = _dealt(parameter, here, (packing.shape[0], size))
                continue
            rows = -(-packing.shape[0] // packing.rows_of_scale)  # each rank reads them all, and keeps its own
            everyone = self.state[f"_{name}"] = here.new_zeros(rows, size)
            self._wide.append((here, everyone))
        self._begin = _begin(parameter)

    def finish(self) -> None:
        """Call when all is read."""
        if self._wide and self._weight is not None:
            rows = torch.arange(self._weight._rows.shape[0], device=self._weight.device) + self._begin
            for here, everyone in self._wide:
                here.copy_(everyone[rows // self._weight._packing.rows_of_scale])


class Floats:
    """Fills a weight with the codes of a checkpoint's values, for which `state` has a tensor of floats."""

    def __init__(self, parameter: Any) -> None:
        weight = resting_in(parameter)
        assert weight is not None
        self._parameter, self._values = parameter, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        self.state = {"": _dealt(parameter, self._values, weight._packing.shape)}

    def finish(self) -> None:
        """Call when all is read, on all ranks."""
        cast_into(self._parameter, self._values)


def cast_into(parameter: Any, values: torch.Tensor) -> None:
    """Quantize this rank's rows of a weight; all ranks that shard it call together."""
    weight = resting_in(parameter)
    assert weight is not None
    if not isinstance(parameter, DTensor):
        weight.copy_(values)
        return
    packing = weight._packing
    group = shards.mesh_of(parameter).get_group()
    shard = Shard(packing.form.recipe, packing.square_blocks, packing.shape, tuple(weight.shape), group)
    values = values.detach().to(weight.device, weight.dtype)
    agreed = shards.reduced([shard.statistics(values)], group)[0]
    weight.take_(*packed_rows(shard.cast(values, agreed))[::2])


def before_load(layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Before a layer loads: quantize floats of its weight, of which each rank is given its rows."""
    given, held = state_dict.get(f"{prefix}weight"), layer.weight
    if not isinstance(given, DTensor) or resting_in(given) is not None or not isinstance(held, DTensor):
        return
    if resting_in(held) is None or given.shape != held.shape:
        return  # torch says what is wrong with the shape
    with torch.no_grad():
        cast_into(held, given.redistribute(held.device_mesh, held.placements).to_local())
    state_dict[f"{prefix}weight"] = held


def _dealt(parameter: Any, local: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """A tensor that is dealt out as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    size = {"shape": torch.Size(shape), "stride": (shape[1], 1)}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **size)


def _begin(parameter: Any) -> int:
    """The first of this rank's rows."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = shards.mesh_of(parameter)
    each = -(-parameter.shape[0] // mesh.size())
    return int(min(mesh.get_local_rank() * each, parameter.shape[0]))


def make_shardable_(model: torch.nn.Module, *, at_rest: str = "bf16") -> torch.nn.Module:
    """Make the layers of a model ones that ``torch.distributed.fsdp.fully_shard`` shards, and gathers as codes.

    The ranks then hold their rows, and the gather before each layer's products moves codes and scales, in one
    collective for all layers of an FSDP unit.

    - `breccia.nn.QuantizedLinear`: the ranks hold bytes, and checkpoints of ``torch.distributed.checkpoint`` hold the
      same; they load on any number of ranks.
    - `breccia.nn.ScaledLinear`, which trains: the weight becomes a `ScaledParameter`; the ranks hold floats, and so do
      checkpoints. A weight that a module of another kind uses too, an embedding say, stays as it is.
    - With ``at_rest="codes"`` its checkpoints hold codes; its ``load_state_dict`` takes these as they are, and
      quantizes floats as the whole weight would be.

    Args:
        model: changed in place; call it before ``fully_shard``, after ``parallelize_module``.
        at_rest: of `ScaledParameter`: "bf16", or "codes" for layers that do not learn.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``, or a layer takes its weight's scale from a history.
        ValueError: it has no such layer, or a weight does not suit its recipe.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, (QuantizedLinear, ScaledLinear))
    }
    if not layers:
        raise ValueError(
            "model must have a breccia.nn.QuantizedLinear or ScaledLinear: quantize it with breccia.quantize_ first"
        )
    made: dict[int, Any] = {}
    for name, layer in layers.items():
        if isinstance(layer, QuantizedLinear):
            layer.make_shardable_()
        elif id(layer.weight) not in made:
            made[id(layer.weight)] = _parameter(name, layer, at_rest)
    for module in model.modules():
        if not isinstance(module, ScaledLinear):
            made |= {id(own): own for own in module.parameters(recurse=False)}
    for layer in layers.values():
        if isinstance(layer, ScaledLinear):
            layer.weight = made[id(layer.weight)]
            if isinstance(layer.weight, RestingWeight):
                layer.register_load_state_dict_pre_hook(before_load)
    return model


def _parameter(name: str, layer: ScaledLinear, at_rest: str) -> Any:
    if isinstance(getattr(layer.weight, "_local_tensor", layer.weight), LinearWeight):
        return layer.weight
    recipes = layer.recipes
    try:
        return ScaledParameter(layer.weight, recipes.w, at_rest, square_blocks=recipes.square_weights)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}.weight cannot be sharded as codes: {error}") from None
