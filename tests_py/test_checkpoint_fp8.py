# SPDX-License-Identifier: Apache-2.0
"""FP8 and FP4 in the dress of many files: casts without a scale, ComfyUI's older names, scales of other types."""

import json
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, complete, convert, inspect, save_arrays, target_names, verify
from breccia.checkpoint.files.safetensors_file import SafetensorsFile, SafetensorsWriter
from breccia.checkpoint.judging.verify import values
from checkpoints import weight

ml_dtypes = pytest.importorskip("ml_dtypes")

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def read(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    return {one.name: values(checkpoint.load(checkpoint.refined(one))) for one in checkpoint.found}


def directory(path: Path, arrays: dict[str, Any], said: dict[str, Any]) -> Path:
    path.mkdir()
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": said} if said else {}))
    return path


CASTS = {"blocks.0.q.weight": (64, 256), "blocks.0.q.bias": (64,), "blocks.0.norm.scale": (64,), "txt.weight": (32, 64)}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_without_a_scale_are_numbers_in_every_target(dtype: Any, tmp_path: Path) -> None:
    arrays = {name: (weight(*shape) * 8).astype(dtype) for name, shape in CASTS.items()}
    source = tmp_path / "in.safetensors"
    save_arrays(arrays, source)
    wide = {name: array.astype(np.float32) for name, array in arrays.items()}
    for name, array in read(source).items():
        np.testing.assert_array_equal(array, wide[name])
    findings = inspect(source)["findings"]
    assert findings == [f"{name}: FP8 without a scale: the numbers themselves" for name in arrays if "weight" in name]
    assert complete(source)["problems"] == []
    for i, to in enumerate(target_names()):
        out = tmp_path / f"{i}{'.gguf' if to.startswith('gguf') else '.safetensors'}"
        report = convert(source, out, to)
        said = [note for note in report["notes"] if "FP8 without a scale: the numbers themselves" in note]
        assert said == ["blocks.0.norm.scale and 3 more: FP8 without a scale: the numbers themselves"]
        made = Checkpoint(out)
        assert not [one.name for one in made.found if one.format == "plain" and "F8" in one.dtype]
        for name, array in read(out).items():
            if to in ("bf16", "fp16", "fp32") or name not in ("blocks.0.q.weight", "txt.weight"):
                np.testing.assert_array_equal(array, wide[name], err_msg=f"{to} {name}")
        assert verify(source, out, min_sqnr_db=8)["ok"], to


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, {"quant_method": "fp8"}),
        ({"blocks.0.q.scale": np.ones((), np.float32)}, {}),
        ({"blocks.0.q.scales": np.ones((), np.float32)}, {}),
        ({"blocks.0.q.weight_amax_scale": np.ones((), np.float32)}, {}),
        ({"blocks.0.q.weight.scale": np.ones((), np.float32)}, {}),
        ({"x.weight": np.zeros((64, 64), E4M3), "x.weight_scale": np.ones((), np.float32)}, {}),
    ],
)
def test_codes_whose_scale_is_lost_or_not_known_are_refused(more: Any, said: Any, tmp_path: Path) -> None:
    source = directory(tmp_path / "in", {"blocks.0.q.weight": weight(64, 64).astype(E4M3), **more}, said)
    scaled = any("q." in name for name in more)
    why = "nothing that is read here says what its scale" if scaled else "FP8 without a scale"
    with pytest.raises(ValueError, match=rf"'blocks\.0\.q\.weight'.*{why}"):
        convert(source, tmp_path / "out", "bf16")


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_comfyuis_older_scaled_files(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    w = weight(64, 128)
    scale = np.full(shape, np.abs(w).max() / 400, np.float32)
    arrays = {
        "blocks.0.q.weight": (w / scale.reshape(())).astype(dtype),
        "blocks.0.q.scale_weight": scale,
        "blocks.0.q.scale_input": np.full(shape, 0.5, np.float32),
        "blocks.0.norm.weight": np.ones(64, np.float16),
        "scaled_fp8": np.zeros(2, dtype),
    }
    source = tmp_path / "in.safetensors"
    save_arrays(arrays, source)
    wanted = arrays["blocks.0.q.weight"].astype(np.float32) * scale.reshape(())
    np.testing.assert_array_equal(read(source)["blocks.0.q.weight"], wanted)
    report = convert(source, tmp_path / "bf16.safetensors", "bf16")
    assert set(SafetensorsFile(tmp_path / "bf16.safetensors").entries) == {"blocks.0.q.weight", "blocks.0.norm.weight"}
    assert any("scales of the activations of 1 layers (scale_input)" in note for note in report["notes"])
    report = convert(source, tmp_path / "new.safetensors", "comfyui")
    made = SafetensorsFile(tmp_path / "new.safetensors")
    ends = ("weight", "weight_scale", "comfy_quant", "input_scale")
    assert set(made.entries) == {"blocks.0.norm.weight", *(f"blocks.0.q.{end}" for end in ends)}
    assert made["blocks.0.q.input_scale"].reshape(()) == np.float32(0.5)
    np.testing.assert_array_equal(read(tmp_path / "new.safetensors")["blocks.0.q.weight"], wanted)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_tiles_scales_of_every_float(dtype: Any, tmp_path: Path) -> None:
    scaled = breccia.cast(weight(256, 384), breccia.Float8BlockScaling(block_m=128))
    scale = np.asarray(scaled.scale).astype(dtype)
    arrays = {"l.weight": np.asarray(scaled.data).view(E4M3), "l.weight_scale_inv": scale}
    source = directory(tmp_path / "in", arrays, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    wide = scale.astype(np.float32).repeat(128, 0).repeat(128, 1)
    np.testing.assert_array_equal(read(source)["l.weight"], arrays["l.weight"].astype(np.float32) * wide)
    for to in ("fp32", "deepseek", "compressed-tensors:fp8-block"):
        convert(source, tmp_path / to, to)
        assert verify(source, tmp_path / to, min_sqnr_db=100 if to != "compressed-tensors:fp8-block" else 40)["ok"]


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("said", [{}, {"weight_block_size": [1, 32]}])
def test_mxfp8_whose_scales_are_called_inverse(dtype: Any, said: dict[str, Any], tmp_path: Path) -> None:
    scaled = breccia.cast(weight(128, 256), "mxfp8")
    arrays = {
        "l.weight": np.asarray(scaled.data).view(E4M3),
        "l.weight_scale_inv": np.asarray(scaled.scale).view(dtype),
    }
    source = directory(tmp_path / "in", arrays, {"quant_method": "mxfp8", **said})
    np.testing.assert_array_equal(read(source)["l.weight"], breccia.dequantize(scaled))
    for to in ("modelopt:mxfp8", "compressed-tensors:mxfp8", "mlx:mxfp8"):
        report = convert(source, tmp_path / to, to)
        assert report["tensors"] == {"repack": 1}
        assert verify(source, tmp_path / to, min_sqnr_db=1e9)["ok"]


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8", "F8_E4M3"])
def test_fp4_in_its_own_type(dtype: str, tmp_path: Path) -> None:
    recipe = breccia.NVFP4BlockScaling(two_level=False) if dtype == "F8_E4M3" else breccia.MXFP4BlockScaling()
    scaled = breccia.cast(weight(128, 256), recipe)
    scale = np.asarray(scaled.scale).view(np.uint8)
    plan = {"l.weight": ("F4", (128, 256)), "l.weight_scale": (dtype, scale.shape)}
    (tmp_path / "in").mkdir()
    with SafetensorsWriter(tmp_path / "in" / "model.safetensors", plan, {"format": "pt"}) as writer:
        writer.write("l.weight", np.asarray(scaled.data))
        writer.write("l.weight_scale", scale)
    (tmp_path / "in" / "config.json").write_text("{}")
    np.testing.assert_array_equal(read(tmp_path / "in")["l.weight"], breccia.dequantize(scaled))
    report = convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
    assert report["tensors"] == {"repack": 1}
    assert verify(tmp_path / "in", tmp_path / "out", min_sqnr_db=1e9)["ok"]
