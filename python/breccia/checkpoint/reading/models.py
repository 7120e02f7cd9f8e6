# SPDX-License-Identifier: Apache-2.0
"""What the names of tensors tell of a model as transformers builds it: parts that share weights, layers that servers
fuse, experts kept in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from breccia.bridges.common import turned_shape

# Where a model keeps its input embeddings → modules that may compute with the same weight and have none in the files.
_TIED = (
    (
        r"(?P<at>.*?)(model\.(language_model\.|text_model\.|decoder\.)?|transformer\.|decoder\.)?(embed_tokens|wte)",
        "{at}lm_head",
    ),
    (r"(?P<at>.*?)(transformer\.(tokens_embed|word_embeddings|w)|backbone\.embeddings)", "{at}lm_head"),
    (r"(model\.)?decoder\.embed_tokens", "proj_out output_projection lm_head.out_proj"),
    (r"(model\.(language_model\.)?|led\.)?shared", "lm_head"),
    # transformers 5 calls GPT-NeoX's output layer otherwise than the files do.
    (r"(gpt_neox(_japanese)?\.)?embed_in", "embed_out lm_head"),
    (r"embed_out", "lm_head"),
    (
        r"(?!albert|electra|convbert|distilbert)(\w+\.)?embeddings\.word_embeddings",
        "cls.predictions.decoder lm_head.decoder",
    ),
    (r"albert\.embeddings\.word_embeddings", "predictions.decoder"),
    (r"(electra|convbert)\.embeddings\.word_embeddings", "generator_lm_head"),
    (r"distilbert\.embeddings\.word_embeddings", "vocab_projector"),
    (r"model\.embeddings\.tok_embeddings", "decoder"),
    (r"biogpt\.embed_tokens", "output_projection"),
    (r"rwkv\.embeddings", "head"),
    (r"transformer\.word_embedding", "lm_loss"),
)
_EMBEDS = re.compile(r"embed|wte|shared|transformer\.w\.")  # in every name that one of them matches
_TIED_PATTERNS = [(re.compile(rf"{place}\.weight"), heads.split()) for place, heads in _TIED]


def tied_heads(names: Iterable[str]) -> set[str]:
    """Output layers that share the embeddings' weight, so that no file has theirs."""
    return set(tied(names))


def tied(names: Iterable[str]) -> dict[str, str]:
    """Those layers, and the name of the weight that each shares."""
    there = set(names)
    shared: dict[str, str] = {}
    for name in filter(_EMBEDS.search, there):
        for pattern, heads in _TIED_PATTERNS:
            if (match := pattern.fullmatch(name)) is None:
                continue
            modules = [head.format(**match.groupdict()) for head in heads]
            shared |= {module: name for module in modules if f"{module}.weight" not in there}
    return shared


# Modules of models with eyes or ears, by the files' names → by those that transformers 5 has of them.
_MOVED = (
    (re.compile(r"language_model\.lm_head"), "lm_head"),
    (re.compile(r"language_model\.model\.(.*)"), r"model.language_model.\1"),
    (re.compile(r"vision_tower\.vision_model\.(.*)"), r"model.vision_tower.\1"),
    (
        re.compile(r"((visual|vision_tower|vision_model|audio_tower|\w*mm_projector|multi_modal_projector)\..*)"),
        r"model.\1",
    ),
)


def other_names(modules: Iterable[str]) -> set[str]:
    """What else a program may call these modules: models with eyes or ears have a second layout of names."""
    given = set(modules)
    found = {pattern.sub(to, name) for name in given for pattern, to in _MOVED if pattern.fullmatch(name)}
    if any(name.startswith("visual.") for name in given):
        layers = (name.removeprefix("model.") for name in given if name.startswith("model.layers."))
        found |= {f"model.language_model.{name}" for name in layers}
    return found


# Models whose float checkpoints keep all experts of a layer in one tensor (E, IN, OUT); quantized tensors are always
# (E, OUT, IN).
_TURNED = frozenset({"gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})
# Of these, transformers writes the model's own order (E, OUT, IN) and reads both, by their shape.
_EITHER = frozenset({"qwen3_vl_moe", "qwen3_vl_moe_text"})
_FUSED_EXPERTS = re.compile(r"(.*\.)?experts\.(gate_up_proj|down_proj)")
# Beside those, gates and others apart, as GGUF keeps them.
_EXPERTS_IN_ONE = re.compile(r"(.*\.)?experts\.(gate_up|gate|up|down)_proj")


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
    if len(shape) == 2:
        return _CONV1D_WEIGHTS.fullmatch(name) is not None and bool(_kinds(config) & _CONV1D)
    return len(shape) == 3 and _FUSED_EXPERTS.fullmatch(name) is not None and bool(_kinds(config) & _TURNED)


def is_stored_turned(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> bool:
    """Whether a tensor of a float checkpoint, of this shape, has inputs before outputs."""
    if not is_turned(name, shape, config):
        return False
    for place in _places(config):
        if str(place.get("model_type")) in _EITHER and "moe_intermediate_size" in place and "hidden_size" in place:
            inner, outer = place["moe_intermediate_size"], place["hidden_size"]
            return shape[-2:] != ((outer, inner) if name.endswith("down_proj") else (2 * inner, outer))
    return True


def is_written_turned(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> bool:
    """Whether a tensor with outputs first is written to a float checkpoint with inputs before outputs. Where a model's
    files have either order, programs take a square matrix as it is."""
    return is_stored_turned(name, turned_shape(shape), config)


def _places(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [place for place in (config, config.get("text_config")) if isinstance(place, Mapping)]


def models_name(name: str, shape: tuple[int, ...]) -> str:
    """The model's own name of a tensor: all experts in one are a parameter, not a module with a weight."""
    bare = name.removesuffix(".weight")
    return bare if len(shape) == 3 and _FUSED_EXPERTS.fullmatch(bare) else name


def is_layers_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer, or those of all experts in one, by the names of torch's
    modules; other parameters and buffers have matrices, too."""
    if name.rpartition(".")[2] == "weight":
        return len(shape) in (2, 3)
    return len(shape) == 3 and _EXPERTS_IN_ONE.fullmatch(name) is not None


def is_one_expert(name: str) -> bool:
    """Whether a tensor is of one expert, among others of its layer."""
    return re.search(r"\bexperts\.\d+\.", name) is not None


_EMBEDDINGS = re.compile(r"(.*\.)?(embed_tokens\w*|wte|wpe|shared|embed_in|tok_embeddings|\w+_embeddings)\.weight")


def is_embedding(name: str) -> bool:
    """Whether a tensor is a table of vectors, not a linear layer."""
    return _EMBEDDINGS.fullmatch(name) is not None


_HEADS = re.compile(r"(.*\.)?(lm_head|embed_out|output_layer)\.weight|(head|output)\.weight")


def is_head(name: str) -> bool:
    """Whether a tensor is the weight of the layer that gives a language model's logits."""
    return _HEADS.fullmatch(name) is not None
