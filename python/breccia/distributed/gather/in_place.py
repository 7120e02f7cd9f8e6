# SPDX-License-Identifier: Apache-2.0
"""Gathering equal parts along the first axis without a copy: the codes and scales of each rank go from where they lie
to their places in the whole.

    codes of rank 0 | codes of rank 1 | …        scales of rank 0 | scales of rank 1 | …

They travel in one operation.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from breccia.distributed.gather.agreement import has_one_scale
from breccia.distributed.gather.buffers import Slot, Wire, bytes_of
from breccia.distributed.gather.groups import Handle, members_of
from breccia.distributed.sharding import Plan
from breccia.frameworks.torch.launches import form_number
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS, Form


def suits(scaled: ScaledTensor, axis: int, extents: list[int]) -> bool:
    """Whether the whole's memory is that of the ranks' parts, one after the other."""
    return scaled.ndim > 1 and axis == -scaled.ndim and len(set(extents)) == 1 and extents[0] > 0


class Gathering(NamedTuple):
    """Where the parts of all ranks' tensors go, for tensors of one form."""

    world: int
    form: Form
    slots: dict[str, Slot]  # of the whole, for each part that there is
    single: tuple[str, ...]  # parts that have the same shape in the whole as on one rank

    @classmethod
    def of(cls, scaled: ScaledTensor, group: Any) -> Gathering:
        """For tensors like ``scaled`` along their first axis."""
        world = dist.get_world_size(group)
        whole = Wire(scaled, -scaled.ndim, scaled.shape[0] * world)
        slots = {name: slot for name, slot in zip(PARTS, whole.slots, strict=True) if slot is not None}
        single = tuple(name for name, slot in slots.items() if slot.shape == tuple(getattr(scaled, name).shape))
        return cls(world, scaled._form, slots, single)

    def start(self, scaled: ScaledTensor, group: Any) -> Handle:
        """A handle whose result is the whole; its ``wait()`` refuses ranks with different scales where the whole has
        one."""
        sent = [bytes_of(getattr(scaled, name)) for name in self.slots]
        everyone = [part.new_empty(self.world * part.numel()) for part in sent]
        work = members_of(group).allgather_into_tensor_coalesced(everyone, sent)

        def finish() -> ScaledTensor:
            made = {}
            for (name, slot), gathered in zip(self.slots.items(), everyone, strict=True):
                if name not in self.single:
                    made[name] = gathered.view(slot.dtype).view(slot.shape)
                    continue
                made[name] = getattr(scaled, name)
                if not has_one_scale(scaled, group):
                    _check_equal(gathered.view(self.world, -1), name)
            return ScaledTensor._of(self.form, **made)

        return Handle(work, finish, group)


def _check_equal(everyone: torch.Tensor, name: str) -> None:
    if not bool((everyone == everyone[:1]).all()):
        raise ValueError(
            f"ranks must hold parts with one {name}, for the whole has only one: cast with "
            f"amax=breccia.distributed.amax(...)"
        )


# By group: what repeats a gather by a plan, for tensors of a form.
_known: weakref.WeakKeyDictionary[Any, dict[Any, Gathering]] = weakref.WeakKeyDictionary()


def known(scaled: ScaledTensor, dim: int, dealt: Plan, group: Any) -> Gathering | None:
    """What `keep` remembered for tensors of this form."""
    gatherings = _known.get(members_of(group))
    return None if gatherings is None else gatherings.get((form_number(scaled), dim, dealt))


def keep(gathering: Gathering, scaled: ScaledTensor, dim: int, dealt: Plan, group: Any) -> None:
    """Remember how to gather tensors of this form by this plan, upon which all ranks have agreed."""
    _known.setdefault(members_of(group), {})[form_number(scaled), dim, dealt] = gathering
