# SPDX-License-Identifier: Apache-2.0
"""Models as people have them, tiny and with random weights, saved by transformers."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A config.json of one layer, for weights that a test makes itself.
LAYER_OF_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# name → transformers' class, and what its config has beside the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
# Models with experts in one tensor: with inputs before outputs, without a choice for each row, under other names.
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": MODELS["gpt-oss"],
    "llama4": (
        "Llama4",
        {**EXPERTS, "interleave_moe_layer_step": 1, "intermediate_size": 128, "intermediate_size_mlp": 256},
    ),
    "granite-moe": ("GraniteMoe", EXPERTS),
}
# Models whose embeddings and output layer, of one weight or not, have names of their own.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("Bloom", {}),
    "falcon": ("Falcon", {}),
    "gpt-neox": ("GPTNeoX", {"tie_word_embeddings": False}),
    "gpt-neox-tied": ("GPTNeoX", {"tie_word_embeddings": True}),
    "mamba": ("Mamba", {}),
}
# With rows of whole super-blocks of GGUF, and parts of fused layers of whole tiles of 128; with experts of which two
# processes may have halves.
WIDE = {
    "llama-wide": ("Llama", {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}),
    "qwen3-moe-wide": ("Qwen3Moe", {**MODELS["qwen3-moe"][1], "head_dim": 64, "moe_intermediate_size": 256}),
}
# A tower and layers of a Llama, in a program's own layers both.
TOWER: dict[str, Any] = {
    "text_config": {"model_type": "llama", **SIZES, **WIDE["llama-wide"][1]},
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "scale_factor": 2,
    "image_token_id": 310,
}


@cache
def transformers() -> Any:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def random_model(family: str, more: dict[str, Any], norms: float | None = None) -> Any:
    """A causal model of transformers' class `family` with random weights, in bfloat16.

    Args:
        more: What its config has beside `SIZES`, or instead of them.
        norms: The mean of the norms' weights, which are random then; None leaves them as the class makes them.
    """
    sizes = copy.deepcopy({**SIZES, **more})  # Phi3Config writes to what it is given
    if family.startswith(("Phi", "Deepseek", "Falcon")):  # whose heads have widths of their own
        sizes.pop("head_dim")
    own = getattr(transformers(), f"{family}TextConfig", None) or getattr(transformers(), f"{family}Config")
    return _filled(f"{family}ForCausalLM", own(**sizes), norms)


def _filled(kind: str, config: Any, norms: float | None = None) -> Any:
    import torch

    torch.manual_seed(0)
    model = getattr(transformers(), kind)(config).to(torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" not in key:
                parameter.normal_(0, 0.08)
            elif norms is not None:
                parameter.normal_(norms, 0.08)
    return model


def _save_with_tower(path: Path) -> None:
    """Idefics3, with a tokenizer and a processor of images, without which programs do not open it."""
    from tokenizers import Tokenizer, models

    peer = transformers()
    _filled("Idefics3ForConditionalGeneration", peer.Idefics3Config(**TOWER)).save_pretrained(path)
    words = {f"t{index}": index for index in range(SIZES["vocab_size"])}
    special = {"unk_token": "t0", "pad_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    made = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer = peer.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    side = {"longest_edge": TOWER["vision_config"]["image_size"]}
    images = peer.Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    peer.Idefics3Processor(images, tokenizer, image_seq_len=1).save_pretrained(path)


def tiny(name: str, path: Path) -> Path:
    """A model's directory, in bfloat16."""
    if name == "idefics3-wide":
        _save_with_tower(path)
        return path
    random_model(*{**MODELS, **FUSED, **HEADS, **WIDE}[name]).save_pretrained(path)
    return path


def made_once(folder: Path) -> Callable[[str], Path]:
    """Gives a model's directory by name, made in `folder` when it is first asked for."""
    return cache(lambda name: tiny(name, folder / name))


def logits(path: Path, **options: Any) -> Any:
    """What transformers' own loader makes of a directory: logits of a fixed text, as float32."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers().AutoModelForCausalLM.from_pretrained(path, **options).eval()
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        return model(tokens).logits.float()
