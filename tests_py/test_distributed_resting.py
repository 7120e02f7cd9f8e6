# SPDX-License-Identifier: Apache-2.0
"""Weights of codes at rest and checkpoints, over gloo: codes come back as they were, and floats become the codes that
the whole weight has."""

import copy

import breccia
import numpy as np
import pytest
from breccia.autograd import LinearRecipes
from breccia.checkpoint import convert, save_arrays, target_names

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed.checkpoint as dcp  # noqa: E402
from breccia import distributed  # noqa: E402
from breccia.frameworks.torch.weights import codes_of  # noqa: E402
from breccia.nn import ScaledLinear  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

# Recipes of the weight: the scales of a row follow from that row alone, or from others too.
ALONE = {
    "mxfp8": "mxfp8",
    "blocks": breccia.Float8BlockScaling(),
    "row": breccia.Float8CurrentScaling(granularity="row"),
    "mxfp4": "mxfp4",
    "int4": "int4:asym:32",
}
TOGETHER = {"fp8": "fp8", "nvfp4": "nvfp4", "tiles": breccia.Float8BlockScaling(block_m=128)}
TARGETS = [name for name in target_names() if ":" in name and not name.startswith(("gguf", "gpt-oss"))]
RECIPES = {**ALONE, **TOGETHER}
SHAPES = {"q_proj": (390, 256), "k_proj": (2, 512)}  # cuts through tiles; fewer rows than ranks


def values_of(name):
    rows, columns = SHAPES[name]
    generator = np.random.default_rng(rows)
    values = torch.from_numpy(generator.normal(0, 0.02, (rows, columns)).astype(np.float32))
    values[-1, -1] = 3.0  # the last rank's: scales for all rows follow from it
    return values


class Model(torch.nn.Module):
    """Layers with ordinary weights, of which `sharded` makes some of codes at rest."""

    def __init__(self, seen=True):
        super().__init__()
        for name, (rows, columns) in SHAPES.items():
            setattr(self, name, ScaledLinear(columns, rows, bias=False))
            with torch.no_grad():
                getattr(self, name).weight.copy_(values_of(name) if seen else torch.full((rows, columns), 7.0))


def made(recipe, *, seen=True, square=False):
    model = Model(seen)
    for layer in model.children():
        layer.recipes = LinearRecipes("mxfp8", recipe, "mxfp8", square_weights=square)
    return distributed.make_shardable_(model, at_rest="codes")


def sharded(model, world):
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_codes(model, expected, what):
    """The gathered weights are the codes that were cast of the whole."""
    for name, layer in model.named_children():
        layer.unshard()
        assert layer.weight.scaled.map(torch.clone) == expected[name], (what, name)  # FSDP2 frees the memory itself
        layer.reshard()


def whole_codes(recipe, **options):
    return {name: breccia.cast(values_of(name), recipe, **options) for name in SHAPES}


def saves(rank, world, folder):
    for key, recipe in RECIPES.items():
        dcp.save(sharded(made(recipe), world).state_dict(), checkpoint_id=f"{folder}/{key}")


def loads(rank, world, folder):
    for key, recipe in RECIPES.items():
        model = sharded(made(recipe, seen=False), world)
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{key}")
        model.load_state_dict(state)
        check_codes(model, whole_codes(recipe), key)
        floats = {name: torch.zeros(shape) for name, shape in zip(state, SHAPES.values(), strict=True)}
        dcp.load(floats, checkpoint_id=f"{folder}/{key}")  # into an ordinary model: the values
        for name, codes in whole_codes(recipe).items():
            assert torch.equal(floats[f"{name}.weight"], breccia.dequantize(codes)), (key, name)


def test_checkpoints_hold_codes_for_any_number_of_ranks(tmp_path):
    distributed_ranks.run(2, saves, str(tmp_path))
    for world in (1, 2, 3):
        distributed_ranks.run(world, loads, str(tmp_path))


def loads_floats(rank, world):
    for key, recipe in RECIPES.items():
        for square in (False, True) if key in ("mxfp8", "nvfp4") else (False,):
            model = sharded(made(recipe, seen=False, square=square), world)
            model.load_state_dict(sharded(Model(), world).state_dict())
            check_codes(model, whole_codes(recipe, square_blocks=square), (key, square))
        model = sharded(made(recipe, seen=False), world)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, Model().state_dict(), options=options)
        check_codes(model, whole_codes(recipe), key)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_floats_of_a_state_dict_become_the_codes_of_the_whole(world):
    distributed_ranks.run(world, loads_floats)


def reads_floats(rank, world, folder):
    dcp.save(sharded(Model(), world).state_dict(), checkpoint_id=folder)
    for key, recipe in RECIPES.items():
        model = sharded(made(recipe, seen=False), world)
        state = model.state_dict()
        if key in ALONE:
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state)
        else:
            with pytest.raises(
                dcp.api.CheckpointException, match=r"must get floats of all \d+ rows at once.*load_state_dict"
            ):
                dcp.load(state, checkpoint_id=folder)
            floats = sharded(Model(seen=False), world).state_dict()
            dcp.load(floats, checkpoint_id=folder)
            model.load_state_dict(floats)
        check_codes(model, whole_codes(recipe), key)


def test_checkpoints_of_floats_become_codes(tmp_path):
    distributed_ranks.run(2, reads_floats, str(tmp_path))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The model's weights in every format."""
    folder = tmp_path_factory.mktemp("formats")
    save_arrays({f"{name}.weight": values_of(name).numpy() for name in SHAPES}, folder / "in.safetensors")
    for to in TARGETS:
        convert(folder / "in.safetensors", folder / f"{to.replace(':', '-')}.safetensors", to, include=["*"])
    return folder


def bytes_of(codes):
    """Of its parts, with one code to a byte, for readers unpack them."""
    arrays = (codes_of(codes), codes.scale, codes.zero_point, codes.global_scale)
    return [None if one is None else one.contiguous().reshape(-1).view(torch.uint8).tolist() for one in arrays]


def opens(rank, world, folder):
    kept = set()
    for to in TARGETS:
        path = folder / f"{to.replace(':', '-')}.safetensors"
        stored = {name.removesuffix(".weight"): tensor for name, tensor in breccia.open(path, "torch")}
        quantized = {name: one for name, one in stored.items() if isinstance(one, breccia.ScaledTensor)}
        values = {
            name: breccia.dequantize(one)
            if name in quantized
            else torch.as_tensor(getattr(one, "dequantize", lambda one=one: one)()).float()
            for name, one in stored.items()
        }
        recipes = {"mxfp8", *(one.recipe for one in quantized.values())}
        for recipe in recipes:
            model = sharded(made(recipe, seen=False), world)
            distributed.load(model, path)
            for name, layer in model.named_children():
                layer.unshard()
                got = bytes_of(layer.weight.scaled)
                same = name in quantized and got == bytes_of(quantized[name])
                kept |= {to} if same else set()
                assert same or got == bytes_of(breccia.cast(values[name], recipe)), (to, name, recipe)
    assert {to.partition(":")[0] for to in kept} >= {"comfyui", "compressed-tensors", "deepseek", "mlx", "modelopt"}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_layers_take_codes_of_their_recipe_and_quantize_other_values(world, sources):
    distributed_ranks.run(world, opens, sources)


def made_without_memory(rank, world, folder):
    for key, recipe in RECIPES.items():
        with torch.device("meta"):
            model = sharded(made(recipe, seen=False), world)
        model.to_empty(device="cpu")
        distributed.load(model, folder / "in.safetensors")
        check_codes(model, whole_codes(recipe), key)


def test_models_made_without_memory_are_filled(sources):
    distributed_ranks.run(2, made_without_memory, sources)


def test_what_is_copied_is_another_weight(tmp_path):
    for key in ("nvfp4", "tiles", "mxfp8"):
        model = made(RECIPES[key])
        torch.save(model.state_dict(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        other, kept = copy.deepcopy(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            model.q_proj.weight.copy_(torch.full(SHAPES["q_proj"], 2.0))
        for name, tensor in whole_codes(RECIPES[key]).items():
            values = breccia.dequantize(tensor)
            for weight in (state[f"{name}.weight"], kept[f"{name}.weight"], getattr(other, name).weight):
                assert torch.equal(weight + 0, values), (key, name)
        assert torch.equal(model.q_proj.weight + 0, torch.full(SHAPES["q_proj"], 2.0)), key
        model.load_state_dict(state)
        x = torch.ones(3, 256)
        assert torch.equal(model.q_proj(x), other.q_proj(x)), key


def test_shapes_are_compared():
    model = made("mxfp8")
    message = r"a parameter with at_rest='codes' must get shape \(390, 256\), got \(256,\)"
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model.q_proj.weight.copy_(torch.zeros(256))
