# SPDX-License-Identifier: Apache-2.0
"""Scales of activations and of the KV cache beside quantized weights, from every format that has them to every one that
is written: the same largest magnitude in the target's own number, or a note that they are left out."""

import json
import re
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import comfyui, compressed_tensors, deepseek, modelopt
from breccia.bridges import parts as _parts
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, merge_lora, save_arrays, target_names
from checkpoints import weight

AMAX = 6.0  # of the inputs
LAYER = "model.layers.0.self_attn.q_proj"
KEYS, VALUES = 0.5, 0.25  # scales of the KV cache
FP8, NVFP4 = breccia.Float8CurrentScaling(), breccia.NVFP4BlockScaling()
DIVISOR = breccia.NVFP4BlockScaling(global_scale_form="divisor")
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
MODELOPT_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}


def f32(number: float, *shape: int) -> Any:
    return np.full(shape, number, np.float32)


def modelopts(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_scheme": MODELOPT_CACHE}


# Name → its bridge, recipe, scale of inputs, quantization_config, and how it spells scales of the KV cache.
SOURCES: dict[str, tuple[Any, Any, tuple[str, Any], dict[str, Any], str]] = {
    "modelopt nvfp4": (modelopt, NVFP4, ("input_scale", f32(AMAX / 2688)), modelopts("NVFP4"), "{0}_proj."),
    "modelopt fp8": (modelopt, FP8, ("input_scale", f32(AMAX / 448)), modelopts("FP8"), "{0}_proj."),
    "comfyui nvfp4": (comfyui, NVFP4, ("input_scale", f32(AMAX / 2688)), {}, ""),
    "comfyui fp8": (comfyui, FP8, ("input_scale", f32(AMAX / 448)), {}, ""),
    "compressed-tensors fp8": (
        compressed_tensors,
        FP8,
        ("input_scale", f32(AMAX / 448, 1)),
        {"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": FP8_CACHE},
        "",
    ),
    "compressed-tensors nvfp4": (
        compressed_tensors,
        DIVISOR,
        ("input_global_scale", f32(2688 / AMAX, 1)),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "kv_cache_scheme": FP8_CACHE},
        "",
    ),
    "transformers fp8": (
        deepseek,
        FP8,
        ("activation_scale", f32(AMAX / 448)),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "",
    ),
}


def written(folder: Path, source: str, **more: Any) -> Path:
    """A model of one quantized layer; ``more`` is said of quantization, too."""
    bridge, recipe, (role, scale), said, spelled = SOURCES[source]
    scaled = breccia.cast(weight(64, 128), recipe)
    if bridge is deepseek:
        parts = {"weight": scaled.data.view("float8_e4m3fn"), "weight_scale_inv": np.asarray(scaled.scale, np.float32)}
    else:
        parts = _parts.materialize(bridge.lay_out(scaled))
    arrays = {f"{LAYER}.{name}": array for name, array in parts.items()} | {f"{LAYER}.{role}": scale}
    if spelled or "kv_cache_scheme" in said:
        for which, number in (("k", KEYS), ("v", VALUES)):
            name = f"model.layers.0.self_attn.{spelled.format(which)}{which}_scale"
            arrays[name] = f32(number, *([1] if bridge is compressed_tensors else []))
    folder.mkdir()
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    quantization = {"quantization_config": said | more} if said else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "test", **quantization}))
    return folder


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a conversion wrote, and what it says of quantization."""
    if path.is_file():  # GGUF
        checkpoint = Checkpoint(path)
        return {name: checkpoint.array(name) for name in checkpoint.entries}, {}
    said = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    return dict(SafetensorsFile(path / "model.safetensors").items()), said


@pytest.mark.in_turn
@pytest.mark.parametrize("source", SOURCES)
def test_every_target_means_the_same_inputs_or_says_that_it_does_not(source: str, tmp_path: Path) -> None:
    model = written(tmp_path / "in", source)
    kept, own = set(), set()
    for i, to in enumerate(target_names()):
        out = tmp_path / (f"{i}.gguf" if to.startswith("gguf") else str(i))
        try:
            notes = " ".join(convert(model, out, to)["notes"])
        except ValueError as error:
            assert "model_type" in str(error), to  # deepseek:mxfp4
            continue
        arrays, said = opened(out)
        inputs = {name: array for name, array in arrays.items() if re.search("input|activation_scale|_act_", name)}
        if not inputs:
            assert "scales of the activations of 1 layers" in notes, to
            assert said.get("quant_algo") not in ("FP8", "NVFP4")
            continue
        assert "scales of the activations" not in notes
        ((name, scale),) = inputs.items()
        if f"{LAYER}.weight.data" in arrays:
            own.add(to)
            top = 2688 if breccia.load(out)[f"{LAYER}.weight"].recipe.name == "nvfp4" else 448
            assert (name, float(scale)) == (f"{LAYER}.input_scale", pytest.approx(AMAX / top, rel=1e-6))
            assert breccia.load_scheme(out).rule(LAYER).inputs.when == ("local" if top == 2688 else "static")
            continue
        kept.add(to)
        if to.startswith(("torchao", "gguf")):
            of = "input_scale" if out.suffix else "_weight_act_per_tensor_scale"
            assert (name, float(scale.reshape(()))) == (f"{LAYER}.{of}", pytest.approx(AMAX / 2688, rel=1e-6))
            assert breccia.load_scheme(out).rule(LAYER).inputs.when == "local"
            continue
        four = arrays.get(f"{LAYER}.weight_packed", arrays.get(f"{LAYER}.weight")).dtype == np.uint8
        multiplier = AMAX / (2688 if four else 448)
        if to.startswith("compressed-tensors"):
            assert name == f"{LAYER}.{'input_global_scale' if four else 'input_scale'}"
            assert float(scale[0]) == pytest.approx(1 / multiplier if four else multiplier, rel=1e-6)
            assert breccia.load_scheme(out).rule(LAYER).inputs.when == ("local" if four else "static")
            continue
        assert name == f"{LAYER}.input_scale"
        assert float(scale.reshape(())) == pytest.approx(multiplier, rel=1e-6), to
        assert ("are rescaled" in notes) == (("nvfp4" in source) != four), to
        if to.startswith("quark"):
            inputs_said = said["global_quant_config"]["input_tensors"]
            assert (inputs_said["dtype"], inputs_said["is_dynamic"]) == ("fp8_e4m3", False)
        elif to.startswith("modelopt"):
            assert said["quant_algo"] == ("NVFP4" if four else "FP8")
            assert four or arrays[f"{LAYER}.weight_scale"].shape == ()
        else:
            told = json.loads(bytes(arrays[f"{LAYER}.comfy_quant"]))
            assert "full_precision_matrix_mult" not in told
    wanted = {"modelopt:nvfp4", "modelopt:fp8", "modelopt:fp8-tensor", "modelopt", "comfyui:nvfp4", "comfyui:fp8"}
    here = {"compressed-tensors", "compressed-tensors:nvfp4", "compressed-tensors:fp8"}
    here |= {"compressed-tensors:fp8-tensor", "quark:fp8", "quark:fp8-tensor"}
    here |= {"torchao:nvfp4", "gguf:nvfp4"}
    here |= {"torchao", "gguf"} if "nvfp4" in source else {"quark"}  # which has no NVFP4
    assert own == {"nvfp4", "fp8", "fp8-row", "current", "delayed"}
    assert kept == wanted | {"comfyui", "comfyui:fp8"} | here


@pytest.mark.parametrize("source", [name for name, said in SOURCES.items() if "kv_cache_scheme" in said[3]])
def test_scales_of_the_cache_go_with_what_says_them(source: str, tmp_path: Path) -> None:
    model = written(tmp_path / "in", source)
    formats = {to.partition(":")[0]: to for to in target_names() if to != "deepseek:mxfp4"}  # the last of each
    for i, to in enumerate(formats.values()):
        out = tmp_path / (f"{i}.gguf" if to.startswith("gguf") else str(i))
        notes = " ".join(convert(model, out, to)["notes"])
        arrays, said = opened(out)
        scales = {
            name: float(array.reshape(())) for name, array in arrays.items() if name.endswith(("k_scale", "v_scale"))
        }
        attention = "model.layers.0.self_attn"
        if to.startswith("modelopt"):
            assert scales == {f"{attention}.k_proj.k_scale": KEYS, f"{attention}.v_proj.v_scale": VALUES}
            assert said["kv_cache_scheme"] == MODELOPT_CACHE
            beside = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
            assert beside["kv_cache_quant_algo"] == "FP8"
        elif to.startswith("compressed-tensors"):
            assert scales == {f"{attention}.k_scale": KEYS, f"{attention}.v_scale": VALUES}
            assert said["kv_cache_scheme"] == FP8_CACHE
        elif to.startswith("quark"):
            outputs = {name: float(array) for name, array in arrays.items() if name.endswith("output_scale")}
            assert outputs == {f"{attention}.k_proj.output_scale": KEYS, f"{attention}.v_proj.output_scale": VALUES}
            assert {one["output_tensors"]["dtype"] for one in said["kv_cache_quant_config"].values()} == {"fp8_e4m3"}
        else:
            assert not scales, to
            assert "KV cache (2, such as" in notes, to


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("modelopt fp8", {"kv_cache_scheme": "NVFP4"}),
        ("modelopt fp8", {"kv_cache_scheme": None}),
        ("compressed-tensors fp8", {"kv_cache_scheme": {**FP8_CACHE, "dynamic": True}}),
        ("compressed-tensors fp8", {"kv_cache_scheme": {**FP8_CACHE, "num_bits": 4}}),
        ("compressed-tensors fp8", {"kv_cache_scheme": {**FP8_CACHE, "strategy": "attn_head"}}),
    ],
)
def test_a_cache_of_another_kind_is_left_out(source: str, more: dict[str, Any], tmp_path: Path) -> None:
    """But for files of the same format, which say it in the same words."""
    model = written(tmp_path / "in", source, **more)
    for to in ("modelopt", "compressed-tensors"):
        report = convert(model, tmp_path / to, to)
        arrays, said = opened(tmp_path / to)
        found = [name for name in arrays if name.endswith(("k_scale", "v_scale"))]
        if source.startswith(to) and more["kv_cache_scheme"] is not None:
            assert len(found) == 2
            assert said["kv_cache_scheme"] == more["kv_cache_scheme"]
            assert not [note for note in report["notes"] if "KV cache" in note]
            continue
        assert not found
        assert not said.get("kv_cache_scheme")
        assert any("KV cache" in note for note in report["notes"])


def test_a_cache_without_scales_stays_of_fp8(tmp_path: Path) -> None:
    """Programs take 1 for scales that no file has."""
    model = written(tmp_path / "in", "modelopt fp8")
    arrays = dict(SafetensorsFile(model / "model.safetensors").items())
    kept = {name: array for name, array in arrays.items() if not name.endswith(("k_scale", "v_scale"))}
    save_arrays(kept, tmp_path / "new.safetensors", {"format": "pt"})
    (tmp_path / "new.safetensors").replace(model / "model.safetensors")
    convert(model, tmp_path / "out", "compressed-tensors")
    assert opened(tmp_path / "out")[1]["kv_cache_scheme"] == FP8_CACHE
    assert any("KV cache" in note for note in convert(model, tmp_path / "floats", "bf16")["notes"])


def test_inputs_of_a_layer_that_is_left_out_have_no_scale(tmp_path: Path) -> None:
    model = written(tmp_path / "in", "modelopt fp8")
    report = convert(model, tmp_path / "out", "comfyui:nvfp4", exclude=["*q_proj*"])
    arrays, _ = opened(tmp_path / "out")
    assert f"{LAYER}.weight_scale" in arrays  # its own FP8
    assert float(arrays[f"{LAYER}.input_scale"]) == np.float32(AMAX / 448)
    report = convert(model, tmp_path / "gptq", "gptq:int4", exclude=["*q_proj*"])
    assert set(opened(tmp_path / "gptq")[0]) == {f"{LAYER}.weight"}
    assert any("scales of the activations of 1 layers" in note for note in report["notes"])
    assert any("written as bf16: it is left out" in note for note in report["notes"])


def test_weights_of_rows_have_no_algorithm_with_a_scale_of_inputs(tmp_path: Path) -> None:
    """compressed-tensors may say both; ModelOpt's "FP8" is of one scale."""
    model = written(tmp_path / "in", "compressed-tensors fp8")
    arrays = dict(SafetensorsFile(model / "model.safetensors").items())
    rows = breccia.cast(weight(64, 128), breccia.Float8CurrentScaling(granularity="row"))
    arrays |= {f"{LAYER}.{n}": a for n, a in _parts.materialize(compressed_tensors.lay_out(rows)).items()}
    save_arrays(arrays, tmp_path / "new.safetensors", {"format": "pt"})
    (tmp_path / "new.safetensors").replace(model / "model.safetensors")
    for to in ("modelopt", "modelopt:fp8", "modelopt:fp8-channel"):
        report = convert(model, tmp_path / to, to)
        made, said = opened(tmp_path / to)
        assert said["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
        assert f"{LAYER}.input_scale" not in made
        assert any("scales of the activations of 1 layers" in note for note in report["notes"])
    convert(model, tmp_path / "one", "modelopt:fp8-tensor")
    made, said = opened(tmp_path / "one")
    assert said["quant_algo"] == "FP8"
    assert made[f"{LAYER}.weight_scale"].shape == ()
    assert f"{LAYER}.input_scale" in made


def test_fp8_inputs_of_nvfp4_weights_are_not_taken_for_nvfp4(tmp_path: Path) -> None:
    model = written(tmp_path / "in", "modelopt nvfp4", quant_algo="W4A8_NVFP4_FP8")
    report = convert(model, tmp_path / "out", "comfyui")
    assert f"{LAYER}.input_scale" not in opened(tmp_path / "out")[0]
    assert any("scales of the activations of 1 layers (input_scale) are left out" in n for n in report["notes"])


@pytest.mark.parametrize("source", sorted(SOURCES.keys() - {"transformers fp8"}))  # which is read and not written
def test_merge_lora_keeps_them_as_config_json_does(source: str, tmp_path: Path) -> None:
    model = written(tmp_path / "in", source)
    change = {f"base_model.model.{LAYER}.lora_A.weight": weight(2, 128)}
    change[f"base_model.model.{LAYER}.lora_B.weight"] = weight(64, 2)
    (tmp_path / "adapter").mkdir()
    save_arrays(change, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    merge_lora(model, tmp_path / "adapter", tmp_path / "out")
    before, after = opened(model), opened(tmp_path / "out")
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    scales = [name for name in before[0] if not name.startswith(f"{LAYER}.w") and not name.endswith("comfy_quant")]
    assert scales
    for name in scales:
        np.testing.assert_array_equal(before[0][name], after[0][name], name)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
BESIDE = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "input_zero_point",
    "output_scale",
    "pre_quant_scale",
)


@pytest.mark.parametrize("beside", [*(f"{LAYER}.{role}" for role in BESIDE), f"{LAYER[:-7]}.k_scale", "none"])
def test_gguf_has_its_own_names_whatever_is_left_out(beside: str, tmp_path: Path) -> None:
    """Names are looked at over what is written."""
    layers = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    layers += [f"model.layers.0.{n}" for n in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]
    arrays: dict[str, Any] = {name: weight(64, 128) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    arrays |= {f"{name}.weight": np.ones(128, np.float32) for name in norms}
    for name in layers:
        parts = _parts.materialize(modelopt.lay_out(breccia.cast(weight(128, 128), NVFP4)))
        arrays |= {f"{name}.{role}": array for role, array in parts.items()}
    if beside != "none":
        arrays[beside] = np.full(128 if beside.endswith("pre_quant_scale") else (), 0.5, np.float32)
    (tmp_path / "in").mkdir()
    save_arrays(arrays, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    config = {**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    report = convert(tmp_path / "in", tmp_path / "out.gguf", "gguf:q8_0")
    names = set(Checkpoint(tmp_path / "out.gguf").files[0].entries)
    assert "blk.0.attn_q.weight" in names
    assert not [name for name in names if "scale" in name or name.startswith("model.")]
    assert not any("tensors keep their names" in note for note in report["notes"])
    assert any(text in note for note in report["notes"] for text in ("left out", "into their weights")) == (
        beside != "none"
    )


@pytest.mark.parametrize("source", ["modelopt nvfp4", "comfyui nvfp4", "compressed-tensors nvfp4"])
@pytest.mark.parametrize("to", ["mlx", "mlx:nvfp4", "nvfp4"])
def test_mlx_has_no_second_scale(source: str, to: str, tmp_path: Path) -> None:
    """mlx-lm refuses parameters that its layers have not."""
    report = convert(written(tmp_path / "in", source), tmp_path / "out", to)
    arrays, _ = opened(tmp_path / "out")
    two = [name for name in arrays if name.endswith("global_scale")]
    assert bool(two) == (to == "nvfp4")
    assert ("NVFP4 has one level: mlx-lm loads no second scale" in report["notes"]) == (to != "nvfp4")
    if to != "nvfp4":
        assert set(arrays) == {f"{LAYER}.weight", f"{LAYER}.scales"}
        assert report["requantized"]["sqnr_db"] is None or report["requantized"]["sqnr_db"] > 20
