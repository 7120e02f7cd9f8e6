# SPDX-License-Identifier: Apache-2.0
"""Activations of attention, which compressed-tensors says of classes that have no weights, and KV caches of other kinds
than FP8's: kept in the same format, named in every other."""

import json

import breccia
import numpy as np
import pytest
from breccia.bridges import registry
from breccia.checkpoint import Checkpoint, SafetensorsFile, complete, convert, save_arrays, verify
from breccia.schemes import Activations, KVCache
from scheme_models import ATTENTION, write_model

QUERIES = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
HEADS = Activations("float8_e4m3fn", "head", "static")
CACHES = {
    "FP8": (QUERIES | {"strategy": "tensor"}, KVCache("float8_e4m3fn"), (1,)),
    "FP8 per head": (QUERIES, KVCache("float8_e4m3fn", "head"), (4, 1, 1)),
    "INT8": (QUERIES | {"type": "int", "strategy": "tensor"}, KVCache("int8"), (1,)),
    "none": (None, None, (1,)),
}
LAYER = "model.layers.0.self_attn"
TARGETS = [name for name, bridge in registry().items() if bridge.writes and name not in ("breccia", "onnx")]


@pytest.fixture(params=CACHES)
def source(request, tmp_path):
    """A model whose attention is FP8, as llm-compressor's modifier says it of a class."""
    cache, _, shape = CACHES[request.param]
    folder = tmp_path / "source"
    convert(write_model(tmp_path / "bf16"), folder, "compressed-tensors", rules=["*=fp8-row,inputs=dynamic"])
    config = json.loads((folder / "config.json").read_text())
    said = config["quantization_config"]
    said["kv_cache_scheme"] = cache
    said["config_groups"]["attention"] = {"targets": ["LlamaAttention"], "weights": None, "input_activations": QUERIES}
    (folder / "config.json").write_text(json.dumps(config))
    arrays = dict(SafetensorsFile(folder / "model.safetensors").items())
    arrays[f"{LAYER}.q_scale"] = np.full((4, 1, 1), 0.5, np.float32)
    if cache is not None:
        arrays |= {f"{LAYER}.{of}_scale": np.full(shape, 0.25, np.float32) for of in "kv"}
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    return request.param, folder


def test_the_same_format_keeps_all_of_it(source, tmp_path):
    kind, folder = source
    scheme = breccia.load_scheme(folder)
    assert scheme.rule(LAYER, ("LlamaAttention",)).inputs == HEADS
    assert scheme.rule(ATTENTION[0]).weights == breccia.Float8CurrentScaling(granularity="row")
    assert scheme.kv_cache == CACHES[kind][1]
    assert {one.of for one in scheme.scales} == ({"q"} if kind == "none" else {"q", "k", "v"})
    report = convert(folder, tmp_path / "again", "compressed-tensors")
    assert not [note for note in report["notes"] if "→" in note or "left out" in note]
    first, second = (dict(SafetensorsFile(path / "model.safetensors").items()) for path in (folder, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())
    first, second = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "again"))
    assert first["quantization_config"] == second["quantization_config"]
    assert breccia.load_scheme(tmp_path / "again") == scheme
    assert not [line for line in verify(folder, tmp_path / "again")["scheme"] if "→" in line]


def test_requantized_it_stays_too(source, tmp_path):
    _, folder = source
    convert(folder, tmp_path / "out", "compressed-tensors", rules=["*.experts.*=nvfp4,inputs=none"])
    scheme = breccia.load_scheme(tmp_path / "out")
    assert scheme.rule(LAYER, ("LlamaAttention",)).inputs == HEADS
    assert f"{LAYER}.q_scale" in Checkpoint(tmp_path / "out").entries


@pytest.mark.parametrize("to", [name for name in TARGETS if name not in ("compressed-tensors", "gpt-oss", "deepseek")])
def test_other_formats_say_what_is_lost(to, source, tmp_path):
    kind, folder = source
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    report = convert(folder, out, to)
    lost = "inputs of class LlamaAttention: FP8 per head static → high precision"
    assert lost in report["notes"], report["notes"]
    stored = Checkpoint(out).entries
    assert not [name for name in stored if "q_scale" in name]
    said = breccia.load_scheme(out).kv_cache
    if kind != "none" and said != CACHES[kind][1]:
        assert [note for note in report["notes"] if "KV cache" in note]
        assert not [name for name in stored if name.endswith((".k_scale", ".v_scale"))]
    assert (said == KVCache("float8_e4m3fn")) == (kind == "FP8" and to in ("modelopt", "quark"))
    assert lost in verify(folder, out)["scheme"]
    with pytest.raises(ValueError, match="strict"):
        convert(folder, tmp_path / ("b.gguf" if to == "gguf" else "b"), to, strict=True)


def test_programs_that_skip_it_are_named(source):
    _, folder = source
    assert any("vLLM skips a group without weights (LlamaAttention)" in one for one in complete(folder)["readers"])


def test_it_is_of_the_form_of_the_package(source):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    _, folder = source
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    theirs = quantization.QuantizationConfig.model_validate(said)
    assert theirs.config_groups["attention"].input_activations.strategy == "attn_head"
