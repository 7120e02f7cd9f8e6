# SPDX-License-Identifier: Apache-2.0
"""``--device``: weights rounded by torch's tensors, on a GPU where there is one; else the same path on torch's CPU."""

import dataclasses
import json
import sys
from itertools import product
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.calibration import error_feedback
from breccia.checkpoint import convert, device, finish, merge_lora, plan, save_arrays, target_names
from breccia.checkpoint.planning.targets import FLOATS, parse_target
from breccia.cli import main
from breccia.moments import save_moments
from fault_runner import tree
from test_convert_by_moments import LAYER, LAYER_OF_LLAMA, SHAPES, model, of_shapes
from test_importance import RECIPES, parts

torch = pytest.importorskip("torch")


@pytest.fixture
def gpu(monkeypatch):
    """The name of a GPU; without one torch's tensors of the CPU stand for its, and the list has what was done there."""
    done = []
    if not torch.cuda.is_available():
        monkeypatch.setattr(device, "_place", lambda name: "cpu")
    plain = device.Device.tensor

    def tensor(self, array):
        done.append(array.shape)
        return plain(self, array)

    monkeypatch.setattr(device.Device, "tensor", tensor)
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    model(folder / "model", SHAPES, LAYER_OF_LLAMA)
    save_moments(of_shapes(SHAPES), folder / "moments.safetensors")
    return folder


QUANTIZED = [name for name in target_names() if name not in FLOATS and parse_target(name).recipe is not None]


@pytest.mark.parametrize("to", QUANTIZED)
def test_casts_of_every_target_have_the_same_bytes(folder, tmp_path, gpu, to):
    if to.startswith("onnx"):
        pytest.importorskip("onnx")
    suffix = ".gguf" if to.startswith("gguf") else ""
    here, there = tmp_path / f"here{suffix}", tmp_path / f"there{suffix}"
    try:
        convert(folder / "model", here, to)
    except ValueError:
        return  # the model has no place in the format
    report = convert(folder / "model", there, to, device="cuda")
    kind = parse_target(to).kind
    assert gpu or kind or not report["tensors"].get("cast")
    there.rename(tmp_path / f"moved{suffix}")
    left, right = (tree(path) if path.is_dir() else path.read_bytes() for path in (here, tmp_path / f"moved{suffix}"))
    assert left == right


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_and_option(name, gpu):
    rng = np.random.default_rng(0)
    where, core = device.Device.of("cuda"), device.Device()
    values = rng.normal(size=(24, 256)).astype(np.float32)
    values.flags.writeable = False
    recipe = RECIPES[name]
    for array in (values, values.astype(np.float64), values.astype(np.float16)):
        for options in ({}, {"rounding": "stochastic", "seed": 7}, {"importance": np.arange(256, dtype=np.float32)}):
            made, wanted = where.cast(array, recipe, **options), core.cast(array, recipe, **options)
            assert parts(made) == parts(wanted) and made.original_dtype == wanted.original_dtype
            assert [type(made.data), made.data.dtype] == [type(wanted.data), wanted.data.dtype]
    for source in (breccia.MXFP8BlockScaling(), breccia.Float8CurrentScaling()):
        scaled = breccia.cast(values, source)
        scaled.data.flags.writeable = False
        assert parts(where.requantize(scaled, recipe)) == parts(core.requantize(scaled, recipe))
    with pytest.raises(ValueError, match="float32's range"):
        where.cast(np.full((2, 256), 1e300), recipe)


def test_other_sources_have_the_same_bytes(folder, tmp_path, gpu):
    rng = np.random.default_rng(1)
    for dtype, name in ((np.float16, "half"), (np.float64, "double")):
        save_arrays({"a.weight": rng.normal(size=(128, 256)).astype(dtype)}, tmp_path / f"{name}.safetensors")
    convert(folder / "model", tmp_path / "bf16", "bf16")
    convert(folder / "model", tmp_path / "fp8", "compressed-tensors:fp8")
    cases = product(("bf16", "fp8", "half.safetensors", "double.safetensors"), ("nvfp4", "mxfp4"), ("amax", "mse"))
    for number, (source, to, search) in enumerate(cases):
        places = [tmp_path / f"{name}{number}{Path(source).suffix}" for name in ("cpu", "cuda")]
        for place, name in zip(places, ("cpu", "cuda"), strict=True):
            gpu.clear()
            convert(tmp_path / source, place, to, device=name, scale_search=search)
        assert tree(places[0]) == tree(places[1])
        assert gpu or source == "fp8"  # requantized, not cast


@pytest.mark.parametrize("level", ["full", "block"])
def test_gptq_by_torch_loses_as_little(level, folder, tmp_path, gpu, monkeypatch):
    save_moments(of_shapes(SHAPES, level), tmp_path / "moments.safetensors")
    options = {"moments": tmp_path / "moments.safetensors", "method": "gptq"}
    core = convert(folder / "model", tmp_path / "here", "nvfp4", **options)["output_errors"]
    called = []
    by_torch = error_feedback.gptq_by_torch
    monkeypatch.setattr(device, "gptq_by_torch", lambda *args: called.append(1) or by_torch(*args))
    made = convert(folder / "model", tmp_path / "there", "nvfp4", device="cuda", **options)["output_errors"]
    assert len(called) == len(SHAPES) and made.keys() == core.keys()
    for name, said in made.items():
        for figure in ("output_error", "nearest", "damp"):
            assert said[figure] == pytest.approx(core[name][figure], rel=1e-3)
        assert said["level"] == core[name]["level"] == level


def test_parts_and_work_that_was_begun_go_on_on_any_device(folder, tmp_path, gpu):
    convert(folder / "model", tmp_path / "whole", "compressed-tensors:nvfp4")
    pieces = plan(folder / "model", tmp_path / "out", "compressed-tensors:nvfp4", 3)
    for piece, name in zip(pieces, ("cpu", "cuda", "cpu"), strict=True):
        piece.run(device=name)
    assert gpu
    finish(folder / "model", tmp_path / "out", "compressed-tensors:nvfp4")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("to", ["nvfp4", "compressed-tensors:nvfp4", "fp8"])
def test_merges_have_the_same_bytes(folder, tmp_path, gpu, to):
    convert(folder / "model", tmp_path / "base", to)
    rng = np.random.default_rng(2)
    name = f"base_model.model.{LAYER}mlp.down_proj"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_arrays(
        {
            f"{name}.lora_A.weight": rng.normal(size=(4, 512)).astype(np.float32),
            f"{name}.lora_B.weight": 0.01 * rng.normal(size=(256, 4)).astype(np.float32),
        },
        adapter / "adapter_model.safetensors",
    )
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    for options in ({}, {"seed": 3}, {"rounding": "feedback"}):
        gpu.clear()
        merge_lora(tmp_path / "base", adapter, tmp_path / f"here{len(options)}{options.get('seed')}", **options)
        assert not gpu
        there = tmp_path / f"there{len(options)}{options.get('seed')}"
        merge_lora(tmp_path / "base", adapter, there, device="cuda", **options)
        assert gpu
        assert tree(tmp_path / f"here{len(options)}{options.get('seed')}") == tree(there)


def test_the_command(folder, tmp_path, gpu, capsys):
    words = ["convert", str(folder / "model"), str(tmp_path / "out"), "--to", "nvfp4", "--quiet"]
    assert main([*words, "--device", "cuda"]) == 0 and gpu
    assert main([*words[:2], str(tmp_path / "here"), *words[3:]]) == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "here")
    gpu.clear()
    part = [*words[:2], str(tmp_path / "parts"), *words[3:]]
    assert main([*part, "--device", "cuda", "--part", "1/1"]) == 0 and gpu
    assert main([*part, "--finish", "--device", "cuda"]) == 2
    assert "--device must be left out with --finish" in capsys.readouterr().err
    assert main([*part, "--finish"]) == 0
    assert tree(tmp_path / "parts") == tree(tmp_path / "here")


def test_what_is_refused(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, error, message in (
        ("gpu", ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ("cuda:x", ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'cuda:x'"),
        (0, TypeError, "device must be 'cpu', 'cuda' or 'cuda:N', got 0"),
        ("cuda", ValueError, "device must be 'cpu' where torch .* finds no CUDA device, got 'cuda'"),
    ):
        with pytest.raises(error, match=message):
            convert(folder / "model", tmp_path / "out", "nvfp4", device=name)
        with pytest.raises(error, match=message):
            merge_lora(folder / "model", folder, tmp_path / "out", device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device must be one of 2 CUDA devices, .* got 'cuda:2'"):
        convert(folder / "model", tmp_path / "out", "nvfp4", device="cuda:2")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch is needed here: pip install 'breccia\[torch\]'"):
        convert(folder / "model", tmp_path / "out", "nvfp4", device="cuda")
    assert main(["convert", str(folder / "model"), str(tmp_path / "o"), "--to", "nvfp4", "--device", "cuda"]) == 2
    assert "torch is needed here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_device_is_no_part_of_what_work_is():
    fields = {field.name: field for field in dataclasses.fields(parse_target("nvfp4"))}
    assert not fields["device"].repr
