# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed checkpoints, by its own functions over gloo: codes and scales as its sharded tensors,
TransformerEngine's ``_extra_state`` as its sharded objects, byte for byte."""

import contextlib
import sys
import tempfile
from unittest import mock

import breccia
import cases
import pytest
import te_stub

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402
from breccia.bridges.extra_state import from_extra_state, to_extra_state  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)


@contextlib.contextmanager
def on_the_cpu():
    """Megatron-Core waits for the GPU, whose number it asks for where ranks agree on whether they failed, and looks for
    TransformerEngine, which without its libraries raises no ImportError."""
    before = sys.modules.pop("transformer_engine", None)
    sys.modules["transformer_engine"] = None
    try:
        here = {"current_device": lambda: torch.device("cpu"), "synchronize": lambda: None}
        with mock.patch.multiple(torch.cuda, **here):
            yield
    finally:
        del sys.modules["transformer_engine"]
        if before is not None:
            sys.modules["transformer_engine"] = before


with on_the_cpu():
    dist_checkpointing = pytest.importorskip("megatron.core.dist_checkpointing")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of its calls of torch
RECIPES = {
    "tensor": breccia.Float8CurrentScaling(),
    "tiles": breccia.Float8BlockScaling(block_m=128),
    "rows": breccia.Float8BlockScaling(),
    "mxfp8": breccia.MXFP8BlockScaling(),
    "nvfp4": breccia.NVFP4BlockScaling(),
}
ROWS, COLUMNS = 512, 256


def whole(name):
    return breccia.cast(torch.from_numpy(cases.normal((ROWS, COLUMNS), seed=len(name))), RECIPES[name])


def parts_of(scaled):
    """What a layer's state_dict would have of a weight, as tensors that Megatron-Core knows."""
    parts = {"weight": scaled.data, "weight_scale": scaled.scale, "weight_global_scale": scaled.global_scale}
    return {name: as_bytes(part.contiguous()) for name, part in parts.items() if part is not None}


def as_bytes(part):
    """Types of one byte, which torch knows few operations of, as bytes."""
    return part.view(torch.uint8) if part.element_size() == 1 else part


def cut(part, rank, world):
    return part if part.ndim == 0 or part.shape[0] == 1 else part.chunk(world)[rank].contiguous()


def sharded(name, parts, rank, world):
    """As a ColumnParallelLinear does: parts that have rows are cut along them, others are the same on every rank."""
    made = {}
    for part, tensor in parts.items():
        key = f"layers.{name}.{part}"
        if part == "_extra_state":
            made[key] = dist_checkpointing.ShardedObject(key, tensor, (1,), (0,), replica_id=rank)
        elif tensor.ndim == 0 or tensor.shape[0] == 1:
            made[key] = dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
        else:
            made[key] = dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor, (0, rank, world))
    return made


def state_of(name):
    """Bytes, made once: two pickles of equal states may differ."""
    with te_stub.importable():
        return to_extra_state(2.0 ** -len(name), 0.5).numpy().tobytes()


def parts_here(name, rank, world, states, fresh=False):
    parts = {part: cut(tensor, rank, world) for part, tensor in parts_of(whole(name)).items()}
    if fresh:
        parts = {part: torch.empty_like(tensor) for part, tensor in parts.items()}
    said = b"\0" if fresh else states[name]
    return {**parts, "_extra_state": torch.frombuffer(bytearray(said), dtype=torch.uint8)}


def saves(rank, world, folder, states):
    state = {}
    for name in RECIPES:
        state |= sharded(name, parts_here(name, rank, world, states), rank, world)
    with on_the_cpu():
        dist_checkpointing.save(state, folder)


def loads(rank, world, folder, states):
    wanted = {}
    for name in RECIPES:
        wanted |= sharded(name, parts_here(name, rank, world, states, fresh=True), rank, world)
    with on_the_cpu():
        loaded = dist_checkpointing.load(wanted, folder)
    for name, recipe in RECIPES.items():
        found = {part.rpartition(".")[2]: value for part, value in loaded.items() if f".{name}." in part}
        for part, tensor in parts_here(name, rank, world, states).items():
            assert found[part].dtype == tensor.dtype, (name, part)
            assert torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (found[part], tensor))), (name, part)
        assert from_extra_state(found["_extra_state"].numpy()) == (2.0 ** -len(name),)
        given = whole(name)
        data, scale = found["weight"].view(given.data.dtype), found["weight_scale"].view(given.scale.dtype)
        global_scale = found.get("weight_global_scale")
        again = breccia.ScaledTensor(data, scale, recipe, given.layout, global_scale=global_scale)
        values = breccia.dequantize(given)
        assert torch.equal(breccia.dequantize(again), values.chunk(world)[rank]), name


def saves_and_loads(rank, world, folder, states):
    saves(rank, world, folder, states)
    torch.distributed.barrier()
    loads(rank, world, folder, states)


def test_codes_come_back_on_any_number_of_ranks():
    with tempfile.TemporaryDirectory() as folder:
        states = {name: state_of(name) for name in RECIPES}
        distributed_ranks.run(2, saves_and_loads, folder, states)
        distributed_ranks.run(1, loads, folder, states)


@pytest.mark.slow
def test_codes_come_back_in_other_processes():
    """As after a restart: nothing that the ranks which saved remember is there."""
    with tempfile.TemporaryDirectory() as folder:
        states = {name: state_of(name) for name in RECIPES}
        distributed_ranks.run(2, saves, folder, states)
        distributed_ranks.run(2, loads, folder, states)
