# SPDX-License-Identifier: Apache-2.0
"""What servers take for granted of a checkpoint: one global scale for what they fuse, and a name that says whether
activations have scales."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import compressed_tensors, modelopt
from breccia.bridges import parts as _parts
from breccia.bridges.written import fused_layer
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from checkpoints import deepseek_v3, minilm, modelopt_nvfp4, weight, write_shards

FUSED = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.experts.0.w1", "mlp.experts.0.w3"),
    ("mlp.experts.1.gate_proj", "mlp.experts.1.up_proj"),
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
]
ALONE = ("mlp.down_proj", "self_attn.o_proj", "mlp.experts.0.w2")


def decoder(path: Path) -> Path:
    """Layers whose parts have magnitudes far apart."""
    path.mkdir()
    arrays, factor = {}, 1.0
    for name in (*sum(FUSED, ()), *ALONE):
        factor *= 1.7
        arrays[f"model.layers.0.{name}.weight"] = weight(64, 128) * np.float32(factor)
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "test"}))
    return path


def scales(path: Path) -> dict[str, float]:
    """Global scales as multipliers."""
    found = {}
    for name, array in SafetensorsFile(path / "model.safetensors").items():
        base, _, role = name.rpartition(".")
        if role in ("weight_scale_2", "weight_global_scale"):
            number = float(np.asarray(array).reshape(-1)[0])
            found[base.removeprefix("model.layers.0.")] = number if role == "weight_scale_2" else 1 / number
    return found


@pytest.mark.parametrize("to", ["modelopt:nvfp4", "compressed-tensors:nvfp4"])
@pytest.mark.parametrize("search", [None, "mse"])
def test_parts_of_a_fused_layer_share_their_global_scale(to: str, search: str | None, tmp_path: Path) -> None:
    source = decoder(tmp_path / "in")
    report = convert(source, tmp_path / "q", to, scale_search=search)
    assert not [note for note in report["notes"] if not note.startswith("experts in nvfp4: transformers")]
    found = scales(tmp_path / "q")
    assert found.keys() == {*sum(FUSED, ()), *ALONE}
    weights = SafetensorsFile(source / "model.safetensors").items()
    amax = {name.removeprefix("model.layers.0.").removesuffix(".weight"): np.abs(a).max() for name, a in weights}
    for group in (*FUSED, *((name,) for name in ALONE)):
        largest = max(amax[name] for name in group)
        for name in group:
            assert found[name] == pytest.approx(largest / (448 * 6), rel=1e-6), name
    assert len(set(found.values())) == len(FUSED) + len(ALONE)
    assert verify(source, tmp_path / "q", min_sqnr_db=18)["ok"]


def test_a_part_that_is_left_alone_takes_no_part(tmp_path: Path) -> None:
    source = decoder(tmp_path / "in")
    convert(source, tmp_path / "all", "modelopt:nvfp4")
    convert(source, tmp_path / "q", "modelopt:nvfp4", exclude=["*.up_proj.weight", "*.v_proj.weight"])
    all_of_them, found = scales(tmp_path / "all"), scales(tmp_path / "q")
    assert found["self_attn.q_proj"] == found["self_attn.k_proj"] < all_of_them["self_attn.q_proj"]
    assert found["mlp.gate_proj"] < all_of_them["mlp.gate_proj"]


def test_quantized_sources_share_too(tmp_path: Path) -> None:
    """Other formats' values are quantized with the largest magnitude of the parts."""
    source = decoder(tmp_path / "in")
    convert(source, tmp_path / "fp8", "compressed-tensors:fp8")
    convert(tmp_path / "fp8", tmp_path / "q", "modelopt:nvfp4")
    found = scales(tmp_path / "q")
    for group in FUSED:
        assert len({found[name] for name in group}) == 1, group
    assert verify(tmp_path / "fp8", tmp_path / "q", min_sqnr_db=18)["ok"]


def test_a_repack_says_which_scales_differ(tmp_path: Path) -> None:
    source = decoder(tmp_path / "in")
    convert(source, tmp_path / "apart", "torchao:nvfp4")
    (note,) = convert(tmp_path / "apart", tmp_path / "q", "modelopt")["notes"]
    assert note.startswith("model.layers.0.")
    assert "and 2 more: parts of a layer that servers fuse keep global scales that differ" in note
    convert(source, tmp_path / "together", "compressed-tensors:nvfp4")
    assert not convert(tmp_path / "together", tmp_path / "b", "modelopt")["notes"]


def test_a_real_model_shares(tmp_path: Path) -> None:
    convert(minilm(), tmp_path / "q", "modelopt:nvfp4")
    found = scales(tmp_path / "q")
    for layer in range(6):
        base = f"encoder.layer.{layer}.attention.self"
        assert len({found[f"{base}.{name}"] for name in ("query", "key", "value")}) == 1
    assert verify(minilm(), tmp_path / "q")["ok"]


def algorithm(path: Path) -> Any:
    own = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    said = json.loads((path / "config.json").read_text())["quantization_config"]
    assert own["quant_algo"] == said["quant_algo"]
    return own["quant_algo"], said["config_groups"]["group_0"]


def test_modelopt_says_whether_activations_have_scales(tmp_path: Path) -> None:
    source = decoder(tmp_path / "in")
    convert(source, tmp_path / "w4", "modelopt:nvfp4")
    name, group = algorithm(tmp_path / "w4")
    assert name == "W4A16_NVFP4"
    assert "input_activations" not in group
    kept = modelopt_nvfp4(tmp_path / "theirs")
    convert(kept, tmp_path / "kept", "modelopt")
    name, group = algorithm(tmp_path / "kept")
    assert name == "NVFP4"
    assert group["input_activations"]["num_bits"] == 4
    for to in ("modelopt:fp8", "modelopt:fp8-channel"):
        out = tmp_path / to.partition(":")[2]
        convert(source, out, to)
        name, group = algorithm(out)
        assert name == "FP8_PER_CHANNEL_PER_TOKEN"
        assert group["weights"]["strategy"] == "channel"
        assert SafetensorsFile(out / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale"].shape == (64,)


def test_one_fp8_scale_is_given_to_every_row(tmp_path: Path) -> None:
    """The same values, in the form that servers have for weights without scales of activations."""
    convert(decoder(tmp_path / "in"), tmp_path / "a", "compressed-tensors:fp8-tensor")
    report = convert(tmp_path / "a", tmp_path / "b", "modelopt")
    assert set(report["tensors"]) == {"repack"}
    assert algorithm(tmp_path / "b")[0] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert all(t["equal"] for t in verify(tmp_path / "a", tmp_path / "b", min_sqnr_db=1e9)["tensors"])


def test_one_fp8_scale_stays_where_activations_have_theirs(tmp_path: Path) -> None:
    parts = _parts.materialize(modelopt.lay_out(breccia.cast(weight(64, 128), breccia.Float8CurrentScaling())))
    (tmp_path / "in").mkdir()
    arrays = {f"a.{role}": array for role, array in parts.items()} | {"a.input_scale": np.array(0.5, np.float32)}
    save_arrays(arrays, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
    convert(tmp_path / "in", tmp_path / "out", "modelopt")
    assert algorithm(tmp_path / "out")[0] == "FP8"
    written = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    for name, array in arrays.items():
        assert written[name].tobytes() == np.asarray(array).tobytes()
        assert written[name].shape == array.shape


def test_tiles_have_four_axes_as_in_modelopts_exports(tmp_path: Path) -> None:
    source = deepseek_v3(tmp_path / "in")
    report = convert(source, tmp_path / "out", "modelopt")
    assert report["tensors"]["repack"] == 3
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.entries["model.layers.0.self_attn.o_proj.weight_scale"].shape == (8, 1, 4, 1)
    assert algorithm(tmp_path / "out")[0] == "FP8_PB_WO"
    wanted = {f.name: values(Checkpoint(source).load(f)) for f in Checkpoint(source).found if f.format != "plain"}
    for found in checkpoint.found:
        if found.name in wanted:
            np.testing.assert_array_equal(values(checkpoint.load(found)), wanted[found.name])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention in NVFP4, MLPs in MXFP8, one module in bfloat16, as compressed-tensors has them."""
    root = tmp_path_factory.mktemp("mixed")
    source = decoder(root / "in")
    convert(source, root / "a", "compressed-tensors:nvfp4", include=["*.self_attn.*"])
    convert(source, root / "b", "compressed-tensors:mxfp8", include=["*.mlp.*"], exclude=["*.mlp.down_proj.weight"])
    first, second = (dict(SafetensorsFile(root / name / "model.safetensors").items()) for name in "ab")
    arrays = {n: a for n, a in first.items() if "self_attn" in n} | {n: a for n, a in second.items() if "mlp" in n}
    (root / "mixed").mkdir()
    save_arrays(arrays, root / "mixed" / "model.safetensors", {"format": "pt"})
    (root / "mixed" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "x"}}))
    return root / "mixed"


def test_several_recipes_are_several_groups(mixed: Path, tmp_path: Path) -> None:
    """compressed-tensors' own matcher finds the scheme that each module's bytes have."""
    report = convert(mixed, tmp_path / "ct", "compressed-tensors")
    assert set(report["tensors"]) == {"copy", "repack"}
    said = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    assert said["ignore"] == ["model.layers.0.mlp.down_proj"]
    quantization = pytest.importorskip("compressed_tensors.quantization")
    groups = quantization.QuantizationConfig.model_validate(said).config_groups
    bits = {name: scheme.weights.num_bits for scheme in groups.values() for name in scheme.targets}
    formats = {f.name.removesuffix(".weight"): f.kind for f in Checkpoint(tmp_path / "ct").found if f.format != "plain"}
    assert bits == {name: 4 if kind == "nvfp4" else 8 for name, kind in formats.items()}


def modelopts_own_converter() -> Any:
    """One file of ModelOpt, without its package, which needs many libraries."""
    package = importlib.util.find_spec("modelopt")
    if package is None:
        pytest.skip("nvidia-modelopt is not installed")
    path = Path(package.submodule_search_locations[0]) / "torch" / "export" / "convert_hf_config.py"
    spec = importlib.util.spec_from_file_location("convert_hf_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_modelopt_names_the_algorithm_of_each_module(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "m", "modelopt")
    own = json.loads((tmp_path / "m" / "hf_quant_config.json").read_text())["quantization"]
    assert own["quant_algo"] == "MIXED_PRECISION"
    kinds = {f.name.removesuffix(".weight"): f.kind for f in Checkpoint(tmp_path / "m").found if f.format != "plain"}
    names = {"nvfp4": "W4A16_NVFP4", "mxfp8": "MXFP8"}
    assert {name: said["quant_algo"] for name, said in own["quantized_layers"].items()} == {
        name: names[kind] for name, kind in kinds.items()
    }
    groups = modelopts_own_converter().convert_hf_quant_config_format({"quantization": own})["config_groups"]
    said = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(map(json.dumps, said.values())) == sorted(map(json.dumps, groups.values()))


@pytest.mark.parametrize("to", ["breccia", "mlx", "torchao", "modelopt", "compressed-tensors"])
def test_all_formats_of_several_recipes_are_read_back(to: str, mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "q", to)
    assert verify(mixed, tmp_path / "q", min_sqnr_db=20 if to == "mlx" else 100)["ok"]  # NVFP4 of one level


def test_a_format_of_one_recipe_refuses_several(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {}
    for name, recipe in (("a", breccia.INT4Scaling(group_size=64)), ("b", breccia.INT4Scaling(group_size=128))):
        parts = _parts.materialize(compressed_tensors.lay_out(breccia.cast(weight(64, 128), recipe)))
        arrays |= {f"{name}.{role}": array for role, array in parts.items()}
    source = write_shards(tmp_path / "in", [arrays], {})
    with pytest.raises(ValueError, match="awq: all modules must have one recipe"):
        convert(source, tmp_path / "out", "awq")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    convert(source, tmp_path / "gptq", "gptq")  # which says others by name
    said = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    (other,) = said["dynamic"].values()
    assert {said["group_size"], other["group_size"]} == {64, 128}


LAYERS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.fused_qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "feed_forward.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.mark.parametrize("whole", LAYERS)
def test_gptq_takes_out_a_layer_that_servers_fuse_by_its_own_name(whole: str, tmp_path: Path) -> None:
    """vLLM and SGLang look in ``dynamic`` for the names of their own layers, not for those of the parts."""
    names = [f"model.layers.0.{part}" for part in (*LAYERS[whole], "mlp.down_proj")]
    source = write_shards(tmp_path / "in", [{f"{name}.weight": weight(64, 128) for name in names}], {})
    left = [f"{name}.weight" for name in names[:-1]]
    convert(source, tmp_path / "all", "gptq", exclude=left)
    said = json.loads((tmp_path / "all" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert f"-:^{re.escape(f'model.layers.0.{whole}')}$" in said
    convert(source, tmp_path / "one", "gptq", exclude=left[:1])
    said = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]["dynamic"]
    assert list(said) == [f"-:^{re.escape(names[0])}$"]
    assert {fused_layer(name) for name in left} == {f"model.layers.0.{whole}"}
    assert fused_layer("model.layers.0.mlp.down_proj.weight") is None
