# SPDX-License-Identifier: Apache-2.0
"""Every tensor and every key of a source is read, carried over, named or refused."""

import json
import os
import re
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges.contract import FileFormat
from breccia.checkpoint import Checkpoint, convert, inspect, save_arrays
from breccia.checkpoint.files import disk
from breccia.checkpoint.judging.inspect import scheme_lines
from breccia.checkpoint.judging.verify import values
from breccia.testing import values_of

ml_dtypes = pytest.importorskip("ml_dtypes")

BESIDE = (
    "weight_offset",
    "zero_point",
    "weight_zeros",
    "weight_scale_second",
    "scale_bias",
    "smooth_scale",
    "weight_quantizer.svdquant_lora_a",
    "proj_up",
    "proj_down",
)
WRITTEN = {name: one for name, one in bridges.registry().items() if one.writes and not one.container.whole}
TARGETS = ("bf16", "fp32", "nvfp4", "compressed-tensors:fp8", "modelopt", "gptq:int4", "mlx:int4", "gguf:q8_0")


def model(path: Path, arrays: dict[str, Any], config: dict[str, Any], beside: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    for name, said in (beside or {}).items():
        (path / name).write_text(json.dumps(said))
    return path


def written(bridge: FileFormat, folder: Path, **more: Any) -> tuple[Path, str]:
    """A checkpoint of a format, further tensors named after its quantized module, and what their names begin with."""
    sample, place = bridge.sample, folder / "quantized"
    arrays = {sample.name: values_of(bridge), "norm.weight": np.ones(8, np.float32)}
    convert(model(folder / "in", arrays, dict(sample.model)), place, bridge.name, include=[sample.name])
    start = sample.name.removesuffix("weight") if sample.name.endswith(".weight") else f"{sample.name}_"
    if more:
        save_arrays({start + role: array for role, array in more.items()}, place / "more.safetensors", {"format": "pt"})
    return place, start


@pytest.mark.parametrize("name", WRITTEN)
def test_a_part_of_a_weight_that_nobody_reads_is_refused(name: str, tmp_path: Path) -> None:
    bridge = WRITTEN[name]
    for role in BESIDE:
        folder = tmp_path / role
        folder.mkdir()
        source, start = written(bridge, folder, **{role: np.ones((4, 4), np.float32)})
        for to in TARGETS:
            with pytest.raises(ValueError, match="stands beside a quantized weight") as caught:
                convert(source, folder / "out", to, dry_run=True)
            assert f"'{start}{role}'" in str(caught.value)
        found = [text for text in inspect(source)["findings"] if text.startswith(f"{start}{role}: ")]
        assert len(found) == 1, role


@pytest.mark.parametrize("name", WRITTEN)
def test_a_bias_is_carried_and_all_else_is_read(name: str, tmp_path: Path) -> None:
    source, start = written(WRITTEN[name], tmp_path, bias=np.ones(256, np.float32))
    for to in ("bf16", name, "compressed-tensors:fp8", "nvfp4"):
        report = convert(source, tmp_path / "out", to, dry_run=True)
        fates = report["account"]["tensors"]
        assert fates.keys() == Checkpoint(source).entries.keys()
        assert "left out" not in fates.values(), to
        assert set(report["account"]["keys"].values()) <= {"read"}, report["account"]["keys"]
        assert not [note for note in report["notes"] if "nobody" in note]
        read, carried = sum(one != "copy" for one in fates.values()), list(fates.values()).count("copy")
        assert report["accounted"].startswith(f"accounted: {len(fates)} tensors ({read} read, {carried} carried)")
        if to != "bf16":
            assert fates[f"{start}bias"] == "copy"


@pytest.mark.parametrize("name", WRITTEN)
def test_words_of_a_scheme_that_nobody_reads_are_named(name: str, tmp_path: Path) -> None:
    if not WRITTEN[name].dialect.words:
        pytest.skip("all words are the format's own")
    source, _ = written(WRITTEN[name], tmp_path)
    config = json.loads((source / "config.json").read_text())
    key = "quantization" if "quantization" in config else "quantization_config"
    config["quantization_config"] = {**config[key], "turned_by": "a matrix", "nothing": None}
    config.pop("quantization", None)
    (source / "config.json").write_text(json.dumps(config))
    report = convert(source, tmp_path / "out", "fp32", dry_run=True)
    assert [note for note in report["notes"] if "turned_by" in note and "nobody here reads it" in note]
    assert report["account"]["keys"]["turned_by"] == "unread"
    assert "turned_by in quantization_config: nobody here reads it" in inspect(source)["findings"]
    with pytest.raises(ValueError, match=r"strict.*turned_by"):
        convert(source, tmp_path / "out", "fp32", strict=True)


def test_a_part_without_its_weight_is_named(tmp_path: Path) -> None:
    arrays = {"a.weight": np.ones((64, 64), np.float32), "a.weight_scale": np.ones(1, np.float32)}
    report = convert(model(tmp_path / "in", arrays, {}), tmp_path / "out", "fp16", dry_run=True)
    assert [note for note in report["notes"] if note.startswith("a.weight_scale: it says something of a quantized")]


@pytest.mark.parametrize("at", ["", "weight_quantizer."])
@pytest.mark.parametrize("factor", [False, True])
def test_low_rank_branches_of_modelopt_are_added(at: str, factor: bool, tmp_path: Path) -> None:
    """As modelopt.torch.quantization's SVDQuantLinear computes: (x · p) (W + B A)ᵀ."""
    rng = np.random.default_rng(3)
    down, up = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((8, 384), (256, 8)))
    p = rng.uniform(0.5, 2, 384).astype(np.float32)
    more = {f"{at}svdquant_lora_a": down, f"{at}svdquant_lora_b": up, **({"pre_quant_scale": p} if factor else {})}
    source, start = written(bridges.registry()["modelopt"], tmp_path, **more)
    one = Checkpoint(source)
    found = next(found for found in one.found if found.name == f"{start}weight")
    wanted = (breccia.dequantize(one.load(found)) + up @ down) * (p if factor else np.float32(1))
    for name, place in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        said = json.loads((source / name).read_text())
        said[place] |= {"quant_algo": "NVFP4_SVD", "lora_rank": 8}
        (source / name).write_text(json.dumps(said))
    convert(source, tmp_path / "again", "modelopt", strict=True)
    again = Checkpoint(tmp_path / "again")
    assert {n: again.array(n).tobytes() for n in again.entries} == {n: one.array(n).tobytes() for n in one.entries}
    assert breccia.load_scheme(tmp_path / "again") == breccia.load_scheme(source)
    for to in ("fp32", "modelopt:nvfp4", "compressed-tensors:fp8"):
        report = convert(source, tmp_path / to, to, strict=to == "fp32")  # others have other inputs
        out = Checkpoint(tmp_path / to)
        made = next(found for found in out.found if found.name == f"{start}weight")
        got = values(out.load(out.folded(made)))
        assert np.linalg.norm(got - wanted) < (1e-6 if to == "fp32" else 0.12) * np.linalg.norm(wanted), to
        assert not [name for name in out.entries if "svdquant" in name]
        assert report["account"]["tensors"][f"{start}{at}svdquant_lora_a"] in ("float", "cast")


METHODS = {
    "exl3": {"trellis": np.zeros((16, 16, 64), np.int16), "suh": np.ones(256, np.float16)},
    "hqq": {"W_q": np.zeros((64, 16), np.uint8), "scale": np.ones((64, 1), np.float32)},
    "bitnet": {"weight": np.ones((16, 64), np.uint8), "weight_scale": np.ones(1, np.float32)},
    "nunchaku": {"qweight": np.ones((64, 32), np.int8), "wscales": np.ones((4, 64), np.float16)},
    "w4afp8": {"weight": np.ones((64, 64), np.int8), "weight_scale_inv": np.ones((64, 2), np.float32)},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_scheme_does_not_call_high_precision_what_is_not_read(method: str, tmp_path: Path) -> None:
    arrays = {f"model.layers.0.mlp.up_proj.{name}": array for name, array in METHODS[method].items()}
    source = model(tmp_path / "in", arrays, {"quantization_config": {"quant_method": method}})
    rule = breccia.load_scheme(source).rule("model.layers.0.mlp.up_proj")
    assert str(rule) == f"{method}, not read here"
    assert next(scheme_lines(source, breccia.load_scheme(source))) == f"mlp: {method}, not read here"


ATTENTION = "model.layers.0.self_attn"
KEYS, VALUES = np.float32(0.03), np.float32(0.05)
MODELOPT_KV = {"FP8": "fp8", "INT8": "int8", "NVFP4": "nvfp4", "NVFP4_AFFINE": "nvfp4"}


def caches(path: Path) -> dict[str, float]:
    """The scales and biases of keys and values that a checkpoint has."""
    opened = Checkpoint(path)
    ends = ("k_scale", "v_scale", "kv_scale", "output_scale", "_bias")
    names = [name for name in opened.entries if name.endswith(ends)]
    return {name: float(np.asarray(opened.array(name)).reshape(-1)[0]) for name in names}


def modelopt_with_cache(folder: Path, algorithm: str) -> Path:
    source, _ = written(bridges.registry()["modelopt"], folder)
    arrays = {f"{ATTENTION}.k_proj.k_scale": KEYS.reshape(()), f"{ATTENTION}.v_proj.v_scale": VALUES.reshape(())}
    if algorithm == "NVFP4_AFFINE":
        arrays |= {f"{ATTENTION}.{one}_proj.{one}_bias": np.full(8, 0.25, np.float32) for one in "kv"}
    save_arrays(arrays, source / "cache.safetensors", {"format": "pt"})
    for name, place in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        said = json.loads((source / name).read_text())
        said[place]["kv_cache_quant_algo"] = algorithm
        (source / name).write_text(json.dumps(said))
    return source


@pytest.mark.parametrize("algorithm", MODELOPT_KV)
def test_modelopts_caches_of_every_kind_stay_whole(algorithm: str, tmp_path: Path) -> None:
    source = modelopt_with_cache(tmp_path, algorithm)
    for to in ("modelopt", "modelopt:fp8"):
        report = convert(source, tmp_path / to, to)
        assert not [note for note in report["notes"] if "cache" in note], to
        assert caches(tmp_path / to) == caches(source)
        said = json.loads((tmp_path / to / "hf_quant_config.json").read_text())["quantization"]
        assert said["kv_cache_quant_algo"] == algorithm
        assert breccia.load_scheme(tmp_path / to).kv_cache == breccia.load_scheme(source).kv_cache
    for to in sorted(set(WRITTEN) - {"modelopt", "gpt-oss"}):
        report = convert(source, tmp_path / to, to)
        moved = (algorithm in ("FP8", "INT8") and to == "compressed-tensors") or (algorithm, to) == ("FP8", "quark")
        assert bool(caches(tmp_path / to)) == moved, to
        assert bool([note for note in report["notes"] if "KV cache" in note]) != moved, to
        if moved:
            assert breccia.load_scheme(tmp_path / to).kv_cache == breccia.load_scheme(source).kv_cache


@pytest.mark.parametrize(("kv", "factor"), [("int8", 448 / 127), ("nvfp4", 1), ("fp8", 1)])
def test_a_cache_of_another_kind_is_asked_for(kv: str, factor: float, tmp_path: Path) -> None:
    source = modelopt_with_cache(tmp_path, "FP8")
    convert(source, tmp_path / "out", "modelopt", kv=kv)
    wanted = {f"{ATTENTION}.k_proj.k_scale": KEYS * factor, f"{ATTENTION}.v_proj.v_scale": VALUES * factor}
    assert caches(tmp_path / "out") == pytest.approx(wanted, rel=1e-6)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert said["kv_cache_scheme"] == (fp8 if kv == "fp8" else kv.upper())
    plain = model(tmp_path / "plain", {f"{ATTENTION}.k_proj.weight": np.ones((64, 64), np.float32)}, {})
    if kv == "int8":
        with pytest.raises(ValueError, match="a cache of INT8 static needs scales of keys and values"):
            convert(plain, tmp_path / "none", "modelopt", kv=kv)
    else:
        report = convert(plain, tmp_path / "none", "modelopt", kv=kv)
        assert [note for note in report["notes"] if "programs take 1" in note]


@pytest.mark.parametrize("to", ["bf16", *TARGETS[2:], "modelopt:fp8", "quark", "breccia", "torchao"])
def test_a_model_in_floats_with_a_quantized_cache(to: str, tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    arrays = {f"{ATTENTION}.{one}_proj.weight": np.ones((64, 128), np.float32) for one in "kv"}
    arrays |= {f"{ATTENTION}.k_scale": KEYS.reshape(1), f"{ATTENTION}.v_scale": VALUES.reshape(1)}
    said = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme, "config_groups": {}, "ignore": []}
    source = model(tmp_path / "in", arrays, {"quantization_config": said})
    out = tmp_path / ("out.gguf" if to.startswith("gguf") else "out")
    report = convert(source, out, to)
    notes = [note for note in report["notes"] if "KV cache" in note]
    if to.partition(":")[0] in ("compressed-tensors", "modelopt", "quark"):
        assert sorted(caches(out).values()) == pytest.approx([KEYS, VALUES])
        assert breccia.load_scheme(out).kv_cache == breccia.load_scheme(source).kv_cache
        assert not notes
    else:
        assert not caches(out)
        assert notes
        assert list(report["account"]["tensors"].values()).count("left out") == 2


def test_the_scale_of_both_keys_and_values_that_autofp8_writes(tmp_path: Path) -> None:
    source, _ = written(bridges.registry()["deepseek"], tmp_path)
    save_arrays({f"{ATTENTION}.kv_scale": KEYS.reshape(())}, source / "cache.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = "static"
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "ct", "compressed-tensors", strict=True)
    assert caches(tmp_path / "ct") == {f"{ATTENTION}.k_scale": KEYS, f"{ATTENTION}.v_scale": KEYS}
    assert str(breccia.load_scheme(tmp_path / "ct").kv_cache) == "FP8 static"
    report = convert(source, tmp_path / "bf16", "bf16")
    assert not caches(tmp_path / "bf16")
    assert [note for note in report["notes"] if "KV cache (1, such as" in note]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_of_a_byte_to_a_code_stays_int4(groups: int, symmetric: bool, tmp_path: Path) -> None:
    """llm-compressor's W4A8, whose form vLLM reads: byte by byte, num_bits 4, dynamic inputs of INT8."""
    rng, arrays, wanted = np.random.default_rng(1), {}, {}
    for name, shape in (("up_proj", (128, 256)), ("down_proj", (64, 128))):
        codes, scale = (
            rng.integers(-8, 8, shape, np.int8),
            rng.uniform(0.01, 0.02, (shape[0], groups)).astype(np.float32),
        )
        zero = rng.integers(-8, 8, scale.shape, np.int8)
        module = f"model.layers.0.mlp.{name}"
        arrays |= {f"{module}.weight": codes, f"{module}.weight_scale": scale}
        arrays |= {} if symmetric else {f"{module}.weight_zero_point": zero}
        size = shape[1] // groups
        minus = np.repeat(zero, size, 1) * np.int32(not symmetric)
        wanted[f"{module}.weight"] = (codes - minus).astype(np.float32) * np.repeat(scale, size, 1)
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if groups == 1 else {"strategy": "group", "group_size": 32}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    if groups == 4:
        del arrays["model.layers.0.mlp.up_proj.weight_scale"], arrays["model.layers.0.mlp.up_proj.weight"]
        arrays.pop("model.layers.0.mlp.up_proj.weight_zero_point", None)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    source = model(tmp_path / "in", arrays, {"quantization_config": {**said, "ignore": []}})
    convert(source, tmp_path / "out", "compressed-tensors", strict=True)
    one, made = Checkpoint(source), Checkpoint(tmp_path / "out")
    assert made.entries.keys() == one.entries.keys()
    for name in one.entries:
        assert made.array(name).tobytes() == one.array(name).tobytes()
    (group,) = made.quantization["config_groups"].values()
    kept = ("num_bits", "type", "symmetric", "strategy", "group_size")
    assert {key: group["weights"].get(key) for key in kept} == {key: weights.get(key) for key in kept}
    assert (group["format"], group["input_activations"]["num_bits"]) == ("int-quantized", 8)
    for found in one.found:
        assert found.recipe is not None
        assert found.recipe.name == "int4"
        np.testing.assert_array_equal(values(one.load(one.refined(found))), wanted[found.name])
    report = convert(source, tmp_path / "words", "compressed-tensors", activations="none")
    assert report["tensors"] == {"repack": len(wanted) if groups == 1 else 1}
    assert all(name.endswith(("packed", "scale", "shape", "point")) for name in Checkpoint(tmp_path / "words").entries)


def test_codes_of_a_byte_in_a_mixed_model_have_the_bits_of_their_group(tmp_path: Path) -> None:
    arrays = {f"{name}.weight": np.full((64, 64), 5, np.int8) for name in "ab"}
    arrays |= {f"{name}.weight_scale": np.ones((64, 1), np.float32) for name in "ab"}
    both = {"type": "int", "strategy": "channel", "symmetric": True}
    groups = {
        "one": {"targets": ["re:a$"], "weights": {**both, "num_bits": 4}},
        "other": {"targets": ["Linear"], "weights": {**both, "num_bits": 8}},
    }
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    found = {
        one.name: one.kind for one in Checkpoint(model(tmp_path / "in", arrays, {"quantization_config": said})).found
    }
    assert found == {"a.weight": "int4-bytes", "b.weight": "int8"}


def test_modelopts_w4a8_awq_stays_whole(tmp_path: Path) -> None:
    """INT4 weights whose scales are rounded to FP8 by a second one, static FP8 inputs, factors of inputs."""
    bridge = bridges.registry()["modelopt"]
    plain = model(tmp_path / "in", {bridge.sample.name: values_of(bridge)}, {})
    source = tmp_path / "quantized"
    convert(plain, source, "modelopt:int4", include=["*"])
    start, p = bridge.sample.name.removesuffix("weight"), np.linspace(0.5, 2, 384).astype(np.float32)
    more = {"weight_scale_2": np.float32(0.001), "input_scale": np.float32(0.02), "pre_quant_scale": p}
    more = {start + role: np.asarray(array) for role, array in more.items()}
    save_arrays(more, source / "more.safetensors", {"format": "pt"})
    for name, place in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        said = json.loads((source / name).read_text())
        said[place] |= {"quant_algo": "W4A8_AWQ", "pre_quant_scale": True}
        (source / name).write_text(json.dumps(said))
    convert(source, tmp_path / "again", "modelopt", strict=True)
    one, again = Checkpoint(source), Checkpoint(tmp_path / "again")
    assert again.entries.keys() == one.entries.keys()
    for name in one.entries:
        assert again.array(name).tobytes() == one.array(name).tobytes(), name
    assert breccia.load_scheme(tmp_path / "again") == breccia.load_scheme(source)
    said = json.loads((tmp_path / "again" / "hf_quant_config.json").read_text())["quantization"]
    assert (said["quant_algo"], said["group_size"]) == ("W4A8_AWQ", 128)
    (found,) = (found for found in one.found if found.name == f"{start}weight")
    wanted = breccia.dequantize(one.load(found)) * p
    for to in ("fp32", "compressed-tensors:int4", "modelopt:fp8", "gptq"):
        report = convert(source, tmp_path / to, to)
        assert report["account"]["tensors"][f"{start}weight_scale_2"] not in ("copy", "left out")
        out = Checkpoint(tmp_path / to)
        assert not [name for name in out.entries if name.endswith("weight_scale_2")]
        (made,) = (found for found in out.found if found.name == f"{start}weight")
        got = values(out.load(out.folded(out.refined(made))))
        assert np.linalg.norm(got - wanted) < (1e-6 if to == "fp32" else 0.12) * np.linalg.norm(wanted), to


@pytest.mark.parametrize("beside", [True, False])
def test_gptq_in_order_of_activation_without_words(beside: bool, tmp_path: Path) -> None:
    """AutoGPTQ said what a folder is in a file of its own; without any, nothing can be written as it is."""
    order, rng = (
        np.random.default_rng(2).permutation(np.repeat(np.arange(2, dtype=np.int32), 128)),
        np.random.default_rng(3),
    )
    arrays = {
        "a.qweight": rng.integers(-(2**31), 2**31 - 1, (32, 64), np.int32),
        "a.qzeros": np.full((2, 8), 0x77777777, np.int32),
        "a.scales": np.ones((2, 64), np.float16),
        "a.g_idx": order,
    }
    said = {"bits": 4, "group_size": 128, "desc_act": True, "damp_percent": 0.01, "model_file_base_name": "model"}
    source = model(tmp_path / "in", arrays, {}, {"quantize_config.json": said} if beside else {})
    convert(source, tmp_path / "bf16", "bf16", strict=True)
    assert not (tmp_path / "bf16" / "quantize_config.json").exists()
    if not beside:
        with pytest.raises(ValueError, match="must say bits, group_size and desc_act"):
            convert(source, tmp_path / "out", "gptq")
        return
    report = convert(source, tmp_path / "out", "gptq", strict=True)
    assert report["tensors"] == {"same": 1}
    assert len(report["account"]["keys"]) == 6
    assert Checkpoint(tmp_path / "out").quantization == {"quant_method": "gptq", **said}


def test_the_algorithm_of_experts_alone(tmp_path: Path) -> None:
    """DeepSeek's models with FP8 in dense layers and ModelOpt's NVFP4 in experts, as ``moe_quant_algo`` says."""
    source, start = written(bridges.registry()["deepseek"], tmp_path)
    arrays = {"model.layers.0.mlp.experts.0.up_proj.weight": np.full((128, 256), 0.5, np.float32)}
    convert(model(tmp_path / "e", arrays, {}), tmp_path / "experts", "modelopt:nvfp4", include=["*"])
    (source / "more.safetensors").write_bytes((tmp_path / "experts" / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["moe_quant_algo"] = "NVFP4"
    (source / "config.json").write_text(json.dumps(config))
    scheme = breccia.load_scheme(source)
    assert str(scheme.rule("model.layers.0.mlp.experts.0.up_proj")) == "NVFP4 × NVFP4 local"
    assert str(scheme.rule(start[:-1])) == "FP8 128 × 128 × FP8 g128 dynamic"
    convert(source, tmp_path / "ct", "compressed-tensors")
    groups = Checkpoint(tmp_path / "ct").quantization["config_groups"].values()
    assert {one["format"] for one in groups} == {"nvfp4-pack-quantized", "float-quantized"}


@pytest.mark.parametrize("offset", [0, -3])
@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W4A8_DYNAMIC"])
def test_modelslims_files(kind: str, offset: int, tmp_path: Path) -> None:
    """Offsets of 0 say nothing; of others programs differ in the sign. Types that are not read are refused."""
    codes = np.random.default_rng(0).integers(-127, 128, (64, 128), np.int8)
    arrays = {
        "a.weight": codes,
        "a.weight_scale": np.full((64, 1), 0.01, np.float32),
        "a.weight_offset": np.full((64, 1), offset, np.float32),
    }
    said = {"model_quant_type": kind, **dict.fromkeys(arrays, kind), "norm.weight": "FLOAT"}
    source = model(tmp_path / "in", arrays, {"model_type": "test"}, {"quant_model_description.json": said})
    if offset and kind == "W8A8_DYNAMIC":
        with pytest.raises(ValueError, match=r"a\.weight_offset stands beside a quantized weight and must be 0"):
            convert(source, tmp_path / "out", "fp32")
        return
    if kind == "W4A8_DYNAMIC":
        with pytest.raises(ValueError, match=r"must say W8A8_DYNAMIC, W8A16, FLOAT alone, got .*W4A8_DYNAMIC"):
            convert(source, tmp_path / "out", "fp32")
        return
    report = convert(source, tmp_path / "out", "fp32", strict=True)
    assert report["account"]["tensors"] == dict.fromkeys(arrays, "float")
    assert not (tmp_path / "out" / "quant_model_description.json").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "test"
    out = Checkpoint(tmp_path / "out")
    np.testing.assert_array_equal(out.array("a.weight"), codes.astype(np.float32) * np.float32(0.01))


def test_rows_of_one_group_have_the_scheme_of_longer_rows(tmp_path: Path) -> None:
    """vLLM wants one scheme for all projections of an expert, of which some rows are as long as a group."""
    for width, wanted in ((128, ("channel", None)), (256, ("group", 128))):
        folder = tmp_path / str(width)
        tensors = {f"model.layers.0.mlp.{n}_proj.weight": np.ones((128, 128), np.float32) for n in ("gate", "up")}
        tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((128, width), np.float32)
        folder.mkdir()
        save_arrays(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        convert(folder, tmp_path / f"out{width}", "compressed-tensors:int4")
        said = json.loads((tmp_path / f"out{width}" / "config.json").read_text())["quantization_config"]
        (group,) = said["config_groups"].values()
        assert (group["weights"]["strategy"], group["weights"]["group_size"]) == wanted


NVFP4_FLAT = breccia.NVFP4BlockScaling(two_level=False)
EXPERTS = "model.layers.0.feed_forward.experts."
ONE_TENSOR = {"gate_up_proj": (4, 192, 128), "down_proj": (4, 128, 96)}


@pytest.mark.parametrize("second", ["one", "each", "halves", "equal halves"])
@pytest.mark.parametrize("kind", ["llama4", "qwen3_5_moe"])
def test_experts_in_one_tensor_as_modelopt_has_them(kind: str, second: str, tmp_path: Path) -> None:
    """Llama 4's packed along their first axis of two, with scales (E, K / 16, N); the second scale is one number, one
    of each expert, or two of each: of gates and of others."""
    rng, arrays, wanted = np.random.default_rng(4), {}, {}
    for name, (count, rows, columns) in ONE_TENSOR.items():
        q = [breccia.cast(rng.normal(0, 0.05, (rows, columns)).astype(np.float32), NVFP4_FLAT) for _ in range(count)]
        level = np.array(
            {"one": 3.0, "each": [1, 2, 3, 4], "halves": [[1, 2], [3, 4], [5, 6], [7, 8]]}.get(
                second, [[1, 1], [3, 3], [5, 5], [7, 7]]
            ),
            np.float32,
        )
        if name == "down_proj" and level.ndim == 2:
            level = level[:, 0]
        of_rows = np.broadcast_to(
            np.repeat(level, rows // 2, 1) if level.ndim == 2 else level.reshape(-1, 1), (4, rows)
        )
        codes, scales = (
            np.stack([np.asarray(part).view(np.uint8) for part in parts])
            for parts in zip(*((one.data, one.scale) for one in q), strict=True)
        )
        wanted[EXPERTS + name] = np.stack([one.dequantize() for one in q]) * of_rows[..., None]
        if kind == "llama4":
            codes, scales = (np.ascontiguousarray(np.swapaxes(one, -1, -2)) for one in (codes, scales))
        arrays |= {EXPERTS + name: codes, f"{EXPERTS}{name}_weight_scale_2": level}
        arrays[f"{EXPERTS}{name}_weight_scale"] = scales.view(ml_dtypes.float8_e4m3fn)
        arrays[f"{EXPERTS}{name}_input_scale"] = np.float32(0.5).reshape(())
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    source = model(tmp_path / "in", arrays, {"model_type": kind, "quantization_config": said})
    report = convert(source, tmp_path / "fp32", "fp32")
    assert set(report["account"]["tensors"].values()) <= {"float", "left out"}
    out = Checkpoint(tmp_path / "fp32")
    for name, values_of_it in wanted.items():
        got = out.array(name)
        np.testing.assert_array_equal(np.swapaxes(got, -1, -2) if kind == "llama4" else got, values_of_it)
    convert(source, tmp_path / "again", "modelopt", strict=True)
    again = Checkpoint(tmp_path / "again")
    assert again.entries.keys() == arrays.keys()
    for name in arrays:
        was, now = Checkpoint(source).array(name), again.array(name)
        if name.endswith("scale_2"):
            assert now.shape in ((4,), was.shape)
            both = [np.broadcast_to(x if x.ndim == 2 else x.reshape(-1, 1), (4, 2)) for x in (was, now)]
            np.testing.assert_array_equal(*both)
        else:
            assert now.tobytes() == was.tobytes(), name
    for to in ("nvfp4", "compressed-tensors:nvfp4", "modelopt:fp8-tensor"):
        convert(source, tmp_path / to, to)
        convert(tmp_path / to, tmp_path / f"{to}-fp32", "fp32")
        back = Checkpoint(tmp_path / f"{to}-fp32")
        for name, values_of_it in wanted.items():
            got = back.array(name).astype(np.float32)
            got = np.swapaxes(got, -1, -2) if kind == "llama4" else got
            assert np.linalg.norm(got - values_of_it) < 0.12 * np.linalg.norm(values_of_it), (to, name)


def test_experts_of_fp8_in_one_tensor_of_llama4(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(0, 0.05, (4, 128, 96)).astype(np.float32)
    source = model(tmp_path / "in", {f"{EXPERTS}down_proj": weight}, {"model_type": "llama4_text"})
    convert(source, tmp_path / "q", "modelopt:fp8-tensor", strict=True)
    one = Checkpoint(tmp_path / "q")
    assert {name: (entry.dtype, entry.shape) for name, entry in one.entries.items()} == {
        f"{EXPERTS}down_proj": ("F8_E4M3", (4, 128, 96)),
        f"{EXPERTS}down_proj_weight_scale": ("F32", ()),
    }
    convert(tmp_path / "q", tmp_path / "back", "fp32", strict=True)
    got = Checkpoint(tmp_path / "back").array(f"{EXPERTS}down_proj")
    np.testing.assert_allclose(got, weight, atol=0.04 * np.abs(weight).max())
    report = convert(source, tmp_path / "rows", "modelopt:fp8", dry_run=True)
    assert [note for note in report["notes"] if "in experts of Llama 4" in note]


# Rows of a chunk of MiMo-V2.5's layers in small: 2 or 4 heads of keys of 48 and of values of 32 beside their queries.
CHUNKS = {
    "by heads": (4, 4, 464),
    "fewer chunks than heads": (2, 4, 464),
    "whole tiles": (4, 4, 256),
    "plain": (1, 4, 464),
}


@pytest.mark.parametrize("kind", CHUNKS)
def test_fused_projections_that_were_quantized_in_chunks(kind: str, tmp_path: Path) -> None:
    """MiMo's, each of whose chunks has a short last tile, unless whole tiles fill it."""
    chunks, heads, rows = CHUNKS[kind]
    rng = np.random.default_rng(7)
    parts = [rng.normal(0, 0.05, (rows, 256)).astype(np.float32) * 4**i for i in range(4)]
    parts = [np.concatenate(some) for some in np.array_split(np.array(parts), chunks)]
    tiles = breccia.Float8BlockScaling(block_m=128)
    codes = [breccia.cast(one, tiles) for one in parts]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    arrays = {name: np.concatenate([np.asarray(one.data) for one in codes]).view(ml_dtypes.float8_e4m3fn)}
    arrays[f"{name}_scale_inv"] = np.concatenate([np.asarray(one.scale) for one in codes])
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {
        "model_type": "mimo_v2",
        "num_key_value_heads": chunks,
        "swa_num_key_value_heads": heads,
        "quantization_config": config,
    }
    source = model(tmp_path / "in", arrays, config)
    wanted = np.concatenate([one.dequantize() for one in codes])
    convert(source, tmp_path / "fp32", "fp32", strict=True)
    np.testing.assert_array_equal(Checkpoint(tmp_path / "fp32").array(name), wanted)
    convert(source, tmp_path / "again", "deepseek", strict=kind != "plain")  # transformers misreads short tiles
    for stored in arrays:
        assert Checkpoint(tmp_path / "again").array(stored).tobytes() == Checkpoint(source).array(stored).tobytes()
    for to in ("nvfp4", "compressed-tensors:fp8", "mlx:int4"):
        convert(source, tmp_path / to, to)
        out = Checkpoint(tmp_path / to)
        (made,) = out.found
        assert np.linalg.norm(values(out.load(out.refined(made))) - wanted) < 0.12 * np.linalg.norm(wanted), to


def test_chunks_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    arrays = {name: np.ones((640, 128), ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": np.ones((8, 1), np.float32)}
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    heads = {"num_key_value_heads": 4, "swa_num_key_value_heads": 8}
    for kind, text in (("mimo_v2", ""), ("other", "may be those of 4 or 8 chunks")):
        source = model(tmp_path / kind, arrays, {"model_type": kind, **heads, "quantization_config": said})
        if text:
            with pytest.raises(ValueError, match=text):
                convert(source, tmp_path / "out", "fp32", dry_run=True)
        else:
            convert(source, tmp_path / "out", "fp32", dry_run=True)
    arrays[f"{name}_scale_inv"] = np.ones((9, 1), np.float32)
    with pytest.raises(ValueError, match=r"looks quantized but does not fit: scale.shape must be \(5, 1\) \(tiles\)"):
        convert(
            model(tmp_path / "odd", arrays, {"model_type": "mimo_v2", **heads, "quantization_config": said}),
            tmp_path / "o",
            "fp32",
        )


GROUPED = ["gptq:int4", "awq", "mlx:int4", "quark:int4"]


@pytest.mark.parametrize("to", GROUPED)
def test_words_that_do_not_fit_what_is_written_are_a_defect(to: str, tmp_path: Path) -> None:
    """The format's own reader looks at names, shapes and words before a byte is written."""
    bridge = WRITTEN[to.partition(":")[0]]
    source = model(tmp_path / "in", {bridge.sample.name: values_of(bridge)}, dict(bridge.sample.model))
    convert(source, tmp_path / "out", to, include=["*"])
    write = bridge.dialect.write

    def said(written: Any) -> dict[str, Any]:
        text = json.dumps(write(written))
        assert "group_size" in text
        return json.loads(re.sub(r'"(group_size|bits)": \d+', r'"\1": 7', text))

    object.__setattr__(bridge.dialect, "write", said)
    try:
        with pytest.raises(ValueError, match="must"):
            convert(source, tmp_path / "other", to, include=["*"], dry_run=True)
    finally:
        object.__setattr__(bridge.dialect, "write", write)


def test_a_file_that_changes_while_it_is_written_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program cuts it, or writes over its header."""
    source = model(tmp_path / "in", {"a.weight": np.ones((64, 64), np.float32)}, {})
    sync = disk.sync
    for at, data in (("cut", b""), ("header", b"{}")):

        def damaged(fd: int, path: Path, data: bytes = data) -> None:
            if path.name.endswith(".safetensors.partial"):
                os.pwrite(fd, data, 12) if data else os.ftruncate(fd, 100)
            sync(fd, path)

        with monkeypatch.context() as patch:
            patch.setattr(disk, "sync", damaged)
            with pytest.raises(ValueError, match="must keep its header and size while it is written"):
                convert(source, tmp_path / at, "nvfp4")
        assert not (tmp_path / at).exists()
