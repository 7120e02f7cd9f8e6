# SPDX-License-Identifier: Apache-2.0
"""Models as GGUF spells them: tensor names, hyperparameters and tokenizer of the architectures known here.

Llama (and Mistral), Qwen2, Qwen3 and BERT. Other models keep their tensors' names: readers of GGUF read them,
but no program knows what to do with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["ModelMap", "model_map", "model_of"]

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
Fields = dict[str, tuple[int, Any]]

_DECODER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
_NORMED = {
    **_DECODER,
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
}
_ENCODER = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.{}.attention.self.query": "blk.{}.attn_q",
    "encoder.layer.{}.attention.self.key": "blk.{}.attn_k",
    "encoder.layer.{}.attention.self.value": "blk.{}.attn_v",
    "encoder.layer.{}.attention.output.dense": "blk.{}.attn_output",
    "encoder.layer.{}.attention.output.LayerNorm": "blk.{}.attn_output_norm",
    "encoder.layer.{}.intermediate.dense": "blk.{}.ffn_up",
    "encoder.layer.{}.output.dense": "blk.{}.ffn_down",
    "encoder.layer.{}.output.LayerNorm": "blk.{}.layer_output_norm",
}
_TABLES = {"llama": _DECODER, "qwen2": _DECODER, "qwen3": _NORMED, "bert": _ENCODER}
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "bert": "bert"}
# Architectures whose programs multiply by the second scale of every NVFP4 matrix; others leave some out.
_SECOND_SCALES = frozenset({"llama", "qwen3"})
# What a model computes anew, and BERT's pooler, which embedding models do without: programs refuse these.
_LEFT_OUT = re.compile(r".*(rotary_emb\.inv_freq|position_ids)$|(bert\.)?pooler\.dense\.(weight|bias)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class ModelMap:
    """One model's names, both ways.

    Attributes:
        architecture: as GGUF spells it.
        heads: rows of these projections are in GGUF's order, by head: name's last module → number of heads.
        prefix: of the names outside GGUF, such as "bert.".
    """

    architecture: str
    heads: dict[str, int] = field(default_factory=dict)
    prefix: str = ""

    @property
    def second_scales(self) -> bool:
        """Whether a program applies the second scales of NVFP4."""
        return self.architecture in _SECOND_SCALES

    def inside(self, name: str) -> str | None:
        """GGUF's name of a tensor, None where it has none."""
        module, _, last = name.removeprefix(self.prefix).rpartition(".")
        known = _TABLES[self.architecture].get(_NUMBER.sub("{}", f"{module}.")[:-1])
        return None if known is None or last not in ("weight", "bias") else f"{_numbered(known, module)}.{last}"

    def outside(self, name: str) -> str:
        """The name that the model's own checkpoints give a tensor; a name GGUF does not know as it is."""
        module, _, last = name.rpartition(".")
        known = {v: k for k, v in _TABLES[self.architecture].items()}.get(_NUMBER.sub("{}", f"{module}.")[:-1])
        return name if known is None else f"{self.prefix}{_numbered(known, module)}.{last}"

    def left_out(self, name: str) -> bool:
        """Whether a tensor has no place in GGUF."""
        return _LEFT_OUT.match(name) is not None

    def row_order(self, name: str, rows: int) -> np.ndarray[Any, Any] | None:
        """Which row of the model's own tensor each row of GGUF's is; None where they are the same.

        Llama's rotary embedding takes neighbours in GGUF and halves of a head in its own checkpoints.
        """
        heads = self.heads.get(name.split(".")[-2] if "." in name else "")
        if not heads or rows % (2 * heads):
            return None
        return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _numbered(pattern: str, module: str) -> str:
    number = _NUMBER.search(f"{module}.")
    return pattern if number is None else pattern.replace("{}", number[0])


def _heads(architecture: str, heads: int, key_heads: int) -> dict[str, int]:
    return {"q_proj": heads, "k_proj": key_heads} if architecture == "llama" else {}


def model_of(fields: Fields) -> ModelMap | None:
    """The names of a GGUF file's model, from its metadata; None where it is not known here."""
    architecture = fields.get("general.architecture", (STRING, ""))[1]
    if architecture not in _TABLES:
        return None
    heads = fields.get(f"{architecture}.attention.head_count", (UINT32, 0))[1]
    key_heads = fields.get(f"{architecture}.attention.head_count_kv", (UINT32, heads))[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or min(heads, key_heads) < 0:
        return None
    return ModelMap(architecture, _heads(architecture, heads, key_heads))


def model_map(config: Mapping[str, Any], names: Iterable[str]) -> tuple[ModelMap | None, str]:
    """The names of a model, from its config.json and the names of all its tensors; None and the reason
    where it is not known here."""
    kind = str(config.get("model_type", ""))
    if kind not in _ARCHITECTURES:
        return None, f"model_type {kind!r} has no GGUF names here, which are {', '.join(_ARCHITECTURES)}'s"
    architecture = _ARCHITECTURES[kind]
    try:
        scaling = _rope(config).get("rope_type", "default")
        if scaling not in ("default", "linear", "yarn"):
            return None, f"rope_type {scaling!r} has no GGUF form here"
        heads = int(config["num_attention_heads"])
        prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
        known = ModelMap(architecture, _heads(architecture, heads, int(_key_heads(config))), prefix)
        _check(hyperparameters(config, known))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return None, f"config.json lacks what GGUF must say: {error}"
    strange = next((n for n in names if known.inside(n) is None and not known.left_out(n)), None)
    if strange is not None:
        return None, f"tensor {strange!r} has no GGUF name in architecture {architecture!r}"
    return known, ""


def _check(said: Fields) -> None:
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
    said = dict(given)
    said.setdefault("rope_type", said.get("type") or "default")
    said.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return said


def _key_heads(config: Mapping[str, Any]) -> Any:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def hyperparameters(config: Mapping[str, Any], known: ModelMap) -> Fields:
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
    if known.architecture == "bert":
        said["attention.causal"] = (BOOL, False)
        said["attention.layer_norm_epsilon"] = (FLOAT32, float(config["layer_norm_eps"]))
    else:
        rope = _rope(config)
        width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        said["attention.head_count_kv"] = (UINT32, int(_key_heads(config)))
        said["attention.layer_norm_rms_epsilon"] = (FLOAT32, float(config["rms_norm_eps"]))
        said["attention.key_length"] = said["attention.value_length"] = (UINT32, width)
        said["rope.dimension_count"] = (UINT32, width)
        said["rope.freq_base"] = (FLOAT32, float(rope["rope_theta"]))
        said["vocab_size"] = (UINT32, int(config["vocab_size"]))
        if rope["rope_type"] != "default":
            said["rope.scaling.type"] = (STRING, rope["rope_type"])
            said["rope.scaling.factor"] = (FLOAT32, float(rope["factor"]))
            original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
            said["rope.scaling.original_context_length"] = (UINT32, int(original))
    return {f"{known.architecture}.{key}": value for key, value in said.items()}
