# SPDX-License-Identifier: Apache-2.0
"""Inputs that are quantized by scales made of them, in torchao's own words: its classes are made of what is written."""

import json
from dataclasses import replace

import breccia
import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, convert
from breccia.schemes import Activations, ModelScheme
from scheme_models import write_model, write_moments

DENSE = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo")


@pytest.mark.parametrize("recipe", ["int8", "fp8-row", "mxfp8"])
def test_torchao_reads_how_inputs_are_quantized(recipe, tmp_path):
    pytest.importorskip("torchao")
    from safetensors import safe_open
    from torchao.core.config import config_from_dict
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    model = write_model(tmp_path / "bf16", DENSE)
    report = convert(model, tmp_path / "ao", "torchao", rules=[f"*.self_attn.*={recipe},inputs=dynamic"])
    assert not [note for note in report["notes"] if "inputs" in note]
    said = json.loads((tmp_path / "ao" / "config.json").read_text())["quantization_config"]["quant_type"]["default"]
    assert "DynamicActivation" in type(config_from_dict(said)).__name__
    with safe_open(tmp_path / "ao" / "model.safetensors", "pt") as file:
        stored = {key: file.get_tensor(key) for key in SafetensorsFile(tmp_path / "ao" / "model.safetensors")}
        tensors, left = unflatten_tensor_state_dict(stored, file.metadata())
    assert not left
    for name in DENSE:
        kwargs = tensors[f"{name}.weight"].act_quant_kwargs
        assert kwargs is not None
        assert kwargs.__class__.__name__.startswith("QuantizeTensorTo")
    scheme = breccia.load_scheme(tmp_path / "ao")
    report = convert(tmp_path / "ao", tmp_path / "again", "torchao")
    assert not report["notes"]
    assert all(scheme.rule(name).inputs.when == "dynamic" for name in DENSE)
    first, second = (SafetensorsFile(tmp_path / name / "model.safetensors").metadata for name in ("ao", "again"))
    assert {key: json.loads(text) for key, text in first.items() if key in tensors} == {
        key: json.loads(text) for key, text in second.items() if key in tensors
    }


LOCAL = Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
NVFP4 = Activations("float4_e2m1fn", "group", "dynamic", 16, scale="float8_e4m3fn")


@pytest.mark.parametrize(
    ("recipe", "inputs", "role"),
    [("nvfp4", LOCAL, "act_per_tensor_scale"), ("int8", Activations("int8", "tensor", "static"), "act_quant_scale")],
)
def test_static_scales_of_inputs_are_tensors_of_the_weight(recipe, inputs, role, tmp_path):
    """By torchao's own reader, and to compressed-tensors and back."""
    pytest.importorskip("torchao")
    model, moments = write_model(tmp_path / "bf16", DENSE), write_moments(tmp_path / "m.safetensors")
    report = convert(model, tmp_path / "ao", "torchao", rules=[f"*={recipe},inputs=static"], amax=moments)
    assert report["notes"] == []
    top = 2688 if recipe == "nvfp4" else 127.5
    for i, name in enumerate(DENSE):
        tensor = theirs(tmp_path / "ao")[f"{name}.weight"]
        assert tensor.act_quant_kwargs is not None
        assert float(getattr(tensor, role)) == np.float32((2 + i) / top)
    scheme = breccia.load_scheme(tmp_path / "ao")
    assert [scheme.rule(name).inputs for name in DENSE] == [inputs] * 4
    assert sorted(one.module for one in scheme.scales) == sorted(DENSE)
    assert convert(tmp_path / "ao", tmp_path / "again", "torchao", strict=True)["notes"] == []
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "ao/model.safetensors").read_bytes()
    report = convert(tmp_path / "ao", tmp_path / "ct", "compressed-tensors")
    assert not [note for note in report["notes"] if "→" in note]
    assert breccia.load_scheme(tmp_path / "ct").rule(DENSE[0]).inputs == inputs
    assert convert(tmp_path / "ct", tmp_path / "back", "torchao")["notes"] == []
    assert breccia.load_scheme(tmp_path / "back").rule(DENSE[0]).inputs == inputs
    report = convert(tmp_path / "ao", tmp_path / "mlx", "mlx")
    assert any(note.startswith("inputs of 4 layers") and "→" in note for note in report["notes"])


def test_each_tensor_says_how_its_inputs_are(tmp_path):
    """config.json has one configuration, which is not that of all."""
    rules = ["*.q_proj=fp8-row,inputs=dynamic", "*.k_proj=fp8-row,inputs=none", "*=nvfp4,inputs=dynamic"]
    report = convert(write_model(tmp_path / "bf16", DENSE), tmp_path / "ao", "torchao", rules=rules)
    assert not [note for note in report["notes"] if "→" in note]
    scheme = breccia.load_scheme(tmp_path / "ao")
    fp8 = Activations("float8_e4m3fn", "token", "dynamic")
    assert [scheme.rule(name).inputs for name in DENSE] == [fp8, None, NVFP4, NVFP4]


def theirs(path):
    """What torchao makes of a file, by name."""
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {key: file.get_tensor(key) for key in SafetensorsFile(path / "model.safetensors")}
        tensors, left = unflatten_tensor_state_dict(stored, file.metadata())
    assert not left
    return tensors


def produced(kind):
    """A layer as torchao 0.18 quantizes it on a CPU, and how its inputs are."""
    torch = pytest.importorskip("torch")
    torchao = pytest.importorskip("torchao")
    from torchao.prototype.mx_formats import inference_workflow as four
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
    from torchao.quantization import quant_api as api

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False).to(torch.bfloat16))
    x = torch.randn(3, 256).to(torch.bfloat16)
    if kind == "int8 dynamic":
        torchao.quantize_(layer, api.Int8DynamicActivationInt8WeightConfig(version=2))
        return layer, Activations("int8", "token", "dynamic")
    if kind == "int8 static":
        scale = (x.abs().max() / 127.5).float().reshape(1, 1)
        rows = [api.PerTensor(), api.PerRow()]
        torchao.quantize_(layer, api.Int8StaticActivationInt8WeightConfig(act_quant_scale=scale, granularity=rows))
        return layer, Activations("int8", "tensor", "static")
    if kind == "int4":
        size = api.PerGroup(64)
        config = api.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=size)
        torchao.quantize_(layer, config)
        return layer, Activations("int8", "token", "dynamic", symmetric=False)
    if kind == "nvfp4 local":
        torchao.quantize_(layer, four.NVFP4DynamicActivationNVFP4WeightConfig(step="prepare"))
        layer(x)
        torchao.quantize_(layer, four.NVFP4DynamicActivationNVFP4WeightConfig(step="convert"))
        return layer, LOCAL
    two = kind == "nvfp4 in two levels"  # whose configuration asks for a GPU: its tensor does not
    said = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=two)
    weight = NVFP4Tensor.to_nvfp4(layer[0].weight.detach(), act_quant_kwargs=said)
    layer[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer, replace(NVFP4, two_level=two)


KINDS = ["int8 dynamic", "int8 static", "int4", "nvfp4 local", "nvfp4 in two levels", "nvfp4 in one level"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_torchao_makes_is_read_and_stays(kind, tmp_path):
    layer, inputs = produced(kind)
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict({"mlp.up_proj.weight": layer[0].weight})
    (tmp_path / "ao").mkdir()
    save_file(tensors, tmp_path / "ao/model.safetensors", metadata)
    said = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Any", "_data": {}}}}
    (tmp_path / "ao/config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
    scheme = breccia.load_scheme(tmp_path / "ao")
    assert scheme.rule("mlp.up_proj").inputs == inputs
    assert ModelScheme.from_toml(scheme.to_toml()) == scheme
    report = convert(tmp_path / "ao", tmp_path / "again", "torchao")
    assert not [note for note in report["notes"] if "→" in note or "left out" in note]
    assert breccia.load_scheme(tmp_path / "again").rule("mlp.up_proj").inputs == inputs
    before, after = (theirs(tmp_path / name)["mlp.up_proj.weight"] for name in ("ao", "again"))
    was, now = (getattr(one, "act_quant_kwargs", None) for one in (before, after))
    for name in ("use_dynamic_per_tensor_scale", "mapping_type", "granularity"):
        assert getattr(was, name, None) == getattr(now, name, None), name
    for name in ("act_per_tensor_scale", "act_quant_scale", "activation_quantization"):
        was, now = getattr(before, name, None), getattr(after, name, None)
        assert was == now, name
    other = convert(tmp_path / "ao", tmp_path / "gptq.safetensors", "gptq", dry_run=True)
    assert any("→ high precision" in note or "→ left to" in note for note in other["notes"])
