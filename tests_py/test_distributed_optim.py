# SPDX-License-Identifier: Apache-2.0
"""`breccia.optim.AdamW` under FSDP2, over gloo: moments of shards, and torch's distributed checkpoints of them."""

import tempfile

import pytest

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed.checkpoint as dcp  # noqa: E402
from breccia.optim import AdamW  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

STATES = ("fp8", "int8", "mxfp8")


def made(mesh, states, hidden=512, out=64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, out))
    if mesh is not None:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return model, AdamW(model.parameters(), lr=1e-2, states=states)


def train(model, optimizer, seeds):
    """All ranks see the same rows, so that gradients are those of one process."""
    for seed in seeds:
        optimizer.zero_grad()
        model(torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p.detach()


def steps_are_those_of_one_process(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for states in ("fp8", "int8"):  # draws of "mxfp8" follow places in the shard
        alone, one = made(None, states)
        model, optimizer = made(mesh, states)
        train(alone, one, range(3))
        train(model, optimizer, range(3))
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(whole(p), q, rtol=0, atol=1e-6), (states, name)


@pytest.mark.parametrize("world", [2])
def test_steps_are_those_of_one_process(world):
    distributed_ranks.run(world, steps_are_those_of_one_process)


def saves(rank, world, folder, hidden):
    mesh = init_device_mesh("cpu", (world,))
    for states in STATES:
        model, optimizer = made(mesh, states, hidden)
        train(model, optimizer, range(2))
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{states}")
        train(model, optimizer, range(2, 4))
        torch.save([whole(p) for p in model.parameters()], f"{folder}/{states}.{rank}")


def goes_on(rank, world, folder, hidden):
    mesh = init_device_mesh("cpu", (world,))
    for states in STATES:
        model, optimizer = made(mesh, states, hidden)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{states}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        train(model, optimizer, range(2, 4))
        for p, wanted in zip(model.parameters(), torch.load(f"{folder}/{states}.0"), strict=True):
            assert torch.equal(whole(p), wanted), states


@pytest.mark.parametrize("hidden", [512, 301], ids=["even", "uneven"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(hidden):
    with tempfile.TemporaryDirectory() as folder:
        distributed_ranks.run(2, saves, folder, hidden)
        distributed_ranks.run(2, goes_on, folder, hidden)


def refuses(rank, world, folder, hidden):
    model, optimizer = made(init_device_mesh("cpu", (world,)), "fp8", hidden)
    weights, moments = get_state_dict(model, optimizer)
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .*exp_avg"):
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/fp8")


def moments_of(optimizer):
    """Each rank's part of each state, the ranks one after the other, as bytes: gloo sends no 8-bit floats."""
    found = []
    for state in optimizer.state_dict()["state"].values():
        for name, part in sorted(state.items()):
            mine = part.to_local().contiguous().view(torch.uint8) if isinstance(part, DTensor) else part
            told = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(told, mine)
            found.append((name, torch.cat(told) if mine.ndim else mine.clone()))
    return found


def saves_groups(rank, world, folder):
    """Rows of whole groups, of which no number of ranks has as many as another."""
    for states in STATES:
        model, optimizer = made(init_device_mesh("cpu", (world,)), states, 130, 16)
        train(model, optimizer, range(2))
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{states}")
        found = moments_of(optimizer)
        train(model, optimizer, [2])
        torch.save((found, [whole(p) for p in model.parameters()]), f"{folder}/{states}.{rank}")


def loads_groups(rank, world, folder):
    for states in STATES:
        model, optimizer = made(init_device_mesh("cpu", (world,)), states, 130, 16)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{states}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        saved, trained = torch.load(f"{folder}/{states}.0")
        for (name, found), (_, wanted) in zip(moments_of(optimizer), saved, strict=True):
            assert torch.equal(found, wanted), (states, name)
        train(model, optimizer, [2])  # a step's update is of moments before they are rounded
        for p, wanted in zip(model.parameters(), trained, strict=True):
            assert torch.allclose(whole(p), wanted, rtol=0, atol=1e-6), states


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_shards_of_whole_groups_load_on_any_number_of_ranks(before, after):
    with tempfile.TemporaryDirectory() as folder:
        distributed_ranks.run(before, saves_groups, folder)
        distributed_ranks.run(after, loads_groups, folder)


def test_other_shards_load_on_as_many_ranks():
    with tempfile.TemporaryDirectory() as folder:
        distributed_ranks.run(2, saves, folder, 301)
        distributed_ranks.run(1, refuses, folder, 301)
