# SPDX-License-Identifier: Apache-2.0
"""Weights of codes at rest from checkpoints: codes as they are stored, or floats, quantized where they lie to the bytes
that the whole weight has there."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from breccia.distributed.fsdp import shards
from breccia.distributed.fsdp.resting import RestingWeight, packed_rows
from breccia.distributed.fsdp.shards import Shard


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
