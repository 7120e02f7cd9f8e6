# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of quantized layers by DTensor, over gloo, alone and with FSDP2."""

import collections
import copy
import re
import subprocess
import sys

import breccia
import cases
import pytest
from breccia.autograd import LinearRecipes
from breccia.value.slicing import block_along

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed.checkpoint as dcp  # noqa: E402
from breccia import distributed  # noqa: E402
from breccia.nn import ScaledLinear  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402

PLAN = {"0": distributed.ColwiseParallel(), "2": distributed.RowwiseParallel()}


def model_of(recipe, hidden=512):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 96))
    return breccia.quantize_(model, recipe)


def close(y, expected):
    return torch.allclose(y, expected, rtol=1e-5, atol=1e-5)


def packed_layers_run_as_one_process(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = torch.from_numpy(cases.normal((5, 256)))
    whole = model_of("mxfp6")
    cut = parallelize_module(breccia.nn.pack_(copy.deepcopy(whole)), mesh, PLAN)
    assert close(cut(x), whole(x))
    assert cut[2].weight_data.to_local().shape == (96, 512 * 3 // 4 // world)
    sharded = breccia.nn.pack_(copy.deepcopy(whole))
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer.make_shardable_(), mesh=mesh)
    assert torch.equal(fully_shard(sharded, mesh=mesh)(x), whole(x))


def test_packed_layers_run_as_one_process():
    distributed_ranks.run(2, packed_layers_run_as_one_process)


def runs_as_one_process(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = torch.from_numpy(cases.normal((5, 256)))
    tried = 0
    for name, recipe in cases.RECIPES.items():
        if block_along(recipe.layout, False, -2) > 128:
            continue
        whole = model_of(recipe)
        given, alone = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = whole(alone)
        expected.sum().backward()
        model = parallelize_module(copy.deepcopy(whole), mesh, PLAN)
        held = sum(p.to_local().nbytes for p in model[0].parameters() if p.dtype == torch.uint8)
        assert held * world <= sum(p.nbytes for p in whole[0].buffers()) + 64 * world, name
        first = model[0](x)
        assert torch.equal(
            first, distributed.plan(expected.new_empty(5, 512).shape, "fp8", world, 1).cut(whole[0](x), rank)
        ), name
        y = model(given)
        assert close(y, expected), name
        y.sum().backward()
        assert close(given.grad, alone.grad), name
        tried += 1
    assert tried > 30


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_compute_what_whole_ones_do(world):
    distributed_ranks.run(world, runs_as_one_process)


class Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the names of the collectives."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.dtypes = collections.defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.seen.append(name)
            self.dtypes[name] |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def casts_as_one_process(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    tried = 0
    for recipe in cases.RECIPES.values():
        x = torch.from_numpy(cases.heavy_tailed("normal", (256, 512)))
        x[-1, -1] = 1e4
        whole = breccia.cast(x, recipe)
        for dim in (0, 1):
            if not getattr(recipe, "symmetric", True) and recipe.layout.name == "per_channel":
                continue
            made = breccia.cast(distribute_tensor(x, mesh, [Shard(dim)]), recipe)
            assert made.shape == (256, 512) and made.data.placements == (Shard(dim),)
            dealt = distributed.plan(x.shape, recipe, world, dim)
            local = breccia.ScaledTensor._of(
                made._form,
                *[
                    None if part is None else part.to_local()
                    for part in (made.data, made.scale, made.zero_point, made.global_scale)
                ],
            )
            assert local == dealt.cut(whole, rank), (recipe, dim)
            with Sent() as sent:
                values = breccia.dequantize(made)
            assert not sent.seen and values.placements == (Shard(dim),)
            assert torch.equal(values.to_local(), dealt.cut(breccia.dequantize(whole), rank))
            tried += 1
        replicated = breccia.cast(distribute_tensor(x, mesh, [Replicate()]), recipe)
        assert torch.equal(breccia.dequantize(replicated).to_local(), breccia.dequantize(whole))
    assert tried > 50
    dealt = distribute_tensor(torch.zeros(96, 96), mesh, [Shard(1)])
    legal = "even ones for 1, 3 ranks"
    with pytest.raises(
        ValueError, match=re.escape("x must be cut between blocks of 32 along axis 1, got 96 for 2")
    ) as e:
        breccia.cast(dealt, "mxfp8")
    assert legal in str(e.value)
    with pytest.raises(ValueError, match="x must be a plain tensor for rounding="):
        breccia.cast(dealt, "fp8", rounding="stochastic", seed=1)


def test_casts_of_dtensors_have_the_bytes_of_the_whole():
    distributed_ranks.run(2, casts_as_one_process)


ALONE = """
import tempfile
import breccia, torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
with tempfile.TemporaryDirectory() as folder:
    init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    x = torch.arange(4096.0).reshape(32, 128)
    dealt = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
    made = OPERATION
    assert made.data.placements == (Shard(0),)
    assert torch.equal(made.dequantize().to_local(), breccia.cast(x, "fp8-row").dequantize())
    destroy_process_group()
"""


@pytest.mark.parametrize("options", ["", ", offset=(0, 128)"])
def test_a_dtensor_is_cast_where_nothing_has_imported_the_rules(options):
    code = ALONE.replace("OPERATION", f'breccia.cast(dealt, "fp8-row"{options})')
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def converts_as_one_process(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = torch.from_numpy(cases.normal((256, 512)))
    x[-1, -1] = 1e4
    targets = ("mxfp8", breccia.Float8BlockScaling(), "fp8-block", "fp8", "fp8-row", "nvfp4", "int8")
    for recipe in ("nvfp4", "mxfp8", "fp8", "fp8-row", "int4:asym:32"):
        for dim in (0, 1):
            made = breccia.cast(distribute_tensor(x, mesh, [Shard(dim)]), recipe)
            for to in (one for one in targets if one != recipe):
                expected = breccia.requantize(breccia.cast(x, recipe), to)
                with Sent() as sent:
                    got = breccia.requantize(made, to)
                what = (recipe, to, dim)
                stays = to not in ("fp8", "nvfp4") and (dim == 0 or to not in ("fp8-row", "int8"))
                assert bool(sent.seen) != stays, (what, sent.seen)
                assert got.data.placements == (Shard(dim),), (what, got.data.placements)
                for name in got._form.parts:
                    full = getattr(got, name)
                    bits = full.to_local().view(torch.uint8) if full.ndim else full.to_local()
                    wanted = getattr(expected, name)
                    if full.placements == (Shard(dim),):
                        wanted = wanted.chunk(world, dim)[rank]
                    wanted = wanted.contiguous().view(torch.uint8) if wanted.ndim else wanted
                    assert torch.equal(bits, wanted), (what, name)


def test_conversions_of_dtensors_have_the_bytes_of_the_whole():
    distributed_ranks.run(2, converts_as_one_process)


def refuses_no_cut(rank, world):
    """Parts that are no whole blocks of the target: every rank has all."""
    mesh = init_device_mesh("cpu", (world,))
    x = torch.from_numpy(cases.normal((192, 256)))
    made = breccia.requantize(breccia.cast(distribute_tensor(x, mesh, [Shard(0)]), "mxfp8"), "fp8-block")
    assert made.data.placements == (Replicate(),)
    expected = breccia.requantize(breccia.cast(x, "mxfp8"), "fp8-block")
    assert torch.equal(made.data.to_local().view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(breccia.dequantize(made).to_local(), breccia.dequantize(expected))
    turned = breccia.requantize(breccia.cast(distribute_tensor(x, mesh, [Shard(1)]), "mxfp8").mT, "mxfp8")
    assert turned.shape == (256, 192) and turned.data.placements == (Shard(0),)
    expected = breccia.requantize(breccia.cast(x, "mxfp8").mT, "mxfp8")
    assert torch.equal(breccia.dequantize(turned).full_tensor(), breccia.dequantize(expected))


def test_conversions_to_blocks_that_two_ranks_hold():
    distributed_ranks.run(2, refuses_no_cut)


def sends_sums_alone(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = parallelize_module(model_of("nvfp4"), mesh, PLAN)
    x = torch.from_numpy(cases.normal((5, 256)))
    model(x)
    with Sent() as sent:
        model(x)
    assert sent.seen == ["all_reduce"], sent.seen
    torch.manual_seed(0)
    quantized = breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(512, 256)), "fp8", activations="fp8")
    whole = copy.deepcopy(quantized)
    model = parallelize_module(quantized, mesh, {"0": distributed.RowwiseParallel(input_layouts=Replicate())})
    x = torch.from_numpy(cases.normal((5, 512)))
    x[0, -1] = 100.0  # one rank has the amax of all
    assert close(model(x), whole(x))


def test_only_sums_and_amaxes_are_sent():
    distributed_ranks.run(2, sends_sums_alone)


def refuses_cuts_through_blocks(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    wanted = re.escape("along axis 1, got 96 for 2 ranks: legal cuts are the multiples of 32, even ones for 1, 3 ranks")
    for style, shape, recipe, message in (
        (distributed.RowwiseParallel(), (96, 64), "mxfp8", wanted),
        (distributed.ColwiseParallel(), (256, 192), breccia.Float8BlockScaling(block_m=128), "along axis 0, got 192"),
    ):
        model = breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(*shape)), recipe)
        with pytest.raises(ValueError, match=message):
            parallelize_module(model, mesh, {"0": style})
    with pytest.raises(NotImplementedError, match=r"currently only support nn\.Linear and nn\.Embedding"):
        parallelize_module(torch.nn.Sequential(torch.nn.GELU()), mesh, {"0": distributed.ColwiseParallel()})
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 96))
    x = torch.ones(2, 64)
    expected = plain(x)
    parallelize_module(plain, mesh, {"0": distributed.ColwiseParallel(output_layouts=Replicate())})
    assert close(plain(x), expected)


def test_errors_name_the_legal_cuts():
    distributed_ranks.run(2, refuses_cuts_through_blocks)


def runs_on_meshes(rank, world):
    for shape in ((2, 1), (1, 2), (2, 2)):
        if shape[0] * shape[1] != world:
            continue
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        for recipe in ("nvfp4", "mxfp8", "fp8", breccia.Float8BlockScaling(block_m=128), "int4"):
            whole = model_of(recipe)
            x = torch.from_numpy(cases.normal((5, 256), seed=mesh.get_local_rank("data")))
            model = parallelize_module(copy.deepcopy(whole), mesh["tensor"], PLAN)
            distributed.make_shardable_(model)
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh["data"])
            for _ in range(2):
                assert close(model(x), whole(x)), (shape, recipe)
            codes = model[0].weight_data.to_local()
            assert codes.numel() * world == whole[0].weight_data.numel()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_meshes_of_sharded_and_tensor_parallel_ranks(world):
    distributed_ranks.run(world, runs_on_meshes)


def runs_on_meshes_before_2_13(rank, world, folder):
    distributed_ranks.before_2_13()
    runs_on_meshes(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    whole = model_of("nvfp4")
    model = parallelize_module(copy.deepcopy(whole), mesh, PLAN)
    x = torch.from_numpy(cases.normal((5, 256)))
    assert close(model(x), whole(x))
    saves(rank, world, folder)
    loads(rank, world, folder)


def test_meshes_under_earlier_torch(tmp_path):
    distributed_ranks.run(2, runs_on_meshes_before_2_13, str(tmp_path))


def runs_in_subgroups(rank, world):
    """Two groups that are parallel each for itself, with weights of their own."""
    mesh = DeviceMesh("cpu", torch.arange(world).reshape(-1, 2), mesh_dim_names=("replica", "tensor"))["tensor"]
    torch.manual_seed(rank // 2)
    whole = breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(256, 64)), "nvfp4")
    x = torch.from_numpy(cases.normal((3, 256), seed=rank // 2))
    style = distributed.ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(copy.deepcopy(whole), mesh, {"0": style})
    assert torch.equal(model(x), whole(x))


def test_subgroups():
    distributed_ranks.run(4, runs_in_subgroups)


def runs_in_other_ways(rank, world):
    """Inputs of three axes whole, cut along the sequence, and in bfloat16; compiled layers."""
    mesh = init_device_mesh("cpu", (world,))
    whole = model_of("nvfp4")
    x = torch.from_numpy(cases.normal((2, 8, 256)))
    expected = whole(x)
    model = parallelize_module(copy.deepcopy(whole), mesh, PLAN)
    assert close(model(x), expected)
    half = model(x.bfloat16())
    assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), whole(x.bfloat16()).float(), atol=0.02)
    model.compile(backend="aot_eager")
    assert close(model(x), expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    by_sequence = {
        "0": distributed.ColwiseParallel(input_layouts=Shard(1)),
        "2": distributed.RowwiseParallel(output_layouts=Shard(1)),
    }
    model = parallelize_module(copy.deepcopy(whole), mesh, by_sequence)
    assert close(model(x.chunk(world, 1)[rank]), expected.chunk(world, 1)[rank])


def test_other_inputs_and_compiled_layers():
    distributed_ranks.run(2, runs_in_other_ways)


def saves(rank, world, folder):
    model = parallelize_module(model_of("nvfp4"), init_device_mesh("cpu", (world,)), PLAN)
    dcp.save(model.state_dict(), checkpoint_id=folder)


def loads(rank, world, folder):
    other = model_of("nvfp4")
    for layer in (other[0], other[2]):
        layer.weight_data.view(torch.uint8).zero_()
        layer.bias.data.zero_()
    model = parallelize_module(other, init_device_mesh("cpu", (world,)), PLAN)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    x = torch.from_numpy(cases.normal((5, 256)))
    assert close(model(x), model_of("nvfp4")(x))


def test_checkpoints_load_on_another_number_of_ranks(tmp_path):
    distributed_ranks.run(2, saves, str(tmp_path))
    for world in (1, 4):
        distributed_ranks.run(world, loads, str(tmp_path))


def trains(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for recipes in (LinearRecipes.fp8(), LinearRecipes.mxfp8()):
        torch.manual_seed(0)
        whole = torch.nn.Sequential(
            ScaledLinear(256, 512, recipes=recipes), torch.nn.GELU(), ScaledLinear(512, 96, recipes=recipes)
        )
        model = parallelize_module(copy.deepcopy(whole), mesh, PLAN)
        x = torch.from_numpy(cases.normal((64, 256)))
        for net in (whole, model):
            net(x).square().sum().backward()
        for here, there in zip(model.parameters(), whole.parameters(), strict=True):
            got = here.grad.full_tensor()
            assert torch.allclose(got, there.grad, rtol=1e-3, atol=2e-2 * float(there.grad.abs().max()))


def test_layers_that_train():
    distributed_ranks.run(2, trains)


def trains_on_meshes(rank, world):
    """Tensor-parallel ranks whose weights FSDP2 shards and gathers as codes."""
    for shape in ((2, 1), (1, 2), (2, 2)):
        if shape[0] * shape[1] != world:
            continue
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        for recipes in (LinearRecipes.fp8(), LinearRecipes.mxfp8()):
            torch.manual_seed(0)
            whole = torch.nn.Sequential(
                ScaledLinear(256, 512, recipes=recipes), torch.nn.GELU(), ScaledLinear(512, 96, recipes=recipes)
            )
            model = parallelize_module(copy.deepcopy(whole), mesh["tensor"], PLAN)
            distributed.make_shardable_(model)
            distributed.make_shardable_(whole)
            for layer in (model[0], model[2], model):
                fully_shard(layer, mesh=mesh["data"])
            distributed.precompute_amax_(model)
            x = torch.from_numpy(cases.normal((64, 256)))
            losses = []
            for net in (whole, model):
                optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
                for _ in range(3):
                    loss = net(x).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
            assert losses[2] < 0.9 * losses[0]
            assert losses[3] == pytest.approx(losses[0], rel=1e-5)  # the scales are those of the whole weight
            assert losses[3:] == pytest.approx(losses[:3], rel=2e-3)
            with Sent() as sent, torch.no_grad():
                distributed.precompute_amax_(model)
                model(x)
            assert sent.dtypes["_allgather_base_"] == ({torch.uint8} if shape[0] > 1 else set())


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_meshes_of_ranks_that_train(world):
    distributed_ranks.run(world, trains_on_meshes)
