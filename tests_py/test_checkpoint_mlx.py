# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as mlx-lm writes them: several widths and group sizes in one model, said in config.json alone."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from checkpoints import weight

mx = pytest.importorskip("mlx.core")

OWN = {
    "model.layers.0.mlp.gate": {"group_size": 64, "bits": 8},
    "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 3, "mode": "affine"},
    "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}


def mlx_checkpoint(path: Path, everyone: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A directory of MLX's, and the values that MLX gives its tensors."""
    path.mkdir()
    arrays: dict[str, Any] = {"model.norm.weight": np.ones(128, np.float32)}
    wanted = {}
    for module in ("model.layers.0.self_attn.q_proj", *OWN):
        said = own.get(module, everyone)
        parts = mx.quantize(mx.array(weight(96, 128)), **said)
        wanted[f"{module}.weight"] = np.array(mx.dequantize(*parts, **said, dtype=mx.float32))
        for role, array in zip(("weight", "scales", "biases"), parts, strict=False):
            arrays[f"{module}.{role}"] = np.array(array)
    save_arrays(arrays, path / "model.safetensors", {"format": "mlx"})
    said = {**everyone, **own}
    (path / "config.json").write_text(json.dumps({"quantization": said, "quantization_config": said}))
    return wanted


@pytest.mark.parametrize("own", [{}, OWN], ids=["one", "several"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_bits_and_group_sizes_are_those_of_config_json(bits: int, size: int, own: Any, tmp_path: Path) -> None:
    wanted = mlx_checkpoint(tmp_path / "in", {"group_size": size, "bits": bits}, own)
    convert(tmp_path / "in", tmp_path / "out", "fp32")
    checkpoint = Checkpoint(tmp_path / "out")
    for name, value in wanted.items():
        # MLX may compute product and sum in one rounding, where its own dequantize of float32 scales does.
        np.testing.assert_allclose(checkpoint.array(name), value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_what_config_json_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    mlx_checkpoint(tmp_path / "in", {"group_size": 64, "bits": 8}, {})
    (tmp_path / "in" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json must say bits and group_size: shapes alone fit several"):
        convert(tmp_path / "in", tmp_path / "out", "fp32")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"quantization": {"group_size": 32, "bits": 4}}))
    with pytest.raises(ValueError, match=r"config\.json must say a group_size of 128 for 4 bits"):
        convert(tmp_path / "in", tmp_path / "out", "fp32")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_several_recipes_are_written_by_their_modules_names(tmp_path: Path) -> None:
    """A source of two formats becomes one of two entries, which MLX decodes."""
    wanted = mlx_checkpoint(
        tmp_path / "in",
        {"group_size": 32, "bits": 8, "mode": "mxfp8"},
        {"model.layers.0.mlp.gate": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
    )
    convert(tmp_path / "in", tmp_path / "ct", "compressed-tensors")
    convert(tmp_path / "ct", tmp_path / "out", "mlx")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert (said["bits"], said["model.layers.0.mlp.gate"]["bits"]) == (8, 4)
    tensors = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name, value in wanted.items():
        base = name.removesuffix(".weight")
        own = said.get(base) or {k: said[k] for k in ("bits", "group_size", "mode")}
        theirs = mx.dequantize(tensors[name], tensors[f"{base}.scales"], None, **own, dtype=mx.float32)
        np.testing.assert_array_equal(np.array(theirs), value, name)


@pytest.mark.parametrize("to", ["compressed-tensors:mxfp4", "torchao:int8", "modelopt", "deepseek:block", "mlx:mxfp4"])
def test_quantized_embeddings_become_floats_where_programs_want_them(to: str, tmp_path: Path) -> None:
    """MLX and GGUF quantize them; other formats' loaders would find none and fill them with random numbers."""
    name = "model.embed_tokens.weight"
    save_arrays({name: weight(64, 128), "a.q_proj.weight": weight(128, 128)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "mlx.safetensors", "mlx:int4", include=["*"])
    report = convert(tmp_path / "mlx.safetensors", tmp_path / "out.safetensors", to)
    formats = {f.name: f.format for f in Checkpoint(tmp_path / "out.safetensors").found}
    assert formats["a.q_proj.weight"] != "plain"
    assert formats[name] == ("mlx" if to.startswith("mlx") else "plain")
    assert any("embeddings have no form" in note for note in report["notes"]) == (not to.startswith("mlx"))
    assert verify(tmp_path / "mlx.safetensors", tmp_path / "out.safetensors", min_sqnr_db=15)["ok"]


def test_eight_bits_are_written(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mlx:int8")
    checkpoint = Checkpoint(tmp_path / "b.safetensors")
    (found,) = checkpoint.found
    assert found.kind == "affine 8 bits"
    scaled = breccia.cast(weight(64, 256), breccia.INT8Scaling(group_size=64, symmetric=False, scale_dtype="fp16"))
    np.testing.assert_allclose(values(checkpoint.load(found)), breccia.dequantize(scaled), rtol=1e-6, atol=1e-7)


def experts(path: Path, block: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Twelve experts in tensors of their own, numbers of two digits among them."""
    path.mkdir()
    names = [f"model.layers.0.{block}.experts.{e}.{kind}.weight" for e in range(12) for kind in kinds]
    arrays = {name: weight(32, 64 if i % 3 else 128) * (1 + i) for i, name in enumerate(names)}
    arrays["model.layers.0.self_attn.kv_b_proj.weight"] = weight(64, 128)
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "test"}))
    return arrays


BLOCKS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w2", "w3")}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("to", ["mlx:mxfp4", "mlx:mxfp8", "mlx:int4", "mlx:int8", "mlx:nvfp4"])
def test_experts_are_one_tensor_and_come_apart_again(to: str, block: str, tmp_path: Path) -> None:
    arrays = experts(tmp_path / "in", block, BLOCKS[block])
    convert(tmp_path / "in", tmp_path / "q", to)
    stored = Checkpoint(tmp_path / "q").entries
    for kind in ("gate_proj", "up_proj", "down_proj"):
        assert stored[f"model.layers.0.{block}.switch_mlp.{kind}.weight"].shape[0] == 12
        assert stored[f"model.layers.0.{block}.switch_mlp.{kind}.scales"].shape[:2] == (12, 32)
    assert not any("experts." in name for name in stored)
    assert stored["model.layers.0.self_attn.kv_b_proj.weight"].dtype == "F32"  # which mlx-lm takes apart
    assert {f.name for f in Checkpoint(tmp_path / "q").found} == arrays.keys()
    assert verify(tmp_path / "in", tmp_path / "q", min_sqnr_db=15)["ok"]
    convert(tmp_path / "q", tmp_path / "floats", "fp32")
    assert all(t["equal"] for t in verify(tmp_path / "q", tmp_path / "floats", min_sqnr_db=1e9)["tensors"])
    convert(tmp_path / "q", tmp_path / "again", "mlx")
    if to in ("mlx:mxfp4", "mlx:mxfp8", "mlx:nvfp4"):
        one, two = (tmp_path / name / "model.safetensors" for name in ("q", "again"))
        assert one.read_bytes() == two.read_bytes()


def test_experts_of_two_levels_get_one(tmp_path: Path) -> None:
    """mlx-lm's layers have no second scale; MLX decodes what is written as breccia does."""
    experts(tmp_path / "in", "mlp", BLOCKS["mlp"])
    convert(tmp_path / "in", tmp_path / "two", "compressed-tensors:nvfp4")
    report = convert(tmp_path / "two", tmp_path / "q", "mlx")
    assert report["tensors"]["requantize"] == 3
    assert "NVFP4 has one level: mlx-lm loads no second scale" in report["notes"]
    tensors = mx.load(str(tmp_path / "q" / "model.safetensors"))
    assert not [name for name in tensors if name.endswith("global_scale")]
    made = Checkpoint(tmp_path / "q")
    ours = {one.name: values(made.load(one)) for one in made.found}
    for kind in ("gate_proj", "up_proj", "down_proj"):
        base = f"model.layers.0.mlp.switch_mlp.{kind}"
        for e in range(12):
            stored = tensors[f"{base}.weight"][e], tensors[f"{base}.scales"][e]
            theirs = mx.dequantize(*stored, mode="nvfp4", dtype=mx.float32)
            np.testing.assert_array_equal(np.array(theirs), ours[f"model.layers.0.mlp.experts.{e}.{kind}.weight"])
    result = verify(tmp_path / "two", tmp_path / "q", min_sqnr_db=20)
    assert result["ok"]
    assert not result["missing"]


@pytest.mark.parametrize("through", ["compressed-tensors:fp8-tensor", "compressed-tensors:fp8", "gptq:int4"])
def test_quantized_experts_of_other_formats_are_stacked(through: str, tmp_path: Path) -> None:
    """One scale for a matrix, one for each row, words that run down the columns: no batch of these is a tensor."""
    experts(tmp_path / "in", "mlp", BLOCKS["mlp"])
    convert(tmp_path / "in", tmp_path / "a", through)
    convert(tmp_path / "a", tmp_path / "q", "mlx:mxfp8")
    assert "model.layers.0.mlp.switch_mlp.gate_proj.scales" in Checkpoint(tmp_path / "q").entries
    assert verify(tmp_path / "a", tmp_path / "q", min_sqnr_db=20)["ok"]


def test_experts_that_are_not_alike_stay_apart(tmp_path: Path) -> None:
    experts(tmp_path / "in", "mlp", BLOCKS["mlp"])
    report = convert(tmp_path / "in", tmp_path / "q", "mlx:mxfp4", exclude=["*.experts.3.up_proj.weight"])
    formats = {f.name: f.format for f in Checkpoint(tmp_path / "q").found}
    assert {formats[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(12)} == {"plain"}
    assert {formats[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(12)} == {"mlx"}
    assert report["tensors"] == {"cast": 2, "copy": 2}
