# SPDX-License-Identifier: Apache-2.0
"""`breccia.vllm` in vLLM's own classes: its choice of a kernel, its quantization schemes, its parallel layers and their
weight loaders."""

from typing import Any

import breccia
import pytest
from breccia import checkpoint
from serving import vllm_layers
from serving.programs import needs_files

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")


def lists(vllm: Any) -> list[list[type]]:
    """vLLM's lists of kernels for CPUs."""
    every = [one for name, one in vars(vllm.kernels).items() if name.startswith("_POSSIBLE_")]
    return [one[vllm.cpu] for one in every if vllm.cpu in one]


def test_each_kind_is_registered_once_and_last(vllm: Any) -> None:
    ours = [made.__name__ for one in lists(vllm) for made in one if made.__module__.startswith("breccia")]
    assert len(ours) == len(set(ours)) == 8
    for one in lists(vllm):
        theirs_first = [made.__module__.startswith("breccia") for made in one]
        assert theirs_first == sorted(theirs_first)


OURS = {
    "compressed-tensors:mxfp4": "BrecciaMxFp4LinearKernel",
    "compressed-tensors:mxfp8": "BrecciaMxfp8LinearKernel",
    "compressed-tensors:fp8": "BrecciaFp8A16LinearKernel",
    "compressed-tensors:fp8-tensor": "BrecciaFp8A16LinearKernel",
    "compressed-tensors:int4": "BrecciaIntegersLinearKernel",
    "compressed-tensors:int4-asym": "BrecciaIntegersLinearKernel",
    "compressed-tensors:int8": "BrecciaIntegersLinearKernel",
    "modelopt:mxfp8": "BrecciaMxfp8LinearKernel",
    "modelopt:fp8": "BrecciaFp8LinearKernel",
    "modelopt:fp8-channel": "BrecciaFp8LinearKernel",
    "compressed-tensors:fp8-block": "BrecciaFp8BlockLinearKernel",
    "deepseek:block": "BrecciaFp8BlockLinearKernel",
    "deepseek:block-ue8m0": "BrecciaFp8BlockLinearKernel",
}


def kernel(layer: Any) -> Any:
    """The kernel that a layer's quantization chose."""
    holders = [layer.quant_method, getattr(layer, "scheme", None)]
    found = [getattr(h, n, None) for h in holders for n in ("kernel", "fp8_linear", "linear_kernel", "ocp_mx_linear")]
    return next(one for one in found if one is not None)


@pytest.mark.parametrize("target", OURS)
def test_layers_of_a_converted_model(target: str, vllm: Any, converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads it with its own scheme, takes our kernel, and multiplies by the values that the file stands for."""
    lists = [
        one[vllm.cpu] for name, one in vars(vllm.kernels).items() if name.startswith("_POSSIBLE_") and vllm.cpu in one
    ]
    others = [made.__name__ for one in lists for made in one if not made.__module__.startswith("breccia")]
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", ",".join(others))
    folder = converted(target)
    tensors, said = vllm_layers.stored(folder), vllm_layers.quantization(folder)
    for name in vllm_layers.PARTS:
        layer = vllm_layers.make(name, said)
        assert vllm_layers.fill(layer, name, tensors) > len(vllm_layers.PARTS[name])
        assert type(kernel(layer)).__name__ == OURS[target]
        x = torch.randn(5, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
        wanted = x.double() @ vllm_layers.values(folder, name).T
        got = layer(x)
        assert got.dtype == x.dtype
        assert (got.double() - wanted).norm() <= 5e-3 * wanted.norm()


@pytest.mark.parametrize("target", ["compressed-tensors:mxfp4", "compressed-tensors:int8", "deepseek:block"])
def test_layers_are_compiled(target: str, vllm: Any, converted: Any) -> None:
    """vLLM compiles models as one graph: nothing in a layer may break it."""
    folder, name = converted(target), "mlp.gate_up_proj"
    layer = vllm_layers.make(name, vllm_layers.quantization(folder))
    vllm_layers.fill(layer, name, vllm_layers.stored(folder))
    x = torch.randn(5, vllm_layers.HIDDEN)
    torch._dynamo.reset()
    assert torch.compile(layer, fullgraph=True, backend="aot_eager")(x).equal(layer(x))


def test_mxfp6_of_quark(vllm: Any) -> None:
    """Codes packed as Quark packs them, in the kernel that vLLM's Quark scheme asks for."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    for kind in ("E2M3", "E3M2"):
        scaled = breccia.cast(
            torch.randn(256, 128, dtype=torch.float32) * 0.02, breccia.MXFP6BlockScaling(fp6_format=kind)
        )
        four = scaled.data.reshape(256, 32, 4).int()
        word = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
        packed = torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).to(torch.uint8).reshape(256, 96)
        kernel = vllm.kernels.init_mxfp6_linear_kernel(getattr(quant_utils, f"kMxfp6{kind}Static"))
        layer = torch.nn.Module()
        for name, value in (("weight", packed), ("weight_scale", scaled.scale.view(torch.uint8))):
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        kernel.process_weights_after_loading(layer)
        x = torch.randn(3, 128)
        wanted = x.double() @ breccia.dequantize(scaled).double().T
        assert (kernel.apply_weights(layer, x).double() - wanted).norm() <= 5e-3 * wanted.norm()
        assert layer.weight.numel() == 0  # let go: breccia has the codes one by one


def own(folder: Any) -> Any:
    """A checkpoint in breccia's own format: vLLM's description, and its tensors by vLLM's names."""
    said = vllm_layers.quantization(folder)
    assert type(said).__module__ == "breccia.vllm.quantization"
    return said, vllm_layers.stored(folder), said.get_checkpoint_weight_mapper()


OWN = ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "int4", "int8", "fp8", "fp8-row", "fp8-block"]


@pytest.mark.parametrize("recipe", OWN)
def test_own_format(recipe: str, vllm: Any, converted: Any) -> None:
    """Fused layers give the logits of breccia's own linear on the parts, to the bit."""
    folder = converted(recipe)
    said, tensors, mapper = own(folder)
    opened = breccia.open(folder)
    for name, parts in vllm_layers.PARTS.items():
        layer = vllm_layers.make(name, said)
        assert vllm_layers.fill(layer, name, tensors, mapper) == len(dict(layer.named_parameters())) * len(parts)
        x = torch.randn(5, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
        weights = [opened[f"{vllm_layers.BLOCK}{part}.weight"].to("torch") for part in parts]
        assert layer(x).equal(torch.cat([breccia.linear(x, one, None, x.dtype) for one in weights], -1))


def of_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int, make: Any) -> list[Any]:
    """What `make` makes on each rank of a group of tensor parallelism, as vLLM's layers ask for it."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    made = []
    for rank in range(ranks):
        with monkeypatch.context() as patch:
            for module in (parameter, linear):
                patch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
                patch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
            made.append(make())
    return made


@pytest.mark.parametrize("recipe", OWN)
@pytest.mark.parametrize("name", vllm_layers.PARTS)
def test_tensor_parallel(recipe: str, name: str, vllm: Any, converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks have halves of each weight, and together the whole product."""
    said, tensors, mapper = own(converted(recipe))

    def filled() -> Any:
        layer = vllm_layers.make(name, said)
        vllm_layers.fill(layer, name, tensors, mapper)
        return layer

    if "block" in recipe and name.endswith("qkv_proj"):  # tiles of 128 by 128, and 64 rows of keys on a rank
        with pytest.raises(ValueError, match="rows of each part of a fused layer must be whole blocks of 128"):
            of_ranks(monkeypatch, 2, filled)
        return
    whole, halves = filled(), of_ranks(monkeypatch, 2, filled)
    assert [2 * layer.weight_data.numel() for layer in halves] == [whole.weight_data.numel()] * 2
    columns = vllm_layers.HIDDEN if name.endswith(("up_proj", "qkv_proj")) else None
    x = torch.randn(3, columns or whole.input_size, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    wanted = whole(x)
    if columns is None:
        half = whole.input_size // 2
        got = halves[0](x[:, :half]) + halves[1](x[:, half:])
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
        return
    widths = halves[0].logical_widths
    first, second = (layer(x).split(widths, -1) for layer in halves)
    assert torch.cat([part for pair in zip(first, second, strict=True) for part in pair], -1).equal(wanted)


@pytest.mark.parametrize(("recipe", "when"), [("fp8", "static"), ("nvfp4", "static"), ("fp8-row", "dynamic")])
@pytest.mark.parametrize("name", vllm_layers.PARTS)
def test_inputs_are_those_of_the_scheme(recipe: str, when: str, name: str, vllm: Any, tmp_path: Any) -> None:
    """With a static scale of each part of a fused layer."""
    source = vllm_layers.write_block(tmp_path / "model")
    moments = vllm_layers.write_moments(tmp_path / "m.safetensors") if when == "static" else None
    checkpoint.convert(source, tmp_path / "out", recipe, activations=when, amax=moments)
    said, tensors, mapper = own(tmp_path / "out")
    layer = vllm_layers.make(name, said)
    vllm_layers.fill(layer, name, tensors, mapper)
    x = torch.randn(5, layer.input_size, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    assert layer(x).equal(vllm_layers.outputs(tmp_path / "out", name, x))
    inputs = [one.activations for one in layer.__dict__["breccia_layers"]]
    assert None not in inputs


def test_own_format_is_compiled(vllm: Any, converted: Any) -> None:
    said, tensors, mapper = own(converted("nvfp4"))
    layer = vllm_layers.make("self_attn.qkv_proj", said)
    vllm_layers.fill(layer, "self_attn.qkv_proj", tensors, mapper)
    assert len(layer.__dict__["breccia_layers"]) == 3  # a global scale for each part
    x = torch.randn(5, vllm_layers.HIDDEN)
    torch._dynamo.reset()
    assert torch.compile(layer, fullgraph=True, backend="aot_eager")(x).equal(layer(x))


def test_own_format_refuses(vllm: Any, converted: Any) -> None:
    said = vllm_layers.quantization(converted("nvfp4"))
    recipe, other = breccia.NVFP4BlockScaling(), breccia.MXFP4BlockScaling()
    prefix = f"{vllm_layers.BLOCK}self_attn"
    said.modules = {f"{prefix}.k_proj": other}
    with pytest.raises(ValueError, match=r"are fused into model.layers.0.self_attn.qkv_proj must have one recipe"):
        vllm_layers.make("self_attn.qkv_proj", said)
    said.modules, said.ignore = {}, [f"{prefix}.{part}" for part in vllm_layers.PACKED["qkv_proj"]]
    assert type(vllm_layers.make("self_attn.qkv_proj", said).quant_method).__name__ == "UnquantizedLinearMethod"
    with pytest.raises(ValueError, match="quantization_config must have a recipe, as breccia writes it"):
        type(said).from_config({"quant_method": "breccia"})
    assert said.recipe == recipe


@pytest.mark.parametrize("recipe", OWN)
def test_output_layer(recipe: str, vllm: Any, tmp_path: Any) -> None:
    """A quantized output layer, whose rows vLLM fills up, computes with the stored values; tiles are refused."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    source = vllm_layers.write_block(tmp_path / "model")
    checkpoint.convert(source, tmp_path / "out", to=recipe, include=["lm_head.weight"])
    said, tensors, mapper = own(tmp_path / "out")
    sizes = (vllm_layers.VOCABULARY, vllm_layers.HIDDEN)
    if "block" in recipe:
        with pytest.raises(ValueError, match=r"lm_head must have scales of one row each .* --exclude 'lm_head.\*'"):
            ParallelLMHead(*sizes, quant_config=said, prefix="lm_head")
        return
    head = ParallelLMHead(*sizes, quant_config=said, prefix="lm_head", padding_size=96)
    parameters = dict(head.named_parameters())
    mine = {name: value for name, value in tensors.items() if name.startswith("lm_head.")}
    assert len(mine) == len(parameters)
    for name, value in mapper.apply(mine.items()):
        parameter = parameters[name.removeprefix("lm_head.")]
        parameter.weight_loader(parameter, value)
    head.quant_method.process_weights_after_loading(head)
    x = torch.randn(3, vllm_layers.HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    wanted = breccia.linear(x, breccia.open(tmp_path / "out")["lm_head.weight"].to("torch"), None, x.dtype)
    assert head.quant_method.apply(head, x)[:, : vllm_layers.VOCABULARY].equal(wanted)


@pytest.mark.parametrize("target", ["compressed-tensors:nvfp4", "modelopt:nvfp4"])
def test_nvfp4_of_weights_alone(target: str, vllm: Any, converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for Marlin by name, which needs a GPU: on a CPU breccia's method takes over, on others vLLM's stays."""
    from vllm.platforms import current_platform

    folder = converted(target)
    said, opened = vllm_layers.quantization(folder), breccia.open(folder)
    assert type(said).__module__ == "breccia.vllm.quantization"
    for name, parts in vllm_layers.PARTS.items():
        layer = vllm_layers.make(name, said)
        assert vllm_layers.fill(layer, name, vllm_layers.stored(folder)) == 3 * len(parts)
        x = torch.randn(5, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
        weights = [opened[f"{vllm_layers.BLOCK}{part}.weight"].to("torch") for part in parts]
        assert layer(x).equal(torch.cat([breccia.linear(x, one, None, x.dtype) for one in weights], -1))
    said.ignore = ["re:.*gate_proj$", "*.mlp.up_proj"]
    assert type(vllm_layers.make("mlp.gate_up_proj", said).quant_method).__name__ == "UnquantizedLinearMethod"
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert type(vllm_layers.quantization(folder)).__module__.startswith("vllm.")


def test_only_weights_alone_are_taken_over() -> None:
    from breccia.vllm.weights_alone import names_and_recipe

    weights = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}}
    assert names_and_recipe(said) is not None
    for change in (
        {"kv_cache_scheme": {"num_bits": 8}},
        {"format": "mxfp4-pack-quantized"},
        {"quant_method": "quark"},
        {"config_groups": {}},
        {"config_groups": {"a": group, "b": group}},
        {"config_groups": {"a": group | {"input_activations": {"num_bits": 4}}}},
        {"config_groups": {"a": group | {"targets": ["re:.*q_proj"]}}},
        {"config_groups": {"a": group | {"weights": weights | {"group_size": 32}}}},
    ):
        assert names_and_recipe(said | change) is None, change
