# SPDX-License-Identifier: Apache-2.0
"""Process groups: checks, and how messages call a rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def check_group(group: Any) -> None:
    """Raise RuntimeError unless ``torch.distributed`` runs, ValueError where this process is not in the group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group first")
    if dist.get_rank(group) < 0:
        raise ValueError(f"group must have this process, rank {dist.get_rank()}, among its ranks")


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
