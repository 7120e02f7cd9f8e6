# SPDX-License-Identifier: Apache-2.0
"""Weights that conversions leave alone, and numbers that stay in float32: by the model's class as transformers has it
(architectures.json, which benchmarks/make_architectures.py writes), and by patterns of names."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from fnmatch import translate
from pathlib import Path
from typing import Any

# Words in the names of weights that quantized checkpoints leave alone, and whole patterns, matched as in a shell.
_WORDS = (
    "embed relative_attention_bias position rotary norm conv upsampler "
    "router .gate.e_score shared_expert_gate indexer "  # routers and what chooses among tokens
    "lm_head codebooks_head shared_head classifier qa_outputs "  # outputs
    "eh_proj nextn mtp. mtp_ "  # heads for later tokens
    # eyes and ears of language models
    "vision_tower vision_backbone vision_encoder vision_language vision_proj vision_embed vision_adapter gen_vision "
    "audio_tower audio_encoder audio_model audio_proj audio_mlp speech_ image_encoder image_newline image_vit "
    "img_projection modality_projection multi_modal_ multimodal_ visual_tokenizer patch_merger resampler "
    "perceiver qformer aligner connector projector sam_model gen_head talker. token2wav"
)
_PATTERNS = (
    *("*wte.weight", "*wpe.weight", "shared.weight", "*.shared.weight", "*pos_emb.weight", "query.weight"),
    *("*quer*_feat*.weight", "transformer.w.weight", "token_embd*", "*.gate.weight", "head.weight", "output.weight"),
    *("*output_layer.weight", "*score.weight", "cls.*", "visual.*", "*.visual.*", "vpm.*", "apm.*", "vte.*"),
    *("*.vpm.*", "?*.vision_model.*", "*.vit.*", "vit.*", "*mlp1.[0-9]*.weight"),
)
LATER = "mtp"  # how the modules of heads for later tokens are called that one pattern can name
_LATER = rf".*(?:eh_proj|nextn|\b{LATER}(?:\b|_)|_{LATER}\b)"
# Numbers that programs keep in float32 whatever the model's class; where that is not known, routers' too.
_FLOAT32 = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias", "sinks", "time_decay", "indexer.weights_proj")
# Where a language model with eyes or ears has its layers.
_LANGUAGE = r"(?:(?:model|language_model|text_model|llm|thinker|transformer|backbone|base_model|decoder|gpt_neox)\.)*"
_SENSES = re.compile(
    r".*(?:vision|visual|vit|audio|speech|image)\w*_(?:config|cfg)|visual|vision_tower|mm_vision_tower"
)


class LeftAlone:
    """What is left alone of a model.

    Attributes:
        unknown: the model's class, where nothing is known of it; "" where it is, or the model has none.
    """

    def __init__(self, name: str, layers: int, senses: bool) -> None:
        known = _table().get(name) if name else None
        row = known or {}
        self.unknown, self._layers = name if known is None else "", layers
        towers, ends = ("|".join(map(re.escape, row.get(key, ()))) for key in ("towers", "not linear"))
        every = [rf"(?:(?:model|base_model|thinker)\.)*(?:{towers})\."] if towers else []
        every += [rf"(?:.*\.)?(?:{ends})\.weight$"] if ends else []
        if senses and not towers:  # what is not of the language model's layers is taken for an eye or an ear
            every.append(rf"(?!{_LANGUAGE}(?:layers|h|blocks)\.)")
        always = [*_FLOAT32, *row.get("float32", ())] if known else [*_FLOAT32, "gate.weight"]
        half = [*always, *row.get("float32, not float16", ())]
        self._later = _remembered([_LATER])
        self._weight = _remembered([_WEIGHTS, _LATER, *every])
        self._float32, self._float32_of_half = (_remembered([_parts(names)], 0) for names in (always, half))

    def weight(self, name: str) -> bool:
        """Whether a weight is one that is not quantized."""
        return self._weight(NUMBERS.sub(".0.", name)) or (self._layers > 0 and self.past(name))

    def later(self, name: str) -> bool:
        """Whether a tensor is of a head for later tokens."""
        return self._later(NUMBERS.sub(".0.", name)) or self.past(name)

    def past(self, name: str) -> bool:
        """Whether a tensor is of a layer past the last."""
        match = _LAYER.match(name)
        return match is not None and int(match[1]) >= self._layers > 0

    def float32(self, name: str, dtype: str) -> bool:
        """Whether numbers stay in float32 beside those of a dtype, "BF16" or "F16"."""
        return (self._float32_of_half if dtype == "F16" else self._float32)(NUMBERS.sub(".0.", name))


NUMBERS = re.compile(r"\.\d+\.")
_LAYER = re.compile(_LANGUAGE + r"layers\.(\d{1,9})\.")


def _remembered(patterns: list[str], flags: re.RegexFlag | int = re.IGNORECASE) -> Callable[[str], bool]:
    """Whether a name matches one of some patterns; the layers of a model have the same few names."""
    compiled = re.compile("|".join(patterns), flags)
    return functools.lru_cache(maxsize=1024)(lambda name: compiled.match(name) is not None)


def _parts(names: list[str]) -> str:
    """Names that have one of these among their parts, as transformers looks for them."""
    return rf"(?:.*\.)?(?:{'|'.join(names)})(?:\.|$)"


_WEIGHTS = rf".*(?:{'|'.join(map(re.escape, _WORDS.split()))})|" + "|".join(map(translate, _PATTERNS))


@functools.cache
def _table() -> dict[str, dict[str, list[str]]]:
    """What transformers says of each class."""
    said = json.loads(Path(__file__).with_name("architectures.json").read_bytes())
    table: dict[str, dict[str, list[str]]] = said["classes"]
    return table


_of = functools.lru_cache(maxsize=64)(LeftAlone)


def left_alone(config: Mapping[str, Any]) -> LeftAlone:
    """What is left alone of the model of a config.json, which may be empty."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    text = config.get("text_config") or config.get("llm_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers", config.get("num_hidden_layers"))
    count = layers if isinstance(layers, int) and layers > 0 else 0
    return _of(name, count, any(map(_SENSES.fullmatch, map(str, config))))


NOTHING_KNOWN = left_alone({})
