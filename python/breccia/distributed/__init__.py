# SPDX-License-Identifier: Apache-2.0
"""Block-scaled tensors across the ranks of ``torch.distributed``: codes and scales travel in one buffer of bytes.

A cut never goes through a block (`plan`), and the parts of a tensor have the bytes that the whole has there: where a
scale follows from more than one rank holds, `amax` or `cast` asks all ranks first. Importing this module imports
torch; it works with every backend (gloo, NCCL), because only uint8 travels.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from breccia.distributed.fsdp.modules import make_shardable_
from breccia.distributed.fsdp.parameters import ScaledParameter, precompute_amax_
from breccia.distributed.gather.collectives import all_gather, all_to_all, broadcast, reduce_scatter, scatter
from breccia.distributed.gather.groups import Handle
from breccia.distributed.gather.statistics import amax, cast
from breccia.distributed.sharding import Plan, plan
from breccia.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:
    from breccia.distributed.checkpoints.loading import load, quantize_as_
    from breccia.distributed.checkpoints.reader import CheckpointReader
    from breccia.distributed.engine_weights import Refit, refit

__all__ = [
    "CheckpointReader",
    "ColwiseParallel",
    "Handle",
    "Plan",
    "Refit",
    "RowwiseParallel",
    "ScaledParameter",
    "all_gather",
    "all_to_all",
    "amax",
    "broadcast",
    "cast",
    "load",
    "make_shardable_",
    "plan",
    "precompute_amax_",
    "quantize_as_",
    "reduce_scatter",
    "refit",
    "scatter",
]

# Imported when they are asked for: torch.distributed.checkpoint takes over a second.
_LATE = {
    "CheckpointReader": "checkpoints.reader",
    "Refit": "engine_weights",
    "load": "checkpoints.loading",
    "quantize_as_": "checkpoints.loading",
    "refit": "engine_weights",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"breccia.distributed.{_LATE[name]}"), name)
