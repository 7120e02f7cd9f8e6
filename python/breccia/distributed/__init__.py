# SPDX-License-Identifier: Apache-2.0
"""Block-scaled tensors across the ranks of ``torch.distributed``: codes and scales travel in one buffer of bytes.

A cut never goes through a block (`plan`), and the parts of a tensor have the bytes that the whole has there: where a
scale follows from more than one rank holds, `amax` or `cast` asks all ranks first. Importing this module imports
torch; it works with every backend (gloo, NCCL), because only uint8 travels.
"""

from breccia.distributed.collectives import all_gather, all_to_all, broadcast, reduce_scatter, scatter
from breccia.distributed.handle import Handle
from breccia.distributed.modules import make_shardable_
from breccia.distributed.parameters import ScaledParameter, precompute_amax_
from breccia.distributed.sharding import Plan, plan
from breccia.distributed.statistics import amax, cast
from breccia.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "Handle",
    "Plan",
    "RowwiseParallel",
    "ScaledParameter",
    "all_gather",
    "all_to_all",
    "amax",
    "broadcast",
    "cast",
    "make_shardable_",
    "plan",
    "precompute_amax_",
    "reduce_scatter",
    "scatter",
]
