# SPDX-License-Identifier: Apache-2.0
"""Models that ModelOpt 0.47 and mlx-lm 0.32 quantize themselves: their schemes are read as they mean them, and stay in
the same format and between formats. torchao's are in test_scheme_torchao.py."""

import json
import subprocess
import sys
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert
from breccia.schemes import Activations, KVCache, differences, modules_of
from tiny_models import tiny, transformers

STATIC = Activations("float8_e4m3fn", "tensor", "static")
LOCAL = Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
TOKENS = Activations("float8_e4m3fn", "token", "dynamic")
FP8 = KVCache("float8_e4m3fn")
# Kind → its algorithm, recipe of weights, inputs, KV cache.
MODELOPT = {
    "FP8_DEFAULT_CFG+": ("FP8", breccia.Float8CurrentScaling(), STATIC, FP8),
    "NVFP4_DEFAULT_CFG": ("NVFP4", breccia.NVFP4BlockScaling(), LOCAL, None),
    "NVFP4_DEFAULT_CFG+": ("NVFP4", breccia.NVFP4BlockScaling(), LOCAL, FP8),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": (
        "FP8_PER_CHANNEL_PER_TOKEN",
        breccia.Float8CurrentScaling(granularity="row"),
        TOKENS,
        None,
    ),
    "INT4_AWQ_CFG": ("W4A16_AWQ", breccia.INT4Scaling(), None, None),
}
RECIPES = ("mixed_3_6", "mixed_4_6")


def produced(producer, kinds, folder):
    """A folder with what the producer makes of a tiny Llama."""
    transformers()
    model = tiny("llama", folder / "llama")
    runner = Path(__file__).parent / "producer_runner.py"
    words = [sys.executable, str(runner), producer, str(model), str(folder), *kinds]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def of_modelopt(tmp_path_factory):
    pytest.importorskip("omegaconf")
    pytest.importorskip("modelopt")
    return produced("modelopt", MODELOPT, tmp_path_factory.mktemp("modelopt"))


@pytest.fixture(scope="module")
def of_mlx(tmp_path_factory):
    pytest.importorskip("mlx.core")
    pytest.importorskip("mlx_lm")
    return produced("mlx", RECIPES, tmp_path_factory.mktemp("mlx"))


def scales(path):
    arrays = {}
    for file in sorted(path.glob("*.safetensors")):
        arrays |= {name: array for name, array in SafetensorsFile(file).items() if "scale" in name}
    return arrays


@pytest.mark.parametrize("kind", MODELOPT)
def test_modelopt(kind, of_modelopt, tmp_path):
    source = of_modelopt / kind
    algorithm, recipe, inputs, cache = MODELOPT[kind]
    scheme = breccia.load_scheme(source)
    modules = modules_of(Checkpoint(source))
    assert len(modules) == 14
    for module in modules:
        rule = scheme.rule(module)
        assert (type(rule.weights), rule.inputs) == (type(recipe), inputs)
        assert getattr(rule.weights, "granularity", "") == getattr(recipe, "granularity", "")
    assert scheme.kv_cache == cache
    assert scheme.rule("lm_head").weights is None
    convert(source, tmp_path / "same", "modelopt", strict=algorithm != "W4A16_AWQ")
    assert differences(scheme, breccia.load_scheme(tmp_path / "same"), modules) == []
    first, second = scales(source), scales(tmp_path / "same")
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name].reshape(array.shape), name)
    said = [
        json.loads((path / "hf_quant_config.json").read_text())["quantization"] for path in (source, tmp_path / "same")
    ]
    assert said[0]["quant_algo"] == said[1]["quant_algo"] == algorithm
    assert said[0].get("kv_cache_quant_algo") == said[1].get("kv_cache_quant_algo")
    report = convert(source, tmp_path / "ct", "compressed-tensors")
    assert not [note for note in report["notes"] if "→" in note]
    there = breccia.load_scheme(tmp_path / "ct")
    assert differences(scheme, there, modules) == []
    if algorithm == "W4A16_AWQ":  # whose factors are multiplied into the weights
        return
    convert(tmp_path / "ct", tmp_path / "back", "modelopt")
    assert differences(scheme, breccia.load_scheme(tmp_path / "back"), modules) == []
    wanted = {(one.module, one.of): one.multiplier for one in scheme.scales}
    got = {(one.module, one.of): one.multiplier for one in breccia.load_scheme(tmp_path / "back").scales}
    assert wanted.keys() == got.keys()
    for key, numbers in wanted.items():  # fused layers have the scale of the largest inputs
        assert got[key][0] >= numbers[0] * (1 - 2e-7)


@pytest.mark.parametrize("kind", RECIPES)
def test_mlx(kind, of_mlx, tmp_path):
    source = of_mlx / kind
    said = json.loads((source / "config.json").read_text())["quantization"]
    scheme = breccia.load_scheme(source)
    modules = modules_of(Checkpoint(source))
    bits = {module: said[module]["bits"] for module in modules if isinstance(said.get(module), dict)}
    assert {*bits.values(), said["bits"]} >= {int(part) for part in kind.split("_")[1:]}
    for module in modules:
        width = scheme.rule(module).weights
        assert str(bits.get(module, said["bits"])) in str(width), (module, width)
    convert(source, tmp_path / "same", "mlx", strict=True)
    assert breccia.load_scheme(tmp_path / "same").rule("lm_head") == scheme.rule("lm_head")
    assert differences(scheme, breccia.load_scheme(tmp_path / "same"), modules) == []
    again = json.loads((tmp_path / "same" / "config.json").read_text())["quantization"]
    for module in modules:
        assert again.get(module, again)["bits"] == said.get(module, said)["bits"], module
    before, after = (dict(SafetensorsFile(path / "model.safetensors").items()) for path in (source, tmp_path / "same"))
    assert before.keys() == after.keys()
    assert all(array.tobytes() == after[name].tobytes() for name, array in before.items())
