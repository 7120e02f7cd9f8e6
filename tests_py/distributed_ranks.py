# SPDX-License-Identifier: Apache-2.0
"""Functions that several processes run at once, over gloo."""

import multiprocessing
import os
import tempfile
import traceback
import types

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from breccia.frameworks.torch import byte_parameters

# Ranks are forks of one process that has imported what they need and has no other thread: importing takes seconds.
multiprocessing.set_forkserver_preload(
    [
        "breccia.distributed",
        "breccia.nn",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        __name__,
    ]
)


def run(world, body, *arguments):
    """Call body(rank, world, *arguments) in `world` processes that form the default group; raise what one raised."""
    if world == 1 and not dist.is_initialized():
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                body(0, 1, *arguments)
            finally:
                dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_one, (world, folder, body, arguments), nprocs=world, start_method="forkserver")


def _one(rank, world, folder, body, arguments):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        body(rank, world, *arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the others wait for this rank otherwise
    finally:
        dist.destroy_process_group()


def before_2_13():
    """Let this process shard as torch before 2.13 does: each parameter first requires a gradient."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data, requires_grad=True):
        return torch.nn.Parameter(data).requires_grad_(requires_grad)

    byte_parameters._integers_shard = False
    _fsdp_param.nn = types.SimpleNamespace(Module=torch.nn.Module, Parameter=parameter)
