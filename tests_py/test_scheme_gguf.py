# SPDX-License-Identifier: Apache-2.0
"""Static scales of NVFP4's inputs in GGUF (``.input_scale``), which llama.cpp loads beside the weight."""

import json

import breccia
import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays
from breccia.schemes import UNSAID, Activations
from checkpoints import weight
from scheme_models import ATTENTION, write_moments
from tiny_models import LAYER_OF_LLAMA

LOCAL = Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
MLP = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.fixture
def model(tmp_path):
    """A Llama of one layer whose names GGUF knows."""
    folder = tmp_path / "bf16"
    folder.mkdir()
    sizes = dict.fromkeys(ATTENTION, (256, 256)) | dict.fromkeys(MLP[:2], (512, 256)) | {MLP[2]: (256, 512)}
    arrays = {f"{name}.weight": weight(*shape) for name, shape in sizes.items()}
    arrays |= {f"{name}.weight": weight(32, 256) for name in ("model.embed_tokens", "lm_head")}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        arrays[f"{name}.weight"] = np.ones(256, np.float32)
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LAYER_OF_LLAMA))
    return folder


def test_scales_of_inputs_there_and_back(model, tmp_path):
    moments = write_moments(tmp_path / "m.safetensors")
    convert(model, tmp_path / "mo", "modelopt", rules=["*.self_attn.*=nvfp4,inputs=local"], amax=moments)
    wanted = {one.module: one.multiplier for one in breccia.load_scheme(tmp_path / "mo").scales}
    assert sorted(wanted) == sorted(ATTENTION)
    report = convert(tmp_path / "mo", tmp_path / "a.gguf", "gguf")
    assert not [note for note in report["notes"] if "→" in note or "activations" in note]
    assert [note for note in report["notes"] if "static scales of the inputs of 4 layers are written" in note]
    assert not [note for note in report["notes"] if "keep their names" in note], report["notes"]
    file = Checkpoint(tmp_path / "a.gguf")
    stored = {name: file.entries[name] for name in file.entries if name.endswith("input_scale")}
    assert sorted(stored) == [f"blk.0.attn_{name}.input_scale" for name in ("k", "output", "q", "v")]
    assert {(one.dtype, one.shape) for one in stored.values()} == {("F32", (1,))}
    scheme = breccia.load_scheme(tmp_path / "a.gguf")
    assert {one.module: one.multiplier for one in scheme.scales} == wanted
    assert {one.name for one in scheme.scales} == set(stored)
    assert {scheme.rule(name).inputs for name in ATTENTION} == {LOCAL}
    again = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf", strict=True)
    assert again["requantized"] is None
    assert breccia.load_scheme(tmp_path / "b.gguf") == scheme
    convert(tmp_path / "a.gguf", tmp_path / "back.safetensors", "modelopt")
    back = breccia.load_scheme(tmp_path / "back.safetensors")
    assert {one.module: one.multiplier for one in back.scales} == wanted
    assert {back.rule(name).inputs for name in ATTENTION} == {LOCAL}


def test_a_scale_is_written_beside_nvfp4_alone(model, tmp_path):
    """Other inputs are the program's choice; each that was said otherwise is a note."""
    moments = write_moments(tmp_path / "m.safetensors")
    rules = ["*.q_proj=fp8,inputs=static", "*=nvfp4,inputs=local"]
    convert(model, tmp_path / "ct", "compressed-tensors", rules=rules, exclude=[f"{MLP[0]}*", "*mlp*"], amax=moments)
    report = convert(tmp_path / "ct", tmp_path / "a.gguf", "gguf:q8_0")
    lost = [note for note in report["notes"] if note.startswith("inputs of")]
    assert lost == [
        "inputs of 3 layers: NVFP4 local → left to the program",
        "inputs of model.layers.0.self_attn.q_proj: FP8 static → left to the program",
    ]
    scheme = breccia.load_scheme(tmp_path / "a.gguf")
    assert {scheme.rule(name).inputs for name in ATTENTION} == {UNSAID}
    assert scheme.scales == ()
