# SPDX-License-Identifier: Apache-2.0
"""Gathering equal parts along the first axis without a copy: the codes and scales of each rank go from where they lie
to their places in the whole.

    codes of rank 0 | codes of rank 1 | …        scales of rank 0 | scales of rank 1 | …

They travel in one operation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from breccia.distributed.buffers import Wire, bytes_of
from breccia.distributed.handle import Handle
from breccia.form import PARTS
from breccia.scaled_tensor import ScaledTensor


def suits(scaled: ScaledTensor, axis: int, extents: list[int]) -> bool:
    """Whether the whole's memory is that of the ranks' parts, one after the other."""
    return scaled.ndim > 1 and axis == -scaled.ndim and len(set(extents)) == 1 and extents[0] > 0


def gather(scaled: ScaledTensor, group: Any) -> Handle:
    """A handle whose result is the whole, of parts that `suits` told to be equal.

    Raises:
        ValueError: from ``wait()``, where the ranks have different scales and the whole can have only one.
    """
    world = dist.get_world_size(group)
    whole = Wire(scaled, -scaled.ndim, scaled.shape[0] * world)
    made: dict[str, torch.Tensor] = {}
    shared: dict[str, torch.Tensor] = {}
    pairs = []
    for name, slot in zip(PARTS, whole.slots, strict=True):
        if slot is None:
            continue
        part = getattr(scaled, name)
        sent = bytes_of(part)
        everyone = sent.new_empty(world * sent.numel())
        pairs.append((everyone, sent))
        if slot.shape == tuple(part.shape):
            shared[name] = everyone.reshape(world, -1)
            made[name] = part
        else:
            made[name] = everyone.view(slot.dtype).reshape(slot.shape)
    members = dist.group.WORLD if group is None else group
    work = members.allgather_into_tensor_coalesced([into for into, _ in pairs], [sent for _, sent in pairs])

    def finish() -> ScaledTensor:
        for name, everyone in shared.items():
            if not bool((everyone == everyone[:1]).all()):
                raise ValueError(
                    f"ranks must hold parts with one {name}, for the whole has only one: cast with "
                    f"amax=breccia.distributed.amax(...)"
                )
        return whole.of(made)

    return Handle(work, finish)
