# SPDX-License-Identifier: Apache-2.0
"""What the names of tensors tell of a model as transformers builds it: parts that share weights, layers that servers
fuse, experts kept in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "is_embedding",
    "is_one_expert",
    "is_stored_turned",
    "is_turned",
    "models_name",
    "tied",
    "tied_heads",
    "turns",
]

# Where a model keeps its input embeddings → the module that computes with the same weight and has none in the files.
_TIED = (
    (
        re.compile(
            r"(?P<at>.*?)(model\.(language_model\.|decoder\.)?|transformer\.|decoder\.)?(embed_tokens|wte)\.weight"
        ),
        "{at}lm_head",
    ),
    (re.compile(r"(?P<at>)shared\.weight"), "lm_head"),
    (re.compile(r"(?P<at>)(gpt_neox\.)?embed_in\.weight"), "embed_out"),
    (re.compile(r"(?P<at>)bert\.embeddings\.word_embeddings\.weight"), "cls.predictions.decoder"),
    (re.compile(r"(?P<at>)roberta\.embeddings\.word_embeddings\.weight"), "lm_head.decoder"),
)


def tied_heads(names: Iterable[str]) -> set[str]:
    """Output layers that share the embeddings' weight, so that no file has theirs."""
    return set(tied(names))


def tied(names: Iterable[str]) -> dict[str, str]:
    """Those layers, and the name of the weight that each shares."""
    there = set(names)
    heads = {}
    for name in there:
        for pattern, head in _TIED:
            match = pattern.fullmatch(name)
            if match is not None and f"{(module := head.format(at=match['at']))}.weight" not in there:
                heads[module] = name
    return heads


# Models whose float checkpoints keep all experts of a layer in one tensor (E, IN, OUT); quantized tensors are always
# (E, OUT, IN).
_TURNED = frozenset({"gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})
# Of these, transformers writes the model's own order (E, OUT, IN) and reads both, by their shape.
_EITHER = frozenset({"qwen3_vl_moe", "qwen3_vl_moe_text"})
_FUSED_EXPERTS = re.compile(r"(.*\.)?experts\.(gate_up_proj|down_proj)")


# Models whose linear layers are written as convolutions, with weights (IN, OUT).
_CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_WEIGHTS = re.compile(r"(.*\.)?(c_attn|c_proj|c_fc|q_attn)\.weight")


def turns(config: Mapping[str, Any]) -> bool:
    """Whether a model's float checkpoints keep some tensors transposed."""
    return bool(_kinds(config) & (_CONV1D | _TURNED))


def _kinds(config: Mapping[str, Any]) -> set[str]:
    return {str(place.get("model_type")) for place in _places(config)}


def is_turned(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> bool:
    """Whether a model's float checkpoints keep this tensor transposed: inputs before outputs."""
    kinds = _kinds(config)
    if len(shape) == 2:
        return bool(kinds & _CONV1D) and _CONV1D_WEIGHTS.fullmatch(name) is not None
    return len(shape) == 3 and bool(kinds & _TURNED) and _FUSED_EXPERTS.fullmatch(name) is not None


def is_stored_turned(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> bool:
    """Whether a tensor of a float checkpoint, of this shape, has inputs before outputs."""
    if not is_turned(name, shape, config):
        return False
    for place in _places(config):
        if place.get("model_type") in _EITHER and "moe_intermediate_size" in place and "hidden_size" in place:
            inner, outer = place["moe_intermediate_size"], place["hidden_size"]
            return shape[-2:] != ((outer, inner) if name.endswith("down_proj") else (2 * inner, outer))
    return True


def _places(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [place for place in (config, config.get("text_config")) if isinstance(place, Mapping)]


def models_name(name: str, shape: tuple[int, ...]) -> str:
    """The model's own name of a tensor: all experts in one are a parameter, not a module with a weight."""
    bare = name.removesuffix(".weight")
    return bare if len(shape) == 3 and _FUSED_EXPERTS.fullmatch(bare) else name


def is_one_expert(name: str) -> bool:
    """Whether a tensor is of one expert, among others of its layer."""
    return re.search(r"\bexperts\.\d+\.", name) is not None


_EMBEDDINGS = re.compile(r"(.*\.)?(embed_tokens\w*|wte|wpe|shared|embed_in|tok_embeddings|\w+_embeddings)\.weight")


def is_embedding(name: str) -> bool:
    """Whether a tensor is a table of vectors, not a linear layer."""
    return _EMBEDDINGS.fullmatch(name) is not None
