# SPDX-License-Identifier: Apache-2.0
"""ComfyUI's files, against comfy-kitchen where it is installed, and by the words of its format where it is not."""

import json
import warnings
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.bridges import comfyui, from_comfyui, to_comfyui
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays, verify
from checkpoints import modelopt_nvfp4

KINDS = comfyui.RECIPES


def weight(shape: tuple[int, ...] = (160, 96), seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


@pytest.fixture
def kitchen() -> Any:
    """Its layouts of tensors by the names of the recipes here."""
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = pytest.importorskip("comfy_kitchen.tensor")
    return {
        "nvfp4": tensor.TensorCoreNVFP4Layout,
        "fp8": tensor.TensorCoreFP8Layout,
        "mxfp8": tensor.TensorCoreMXFP8Layout,
        "int8": tensor.TensorWiseINT8Layout,
    }


@pytest.mark.parametrize("key", KINDS)
def test_kitchen_reads_the_same_values(key: str, kitchen: Any) -> None:
    import torch

    scaled = breccia.cast(weight(), KINDS[key])
    parts = {role: _torch(array) for role, array in to_comfyui(scaled).items()}
    layout, scale = kitchen[key], parts["weight_scale"]
    options: dict[str, Any] = {"orig_dtype": torch.float32, "orig_shape": scaled.shape}
    if key == "nvfp4":
        params = layout.Params(scale=parts["weight_scale_2"], block_scale=scale, **options)
    else:
        params = layout.Params(scale=scale.view(torch.float8_e8m0fnu) if key == "mxfp8" else scale, **options)
    theirs = layout.dequantize(parts["weight"], params).numpy()
    np.testing.assert_allclose(theirs, breccia.dequantize(scaled), rtol=1e-6)


@pytest.mark.parametrize("key", KINDS)
def test_what_kitchen_quantizes_is_read(key: str, kitchen: Any) -> None:
    import torch

    x = torch.from_numpy(weight())
    layout = kitchen[key]
    options = {"scale": "recalculate"} if key in ("fp8", "nvfp4") else {"per_channel": True} if key == "int8" else {}
    data, params = layout.quantize(x, **options)
    named = {"weight" + name: tensor for name, tensor in layout.state_dict_tensors(data, params).items()}
    mine = from_comfyui(named)
    assert type(mine.recipe) is type(KINDS[key])
    theirs = layout.dequantize(data, params).numpy()
    np.testing.assert_allclose(breccia.dequantize(mine), theirs, rtol=1e-6)


def _torch(array: Any) -> Any:
    from breccia.bridges.common import to_torch

    return to_torch(np.array(array))


def test_nibbles_and_tiles_are_where_the_format_says() -> None:
    scaled = breccia.cast(weight((144, 96)), breccia.NVFP4BlockScaling())
    parts = to_comfyui(scaled)
    mine, theirs = np.asarray(scaled.data).view(np.uint8), parts["weight"]
    assert (mine[5, 7] & 15, mine[5, 7] >> 4) == (theirs[5, 7] >> 4, theirs[5, 7] & 15)
    assert parts["weight_scale"].shape == (256, 8)
    flat = parts["weight_scale"].view(np.uint8).reshape(-1)
    row, column, tiles = 140, 5, 2
    at = ((row // 128) * tiles + column // 4) * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
    assert flat[at] == np.asarray(scaled.scale).view(np.uint8)[row, column]
    assert bytes(parts["comfy_quant"]) == b'{"format": "nvfp4"}'


def test_shapes_that_would_be_padded_are_refused() -> None:
    for recipe, rows in (("nvfp4", 40), ("mxfp8", 48)):
        with pytest.raises(ValueError, match="multiples of"):
            to_comfyui(breccia.cast(weight((rows, 96)), recipe))


def source(path: Path) -> Path:
    arrays = {f"blocks.{i}.{part}.weight": weight(seed=i) for i in range(2) for part in ("qkv", "proj")}
    arrays["blocks.0.norm.weight"] = np.ones(96, np.float32)
    save_arrays(arrays, path)
    return path


@pytest.mark.parametrize("key", KINDS)
def test_a_file_of_each_format_is_written_and_read(key: str, tmp_path: Path) -> None:
    model = source(tmp_path / "model.safetensors")
    convert(model, tmp_path / "q.safetensors", f"comfyui:{key}")
    file = SafetensorsFile(tmp_path / "q.safetensors")
    said = json.loads(file.metadata["_quantization_metadata"])
    assert said["format_version"] == "1.0"
    assert set(said["layers"]) == {f"blocks.{i}.{part}" for i in range(2) for part in ("qkv", "proj")}
    for name, layer in said["layers"].items():
        assert json.loads(bytes(file[f"{name}.comfy_quant"])) == layer
        assert layer.get("full_precision_matrix_mult", False) == (key == "fp8")
    found = Checkpoint(tmp_path / "q.safetensors").found
    assert {f.format for f in found if f.name.endswith("weight") and "norm" not in f.name} == {"comfyui"}
    assert verify(model, tmp_path / "q.safetensors", min_sqnr_db=18)["ok"]
    convert(tmp_path / "q.safetensors", tmp_path / "own.safetensors", "bf16")
    assert verify(tmp_path / "q.safetensors", tmp_path / "own.safetensors", min_sqnr_db=40)["ok"]


@pytest.mark.parametrize("key", KINDS)
def test_files_that_say_it_in_the_header_alone(key: str, tmp_path: Path) -> None:
    convert(source(tmp_path / "model.safetensors"), tmp_path / "q.safetensors", f"comfyui:{key}")
    file = SafetensorsFile(tmp_path / "q.safetensors")
    arrays = {name: array for name, array in file.items() if not name.endswith("comfy_quant")}
    save_arrays(arrays, tmp_path / "old.safetensors", dict(file.metadata))
    new, old = (Checkpoint(tmp_path / f"{name}.safetensors") for name in ("q", "old"))
    assert [(f.name, f.format, f.kind) for f in new.found] == [(f.name, f.format, f.kind) for f in old.found]
    for one, other in zip(new.found, old.found, strict=True):
        if one.format == "comfyui":
            assert new.load(one) == old.load(other)


def test_nvidias_checkpoints_become_comfyuis_and_back(tmp_path: Path) -> None:
    """NVFP4 as it is, the scales of activations with it."""
    before = modelopt_nvfp4(tmp_path / "in")
    there = convert(before, tmp_path / "comfy", "comfyui")
    assert there["tensors"].keys() <= {"repack", "copy"}
    back = convert(tmp_path / "comfy", tmp_path / "back", "modelopt")
    assert back["tensors"].keys() <= {"repack", "copy"}
    first, second = Checkpoint(before), Checkpoint(tmp_path / "back")
    inputs = [name for name in first.entries if name.endswith("input_scale")]
    assert inputs
    assert set(first.entries) == set(second.entries)
    for name in first.entries:
        assert first.array(name).tobytes() == second.array(name).tobytes(), name


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"format": "convrot_w4a4"}, "format must be FP8, NVFP4, MXFP8 or INT8, got 'convrot_w4a4'"),
        ({"format": "int8_tensorwise", "convrot": True}, "must not be rotated"),
        ({"format": "int8_tensorwise", "params": {"convrot": True}}, "must not be rotated"),
        ({"format": "nvfp4"}, "comfy_quant must say 'int8_tensorwise' of such tensors"),
        ([], "format must be"),
    ],
)
def test_what_is_not_known_is_refused(said: Any, message: str, tmp_path: Path) -> None:
    convert(source(tmp_path / "model.safetensors"), tmp_path / "q.safetensors", "comfyui:int8")
    arrays = dict(SafetensorsFile(tmp_path / "q.safetensors").items())
    arrays["blocks.1.qkv.comfy_quant"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    save_arrays(arrays, tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        convert(tmp_path / "odd.safetensors", tmp_path / "out.safetensors", "bf16")
    assert "blocks.1.qkv.weight" in str(caught.value)
    with pytest.raises(ValueError, match=message):
        breccia.load(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("key", ["nvfp4", "mxfp8"])
def test_large_matrices_are_written_in_pieces(key: str, tmp_path: Path) -> None:
    """Tiles of 128 rows of scales, the last one filled up."""
    x = weight((5024, 2048))
    save_arrays({"a.weight": x}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "q.safetensors", f"comfyui:{key}")
    file = SafetensorsFile(tmp_path / "q.safetensors")
    for role, array in to_comfyui(breccia.cast(x, KINDS[key])).items():
        assert file[f"a.{role}"].tobytes() == array.tobytes(), role
