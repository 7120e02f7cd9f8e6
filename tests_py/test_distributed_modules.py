# SPDX-License-Identifier: Apache-2.0
"""Quantized models under FSDP2 and torch.distributed.checkpoint, over gloo."""

import copy

import breccia
import cases
import pytest

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed.checkpoint as dcp  # noqa: E402
from breccia import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402


def model_of(recipe, seed=0, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 390), torch.nn.GELU(), torch.nn.Linear(390, 256, bias=False))
    ragged = cases.may_be_ragged(recipe)
    chosen = None if ragged else lambda layer, name: layer.in_features == 256
    return breccia.quantize_(model, recipe, chosen, **options)


def sharded(model, world, policy=None, offload=None):
    mesh = init_device_mesh("cpu", (world,))
    options = {} if policy is None else {"mp_policy": policy}
    options |= {} if offload is None else {"offload_policy": offload}
    distributed.make_shardable_(model)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def bytes_held(model):
    own = (p.to_local() if isinstance(p, DTensor) else p for p in (*model.parameters(), *model.buffers()))
    return sum(p.nbytes for p in own)


def runs_as_one_process(rank, world):
    x = torch.from_numpy(cases.normal((5, 256)))
    for name, recipe in cases.RECIPES.items():
        whole = model_of(recipe)
        expected, held = whole(x), bytes_held(whole)
        policy = MixedPrecisionPolicy(param_dtype=torch.float32) if world == 3 else None
        model = sharded(copy.deepcopy(whole), world, policy)
        for _ in range(2):
            assert torch.equal(model(x), expected), name
        assert bytes_held(model) < held / world + 0.1 * held + 256, name


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_sharded_models_compute_what_whole_ones_do(world):
    distributed_ranks.run(world, runs_as_one_process)


def passes_gradients(rank, world):
    """Whatever the layers quantize inputs and gradients to; a layer that learns before them takes the same steps."""
    for activations, gradients in ((None, None), ("fp8", None), ("fp8-row", "fp8:e5m2"), ("mxfp8", "bf16")):
        x = torch.from_numpy(cases.normal((5, 256))).requires_grad_()
        codes = model_of(breccia.NVFP4BlockScaling(), activations=activations, gradients=gradients)
        whole = torch.nn.Sequential(torch.nn.Linear(256, 256), *codes)
        expected = torch.autograd.grad(whole(x).sum(), [x, whole[0].weight])
        model = sharded(copy.deepcopy(whole), world, offload=CPUOffloadPolicy(pin_memory=False))
        model(x).sum().backward()
        assert torch.equal(x.grad, expected[0]), (activations, gradients)
        learned = model[0].weight.grad.full_tensor()  # the mean over the ranks
        torch.testing.assert_close(learned, expected[1], rtol=1e-6, atol=1e-6)


def test_gradients_pass_through_sharded_layers():
    distributed_ranks.run(2, passes_gradients)


def saves(rank, world, folder):
    model = sharded(model_of(breccia.NVFP4BlockScaling()), world)
    dcp.save(model.state_dict(), checkpoint_id=folder)


def loads(rank, world, folder):
    expected = model_of(breccia.NVFP4BlockScaling())
    model = sharded(model_of(breccia.NVFP4BlockScaling(), seed=1), world)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    x = torch.from_numpy(cases.normal((5, 256)))
    assert torch.equal(model(x), expected(x))
    for name, part in distributed.make_shardable_(expected).state_dict().items():
        loaded = model.state_dict()[name]
        loaded = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
        assert loaded.dtype == part.dtype and torch.equal(loaded, part), name


def test_checkpoints_load_on_another_number_of_ranks(tmp_path):
    distributed_ranks.run(2, saves, str(tmp_path))
    distributed_ranks.run(1, loads, str(tmp_path))
    distributed_ranks.run(3, loads, str(tmp_path))


@cases.ALL
def test_state_of_bytes_loads_as_codes_and_back(recipe):
    codes, other = model_of(recipe), model_of(recipe, seed=1)
    x = torch.from_numpy(cases.normal((5, 256)))
    expected = codes(x)
    as_bytes = distributed.make_shardable_(copy.deepcopy(codes))
    assert torch.equal(as_bytes(x), expected)
    other.load_state_dict(as_bytes.state_dict())
    assert torch.equal(other(x), expected)
    again = distributed.make_shardable_(model_of(recipe, seed=1))
    again.load_state_dict(codes.state_dict())
    assert torch.equal(again(x), expected)


def runs_before_2_13(rank, world, folder):
    x = torch.from_numpy(cases.normal((5, 256)))
    bare = torch.nn.Module()
    bare.codes = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    distributed_ranks.before_2_13()
    with pytest.raises(RuntimeError, match="floating point"):
        fully_shard(bare, mesh=init_device_mesh("cpu", (world,)))
    runs_as_one_process(rank, world)
    passes_gradients(rank, world)
    whole = model_of("nvfp4")
    for loaded_by in (lambda model: model, lambda model: model.to(torch.float64), copy.deepcopy):
        model = loaded_by(distributed.make_shardable_(model_of("nvfp4")))
        assert torch.equal(model.float()(x), whole(x))
    saves(rank, world, folder)
    loads(rank, world, folder)
    model = sharded(model_of("nvfp4"), world).to(torch.float64).to(torch.float32)
    assert torch.equal(model(x), whole(x))
    state = sharded(model_of("mxfp8"), world).state_dict()
    assert {tensor.dtype for name, tensor in state.items() if "weight_" in name} == {torch.uint8}


@pytest.mark.in_turn
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_sharded_models_compute_and_load_under_earlier_torch(world, tmp_path):
    if world == 1:  # in a process of its own: what it changes of torch stays changed
        torch.multiprocessing.spawn(one_rank_before_2_13, (str(tmp_path),))
    else:
        distributed_ranks.run(world, runs_before_2_13, str(tmp_path))


def one_rank_before_2_13(index, folder):
    distributed_ranks.run(1, runs_before_2_13, folder)


def test_errors():
    with pytest.raises(ValueError, match=r"model must have a breccia\.nn\.QuantizedLinear or ScaledLinear: quantize"):
        distributed.make_shardable_(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
        distributed.make_shardable_({})
