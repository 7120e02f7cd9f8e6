# SPDX-License-Identifier: Apache-2.0
"""Layers that train under FSDP2, over gloo: codes travel, and the steps are those of one process."""

import copy
import dataclasses

import breccia
import cases
import pytest
from breccia.autograd import LinearRecipes

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed.checkpoint as dcp  # noqa: E402
from breccia import distributed  # noqa: E402
from breccia.nn import ScaledLinear  # noqa: E402
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

TILES = breccia.Float8BlockScaling(block_m=128)
ROWS = breccia.Float8BlockScaling()
RECIPES = {
    "fp8": LinearRecipes.fp8(),
    "mxfp8": LinearRecipes.mxfp8(),
    "nvfp4": dataclasses.replace(LinearRecipes.nvfp4(), stochastic=False),
    "tiles": LinearRecipes(ROWS, TILES, ROWS),
    "blocks": LinearRecipes(ROWS, ROWS, ROWS),
    "mxfp4": LinearRecipes(*[breccia.MXFP4BlockScaling()] * 3),
    "row": LinearRecipes(*[breccia.Float8CurrentScaling(granularity="row")] * 3),
}
EXACT = ("fp8", "nvfp4", "tiles")  # a weight and its transpose have the same codes


def model_of(recipes, hidden=390):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        ScaledLinear(256, hidden, recipes=recipes),
        torch.nn.GELU(),
        torch.nn.Linear(hidden, 256),
        torch.nn.GELU(),
        ScaledLinear(256, 96, bias=False, recipes=recipes),
    )


def batch_of(rank, world):
    """x, target and the weight of the loss. The last of three ranks adds nothing, so that a sum over the ranks has one
    value in any order."""
    x = torch.from_numpy(cases.normal((64, 256), seed=rank))
    y = torch.from_numpy(cases.normal((64, 96), seed=1000 + rank))
    return x, y, 0.0 if world > 2 and rank == world - 1 else 1.0


def loss_of(model, rank, world):
    x, y, weight = batch_of(rank, world)
    return (model(x) - y).square().mean() * weight


def steps_of_one(model, world, steps):
    """The same steps in one process, which adds up the gradients of the ranks' batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    losses = []
    for _ in range(steps):
        total = []
        for rank in range(world):
            loss = loss_of(model, rank, world)
            loss.backward()
            total.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def sharded(model, mesh, **options):
    distributed.make_shardable_(model)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for layer in model.modules():
        if hasattr(layer, "set_gradient_divide_factor"):
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
    return model


def steps_of_rank(model, rank, world, steps, precompute=True):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, rank, world)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            distributed.precompute_amax_(model)
        losses.append(loss.item())
    return losses


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def check_same(name, model, expected, losses, wanted, rank):
    assert losses == [step[rank] for step in wanted], name
    for (key, here), there in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(whole(here), there.detach()), (name, key)


def trains_as_one_process(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for name, recipes in RECIPES.items():
        alone = distributed.make_shardable_(model_of(recipes))
        wanted = steps_of_one(alone, world, 2)
        assert wanted[1][0] < wanted[0][0]
        model = sharded(model_of(recipes), mesh)
        losses = steps_of_rank(model, rank, world, 2, precompute=name != "fp8")
        check_same(name, model, alone, losses, wanted, rank)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_steps_are_those_of_one_process(world):
    distributed_ranks.run(world, trains_as_one_process)


class Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the collectives: name, dtype and bytes that this rank sends."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            tensor = args[0][0] if name == "allreduce" else args[1]
            self.seen.append((name, tensor.dtype, tensor.nbytes))
        return func(*args, **(kwargs or {}))


def sends_codes_alone(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for name, per_weight in (("fp8", 1), ("mxfp8", 33 / 32), ("nvfp4", 9 / 16), ("tiles", 1 + 4 / 128 / 128)):
        layer = torch.nn.Sequential(ScaledLinear(256, 384, bias=False, recipes=RECIPES[name]))
        model = sharded(layer, mesh)
        x = torch.from_numpy(cases.normal((32, 256)))
        model(x).sum().backward()  # the first pass also sets FSDP2 up
        model[0].weight.grad = None
        distributed.precompute_amax_(model)
        with Sent() as sent:
            model(x).sum().backward()
        rows = 384 // world
        gathered = "allgather_base", torch.uint8, rows * 256 * per_weight
        # 1 × 128 and tiles: 192 rows are a tile and a half, whose scales are sent for each row
        if name == "tiles" and rows % 128:
            gathered = *gathered[:2], rows * (256 + 4 * 256 // 128)
        reduced = "reduce_scatter_base", torch.float32, 384 * 256 * 4
        assert sent.seen == [gathered, gathered, reduced] or sent.seen == [gathered, reduced], (name, sent.seen)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gathers_send_bytes_of_codes_and_scales_alone(world):
    distributed_ranks.run(world, sends_codes_alone)


def agrees_once(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    mixed = model_of(RECIPES["fp8"])
    mixed[4] = ScaledLinear(256, 96, recipes=RECIPES["nvfp4"])  # 48 rows of a rank are whole blocks
    model = sharded(mixed, mesh)
    loss_of(model, rank, world).backward()
    with Sent() as sent:
        distributed.precompute_amax_(model)
    assert sent.seen == [("allreduce", torch.float32, 8)]
    with Sent() as sent, torch.no_grad():
        loss_of(model, rank, world)
    assert {name for name, *_ in sent.seen} == {"allgather_base"}
    with torch.no_grad():
        model[0].weight.mul_(2)  # what was agreed upon no longer holds
    with Sent() as sent, torch.no_grad():
        loss_of(model, rank, world)
    assert [name for name, *_ in sent.seen].count("allreduce") == 1


def test_one_all_reduce_for_all_parameters_until_they_change():
    distributed_ranks.run(2, agrees_once)


def casts_parts_as_the_whole(rank, world):
    """NaNs and infinities in blocks that two ranks hold."""
    mesh = init_device_mesh("cpu", (world,))
    for recipe, square in ((TILES, False), (breccia.NVFP4BlockScaling(), True), (breccia.MXFP4BlockScaling(), True)):
        for rows in (390, 3):
            w = torch.from_numpy(cases.heavy_tailed("spread", (rows, 256)))
            w[rows // 3, 5], w[2 * rows // 3, 9], w[-1, 200] = torch.nan, torch.inf, -torch.inf
            layer = torch.nn.Linear(256, rows, bias=False)
            layer.weight = distributed.ScaledParameter(w, recipe, square_blocks=square)
            fully_shard(layer, mesh=mesh)
            layer.unshard()
            made = layer.weight.scaled
            assert made == breccia.cast(w, recipe, square_blocks=square), (recipe, rows)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_blocks_that_two_ranks_hold_are_those_of_the_whole(world):
    distributed_ranks.run(world, casts_parts_as_the_whole)


def trains_offloaded(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    alone = distributed.make_shardable_(model_of(RECIPES["fp8"]))
    wanted = steps_of_one(alone, world, 2)
    policy = CPUOffloadPolicy(pin_memory=False)
    model = sharded(model_of(RECIPES["fp8"]), mesh, offload_policy=policy)
    check_same("offload", model, alone, steps_of_rank(model, rank, world, 2), wanted, rank)
    mixed = sharded(model_of(RECIPES["fp8"]), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    y = mixed(batch_of(rank, world)[0])
    assert y.dtype == torch.bfloat16 and mixed[0].weight.dtype == torch.float32
    y.float().sum().backward()
    assert mixed[0].weight.grad.dtype == torch.float32


def test_shards_may_lie_in_another_memory_and_products_in_another_dtype():
    distributed_ranks.run(2, trains_offloaded)


def trains_compiled(rank, world):
    recipes = RECIPES["mxfp8"]
    alone = distributed.make_shardable_(model_of(recipes))
    wanted = steps_of_one(alone, world, 2)
    model = sharded(model_of(recipes), init_device_mesh("cpu", (world,)))
    model.compile(backend="aot_eager")
    check_same("compiled", model, alone, steps_of_rank(model, rank, world, 2), wanted, rank)
    assert not torch._dynamo.utils.counters["graph_break"], torch._dynamo.utils.counters["graph_break"]


def test_compiled_layers_take_the_same_steps():
    distributed_ranks.run(2, trains_compiled)


def trains_in_other_ways(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    usual = sharded(model_of(RECIPES["fp8"]), mesh)
    wanted = steps_of_rank(usual, rank, world, 2)
    with torch.device("meta"):
        made = sharded(model_of(RECIPES["fp8"]), mesh)
    made.to_empty(device="cpu")
    set_model_state_dict(made, model_of(RECIPES["fp8"]).state_dict(), options=StateDictOptions(full_state_dict=True))
    assert steps_of_rank(made, rank, world, 2) == wanted
    kept = sharded(model_of(RECIPES["fp8"]), mesh, reshard_after_forward=False)
    assert steps_of_rank(kept, rank, world, 2) == wanted
    recomputed = distributed.make_shardable_(model_of(RECIPES["fp8"]))
    for i in (0, 2, 4):
        recomputed[i] = checkpoint_wrapper(recomputed[i])
    assert steps_of_rank(sharded(recomputed, mesh), rank, world, 2) == wanted
    losses = []
    for way in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        model = sharded(model_of(RECIPES["fp8"]), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, **way)
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, world).backward()  # gradients of two batches, sent once
        model.set_requires_gradient_sync(True)
        loss_of(model, rank, world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss_of(model, rank, world).item())
    assert losses[0] != wanted[0] and losses == [pytest.approx(losses[0], rel=1e-6)] * 3


def test_other_ways_to_make_and_train_a_model():
    distributed_ranks.run(2, trains_in_other_ways)


def trains_by_columns(rank, world):
    """Two groups of two ranks with the same shards, whose weights are cut along columns."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))

    def placement(parameter):
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] == 256 else Shard(0)

    for name in ("mxfp8", "fp8", "tiles", "row", "nvfp4", "mxfp4"):
        alone = distributed.make_shardable_(model_of(RECIPES[name], hidden=384))
        x, y, _ = batch_of(0, 1)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        wanted = []
        model = sharded(model_of(RECIPES[name], hidden=384), mesh, shard_placement_fn=placement)
        assert model[0].weight.to_local().shape == (384, 128)
        here = torch.optim.SGD(model.parameters(), lr=0.1 / world)  # gradients of equal batches are added up
        losses = []
        for _ in range(2):
            for net, steps, found in ((alone, optimizer, wanted), (model, here, losses)):
                loss = (net(x) - y).square().mean()
                loss.backward()
                steps.step()
                steps.zero_grad()
                found.append(loss.item())
        assert losses == wanted, name


def test_weights_cut_along_columns_in_replicated_groups():
    distributed_ranks.run(4, trains_by_columns)


def passes_gradients(rank, world):
    """Layers of codes at rest, and an ordinary one between them that learns."""
    mesh = init_device_mesh("cpu", (world,))
    for name in ("fp8", "mxfp8", "nvfp4", "tiles"):
        recipes = RECIPES[name]
        alone = distributed.make_shardable_(model_of(recipes), at_rest="codes")
        floats = distributed.make_shardable_(model_of(recipes))
        x = batch_of(0, 1)[0]
        assert torch.equal(alone(x), floats(x)), name
        wanted = steps_of_one(alone, world, 2)
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if name == "tiles" else {}
        model = sharded(copy.deepcopy(distributed.make_shardable_(model_of(recipes), at_rest="codes")), mesh, **offload)
        held = model[0].weight.to_local()._rows
        assert held.dtype == torch.uint8 and held.nbytes < 1.2 * 390 * 256 / world + 2 * 256
        losses = steps_of_rank(model, rank, world, 2)
        assert losses == [step[rank] for step in wanted], name
        assert torch.equal(whole(model[2].weight), alone[2].weight.detach())
        if name == "tiles":
            model.compile(backend="aot_eager")
            assert torch.equal(model(x), alone(x))
        with pytest.raises(TypeError, match="at_rest='codes' cannot be written to"), torch.no_grad():
            model[0].weight.to_local().mul_(2)


@pytest.mark.parametrize("world", [1, 3])
def test_layers_of_codes_at_rest(world):
    distributed_ranks.run(world, passes_gradients)


def saves(rank, world, folder):
    model = sharded(model_of(RECIPES["mxfp8"]), init_device_mesh("cpu", (world,)))
    steps_of_rank(model, rank, world, 1)
    dcp.save(model.state_dict(), checkpoint_id=folder)


def loads(rank, world, folder):
    model = sharded(model_of(RECIPES["mxfp8"]), init_device_mesh("cpu", (world,)))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    alone = distributed.make_shardable_(model_of(RECIPES["mxfp8"]))
    steps_of_one(alone, 2, 1)
    for here, there in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(whole(here), there.detach())
    x = batch_of(0, 1)[0]
    assert torch.equal(model(x), alone(x))


def test_checkpoints_hold_floats_for_any_number_of_ranks(tmp_path):
    distributed_ranks.run(2, saves, str(tmp_path))
    distributed_ranks.run(1, loads, str(tmp_path))
    distributed_ranks.run(3, loads, str(tmp_path))


def test_a_parameter_is_a_tensor_of_floats(tmp_path):
    w = torch.from_numpy(cases.normal((48, 64))).requires_grad_()
    parameter = distributed.ScaledParameter(w, "mxfp8")
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    assert torch.equal(parameter + 0, w + 0)
    other = copy.deepcopy(parameter)
    with torch.no_grad():
        parameter.mul_(2)
    assert torch.equal(w + 0, parameter + 0) and not torch.equal(other + 0, parameter + 0)
    torch.save({"w": parameter}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt")["w"]
    assert type(loaded) in (torch.Tensor, torch.nn.Parameter) and torch.equal(loaded, w)


def test_weights_of_several_layers_stay_one():
    model = torch.nn.Sequential(*[ScaledLinear(64, 64, recipes=RECIPES["fp8"]) for _ in range(3)])
    model.append(torch.nn.Embedding(64, 64))
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    distributed.make_shardable_(model)
    assert isinstance(model[0].weight, distributed.ScaledParameter) and model[1].weight is model[0].weight
    assert type(model[2].weight) is torch.nn.Parameter and model[3].weight is model[2].weight


def test_what_was_agreed_upon_ends_with_any_write():
    w = torch.from_numpy(cases.normal((48, 64)))
    for write in (
        lambda p: p.mul_(2),
        lambda p: p.detach().mul_(2),
        lambda p: p[3:5].zero_(),
        lambda p: p.data.view(-1).fill_(1),
        lambda p: torch._foreach_add_([p], 1),
    ):
        parameter = distributed.ScaledParameter(w.clone(), "fp8")
        before = parameter._clock.ticks
        with torch.no_grad():
            (parameter * 2).add_(1)
            parameter.clone().mul_(2)
            assert parameter._clock.ticks == before
            write(parameter)
        assert parameter._clock.ticks > before


def test_errors():
    w = torch.zeros(48, 64)
    for arguments, kind, message in (
        ((w, breccia.DelayedScaling()), TypeError, "recipe must take its scale from the weight itself, got Delayed"),
        ((w.int(), "fp8"), TypeError, "w must be a float tensor, got torch.int32"),
        ((w[0], "fp8"), ValueError, r"w must have two axes, \(N, K\), got shape \(64,\)"),
        ((w[:, :50], "mxfp8"), ValueError, "32"),
        ((w, "fp8", "tape"), ValueError, "at_rest must be 'bf16' or 'codes', got 'tape'"),
    ):
        with pytest.raises(kind, match=message):
            distributed.ScaledParameter(*arguments)
    layer = torch.nn.Sequential(ScaledLinear(64, 48, recipes=LinearRecipes.delayed()))
    with pytest.raises(TypeError, match=r"0\.weight cannot be sharded as codes: recipe must take"):
        distributed.make_shardable_(layer)
    for call in (distributed.make_shardable_, distributed.precompute_amax_):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
            call({})
    layer = ScaledLinear(64, 48, recipes=LinearRecipes.mxfp8())
    layer.weight = distributed.ScaledParameter(layer.weight, "fp8")
    with pytest.raises(ValueError, match=r"w must be quantized as recipes\.w says, MXFP8"):
        layer(torch.zeros(4, 64))


@pytest.mark.parametrize("name", RECIPES)
def test_a_parameter_of_codes_trains_as_an_ordinary_weight(name):
    recipes = RECIPES[name]
    plain, coded = model_of(recipes), distributed.make_shardable_(model_of(recipes))
    wanted, losses = steps_of_one(plain, 1, 5), steps_of_one(coded, 1, 5)
    if name in EXACT:
        assert losses == wanted
    else:  # the weight is quantized once more for the gradient of the input
        assert losses[0] == wanted[0]
        assert losses == [[pytest.approx(step[0], rel=0.02)] for step in wanted]
