# SPDX-License-Identifier: Apache-2.0
"""``--to FORMAT`` alone keeps what the source has where the format holds it; and what the model's program reads is
written where it does not read what was asked for."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import dequantize_gguf
from breccia.bridges.gguf.blocks import NUMBERS, TYPES
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, inspect, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from breccia.gguf.container import GgufWriter
from checkpoints import deepseek_v3, gpt_oss_20b, weight, write_shards
from test_checkpoint_contradictions import gptq
from tiny_models import MODELS, logits, random_model, tiny

mx = pytest.importorskip("mlx.core")

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def affine(folder: Path, every: dict[str, Any], own: dict[str, Any]) -> Path:
    """A checkpoint of MLX whose second module has numbers of its own."""
    arrays: dict[str, Any] = {"model.norm.weight": np.ones(128, np.float32)}
    for module, said in zip(NAMES, (every, {**every, **{k: v for k, v in own.items() if v is not None}}), strict=True):
        parts = mx.quantize(mx.array(weight(96, 256)), **said)
        arrays |= {
            f"{module}.{role}": np.array(a) for role, a in zip(("weight", "scales", "biases"), parts, strict=True)
        }
    said = {**every, NAMES[1]: own} if own else every
    folder.mkdir()
    save_arrays(arrays, folder / "model.safetensors", {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({"quantization": said, "quantization_config": said}))
    return folder


def read(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    return {one.name: values(checkpoint.load(checkpoint.refined(one))) for one in checkpoint.found}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("own", [{}, {"bits": 8, "group_size": None}, {"bits": 6, "group_size": 32}])
def test_affine_stays_as_it_is(bits: int, own: dict[str, Any], tmp_path: Path) -> None:
    source = affine(tmp_path / "in", {"group_size": 64, "bits": bits}, own)
    report = convert(source, tmp_path / "out", "mlx")
    assert report["tensors"] == {"same": 2, "copy": 1}
    assert report["notes"] == []
    before, after = (SafetensorsFile(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert {name: array.tobytes() for name, array in before.items()} == {n: a.tobytes() for n, a in after.items()}
    assert verify(source, tmp_path / "out", min_sqnr_db=1e9)["ok"]
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert said["bits"] == bits
    assert said.get(NAMES[1], {}) == own
    asked = convert(source, tmp_path / "asked", "mlx:mxfp4")
    assert asked["tensors"] == {"cast": 2, "copy": 1}


def test_affine_beside_other_modes_keeps_its_numbers(tmp_path: Path) -> None:
    source = affine(tmp_path / "in", {"group_size": 64, "bits": 4}, {})
    file = dict(SafetensorsFile(source / "model.safetensors").items())
    weight_, scales = mx.quantize(mx.array(weight(96, 256)), mode="mxfp4", group_size=32, bits=4)
    file |= {
        "model.layers.1.mlp.up_proj.weight": np.array(weight_),
        "model.layers.1.mlp.up_proj.scales": np.array(scales),
    }
    save_arrays(file, tmp_path / "new.safetensors", {"format": "mlx"})
    (tmp_path / "new.safetensors").replace(source / "model.safetensors")
    report = convert(source, tmp_path / "out", "mlx")
    assert report["tensors"] == {"same": 2, "repack": 1, "copy": 1}
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (said["bits"], said["model.layers.1.mlp.up_proj"]["mode"]) == (4, "mxfp4")
    assert verify(source, tmp_path / "out", min_sqnr_db=1e9)["ok"]


def test_gptq_in_order_of_activation_stays_as_it_is(tmp_path: Path) -> None:
    source, _ = gptq(tmp_path / "in", checkpoint_format="gptq_v2", desc_act=True)
    file = dict(SafetensorsFile(source / "model.safetensors").items())
    file["a.g_idx"] = np.random.default_rng(0).permutation(file["a.g_idx"])
    save_arrays(file, tmp_path / "new.safetensors", {"format": "pt"})
    (tmp_path / "new.safetensors").replace(source / "model.safetensors")
    report = convert(source, tmp_path / "out", "gptq")
    assert report["tensors"] == {"same": 1}
    assert (tmp_path / "out" / "config.json").read_text() != ""
    first, second = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    assert first["quantization_config"] == second["quantization_config"]
    assert verify(source, tmp_path / "out", min_sqnr_db=1e9)["ok"]


@pytest.mark.parametrize("key", ["q4_k", "q6_k", "q2_k"])
def test_blocks_of_gguf_stay_as_they_are(key: str, tmp_path: Path) -> None:
    save_arrays({"model.a.weight": weight(64, 256)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "a.gguf", f"gguf:{key}")
    report = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf")
    assert report["tensors"] == {"keep": 1}
    assert verify(tmp_path / "a.gguf", tmp_path / "b.gguf", min_sqnr_db=1e9)["ok"]


READ_BY_PEER = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ3_S", "IQ2_S", "IQ1_M", "TQ1_0", "TQ2_0")


@pytest.mark.parametrize("kind", [*READ_BY_PEER, "Q8_K", "Q1_0"])
def test_types_of_codebooks(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    number, block, nbytes = TYPES[kind]
    assert (gguf.GGMLQuantizationType[kind].value, gguf.GGML_QUANT_SIZES[number]) == (number, (block, nbytes))
    assert NUMBERS[number] == kind
    blocks = np.random.default_rng(1).integers(0, 256, (8, 2 * nbytes), dtype=np.uint8)
    path = tmp_path / "a.gguf"
    with GgufWriter(path, {"a.weight": (kind, (8, 2 * block))}, {"general.architecture": (8, "llama")}) as writer:
        writer.write("a.weight", blocks)
    (said,) = inspect(path)["tensors"]
    assert (said["kind"], said["shape"]) == (kind, [8, 2 * block])
    if kind in READ_BY_PEER:
        with np.errstate(all="ignore"):  # some scales are no numbers
            theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
            ours = dequantize_gguf(blocks, kind)
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(read(path)["a.weight"], theirs)
        return
    with pytest.raises(ValueError, match=f"kind must be one that breccia or gguf-py decodes, got '{kind}'"):
        convert(path, tmp_path / "out.safetensors", "bf16")


ROPE = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"rope_parameters": ROPE}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_parameters": LINEAR},
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_parameters": {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 1e4}}},
            {"rope_theta": 5e5, "rope_scaling": None, "rope_local_base_freq": 1e4},
        ),
        ({"num_local_experts": 8}, {"num_experts": 8}),
        (
            {"num_local_experts": 8, "num_experts": 4, "rope_theta": 1.0, "rope_parameters": ROPE},
            {"num_experts": 4, "rope_theta": 1.0, "rope_scaling": None},
        ),
        ({"text_config": {"hidden_size": 8, "rope_parameters": ROPE}}, {}),
        ({}, {}),
    ],
)
def test_mlx_is_told_the_models_numbers_by_its_own_names(said: Any, wanted: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path / "in", [{"model.a.weight": weight(64, 128)}], said)
    for to in ("mlx:int4", "mlx:mxfp8", "mxfp8"):
        convert(source, tmp_path / to, to)
        config = json.loads((tmp_path / to / "config.json").read_text())
        added = {k: v for k, v in config.items() if k not in ("model_type", "quantization", "quantization_config")}
        text = added.pop("text_config", None)
        assert added == {k: v for k, v in said.items() if k != "text_config"} | (wanted if "mlx" in to else {})
        if text is not None:
            assert text == {**said["text_config"], **({"rope_theta": 5e5, "rope_scaling": None} if "mlx" in to else {})}


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TO_MLX = ["mlx", "mlx:int4", "mlx:int8", "mlx:mxfp4", "mlx:mxfp8", "mlx:nvfp4"]


@pytest.mark.parametrize("to", TO_MLX)
def test_experts_of_gpt_oss_are_apart_for_mlx(to: str, tmp_path: Path) -> None:
    source = gpt_oss_20b(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt_oss"}))
    size, same = "auto" if "int" in to else None, to in ("mlx", "mlx:mxfp4")
    report = convert(source, tmp_path / "out", to, include=[] if same else ["*experts*"], group_size=size)
    at = "model.layers.0.mlp.experts."
    experts = {
        name.removeprefix(at) for name in SafetensorsFile(tmp_path / "out/model-00001-of-00001.safetensors").entries
    }
    roles = ["weight", "bias", "scales", *(["biases"] if "int" in to else [])]
    parts = {f"{part}_proj.{role}" for part in ("gate", "up", "down") for role in roles}
    assert experts == parts | {"model.layers.0.mlp.router.weight"}
    assert report["tensors"].get("repack", 0) == (3 if same else 0)  # its makers' own codes
    convert(tmp_path / "out", tmp_path / "back", "gpt-oss" if same else "fp32")
    ours, theirs = read(source), read(tmp_path / "back")
    assert theirs.keys() == ours.keys()
    for name, w in ours.items():
        noise = np.linalg.norm(theirs[name] - w)
        assert noise <= (0 if same or "bias" in name else 0.2) * np.linalg.norm(w), name
    again = convert(tmp_path / "out", tmp_path / "again", "mlx")  # the same bytes
    assert not {"cast", "requantize"} & again["tensors"].keys()
    first, second = (next((tmp_path / name).glob("*.safetensors")) for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("to", ["gpt-oss", "bf16"])
def test_gguf_of_gpt_oss_becomes_mlx(to: str, models: Path, tmp_path: Path) -> None:
    convert(tiny("gpt-oss", models / to), tmp_path / "in", to)
    convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:mxfp4")
    convert(tmp_path / "a.gguf", f"{tmp_path}/mlx/", "mlx:mxfp4")
    convert(tmp_path / "in", tmp_path / "wanted", "mlx:mxfp4")
    mine, wanted = read(tmp_path / "mlx"), read(tmp_path / "wanted")
    assert {name for name in wanted if "experts" in name} == {name for name in mine if "experts" in name}
    for name in wanted:
        if "experts" in name:
            np.testing.assert_array_equal(mine[name], wanted[name])


@pytest.mark.parametrize("exclude", [[], ["*gate_up_proj*"], ["*down_proj"], ["*experts*"]])
@pytest.mark.parametrize("to", TO_MLX[1:])
def test_mlx_lm_loads_gpt_oss(to: str, exclude: list[str], models: Path, tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    if not (source := models / "plain").exists():  # without YaRN, whose ramp mlx-lm and transformers do not share
        random_model("GptOss", {**MODELS["gpt-oss"][1], "rope_parameters": PLAIN}).save_pretrained(source)
    convert(source, tmp_path / "out", to, exclude=exclude)
    model, _ = utils.load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    mine = np.array(model(mx.array([list(range(3, 43))])))
    convert(tmp_path / "out", tmp_path / "floats", "fp32")
    np.testing.assert_allclose(mine, logits(tmp_path / "floats").numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("columns", "size"), [(576, 64), (512, 128), (96, 32), (80, None)])
def test_group_sizes_that_divide(columns: int, size: int | None, tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, columns), "b.weight": weight(64, 256)}, tmp_path / "in.safetensors")
    for to in ("compressed-tensors:int4", "int4", "modelopt:int4"):
        report = convert(tmp_path / "in.safetensors", tmp_path / f"{to}.safetensors", to, group_size="auto")
        found = {one.name: one.recipe for one in Checkpoint(tmp_path / f"{to}.safetensors").found}
        assert getattr(found["a.weight"], "group_size", None) == size
        assert getattr(found["b.weight"], "group_size", None) == 128
        assert bool(report["notes"]) == (size is None)
    report = convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "compressed-tensors:int4")
    notes = [note for note in report["notes"] if "--group-size" in note]
    assert bool(notes) == (size in (64, 32))
    if notes:
        assert f"a.weight: groups of 128 do not divide their columns: --group-size {size} divides them all" in notes[0]
    with pytest.raises(ValueError, match=r"^group_size must be a number or 'auto', got 'most'"):
        convert(tmp_path / "in.safetensors", tmp_path / "no.safetensors", "int4", group_size="most")


def test_notes_name_what_transformers_misreads(tmp_path: Path) -> None:
    source = deepseek_v3(tmp_path / "in")
    note = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight: transformers misreads tiles of rows"
    for to in ("deepseek", "deepseek:block-ue8m0"):
        assert any(text.startswith(note) for text in convert(source, tmp_path / to, to)["notes"])
    assert not any("misreads" in text for text in convert(source, tmp_path / "bf16", "bf16")["notes"])
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": weight(64, 128) for i in range(2)}
    save_arrays(experts, tmp_path / "experts.safetensors")
    report = convert(tmp_path / "experts.safetensors", tmp_path / "q.safetensors", "compressed-tensors:mxfp8")
    assert "experts in mxfp8: transformers does not load them: read them by vLLM or SGLang" in report["notes"]
    assert breccia.checkpoint.verify(tmp_path / "experts.safetensors", tmp_path / "q.safetensors")["ok"]
