# SPDX-License-Identifier: Apache-2.0
"""Process groups: checks, how messages call a rank, how one that fails tells those that wait for it, and what an
asynchronous collective returns."""

from __future__ import annotations

import datetime
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist


def check_group(group: Any) -> None:
    """Raise RuntimeError unless ``torch.distributed`` runs, ValueError where this process is not in the group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must have this process, rank {dist.get_rank()}, among its ranks")


def check_tensor(x: Any, argument: str) -> None:
    """Raise TypeError unless x is a torch tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{argument} must be a torch tensor, got {type(x).__name__}")


def members_of(group: Any) -> Any:
    """The process group itself, where None stands for that of all ranks."""
    return dist.group.WORLD if group is None else group


def place(group: Any) -> str:
    """This process, for messages: "rank 1 of 4"."""
    return f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"


def called(group: Any) -> str:
    """The group, for messages: "group 'default_pg' of the ranks 0, 1"."""
    members = members_of(group)
    ranks = ", ".join(map(str, dist.get_process_group_ranks(members)))
    return f"group {members.group_name!r} of the ranks {ranks}"


def device_of(group: Any) -> torch.device:
    """Where the group's backend sends from."""
    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# The name of torch 2.13 and later; before, the same function had another.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# By group: how many collectives this process has begun, which is their number on all ranks.
_begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# By group: the first and the last number of the collectives in a row in which this process exchanged nothing.
_idle: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
_PATIENCE = datetime.timedelta(seconds=0.5)  # before a rank that waits asks whether another has failed

Collective = TypeVar("Collective", bound=Callable[..., Any])


def tells(place_of_group: int) -> Callable[[Collective], Collective]:
    """Marks a collective whose errors are left in the store of the ranks, where those look that wait for this one;
    ``place_of_group``: the number of its argument ``group``."""

    def mark(collective: Collective) -> Collective:
        @functools.wraps(collective)
        def marked(*arguments: Any, **named: Any) -> Any:
            group = arguments[place_of_group] if len(arguments) > place_of_group else named.get("group")
            check_group(group)
            members = members_of(group)
            _begun[members] = _begun.get(members, 0) + 1
            try:
                return collective(*arguments, **named)
            except Exception as error:
                said = f"rank {dist.get_rank(group)} of {called(group)} failed: {type(error).__name__}: {error}"
                _store().set(_note(members, _begun[members]), said)
                raise

        return marked  # type: ignore[return-value]

    return mark


def wait(work: Any, group: Any, number: int | None = None) -> None:
    """Wait for the work of the collective of that number, this process's last one where it is None.

    Raises:
        ValueError: another rank has failed in it, or exchanges nothing in it. The ranks are then no longer in step: its
            work is never done.
    """
    members = members_of(group)
    if device_of(group).type == "cuda":  # the stream waits, and torch's watchdog looks after it
        work.wait()
        return
    number = number_of(group) if number is None else number
    note = _note(members, number)
    while True:
        try:
            work.wait(_PATIENCE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what went wrong
                return
        if _store().check([note]):
            raise ValueError(_store().get(note).decode())
        _look_for_idle_ranks(members, number)


def exchanges_nothing(group: Any) -> None:
    """Tell ranks that may wait in this collective that this process needs none of them, and has gone on."""
    members, number = members_of(group), number_of(group)
    first, last = _idle.get(members, (number, number))
    first = first if last == number - 1 else number
    _idle[members] = first, number
    if device_of(group).type != "cuda":  # nobody looks there
        _store().set(_note(members, f"idle/{dist.get_rank(group)}"), f"{first} {number}")


def _look_for_idle_ranks(members: Any, number: int) -> None:
    for rank in range(dist.get_world_size(members)):
        note = _note(members, f"idle/{rank}")
        if _store().check([note]):
            first, last = map(int, _store().get(note).split())
            if first <= number <= last:
                raise ValueError(
                    f"recipe, dim and the number of tensors must be alike on all ranks, but rank {rank} of "
                    f"{called(members)} needs no other rank's scales for its own, and {place(members)} does"
                )


def number_of(group: Any) -> int:
    """Of the collective that this process has begun last."""
    return _begun.get(members_of(group), 0)


def _note(members: Any, of: int | str) -> str:
    return f"breccia/{members.group_name}/{of}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


class Handle:
    """A collective under way. `wait` returns its result, and may be called again."""

    def __init__(self, work: Any, finish: Callable[[], Any], group: Any = None) -> None:
        self._work, self._finish = work, finish
        self._group, self._number = group, number_of(group)
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the transfer (on a GPU: make the current stream wait) and return what it brought."""
        if self._finish is not None:
            if self._work is not None:
                wait(self._work, self._group, self._number)
            self._result, self._work, self._finish = self._finish(), None, None  # type: ignore[assignment]
        return self._result

    def then(self, change: Callable[[Any], Any]) -> Handle:
        """A handle whose result is ``change(result)``.

        Args:
            change: called once with the result, when that is waited for.

        Returns:
            The new handle.
        """
        return Handle(None, lambda: change(self.wait()))
