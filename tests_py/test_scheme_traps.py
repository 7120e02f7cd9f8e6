# SPDX-License-Identifier: Apache-2.0
"""`verify --complete`: what programs do with checkpoints whose configuration leads them astray."""

import json

import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, convert, save_arrays
from breccia.checkpoint.judging.complete import complete, render
from scheme_models import ATTENTION, EXPERTS, write_model, write_moments

STATIC = ["*.self_attn.*=fp8,inputs=static", "*.experts.*=nvfp4,inputs=local"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Attention in FP8, experts in NVFP4, with scales of inputs and caches, in both formats."""
    folder = tmp_path_factory.mktemp("mixed")
    model, moments = write_model(folder / "bf16"), write_moments(folder / "m.safetensors")
    for to in ("compressed-tensors", "modelopt"):
        convert(model, folder / to, to, rules=STATIC, amax=moments, kv="fp8")
    convert(model, folder / "no-nvfp4", "modelopt", rules=["*.q_proj=fp8-row", "*.self_attn.*=mxfp8,inputs=dynamic"])
    return folder


def changed(source, folder, out=(), more=None, said=None):
    """Another model: without tensors whose names end so, with others, and with another configuration."""
    arrays = dict(SafetensorsFile(source / "model.safetensors").items())
    kept = {name: np.array(array) for name, array in arrays.items() if not name.endswith(tuple(out) or ("/",))}
    folder.mkdir()
    save_arrays(kept | (more or {}), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (said or (lambda one: None))(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def problems(path):
    return {one["tensor"]: one["problem"] for one in complete(path)["problems"]}


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_whole_models_have_none(to, mixed):
    report = complete(mixed / to)
    assert (report["problems"], report["readers"]) == ([], [])


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_missing_scales_of_inputs(to, mixed, tmp_path):
    ends = (f"{ATTENTION[0]}.input_scale", f"{EXPERTS[0]}.input_scale", f"{EXPERTS[0]}.input_global_scale")
    report = complete(changed(mixed / to, tmp_path / "m", ends))
    said = {one["tensor"]: one["problem"] for one in report["problems"]}
    assert set(said) == {ATTENTION[0], EXPERTS[0]}
    assert "-3.4e38" in said[ATTENTION[0]]
    assert "never written" in said[EXPERTS[0]]
    assert not report["ok"]


def test_scales_of_caches(mixed, tmp_path):
    scale, attention = np.ones(1, np.float32), "model.layers.0.self_attn"
    one = changed(mixed / "compressed-tensors", tmp_path / "one", more={f"{attention}.k_scale": scale})
    assert "takes it for both" in problems(one)[attention]
    both = {f"{attention}.{which}_scale": scale for which in "kv"}
    assert problems(changed(mixed / "compressed-tensors", tmp_path / "both", more=both)) == {}
    none = changed(
        mixed / "compressed-tensors", tmp_path / "none", more=both, said=lambda one: one.update(kv_cache_scheme=None)
    )
    assert "no quantized cache" in problems(none)[attention]


def test_layers_that_no_one_says_are_quantized(mixed, tmp_path):
    def without(said):
        del said["quantized_layers"][EXPERTS[0]]

    assert "codes for weights" in problems(changed(mixed / "modelopt", tmp_path / "m", said=without))[EXPERTS[0]]


@pytest.mark.parametrize(
    ("to", "said", "text"),
    [
        ("modelopt", {"ignore": None}, "vLLM refuses ignore: null"),
        ("modelopt", {"ignore": ["layers.0.mlp.experts.1"]}, "vLLM leaves out every layer that has"),
        ("compressed-tensors", {"ignore": None}, "vLLM refuses ignore: null"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "without strategy"),
    ],
)
def test_what_single_programs_refuse(to, said, text, mixed, tmp_path):
    model = changed(mixed / to, tmp_path / "m", said=lambda one: one.update(said))
    report = complete(model)
    assert [one for one in report["readers"] if text in one], report["readers"]
    assert text.split()[0] in render(report)


def test_groups_by_class_and_mixed_models_without_nvfp4(mixed, tmp_path):
    def classes(said):
        said["config_groups"]["group_0"]["targets"] = ["Linear"]

    report = complete(changed(mixed / "compressed-tensors", tmp_path / "m", said=classes))
    assert any("TensorRT-LLM refuses groups by a class (Linear)" in one for one in report["readers"])
    report = complete(
        changed(mixed / "modelopt", tmp_path / "awq", said=lambda one: one.update(quant_algo="W4A16_AWQ"))
    )
    assert "vLLM refuses W4A16_AWQ" in report["readers"]
    convert(mixed / "bf16", tmp_path / "row", "modelopt", rules=["*.self_attn.*=fp8-row,inputs=dynamic"])
    assert complete(tmp_path / "row")["readers"] == ["SGLang refuses FP8_PER_CHANNEL_PER_TOKEN"]
    convert(mixed / "bf16", tmp_path / "int4", "compressed-tensors", rules=["*.self_attn.*=int4,inputs=dynamic"])
    assert complete(tmp_path / "int4")["readers"] == []  # a code to a byte, which vLLM reads
    packed = changed(
        tmp_path / "int4",
        tmp_path / "packed",
        said=lambda one: one["config_groups"]["group_0"].update(format="pack-quantized"),
    )
    assert complete(packed)["readers"] == ["vLLM and SGLang refuse packed integers whose inputs are quantized"]
    assert any("w4afp8" in one for one in complete(mixed / "no-nvfp4")["readers"])
