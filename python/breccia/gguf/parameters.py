# SPDX-License-Identifier: Apache-2.0
"""What a program must know of a model beside its tensors, as GGUF's metadata says it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breccia.gguf.rope import check_rope, head_width, rope_fields, rope_of
from breccia.gguf.types import BOOL, FLOAT32, STRING, UINT32, Fields, number, whole

# Gemma: each layer of a number sees all, others a window; the largest model, by its layers, is scaled otherwise.
_PATTERNS = {"gemma2": (2, 46), "gemma3": (6, 62)}
_SOFTMAX, _SIGMOID = 1, 2  # how probabilities of experts are made
_LOCAL = 10000.0  # RoPE's base in Gemma 3's layers that see a window


def check_fields(said: Fields) -> None:
    """Numbers must be ones that their types hold: config.json can have any."""
    for key, (kind, value) in said.items():
        if kind == UINT32 and not 0 < value < 2**32:
            raise ValueError(f"{key} must be from 1 to 2^32 - 1, got {value}")
        if kind == FLOAT32 and not abs(value) < 3.4e38:
            raise ValueError(f"{key} must be a number of 32 bits, got {value}")
        if kind == STRING and not isinstance(value, str):
            raise ValueError(f"{key} must be a string, got {value!r}")


def key_heads_of(config: Mapping[str, Any]) -> Any:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def hyperparameters(config: Mapping[str, Any], architecture: str) -> Fields:
    """What a program must know of the model beside its tensors. Raises KeyError where config.json does not say it."""
    said: Fields = {
        "context_length": (UINT32, int(config["max_position_embeddings"])),
        "embedding_length": (UINT32, int(config["hidden_size"])),
        "block_count": (UINT32, int(config["num_hidden_layers"])),
        "feed_forward_length": (UINT32, int(config["intermediate_size"])),
        "attention.head_count": (UINT32, int(config["num_attention_heads"])),
    }
    if architecture == "bert":
        said["attention.causal"] = (BOOL, False)
        said["attention.layer_norm_epsilon"] = (FLOAT32, float(config["layer_norm_eps"]))
    else:
        said |= _decoder(config, architecture)
    fields = {f"{architecture}.{key}": value for key, value in said.items()}
    if architecture == "bert":
        fields["tokenizer.ggml.token_type_count"] = (UINT32, int(config.get("type_vocab_size", 2)))
    return fields


def _decoder(config: Mapping[str, Any], architecture: str) -> Fields:
    width = head_width(config)
    said: Fields = {
        "attention.head_count_kv": (UINT32, int(key_heads_of(config))),
        "attention.layer_norm_rms_epsilon": (FLOAT32, float(config["rms_norm_eps"])),
        "attention.key_length": (UINT32, width),
        "attention.value_length": (UINT32, width),
        "vocab_size": (UINT32, int(config["vocab_size"])),
    }
    said |= rope_fields(config, architecture)
    if architecture in ("phi3", "gemma2", "gemma3", "gpt-oss") and config.get("sliding_window"):
        said["attention.sliding_window"] = (UINT32, int(config["sliding_window"]))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if architecture.startswith("gemma") and config.get(key):
            said[key] = (FLOAT32, float(config[key]))
    if architecture == "gemma3":
        said["rope.freq_base_swa"] = (FLOAT32, _LOCAL)
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts and config.get("num_experts_per_tok"):
        said["expert_count"] = (UINT32, int(experts))
        said["expert_used_count"] = (UINT32, int(config["num_experts_per_tok"]))
        if "moe_intermediate_size" in config:
            said["expert_feed_forward_length"] = (UINT32, int(config["moe_intermediate_size"]))
        elif architecture == "gpt-oss":
            said["expert_feed_forward_length"] = (UINT32, int(config["intermediate_size"]))
    return said | _latent(config) if architecture == "deepseek2" else said


def latent_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Heads of latent attention, and rows of keys and of values in each head of ``kv_b_proj``."""
    return int(config["num_attention_heads"]), int(config["qk_nope_head_dim"]), int(config["v_head_dim"])


def latent_of_fields(fields: Fields) -> tuple[int, int, int]:
    """The same of a GGUF file; zeros where it does not say them, as files of older programs do not."""
    keys = ("attention.head_count", "attention.key_length_mla", "attention.value_length_mla", "rope.dimension_count")
    said = [fields.get(f"deepseek2.{key}", (UINT32, 0))[1] for key in keys]
    if not all(isinstance(value, int) and value > 0 for value in said) or said[1] <= said[3]:
        return 0, 0, 0
    heads, keys_and_rope, values, rope = said
    return heads, keys_and_rope - rope, values


def _latent(config: Mapping[str, Any]) -> Fields:
    """What DeepSeek-V2 and V3 have else: attention to one latent head, and experts of several kinds."""
    rope = rope_of(config)
    rank, turned = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    _, keys, values = latent_of(config)
    third = config["model_type"] == "deepseek_v3"
    said: Fields = {
        "attention.head_count_kv": (UINT32, 1),
        "attention.key_length": (UINT32, rank + turned),
        "attention.value_length": (UINT32, rank),
        "attention.key_length_mla": (UINT32, keys + turned),
        "attention.value_length_mla": (UINT32, values),
        "attention.kv_lora_rank": (UINT32, rank),
        "rope.dimension_count": (UINT32, turned),
        "expert_count": (UINT32, int(config["n_routed_experts"])),
        "expert_used_count": (UINT32, int(config["num_experts_per_tok"])),
        "expert_feed_forward_length": (UINT32, int(config["moe_intermediate_size"])),
        "expert_shared_count": (UINT32, int(config["n_shared_experts"])),
        "expert_weights_scale": (FLOAT32, float(config.get("routed_scaling_factor", 1))),
        "expert_weights_norm": (BOOL, bool(config.get("norm_topk_prob"))),
        "expert_gating_func": (UINT32, _SIGMOID if third else _SOFTMAX),
    }
    if config.get("first_k_dense_replace"):
        said["leading_dense_block_count"] = (UINT32, int(config["first_k_dense_replace"]))
    if config.get("q_lora_rank"):
        said["attention.q_lora_rank"] = (UINT32, int(config["q_lora_rank"]))
    if third and int(config.get("n_group") or 1) > 1:
        said["expert_group_count"] = (UINT32, int(config["n_group"]))
        said["expert_group_used_count"] = (UINT32, int(config["topk_group"]))
    if rope["rope_type"] == "yarn":
        said["rope.scaling.yarn_log_multiplier"] = (FLOAT32, 0.1 * float(rope["mscale_all_dim"]))
    return said


def why_not(architecture: str, config: Mapping[str, Any]) -> str:
    """Why the programs of an architecture would compute something else than a model does; "" where they would not."""
    if why := check_rope(config, architecture):
        return why
    if architecture == "gpt-oss":
        return _not_gpt_oss(config)
    if architecture == "deepseek2":
        return _not_deepseek(config, rope_of(config))
    if architecture in _PATTERNS:
        return _not_gemma(architecture, config)
    if architecture == "qwen3moe":
        if not config.get("norm_topk_prob"):
            return "norm_topk_prob must be true in architecture 'qwen3moe', it is not"
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            return "all layers must have experts in architecture 'qwen3moe', some have none"
    return ""


def _not_gpt_oss(config: Mapping[str, Any]) -> str:
    """What programs take for granted of gpt-oss: which layers see a window, and the numbers of its SwiGLU."""
    if not _every(2, config):
        return "every second layer, from the first on, must see a window, and no other, in architecture 'gpt-oss'"
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(key, value) != value:
            return f"{key} must be {value:g} in architecture 'gpt-oss', it is {config[key]}"
    return ""


def _every(number: int, config: Mapping[str, Any]) -> bool:
    """Whether each layer of a number sees all and the others a window, where config.json says it of each layer."""
    if "layer_types" not in config:
        return True
    said = config["layer_types"]
    if not isinstance(said, list) or len(said) != int(config["num_hidden_layers"]):
        return False
    kinds = ["full_attention" if i % number == 0 else "sliding_attention" for i in range(1, len(said) + 1)]
    return bool(said == kinds)


def _not_deepseek(config: Mapping[str, Any], rope: Mapping[str, Any]) -> str:
    """What programs take for granted of DeepSeek-V2 and V3."""
    third = config["model_type"] == "deepseek_v3"
    if config.get("attention_bias"):
        return "attention_bias must be false in architecture 'deepseek2', it is true"
    if config.get("rope_interleave", True) is not True:
        return "rope_interleave must be true in architecture 'deepseek2', it is false"
    if int(config.get("moe_layer_freq", 1)) != 1:
        return f"moe_layer_freq must be 1 in architecture 'deepseek2', it is {config['moe_layer_freq']}"
    if not third and config.get("topk_method", "greedy") != "greedy":
        return f"topk_method must be 'greedy' in a deepseek_v2 model, it is {config['topk_method']!r}"
    if not third and config.get("norm_topk_prob"):
        return "norm_topk_prob must be false in a deepseek_v2 model, it is true"
    if rope["rope_type"] == "yarn" and (not rope.get("mscale") or rope["mscale"] != rope.get("mscale_all_dim")):
        return "mscale and mscale_all_dim must be said and equal in architecture 'deepseek2'"
    return ""


def _not_gemma(architecture: str, config: Mapping[str, Any]) -> str:
    """What programs take for granted of Gemma: which layers see all, and by what attention is scaled."""
    every, _ = _PATTERNS[architecture]
    if not _every(every, config):
        return f"every layer of number {every} must see all, and no other, in architecture {architecture!r}"
    scale = gemma_scale(architecture, config)
    if config.get("query_pre_attn_scalar") != scale:
        said = config.get("query_pre_attn_scalar")
        return f"query_pre_attn_scalar must be {scale} in architecture {architecture!r}, it is {said}"
    if architecture == "gemma3":
        local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
        base = local.get("rope_theta", config.get("rope_local_base_freq", _LOCAL))
        if base != _LOCAL or local.get("rope_type", "default") != "default":
            return f"RoPE of layers that see a window must have the base {_LOCAL:g} in architecture {architecture!r}"
        if config.get("attn_logit_softcapping"):
            return f"attn_logit_softcapping must be absent in architecture {architecture!r}"
    if config.get("use_bidirectional_attention"):
        return f"attention must be causal in architecture {architecture!r}"
    return ""


def gemma_scale(architecture: str, config: Mapping[str, Any]) -> int:
    """By the square root of what attention is divided in Gemma."""
    _, largest = _PATTERNS[architecture]
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return head_width(config)


_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts_per_tok": "expert_used_count",
}
_GPT_OSS = {
    **_SIZES,
    "num_local_experts": "expert_count",
    "intermediate_size": "expert_feed_forward_length",
    "head_dim": "attention.key_length",
    "num_key_value_heads": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
}
_DEEPSEEK = {
    **_SIZES,
    "n_routed_experts": "expert_count",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_rope_head_dim": "rope.dimension_count",
}
# Architectures whose config.json is made here.
OWN = frozenset({"gpt-oss", "deepseek2"})


def config_fields(fields: Fields, architecture: str) -> tuple[str, dict[str, Any]]:
    """transformers' class of a model's config, and what a file of one of `OWN` says of it. Raises ValueError where the
    file does not say it, or a field is not what it must be."""
    names = _GPT_OSS if architecture == "gpt-oss" else _DEEPSEEK
    said = {name: _there(fields, f"{architecture}.{key}", name) for name, key in names.items()}
    return ("GptOssConfig", said) if architecture == "gpt-oss" else _deepseek(fields, said)


def _there(fields: Fields, key: str, name: str) -> Any:
    value = number(fields, key) if name == "rms_norm_eps" else whole(fields, key)
    if value is None:
        raise ValueError(f"{key} must be there, above 0")
    return value


def _deepseek(fields: Fields, said: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    heads_and_rope = _there(fields, "deepseek2.attention.key_length_mla", "")
    if heads_and_rope <= said["qk_rope_head_dim"]:
        raise ValueError("deepseek2.attention.key_length_mla must be above deepseek2.rope.dimension_count")
    third = whole(fields, "deepseek2.expert_gating_func", _SOFTMAX) == _SIGMOID
    said |= {
        "num_key_value_heads": said["num_attention_heads"],
        "qk_nope_head_dim": heads_and_rope - said["qk_rope_head_dim"],
        "q_lora_rank": whole(fields, "deepseek2.attention.q_lora_rank"),
        "first_k_dense_replace": whole(fields, "deepseek2.leading_dense_block_count", 0),
        "routed_scaling_factor": number(fields, "deepseek2.expert_weights_scale", 1.0),
        "norm_topk_prob": fields.get("deepseek2.expert_weights_norm", (BOOL, False))[1] is True,
    }
    if third:
        groups = ("expert_group_count", "expert_group_used_count")
        said |= dict(
            zip(("n_group", "topk_group"), (whole(fields, f"deepseek2.{key}", 1) for key in groups), strict=True)
        )
    return ("DeepseekV3Config" if third else "DeepseekV2Config"), said
