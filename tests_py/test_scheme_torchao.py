# SPDX-License-Identifier: Apache-2.0
"""Inputs that are quantized by scales made of them, in torchao's own words: its classes are made of what is written."""

import json

import breccia
import pytest
from breccia.checkpoint import SafetensorsFile, convert
from scheme_models import write_model

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
    scheme = breccia.scheme(tmp_path / "ao")
    report = convert(tmp_path / "ao", tmp_path / "again", "torchao")
    assert not report["notes"]
    assert all(scheme.rule(name).inputs.when == "dynamic" for name in DENSE)
    first, second = (SafetensorsFile(tmp_path / name / "model.safetensors").metadata for name in ("ao", "again"))
    assert {key: json.loads(text) for key, text in first.items() if key in tensors} == {
        key: json.loads(text) for key, text in second.items() if key in tensors
    }
