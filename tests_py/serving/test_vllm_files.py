# SPDX-License-Identifier: Apache-2.0
"""`breccia.vllm` in vLLM's own classes: its choice of a kernel, its quantization schemes, its parallel layers and their
weight loaders."""

import json
import os
from collections.abc import Iterator
from typing import Any

import breccia
import pytest
from breccia import checkpoint
from serving import vllm_layers
from serving.programs import files_of, needs_files

pytestmark = [needs_files, pytest.mark.filterwarnings("ignore")]
torch = pytest.importorskip("torch")
NOT_COMPILED = ("zmq", "cbor2", "aiohttp", "openai", "openai_harmony", "pybase64", "uvloop", "cpuinfo")
NOT_COMPILED += ("prometheus_client", "xgrammar", "fastapi", "partial_json_parser", "llguidance")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's modules on its CPU platform, with one rank and a configuration, after `breccia.vllm.register`."""
    from types import SimpleNamespace

    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    with files_of(*NOT_COMPILED):
        import breccia.vllm
        from vllm import distributed
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.kernels import linear as kernels
        from vllm.platforms import PlatformEnum

        breccia.vllm.register()
        breccia.vllm.register()
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_moe=False, quantization_config=None)
        store = tmp_path_factory.mktemp("ranks") / "store"
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # as vLLM's loader does
        with set_current_vllm_config(config):
            distributed.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            distributed.initialize_model_parallel(1)
            yield SimpleNamespace(kernels=kernels, config=config, cpu=PlatformEnum.CPU)
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
        torch.set_default_dtype(before)


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
    "deepseek:block": "BrecciaFp8BlockLinearKernel",
    "deepseek:block-ue8m0": "BrecciaFp8BlockLinearKernel",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from functools import cache

    folder = tmp_path_factory.mktemp("converted")
    model = vllm_layers.write_block(tmp_path_factory.mktemp("models") / "llama")

    @cache
    def made(target: str) -> Any:
        out = folder / target.replace(":", "-")
        checkpoint.convert(model, out, to=target)
        return out

    return made


def quantization(folder: Any) -> Any:
    """vLLM's own description of a checkpoint's quantization."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    methods = {name: get_quantization_config(name) for name in QUANTIZATION_METHODS}
    claimed = [method.override_quantization_method(said, None, None) for method in methods.values()]
    name = next((one for one in claimed if one is not None), said["quant_method"])
    made = methods[name].from_config(said)
    made.packed_modules_mapping = vllm_layers.PACKED
    return made


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
    tensors, said = vllm_layers.stored(folder), quantization(folder)
    for name in vllm_layers.PARTS:
        layer = vllm_layers.make(name, said)
        assert vllm_layers.fill(layer, name, tensors) > len(vllm_layers.PARTS[name])
        assert type(kernel(layer)).__name__ == OURS[target]
        x = torch.randn(5, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
        wanted = x.double() @ vllm_layers.values(folder, name).T
        got = layer(x)
        assert got.dtype == x.dtype
        assert (got.double() - wanted).norm() <= 5e-3 * wanted.norm()


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ("compressed-tensors:nvfp4", ValueError, "Forced NVFP4 kernel MarlinNvFp4LinearKernel"),
        ("modelopt:nvfp4", ValueError, "Forced NVFP4 kernel MarlinNvFp4LinearKernel"),
        ("compressed-tensors:fp8-block", AssertionError, ""),  # is_static_input_scheme is None there, not False
    ],
)
def test_what_vllm_refuses_itself(target: str, error: type[Exception], says: str, vllm: Any, converted: Any) -> None:
    """docs/serving.md says so, and what to convert to instead."""
    folder = converted(target)
    with pytest.raises(error, match=says):
        vllm_layers.fill(
            vllm_layers.make("mlp.down_proj", quantization(folder)), "mlp.down_proj", vllm_layers.stored(folder)
        )


@pytest.mark.parametrize("target", ["compressed-tensors:mxfp4", "compressed-tensors:int8", "deepseek:block"])
def test_layers_are_compiled(target: str, vllm: Any, converted: Any) -> None:
    """vLLM compiles models as one graph: nothing in a layer may break it."""
    folder, name = converted(target), "mlp.gate_up_proj"
    layer = vllm_layers.make(name, quantization(folder))
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
