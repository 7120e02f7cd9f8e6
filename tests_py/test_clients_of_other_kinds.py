# SPDX-License-Identifier: Apache-2.0
"""Models with eyes or ears, and with an encoder and a decoder, written by `convert` and opened by transformers: outputs
are those of the quantized weights' values in bfloat16."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from breccia.checkpoint import convert
from breccia.checkpoint.reading.models import other_names
from tiny_models import transformers

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
EYES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
EYES |= {"image_size": 28, "patch_size": 14}
TWO = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
# Name of transformers' classes → what its config has.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 128},
    },
    "Llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **EYES},
    },
    "Gemma3": {"text_config": {**TEXT, "head_dim": 32}, "vision_config": EYES, "mm_tokens_per_image": 4},
    "Whisper": {**TWO, "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 64},
    "Bart": {**TWO, "max_position_embeddings": 64},
    "T5": {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 320},
}


def made(name: str, folder: Path) -> Any:
    """A model of random weights, saved; its class."""
    torch.manual_seed(0)
    kind = getattr(transformers(), f"{name}ForConditionalGeneration")
    model = kind(getattr(transformers(), f"{name}Config")(**MODELS[name])).to(torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key.lower():
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return kind


def logits(kind: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    tokens = torch.arange(3, 43)[None]
    given = {"input_ids": tokens}
    if "Whisper" in kind.__name__:
        sound = torch.randn(1, 16, 60, generator=torch.Generator().manual_seed(0))
        given = {"input_features": sound.bfloat16()}
    if not hasattr(model.config, "vision_config"):
        given["decoder_input_ids"] = tokens
    with torch.no_grad():
        return model.eval()(**given).logits.float()


@pytest.mark.parametrize("to", ["compressed-tensors:fp8", "compressed-tensors:nvfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_what_stays_in_high_precision_is_said_by_the_models_own_names(name: str, to: str, tmp_path: Path) -> None:
    if (name, to) == ("T5", "compressed-tensors:nvfp4"):
        pytest.skip("transformers' T5 asks a layer for its weight, which is packed")
    kind = made(name, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", to)["tensors"]["cast"] > 10
    convert(tmp_path / "out", tmp_path / "floats", "bf16")
    got, wanted = logits(kind, tmp_path / "out"), logits(kind, tmp_path / "floats")
    assert not got.isnan().any()
    assert float((got - wanted).norm() / wanted.norm()) <= 1e-2


def test_layers_beside_eyes_have_both_names(tmp_path: Path) -> None:
    made("Qwen2VL", tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "modelopt:nvfp4", exclude=["*.layers.1.mlp.*"])
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.1.mlp.up_proj", "model.language_model.layers.1.mlp.up_proj"} <= set(said)
    assert {"visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv"} <= set(said)
    assert other_names(["language_model.lm_head", "vision_tower.vision_model.a.b", "lm_head", "model.layers.0.a"]) == {
        "lm_head",
        "model.vision_tower.a.b",
        "model.vision_tower.vision_model.a.b",
    }
