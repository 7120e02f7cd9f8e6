# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell each other before they gather: that they hold parts of one tensor, and how long these are."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from breccia.distributed.gather.groups import called, gather_into, members_of, place, wait
from breccia.distributed.sharding import Plan
from breccia.frameworks.torch.meta import flatten
from breccia.scaled_tensor import ScaledTensor

# By group: the plans with which its ranks have gathered tensors of a form. Told once, not before each gather.
_agreed: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


Result = TypeVar("Result")


def on_all_ranks(do: Callable[[], Result], group: Any, alike: Callable[[Result], str] | None = None) -> Result:
    """Does something that asks no other rank, and tells all ranks how it went, so that none waits for one that failed:
    what ``do`` raised is raised here, and elsewhere a ValueError that names the rank. ``alike`` says of the result what
    must be the same on all ranks; ``group`` is None where they are all there are, or this process is alone."""
    error: BaseException | None = None
    said, key = "", ""
    try:
        result = do()
        key = "" if alike is None else alike(result)
    except BaseException as raised:
        error, said = raised, f"{type(raised).__name__}: {raised}"
    told: list[Any] = []
    if dist.is_available() and dist.is_initialized() and dist.get_rank(group) >= 0:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, (said, key), group=group)
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(told):
        if other:
            raise ValueError(f"rank {rank} of {called(group)} failed: {other}")
    for rank, (_, other) in enumerate(told):
        if other != key:
            raise ValueError(
                f"path must lead to one checkpoint on all ranks, but rank {rank} of {called(group)} sees another "
                f"than {place(group)}"
            )
    return result


def extents(scaled: ScaledTensor, axis: int, group: Any) -> list[int]:
    """How long the ranks' parts are along an axis, told by each of them; all refuse a part of another form."""
    of_ranks = tell([scaled.shape[axis], form(scaled, axis)], scaled.data.device, group)
    check_one("scaled must be a part of one tensor", [form for _, form in of_ranks], group)
    return [extent for extent, _ in of_ranks]


def check_alike(argument: str, form: Any, device: Any, group: Any) -> None:
    """Refuse, on all ranks, what differs between them: how an argument is made, as numbers and texts. They tell each
    other at the first of a form, whose sizes the backend would else not check or end the process for."""
    known, key = _agreed.setdefault(members_of(group), set()), (argument, str(form))
    if key not in known:
        numbers = tell([_number(key)], device, group)
        check_one(f"{argument} must be alike", [number for (number,) in numbers], group)
        known.add(key)


def tell(mine: list[int], device: Any, group: Any) -> list[list[int]]:
    """The numbers of each rank."""
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    everyone = sent.new_empty(len(mine) * dist.get_world_size(group))
    wait(gather_into(everyone, sent, group=group, async_op=True), group)
    numbers: list[list[int]] = everyone.reshape(-1, len(mine)).tolist()
    return numbers


def check_one(
    argument: str, told: list[int], group: Any, what: str = "has another recipe, layout, dtype or shape"
) -> None:
    """Refuse, on all ranks, what they told each other of an argument where it differs."""
    for rank, number in enumerate(told):
        if number != told[0]:
            raise ValueError(
                f"{argument} on all ranks, but rank {rank} {what} than rank 0 of {called(group)} "
                f"(seen by {place(group)})"
            )


def planned(scaled: ScaledTensor, axis: int, dealt: Plan, group: Any) -> list[int]:
    """How long the ranks' parts are, as a plan says. The first tensor of a form that a group gathers by a plan is
    checked on all ranks."""
    known = _agreed.setdefault(members_of(group), set())
    rest = [n for i, n in enumerate(scaled.shape) if i - scaled.ndim != axis]
    key = (scaled._form, tuple(rest), axis, scaled.data.dtype, scaled.scale.dtype, dealt)
    lengths = [end - begin for begin, end in dealt.ranges]
    if key not in known:
        for rank, extent in enumerate(extents(scaled, axis, group)):
            if rank >= len(lengths) or extent != lengths[rank]:
                wanted = dealt.shape_of(rank) if rank < len(lengths) else "nothing"
                raise ValueError(
                    f"scaled must be the part that the plan gives its rank, but rank {rank} of {called(group)} has "
                    f"{extent} along dim {axis + scaled.ndim} where the plan gives it {wanted}"
                )
    wanted = dealt.shape_of(dist.get_rank(group))
    if dealt.dim - len(dealt.shape) != axis or scaled.shape != wanted:
        raise ValueError(
            f"scaled must be the part that the plan gives {place(group)}, {wanted} along dim {dealt.dim}, "
            f"got {scaled.shape} along dim {axis + scaled.ndim}"
        )
    known.add(key)
    return lengths


def note_one_scale(scaled: ScaledTensor, group: Any) -> None:
    """Note that the ranks of the group made the scale of this part together, so that nobody need compare it."""
    scaled.__dict__["_one_scale"] = weakref.ref(members_of(group))


def has_one_scale(scaled: ScaledTensor, group: Any) -> bool:
    """Whether `note_one_scale` noted so."""
    noted = scaled.__dict__.get("_one_scale")
    return noted is not None and noted() is members_of(group)


def form(scaled: ScaledTensor, axis: int) -> int:
    """What the parts of one tensor have in common."""
    _, key = flatten(scaled)
    recipe, layout, packing, dtype, flags = key.split("|")
    if axis == -1 and packing == "odd":
        packing = "two"
    shape = [n for i, n in enumerate(scaled.shape) if i - scaled.ndim != axis]
    return _number([recipe, layout, packing, dtype, flags, shape, [str(scaled.data.dtype), str(scaled.scale.dtype)]])


def _number(form: Any) -> int:
    """A form as a number of 62 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(form).encode()).digest()[:8], "little") >> 2
