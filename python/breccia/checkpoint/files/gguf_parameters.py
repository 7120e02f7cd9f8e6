# SPDX-License-Identifier: Apache-2.0
"""What a program must know of a model beside its tensors, as GGUF's metadata says it, and back: sizes and RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = [
    "ROPE_FACTORS",
    "check_fields",
    "gemma_scale",
    "hyperparameters",
    "key_heads_of",
    "latent_of",
    "latent_of_fields",
    "llama3_of",
    "rope_factors",
    "why_not",
]

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
Fields = dict[str, tuple[int, Any]]
# Gemma: each layer of a number sees all, others a window; the largest model, by its layers, is scaled otherwise.
_PATTERNS = {"gemma2": (2, 46), "gemma3": (6, 62)}
_SOFTMAX, _SIGMOID = 1, 2  # how probabilities of experts are made
_LOCAL = 10000.0  # RoPE's base in Gemma 3's layers that see a window
ROPE_FACTORS = "rope_freqs.weight"  # the tensor of Llama 3's scaling: what each frequency is divided by
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_fields(said: Fields) -> None:
    """Numbers must be ones that their types hold: config.json can have any."""
    for key, (kind, value) in said.items():
        if kind == UINT32 and not 0 < value < 2**32:
            raise ValueError(f"{key} must be from 1 to 2^32 - 1, got {value}")
        if kind == FLOAT32 and not abs(value) < 3.4e38:
            raise ValueError(f"{key} must be a number of 32 bits, got {value}")
        if kind == STRING and not isinstance(value, str):
            raise ValueError(f"{key} must be a string, got {value!r}")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling must be an object, got {given!r}")
    said = dict(given.get("full_attention") or given)  # of layers that see all, where others have their own
    said.setdefault("rope_type", said.get("type") or "default")
    said.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return said


def key_heads_of(config: Mapping[str, Any]) -> Any:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def hyperparameters(config: Mapping[str, Any], architecture: str) -> Fields:
    """What a program must know of the model beside its tensors.

    Raises:
        KeyError: config.json does not say it.
    """
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
    return {f"{architecture}.{key}": value for key, value in said.items()}


def _decoder(config: Mapping[str, Any], architecture: str) -> Fields:
    rope, width = _rope(config), _head_width(config)
    said: Fields = {
        "attention.head_count_kv": (UINT32, int(key_heads_of(config))),
        "attention.layer_norm_rms_epsilon": (FLOAT32, float(config["rms_norm_eps"])),
        "attention.key_length": (UINT32, width),
        "attention.value_length": (UINT32, width),
        "rope.dimension_count": (UINT32, int(width * float(rope.get("partial_rotary_factor") or 1))),
        "rope.freq_base": (FLOAT32, float(rope["rope_theta"])),
        "vocab_size": (UINT32, int(config["vocab_size"])),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        said["rope.scaling.type"] = (STRING, rope["rope_type"])
        said["rope.scaling.factor"] = (FLOAT32, float(rope["factor"]))
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        said["rope.scaling.original_context_length"] = (UINT32, int(original))
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                said[f"rope.scaling.yarn_{key}"] = (FLOAT32, float(rope[key]))
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
    return said | _latent(config, rope) if architecture == "deepseek2" else said


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


def _latent(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Fields:
    """What DeepSeek-V2 and V3 have else: attention to one latent head, and experts of several kinds."""
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


def _head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def why_not(architecture: str, config: Mapping[str, Any]) -> str:
    """Why the programs of an architecture would compute something else than a model does; "" where they would not."""
    rope = _rope(config)
    scaling = rope["rope_type"]
    known = ("default", "linear", "yarn", "llama3") if architecture == "llama" else ("default", "linear", "yarn")
    if scaling not in known:
        return f"rope_type {scaling!r} has no GGUF form here"
    if scaling == "llama3":
        rope_factors(config)  # raises where something is not said
    if architecture == "gpt-oss":
        return _not_gpt_oss(config)
    if architecture == "deepseek2":
        return _not_deepseek(config, rope)
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
    count = int(config["num_hidden_layers"])
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    if config.get("layer_types", kinds) != kinds:
        return "every second layer, from the first on, must see a window, and no other, in architecture 'gpt-oss'"
    for key, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if config.get(key, value) != value:
            return f"{key} must be {value:g} in architecture 'gpt-oss', it is {config[key]}"
    return ""


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
    count = int(config["num_hidden_layers"])
    every, _ = _PATTERNS[architecture]
    kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]
    if config.get("layer_types", kinds) != kinds:
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
    return _head_width(config)


def rope_factors(config: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """What Llama 3's scaling divides each frequency by, the tensor `ROPE_FACTORS`; None where there is no such scaling.

    Raises:
        KeyError: config.json does not say it.
    """
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    factor, low, high, original = (float(rope[key]) for key in _LLAMA3)
    width = _head_width(config)
    periods = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, width, 2) / width)
    # Frequencies that turn rarely in the original context are divided, those that turn often are not.
    share = np.clip((original / periods - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, Any] = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return factors


def llama3_of(factors: np.ndarray[Any, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, of the tensor that they give; ``low_freq_factor`` is 1, which leaves none to
    choose.

    Raises:
        ValueError: no parameters give the tensor.
    """
    rope, width = _rope(config), _head_width(config)
    wide = factors.astype(np.float64)
    periods = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, width, 2) / width)
    factor = float(wide.max(initial=1.0))
    between = np.flatnonzero((wide > 1) & (wide < factor)) if len(wide) == len(periods) else np.arange(0)
    if len(between) > 1:
        # The share of the undivided frequency is a line in the number of turns: through the first and the last one.
        ends = between[[0, -1]]
        share = (1 / wide[ends] - 1 / factor) / (1 - 1 / factor)
        slope = (share[0] - share[1]) / (1 / periods[ends[0]] - 1 / periods[ends[1]])
        start = slope / periods[ends[0]] - share[0]
        high, original = 1 + 1 / start, slope / start
        if math.isfinite(high) and math.isfinite(original) and original > 0:
            said = (factor, 1.0, float(round(high, 3)), round(original))
            found = {**rope, **dict(zip(_LLAMA3, said, strict=True)), "rope_type": "llama3"}
            again = rope_factors({**config, "rope_parameters": found})
            if again is not None and np.allclose(again, factors, rtol=1e-4):
                return found
    raise ValueError(f"{ROPE_FACTORS} must have the factors of Llama 3's scaling, it has others")
