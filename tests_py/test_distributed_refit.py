# SPDX-License-Identifier: Apache-2.0
"""Weights of models that train, as engines load them: the bytes that `breccia convert` writes of the saved model."""

import collections
import json

import breccia
import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, convert, save_arrays, target_names
from breccia.checkpoint.planning.targets import parse_target

ml_dtypes = pytest.importorskip("ml_dtypes")

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
from breccia import distributed  # noqa: E402
from breccia.checkpoint.files.dtypes import torch_dtype  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

TARGETS = [name for name in target_names() if ":" in name and not parse_target(name).bridge.container.whole]
CONFIG = {"model_type": "deepseek_v4"}


class Layer(torch.nn.Module):
    def __init__(self, linear=torch.nn.Linear):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linear(256, 384), linear(256, 128), linear(256, 136)
        self.o_proj = linear(512, 328, bias=False)
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({"gate_proj": linear(128, 64), "up_proj": linear(128, 64)}) for _ in range(2)
        )
        self.input_layernorm = torch.nn.LayerNorm(256)
        self.register_buffer("steps", torch.tensor(3))


class Model(torch.nn.Module):
    def __init__(self, linear=torch.nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = torch.nn.Embedding(96, 256)
        self.layers = torch.nn.ModuleList([Layer(linear), Layer(linear)])
        self.lm_head = linear(256, 96, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


def save(model, path):
    """As a program that trains would: without the second name of a weight that two layers share."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    arrays = {
        name: tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in state.items()
    }
    path.mkdir()
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refit")
    source = save(Model().bfloat16(), folder / "in")
    for to in TARGETS:
        convert(source, folder / to.replace(":", "-"), to)
    return folder


def same(given, path):
    file = SafetensorsFile(path / "model.safetensors")
    assert set(given) == set(file.entries)
    for name, tensor in given.items():
        assert tensor.dtype == torch_dtype(file.entries[name].dtype), name
        raw = np.ascontiguousarray(file[name]).reshape(-1).view(np.uint8)
        assert torch.equal(tensor.contiguous().reshape(-1).view(torch.uint8), torch.tensor(raw)), (path.name, name)


def sharded(model, world):
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gives_what_convert_writes(rank, world, folder):
    for to in TARGETS:
        model = sharded(Model().bfloat16(), world) if world > 1 else Model().bfloat16()
        weights = distributed.refit(model, to, config=CONFIG)
        given = dict(weights)
        same(given, folder / to.replace(":", "-"))
        weights.check(given)
        assert {name: (t.dtype, tuple(t.shape)) for name, t in given.items()} == weights.expected
        said = json.loads((folder / to.replace(":", "-") / "config.json").read_text())
        assert weights.quantization_config.items() <= said.items() or (
            weights.quantization_config == said.get("quantization_config", {})
        ), to


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_bytes_are_those_of_convert(world, converted):
    distributed_ranks.run(world, gives_what_convert_writes, converted)


def test_engines_have_names(converted):
    for name in ("vllm-fp8", "sglang-nvfp4"):
        given = dict(distributed.refit(Model().bfloat16(), name, config=CONFIG))
        same(given, converted / f"compressed-tensors-{name.partition('-')[2]}")


def test_masters_are_rounded_first(converted):
    model = Model().bfloat16().float()
    same(
        dict(distributed.refit(model, "modelopt:nvfp4", config=CONFIG, dtype=torch.bfloat16)),
        converted / "modelopt-nvfp4",
    )


def test_layers_that_train_in_low_precision(converted):
    """Their histories of scales are no weights."""
    recipes = breccia.autograd.LinearRecipes(*[breccia.DelayedScaling()] * 3)

    def linear(*arguments, **options):
        return breccia.nn.ScaledLinear(*arguments, **options, recipes=recipes)

    model = Model(linear).bfloat16()
    model.load_state_dict(Model().bfloat16().state_dict(), strict=False)
    same(dict(distributed.refit(model, "deepseek:block", config=CONFIG)), converted / "deepseek-block")


def gathers_scaled_parameters(rank, world, folder):
    model = Model().bfloat16()
    for layer in model.layers:
        layer.q_proj.weight = distributed.ScaledParameter(layer.q_proj.weight, "mxfp8")
    same(dict(distributed.refit(sharded(model, world), "vllm-fp8", config=CONFIG)), folder / "compressed-tensors-fp8")


def test_parameters_that_are_gathered_as_codes(converted):
    distributed_ranks.run(2, gathers_scaled_parameters, converted)


class Gathered(torch.utils._python_dispatch.TorchDispatchMode):
    """The dtypes that are gathered, and the bytes that this rank sends of them."""

    def __init__(self):
        super().__init__()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "gather" in func._schema.name:
            sent = args[1] if func.namespace == "c10d" else args[0]
            for tensor in sent if isinstance(sent, list) else [sent]:
                self.bytes[tensor.dtype] += tensor.nbytes
        return func(*args, **(kwargs or {}))


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, rows in (("q_proj", 512), ("k_proj", 256), ("v_proj", 384)):
            setattr(self, name, torch.nn.Linear(256, rows, bias=False))
        with torch.no_grad():
            self.v_proj.weight[-1, -1] = 3.0  # the last rank has the largest magnitude of the three


# Of the bytes of bf16: codes and scales.
SHARES = {"vllm-fp8": 0.53, "modelopt:fp8": 0.51, "deepseek:block": 1.0, "modelopt:mxfp8": 0.53, "vllm-nvfp4": 0.29}


def gathers_codes(rank, world):
    for to, share in SHARES.items():
        expected = dict(distributed.refit(Attention().bfloat16(), to, config=CONFIG))
        model = fully_shard(Attention(), mesh=init_device_mesh("cpu", (world,)))
        weights = distributed.refit(model, to, config=CONFIG, dtype=torch.bfloat16)
        with Gathered() as gathered:
            given = dict(weights)
        assert given.keys() == expected.keys()
        for name, tensor in given.items():
            same = [one.contiguous().reshape(-1).view(torch.uint8) for one in (tensor, expected[name])]
            assert torch.equal(*same), (to, name)
        large = {dtype: count for dtype, count in gathered.bytes.items() if count > 1024}
        if to == "deepseek:block":  # ranks hold half a tile of v_proj, whose floats are gathered: 384 rows of 256
            assert large.pop(torch.bfloat16) == 384 * 256 * 2 // world
        assert large.keys() == {torch.uint8} and large[torch.uint8] <= share * 2 * 1152 * 256 // world, (to, large)


def test_ranks_cast_their_rows_and_codes_are_gathered():
    distributed_ranks.run(2, gathers_codes)


def test_what_an_engine_did_not_write_is_named():
    weights = distributed.refit(Model().bfloat16(), "vllm-fp8", config=CONFIG)
    total = len(weights)
    with pytest.raises(ValueError, match=rf"the iteration must give .*: {total} of {total} tensors are missing"):
        weights.check()
    given = dict(weights)
    weights.check(given)
    scale = "layers.1.o_proj.weight_scale"
    with pytest.raises(
        ValueError, match=rf"1 of {total} tensors are missing, such as '{scale}'; 1 are too many.*'more'"
    ):
        weights.check([*(name for name in given if name != scale), "more"])
    with pytest.raises(ValueError, match=rf"written\['{scale}'\] must have the bytes that were given, it has others"):
        weights.check({**given, scale: torch.zeros_like(given[scale])})
    with pytest.raises(ValueError, match=rf"written\['{scale}'\] must be torch.float32 of shape \(328, 1\), got"):
        weights.check({**given, scale: given[scale][:300]})


def test_refusals():
    model = Model()
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        distributed.refit(3, "vllm-fp8")
    with pytest.raises(ValueError, match=r"target must be a format of tensors, got 'gguf:q8_0'"):
        distributed.refit(model, "gguf:q8_0")
    with pytest.raises(ValueError, match=r"^to must be a recipe or a format"):
        distributed.refit(model, "nonsense")
    with pytest.raises(ValueError, match=r"model must have float weights, layers.0.q_proj is quantized"):
        distributed.refit(breccia.quantize_(model, "mxfp8", lambda _, name: "q_proj" in name), "vllm-fp8")


def saved_model(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "num_experts_per_tok": 2}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 64}
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "Llama"])
def test_a_model_of_transformers_gives_the_bytes_of_the_saved_one(kind, tmp_path):
    """transformers has the experts of a layer in one tensor, and saves them apart."""
    model = saved_model(kind)
    model.save_pretrained(tmp_path / "saved")
    for to in ["bf16", *(TARGETS if kind == "Qwen3Moe" else TARGETS[::5])]:
        if to == "deepseek:mxfp4":  # the form of that model's experts alone
            with pytest.raises(ValueError, match="model_type must be its, got 'qwen3_moe'"):
                distributed.refit(model, to)
            continue
        convert(tmp_path / "saved", tmp_path / to, to)
        refit = distributed.refit(model, to)
        given = dict(refit)
        refit.check(list(given))
        same(given, tmp_path / to)


def gives_the_names_of_the_saved_one(rank, world, folder):
    for to in SHARDED:
        model = saved_model("Qwen3Moe")
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        refit = distributed.refit(fully_shard(model, mesh=mesh), to)
        with Gathered() as gathered:
            given = dict(refit)
        refit.check(list(given))
        same(given, folder / to)
        experts = 2 * 4 * 3 * 64 * 64 * 4 // world  # of two layers, each gathered once
        assert experts <= sum(gathered.bytes.values()) < 2 * experts


SHARDED = ["bf16", "compressed-tensors:nvfp4", "modelopt:fp8"]


def test_a_sharded_model_of_transformers_gives_the_names_of_the_saved_one(tmp_path):
    saved_model("Qwen3Moe").save_pretrained(tmp_path / "saved")
    for to in SHARDED:
        convert(tmp_path / "saved", tmp_path / to, to)
    distributed_ranks.run(2, gives_the_names_of_the_saved_one, tmp_path)
