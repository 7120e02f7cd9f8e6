# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer.json as GGUF's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breccia.checkpoint.gguf_models import ARRAY, BOOL, STRING, UINT32, Fields

__all__ = ["tokenizer_fields"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_PRE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "bert": "default"}
_SPECIAL = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
    "unk_token": "unknown_token_id",
    "[CLS]": "bos_token_id",
    "[SEP]": "eos_token_id",
    "[MASK]": "mask_token_id",
}


def tokenizer_fields(tokenizer: Mapping[str, Any], config: Mapping[str, Any], architecture: str) -> tuple[Fields, str]:
    """The metadata of a tokenizer: byte-level BPE or WordPiece; none and the reason for others.

    Args:
        tokenizer: tokenizer.json.
        config: config.json.
        architecture: GGUF's name of the model's.
    """
    try:
        model = tokenizer["model"]
        kind, vocabulary = model["type"], {str(token): int(number) for token, number in model["vocab"].items()}
        added = {token["content"]: token for token in tokenizer.get("added_tokens", [])}
        vocabulary |= {text: int(token["id"]) for text, token in added.items()}
        size = max(int(config.get("vocab_size", 0)), 1 + max(vocabulary.values()))
        if size > 1 << 24 or min(vocabulary.values()) < 0:
            raise ValueError(f"ids must be from 0 to 2^24, got {size}")
        if kind == "WordPiece":
            name = "bert"
        elif kind == "BPE" and "ByteLevel" in str(tokenizer.get("pre_tokenizer")):
            name = "gpt2"
        else:
            return (
                {},
                f"a tokenizer of type {kind} that is not of bytes has no GGUF form here: the file has none",
            )
        tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
        for text, number in vocabulary.items():
            special = added.get(text, {}).get("special")
            types[number] = _NORMAL if special is None else _CONTROL if special else _USER_DEFINED
            tokens[number] = _word(text, types[number]) if name == "bert" else text
        said: Fields = {
            "model": (STRING, name),
            "pre": (STRING, _PRE[architecture]),
            "tokens": (ARRAY, tokens),
            "token_type": (ARRAY, types),
        }
        if name == "gpt2":
            said["merges"] = (ARRAY, [m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
        said |= _special(config, vocabulary, str(model.get("unk_token")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return {}, f"tokenizer.json must be a tokenizer's: {type(error).__name__} {error}"
    if name == "bert":
        said["seperator_token_id"] = said.get("eos_token_id", (UINT32, 0))  # GGUF's spelling
        said["token_type_count"] = (UINT32, int(config.get("type_vocab_size", 1)))
    else:
        begin, end = _ends(tokenizer.get("post_processor"))
        said |= {"add_bos_token": (BOOL, begin), "add_eos_token": (BOOL, end)}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}, ""


def _word(text: str, kind: int) -> str:
    """A token as GGUF's WordPiece has it: what begins a word is marked instead of what goes on."""
    if kind == _CONTROL:
        return text
    return text.removeprefix("##") if text.startswith("##") else "\u2581" + text


def _ends(processor: Any) -> tuple[bool, bool]:
    """Whether texts get a token before and after them."""
    if not isinstance(processor, dict):
        return False, False
    for part in processor.get("processors", [processor]):
        single = part.get("single") if isinstance(part, dict) else None
        if isinstance(single, list) and single:
            return "SpecialToken" in single[0], "SpecialToken" in single[-1]
    return False, False


def _special(config: Mapping[str, Any], vocabulary: Mapping[str, int], unknown: str) -> Fields:
    said: Fields = {}
    for key, name in _SPECIAL.items():
        number = config.get(key) if key.endswith("_id") else vocabulary.get(unknown if key == "unk_token" else key)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
            said[name] = (UINT32, number)
    return said
