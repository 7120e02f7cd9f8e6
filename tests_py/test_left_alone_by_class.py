# SPDX-License-Identifier: Apache-2.0
"""What is left alone of a model by its class: towers, heads for later tokens, numbers that stay in float32."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import Checkpoint, convert, save_arrays, target_names
from breccia.checkpoint.planning import left_alone as module
from breccia.checkpoint.planning.left_alone import left_alone
from checkpoints import weight

ml_dtypes = pytest.importorskip("ml_dtypes")
TABLE: dict[str, Any] = json.loads(Path(module.__file__).with_name("architectures.json").read_text())
# Linear layers of language models that stay as they are by their names: outputs, routers, and what embeds.
BY_NAME = re.compile(
    r"(lm_head|embed|norm|conv|position|rotary|router|\bgate$|shared_expert_gate|indexer|shared_head|classifier|score"
    r"|qa_outputs|^head|output_layer|^cls|eh_proj|mtp|upsampler|codebooks_head|query$"
    r"|vision|audio|image|speech|connector|projector|merger|resampler|perceiver|^output$|vlm\.|sam_model)"
)


@pytest.fixture(scope="module")
def maker() -> Any:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = pytest.importorskip("make_architectures")
    transformers.utils.logging.set_verbosity_error()
    return made


def test_the_table_is_of_the_transformers_that_is_installed(maker: Any) -> None:
    transformers = importlib.import_module("transformers")
    assert TABLE["transformers"] == transformers.__version__
    assert list(TABLE["classes"]) == list(maker.classes())


@pytest.mark.in_turn
@pytest.mark.parametrize("name", TABLE["classes"])
def test_the_table_says_what_the_class_does(maker: Any, name: str) -> None:
    kind = maker.classes()[name]
    assert maker.said(name, kind) == TABLE["classes"][name]
    model = maker.built(name, kind)
    if model is None:
        return
    _, linear, _, beside = maker.parts(model)
    known = left_alone({"architectures": [name]})
    assert not known.unknown
    assert not [one for one in beside if not known.weight(f"{one}.weight")]
    assert not [one for one in linear if known.weight(f"{one}.weight") and not BY_NAME.search(one)]


TOWERS = (
    *("vision_model.encoder.layers.0.attn.qkv", "mlp1.1", "vision_encoder.transformer.layers.0.attention.wq"),
    *("vision_language_adapter.w_in", "vpm.encoder.layers.0.self_attn.q_proj", "resampler.attn.out_proj"),
    *("apm.layers.0.fc1", "model.vision_backbone.image_vit.transformer.resblocks.0.attention.wq"),
    *("model.vision_backbone.image_projector.w1", "aligner.layers.0", "gen_vision_model.encoder.mid.0.attn.q"),
    *("gen_aligner.layers.0", "gen_head.output_mlp_projector", "model.connector.modality_projection.proj"),
    *("model.vision_model.encoder.layers.0.self_attn.q_proj", "visual_tokenizer.backbone.layers.0.attn.qkv"),
    *("visual_tokenizer.head.0", "vte", "model.audio_tower.layers.0.self_attn.q_proj"),
    *("model.multi_modal_projector.linear_1", "model.visual.blocks.0.attn.qkv"),
    *("speech_encoder.encoders.0.self_attn.linear_k", "img_projection.0", "model.mm_projector.0"),
    *("model.sam_model.blocks.0.attn.qkv", "sound_encoder.layers.0.fc1", "model.tower_of_a_new_kind.blocks.0.qkv"),
)
LATER = (
    *("mtp.fc", "mtp.layers.0.mlp.up_proj", "model.mtp.layers.0.self_attn.q_proj", "model.layers.1.eh_proj"),
    *("model.layers.1.mlp.up_proj", "nextn_proj", "model.mtp_block.fc"),
)
TAKEN = ("model.layers.0.mlp.up_proj", "language_model.model.layers.0.self_attn.q_proj")
FLOAT32 = {
    "model.layers.0.mlp.gate.e_score_correction_bias": (16,),
    "model.layers.0.linear_attn.A_log": (16,),
    "model.layers.0.linear_attn.dt_bias": (16,),
    "model.layers.0.self_attn.sinks": (16,),
    "model.layers.0.mlp.expert_bias": (16,),
    "model.layers.0.attention.time_decay": (16,),
    "model.layers.0.self_attn.indexer.weights_proj.weight": (16, 128),
}
CLASSES = ["LlamaForCausalLM", "InternVLChatModel", "Glm4MoeForCausalLM"]


def _source(path: Path, kind: str) -> Path:
    path.mkdir()
    arrays = {f"{name}.weight": weight(32, 128).astype(ml_dtypes.bfloat16) for name in (*TOWERS, *LATER, *TAKEN)}
    arrays |= {name: np.float32(6.817) + weight(*shape) for name, shape in FLOAT32.items()}
    save_arrays(arrays, path / "model.safetensors")
    said = {"architectures": [kind], "model_type": "llama", "num_hidden_layers": 1, "vision_config": {}}
    (path / "config.json").write_text(json.dumps({**said, "num_attention_heads": 2, "num_key_value_heads": 2}))
    return path


@pytest.mark.parametrize("to", target_names())
def test_every_target_leaves_alone_what_programs_have_in_floats(to: str, tmp_path: Path) -> None:
    """Towers and heads for later tokens, and numbers in float32; GGUF has no place for most of these."""
    source = _source(tmp_path / "in", CLASSES[len(to) % 3])
    try:
        convert(source, tmp_path / "out", to)
    except ValueError as error:
        assert re.search("DeepSeek V4|GGUF|no tensor|must be one", str(error)), error
        return
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    found = {one.name: one for one in after.found}
    whole = (tmp_path / "out").is_file()
    alone = [f"{name}.weight" for name in (*TOWERS, *LATER)]
    assert all(found[name].format == "plain" and found[name].kind != "fp8" for name in alone if name in found)
    assert whole or set(alone) <= set(found)
    for name in FLOAT32:
        if name in found or not whole:
            one = np.asarray(after.load(found[name]))
            assert one.dtype == np.float32
            np.testing.assert_array_equal(one, before.array(name))


def test_ignore_lists_have_a_pattern_of_heads_for_later_tokens(tmp_path: Path) -> None:
    source = _source(tmp_path / "in", "Qwen3NextForCausalLM")
    convert(source, tmp_path / "ct", "compressed-tensors:nvfp4")
    ignored = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"re:.*mtp.*", "mtp.fc", "mtp.layers.0.mlp.up_proj", "model.layers.1.eh_proj"} <= set(ignored)
    convert(source, tmp_path / "mo", "modelopt:nvfp4")
    ignored = json.loads((tmp_path / "mo" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"*mtp*", "mtp.fc"} <= set(ignored)
    convert(source, tmp_path / "all", "compressed-tensors:nvfp4", include=["mtp.*", "*up_proj.weight"])
    ignored = json.loads((tmp_path / "all" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "re:.*mtp.*" not in ignored
    assert "mtp.fc" not in ignored


def test_heads_for_later_tokens_that_were_quantized_become_floats_in_another_recipe(tmp_path: Path) -> None:
    source = _source(tmp_path / "in", "Qwen3NextForCausalLM")
    convert(source, tmp_path / "fp8", "compressed-tensors:fp8", include=["mtp.*", "model.layers.0.mlp.up_proj.weight"])
    report = convert(tmp_path / "fp8", tmp_path / "out", "modelopt:nvfp4")
    found = {one.name: one for one in Checkpoint(tmp_path / "out").found}
    assert found["mtp.fc.weight"].format == "plain"
    assert found["model.layers.0.mlp.up_proj.weight"].format == "modelopt"
    assert "mtp.fc.weight: written as bf16: heads for later tokens stay in floats" in report["notes"]
    same = convert(tmp_path / "fp8", tmp_path / "same", "modelopt")
    assert "mtp.fc.weight" in {one.name for one in Checkpoint(tmp_path / "same").found if one.format == "modelopt"}
    assert not [note for note in same["notes"] if "later" in note]


def test_a_class_that_is_not_known_is_a_remark_with_the_names_that_are_quantized(tmp_path: Path) -> None:
    report = convert(_source(tmp_path / "in", "MyOwnForCausalLM"), tmp_path / "out", "nvfp4", strict=True)
    (note,) = report["notes"]
    assert note.startswith("MyOwnForCausalLM is not a class that is known here")
    assert note.endswith("quantized are those called q_proj, up_proj")
    assert not convert(tmp_path / "in", tmp_path / "floats", "bf16")["notes"]


def test_float16_keeps_what_its_programs_widen(tmp_path: Path) -> None:
    save = {"decoder.block.0.layer.2.DenseReluDense.wo.weight": weight(32, 128), "x.weight": weight(32, 128)}
    (tmp_path / "in").mkdir()
    save_arrays(save, tmp_path / "in" / "model.safetensors")
    said = json.dumps({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"})
    (tmp_path / "in" / "config.json").write_text(said)
    for to, wide in (("fp16", {"F32", "F16"}), ("bf16", {"BF16"})):
        convert(tmp_path / "in", tmp_path / to, to)
        assert {one.dtype for one in Checkpoint(tmp_path / to).found} == wide
