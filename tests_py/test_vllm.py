# SPDX-License-Identifier: Apache-2.0
"""`breccia.vllm`: vLLM's interface of linear kernels, filled. vLLM has no build for CPUs on the package index: what it
asks of a kernel stands here as it asks it, in classes of our own. tests_py/serving takes vLLM's own Python files."""

import abc
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import to_compressed_tensors, to_modelopt
from breccia.bridges.common import to_torch

torch = pytest.importorskip("torch")
METHODS = ("is_supported", "can_implement", "process_weights_after_loading", "apply_weights")


def abstract(name: str) -> type:
    """A base class that cannot be made while a method is missing, and asks what vLLM's asks when it is."""

    def init(self: Any, config: Any) -> None:
        assert self.can_implement(config)[0]
        assert self.is_supported()[0]
        self.config = config

    methods = {method: abc.abstractmethod(lambda self: None) for method in METHODS}
    return abc.ABCMeta(name, (), {"__init__": init, **methods})


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules with the names that vLLM 0.33 has; `lists` has what was registered, `on` says which platform it is."""
    said = types.SimpleNamespace(lists=[], on="CPU")

    def module(name: str, **content: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    root = "vllm.model_executor.kernels.linear"
    for package in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels"):
        module(package)
    platform = types.SimpleNamespace(is_cpu=lambda: said.on == "CPU")
    module("vllm.platforms", current_platform=platform, PlatformEnum=types.SimpleNamespace(CPU="CPU"))
    module(root, register_linear_kernel=lambda *args: said.lists.append(args))
    layers = "vllm.model_executor.layers"
    said.formats = {}
    keep = lambda name: lambda kind: said.formats.setdefault(name, kind)  # noqa: E731
    for package in (layers, f"{layers}.quantization"):
        module(package, register_quantization_config=keep)
    module(f"{layers}.quantization.base_config", QuantizationConfig=type("QuantizationConfig", (), {}))
    monkeypatch.setitem(sys.modules, "breccia.vllm.quantization", types.ModuleType("gone after the test"))
    del sys.modules["breccia.vllm.quantization"]
    import breccia.vllm
    from breccia.vllm import kernels

    for path, name in {kind.base for kind in kernels._KINDS.values()}:
        module(f"{root}.{path}", **{name: abstract(name)})
    monkeypatch.setattr(kernels, "_registered", [])
    said.register = breccia.vllm.register
    said.kinds = kernels._KINDS
    return said


def test_registers_once_and_kernels_on_cpus_alone(vllm: Any) -> None:
    vllm.on = "CUDA"
    vllm.register()
    assert not vllm.lists
    assert list(vllm.formats) == ["breccia"]
    vllm.on = "CPU"
    vllm.register()
    vllm.register()
    public = [kind for kind, said in vllm.kinds.items() if not said.private]
    assert [(kind, platform) for _, platform, kind in vllm.lists] == [(kind, "CPU") for kind in public]


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_values(kind: str, dtype: str, vllm: Any) -> None:
    vllm.register()
    kernel = next(made for made, _, name in vllm.lists if name == kind)(types.SimpleNamespace())
    scaled = breccia.cast(np.random.default_rng(0).normal(0, 0.02, (256, 128)).astype(np.float32), kind)
    parts = to_compressed_tensors(scaled) if kind == "mxfp4" else to_modelopt(scaled)
    layer = torch.nn.Module()
    names = {"weight_packed": "weight", "weight_scale_2": "weight_global_scale"}
    for name, array in parts.items():
        parameter = torch.nn.Parameter(to_torch(np.array(array)), requires_grad=False)
        layer.register_parameter(names.get(name, name), parameter)
    before = set(layer.state_dict())
    kernel.process_weights_after_loading(layer)
    assert set(layer.state_dict()) == before
    made = layer.__dict__["breccia_linear"].weight
    assert made.data.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()  # a view
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(getattr(torch, dtype))
    bias = torch.arange(256, dtype=x.dtype) / 256
    got = kernel.apply_weights(layer, x, bias)
    assert got.dtype == x.dtype
    wanted = x.double() @ torch.from_numpy(breccia.dequantize(scaled)).double().T + bias.double()
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error <= (1e-6 if dtype == "float32" else 5e-3)


def test_batched_products_are_left_to_vllm(vllm: Any) -> None:
    vllm.register()
    kernel = next(made for made, _, name in vllm.lists if name == "mxfp8")
    assert kernel.can_implement(types.SimpleNamespace(bmm_batch_size=None)) == (True, None)
    assert not kernel.can_implement(types.SimpleNamespace(bmm_batch_size=4))[0]


@pytest.mark.parametrize(("group", "module"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_programs_find_the_entry_point(group: str, module: str) -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    section = text.partition(f'[project.entry-points."{group}"]\n')[2]
    assert section.startswith(f'breccia = "breccia.{module}:register"\n')
    assert callable(importlib.import_module(f"breccia.{module}").register)


def test_what_programs_must_say_is_abstract() -> None:
    """A class for a further program that leaves it out is refused where it is made, not where a model runs."""
    from breccia._serving.experts import ExpertsMethod
    from breccia._serving.linear import LinearMethod

    assert LinearMethod.__abstractmethods__ == {"say_block"}
    assert ExpertsMethod.__abstractmethods__ == {"place"}
    with pytest.raises(TypeError, match="say_block"):
        LinearMethod(breccia.NVFP4BlockScaling(), None, {})  # type: ignore[abstract]
