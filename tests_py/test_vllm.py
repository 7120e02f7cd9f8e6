# SPDX-License-Identifier: Apache-2.0
"""`breccia.vllm`: vLLM's interface of linear kernels, filled. vLLM has no build for CPUs on the package index: what it
asks of a kernel stands here as it asks it, in classes of our own. tests_py/serving takes vLLM's own Python files."""

import abc
import importlib
import importlib.util
import re
import subprocess
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
    """Modules with the names that vLLM 0.33 has; `lists` has what was registered, `on` says which platform it is,
    `unknown` has kinds that `register_linear_kernel` refuses, `module` makes a module or changes it."""
    said = types.SimpleNamespace(lists=[], on="CPU", unknown={"fp8_a16"})

    def register_linear_kernel(made: type, platform: str, kind: str) -> None:
        if kind in said.unknown:
            raise ValueError(f"Unrecognized kernel type: {kind}")
        said.lists.append((made, platform, kind))

    def module(name: str, **content: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    root = "vllm.model_executor.kernels.linear"
    for package in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels"):
        module(package)
    platform = types.SimpleNamespace(is_cpu=lambda: said.on == "CPU")
    module("vllm.platforms", current_platform=platform, PlatformEnum=types.SimpleNamespace(CPU="CPU"))
    said.of_a16 = {}
    module(root, register_linear_kernel=register_linear_kernel, _POSSIBLE_WFP8A16_KERNELS=said.of_a16)
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
    monkeypatch.setattr(kernels, "_registered", set())
    said.register, said.module, said.root = breccia.vllm.register, module, root
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
    public = [kind for kind in vllm.kinds if kind != "fp8_a16"]
    assert [(kind, platform) for _, platform, kind in vllm.lists] == [(kind, "CPU") for kind in public]
    assert [made.__name__ for made in vllm.of_a16["CPU"]] == ["BrecciaFp8A16LinearKernel"]


def kinds() -> list[str]:
    from breccia.vllm import kernels

    return list(kernels._KINDS)


def names_in(log: pytest.LogCaptureFixture) -> str:
    """What was left out, of the one warning."""
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "\n" not in record.getMessage()
    return record.getMessage()


@pytest.mark.parametrize("kind", kinds())
def test_what_a_version_lacks_is_left_out(kind: str, vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A kind that the function does not know and that has no list; then a base class that is elsewhere."""
    vllm.unknown.add(kind)
    vllm.module(vllm.root, register_linear_kernel=sys.modules[vllm.root].register_linear_kernel)
    vllm.register()
    assert f"kernels for {kind} (ValueError: Unrecognized kernel type: {kind})" in names_in(caplog)
    assert {name for _, _, name in vllm.lists} == set(vllm.kinds) - {kind, "fp8_a16"}
    caplog.clear()
    vllm.module(f"{vllm.root}.{vllm.kinds[kind].base[0]}")
    vllm.register()
    assert f"kernels for {kind} (AttributeError: " in names_in(caplog)


def test_a_list_takes_what_the_function_does_not_know(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM 0.32: a list of kernels for FP8 in blocks, and no name for it."""
    vllm.unknown.add("fp8_block")
    of_blocks: dict[str, list[type]] = {}
    sys.modules[vllm.root]._POSSIBLE_FP8_BLOCK_KERNELS = of_blocks  # type: ignore[attr-defined]
    vllm.register()
    assert [made.__name__ for made in of_blocks["CPU"]] == ["BrecciaFp8BlockLinearKernel"]
    assert not caplog.records


def test_kernels_that_could_not_be_made_are_left_out(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    further = abc.ABCMeta("Mxfp8LinearKernel", (), {"of_the_next_version": abc.abstractmethod(lambda self: None)})
    vllm.module(f"{vllm.root}.mxfp8.Mxfp8LinearKernel", Mxfp8LinearKernel=further)
    vllm.register()
    assert "kernels for mxfp8 (TypeError: kernels must have of_the_next_version)" in names_in(caplog)


def test_layers_in_words_of_another_version_are_left_to_vllm(vllm: Any) -> None:
    vllm.register()
    for made, _, kind in vllm.lists:
        if kind in ("fp8", "fp8_block", "mxfp6", "mp"):
            able, why = made.can_implement(types.SimpleNamespace())
            assert not able
            assert "this version of vLLM" in why


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_programs_start_where_nothing_can_be_added(
    program: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty program stands for a version in which every module has another name."""
    for name in [name for name in sys.modules if name.partition(".")[0] == program]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, program, types.ModuleType(program))
    monkeypatch.delitem(sys.modules, f"breccia.{program}.quantization", raising=False)
    importlib.import_module(f"breccia.{program}").register()
    assert "checkpoints in breccia's format (ModuleNotFoundError: " in names_in(caplog)


@pytest.mark.parametrize("groups", [[], {}, {"a": []}, {"a": {"targets": ["Linear"], "weights": [4]}}, {"a": None}])
def test_descriptions_that_are_none_are_left_to_vllm(groups: Any) -> None:
    from breccia.vllm.weights_alone import names_and_recipe

    assert names_and_recipe({"quant_method": "compressed-tensors", "config_groups": groups}) is None


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


@pytest.mark.parametrize(("program", "old"), [("transformers", "5.22.2"), ("peft", "0.20.0"), ("diffusers", "0.41.0")])
def test_older_versions_are_refused_in_a_sentence(program: str, old: str) -> None:
    """In a process of its own, for a module that fails stays half imported."""
    if importlib.util.find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    stop = "import sys; sys.modules['transformer_engine'] = None  # it asks for a GPU when imported\n"
    code = f"{stop}import {program}; {program}.__version__ = {old!r}; import breccia.{program}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    sentence = rf"ImportError: breccia.{program} works with {program} [\d.]+ and newer, {old} is installed: "
    assert re.search(sentence, done.stderr), done.stderr


def test_what_programs_must_say_is_abstract() -> None:
    """A class for a further program that leaves it out is refused where it is made, not where a model runs."""
    from breccia._serving.experts import ExpertsMethod
    from breccia._serving.linear import LinearMethod

    assert LinearMethod.__abstractmethods__ == {"say_block"}
    assert ExpertsMethod.__abstractmethods__ == {"place"}
    with pytest.raises(TypeError, match="say_block"):
        LinearMethod(breccia.NVFP4BlockScaling(), None, {})  # type: ignore[abstract]
