# SPDX-License-Identifier: Apache-2.0
"""Checkpoints into models sharded over two GPUs, and weights of such models for an engine, over NCCL."""

import tempfile

import breccia
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from breccia import distributed
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ml_dtypes = pytest.importorskip("ml_dtypes")

SHAPES = {"q_proj": (384, 256), "o_proj": (328, 512)}
TARGETS = ("modelopt:nvfp4", "compressed-tensors:fp8", "deepseek:block", "gptq:int4", "mlx:mxfp8")


def model(device, dtype=torch.bfloat16):
    layers = {n: torch.nn.Linear(k, m, bias=False, dtype=dtype, device=device) for n, (m, k) in SHAPES.items()}
    return torch.nn.ModuleDict(layers)


def sharded(layers, device, world):
    for layer in layers.values():
        fully_shard(layer, mesh=init_device_mesh(device, (world,)))
    return layers


def work(rank, world, device, folder):
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for to in TARGETS:
        path = f"{folder}/{to.replace(':', '-')}"
        values = Checkpoint(f"{path}-bf16.safetensors")
        floats = distributed.load(sharded(model(device), device, world), f"{path}.safetensors")
        for found in values.found:
            wanted = torch.from_numpy(np.array(values.array(found.name), np.float32))
            assert torch.equal(floats.state_dict()[found.name].full_tensor().cpu().float(), wanted), to
        codes = distributed.quantize_as_(model("meta"), f"{path}.safetensors").to(device)
        distributed.load(sharded(codes, device, world), f"{path}.safetensors")
        for name, layer in codes.items():
            x = torch.randn(4, SHAPES[name][1], device=device, dtype=torch.bfloat16)
            wanted = x.float() @ floats.state_dict()[f"{name}.weight"].full_tensor().float().T
            error = (layer(x).float() - wanted).abs().max() / wanted.abs().max()
            assert error < 0.02, (to, name, error)
    plain = distributed.load(sharded(model(device), device, world), f"{folder}/in.safetensors")
    weights = distributed.refit(plain, "vllm-fp8")
    given = dict(weights)
    weights.check({name: tensor.to(device) for name, tensor in given.items()})
    file = SafetensorsFile(f"{folder}/compressed-tensors-fp8.safetensors")
    for name, tensor in given.items():
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(file[name]).tobytes(), (
            name
        )
    dist.barrier()
    dist.destroy_process_group()


def run(device):
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        arrays = {f"{n}.weight": rng.normal(0, 0.02, s).astype(ml_dtypes.bfloat16) for n, s in SHAPES.items()}
        save_arrays(arrays, f"{folder}/in.safetensors")
        for to in TARGETS:
            path = f"{folder}/{to.replace(':', '-')}"
            convert(f"{folder}/in.safetensors", f"{path}.safetensors", to)
            convert(f"{path}.safetensors", f"{path}-bf16.safetensors", "bf16")
        mp.spawn(work, (2, device, folder), nprocs=2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    assert breccia.gpu_info()
    run("cuda")
