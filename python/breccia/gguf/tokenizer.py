# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer as GGUF's metadata: tokenizer.json, and SentencePiece's tokenizer.model, a message of protocol
buffers."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from breccia.gguf.types import ARRAY, BOOL, MAX_TOKENS, STRING, UINT32, Fields

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
)
# How a tokenizer splits text into words, by its regular expression → llama.cpp's name of that way.
_PRE = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
    _CASED + r"\p{N}" + _REST.replace("[\\r\\n]*", "[\\r\\n/]*"): "tekken",
}
# Token of tokenizer_config.json → GGUF's key, and config.json's number of it.
_SPECIAL = {
    "bos_token": ("bos_token_id", "bos_token_id"),
    "eos_token": ("eos_token_id", "eos_token_id"),
    "pad_token": ("padding_token_id", "pad_token_id"),
    "unk_token": ("unknown_token_id", ""),
    "mask_token": ("mask_token_id", ""),
}
_WORDPIECE = {"[CLS]": "bos_token_id", "[SEP]": "eos_token_id", "[MASK]": "mask_token_id"}


def tokenizer_fields(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], said_of_it: Mapping[str, Any]
) -> tuple[Fields, str]:
    """The metadata of a tokenizer.json with config.json and tokenizer_config.json: byte-level BPE or WordPiece; none
    and the reason for others."""
    try:
        model = tokenizer["model"]
        kind, vocabulary = model["type"], {str(token): int(number) for token, number in model["vocab"].items()}
        added = {token["content"]: token for token in tokenizer.get("added_tokens", [])}
        vocabulary |= {text: int(token["id"]) for text, token in added.items()}
        size = max(int(config.get("vocab_size", 0)), 1 + max(vocabulary.values()))
        if size > MAX_TOKENS or min(vocabulary.values()) < 0:
            raise ValueError(f"ids must be from 0 to {MAX_TOKENS}, got {size}")
        if kind == "WordPiece":
            name, pre = "bert", "default"
        elif kind == "BPE" and "ByteLevel" in str(tokenizer.get("pre_tokenizer")):
            name, pre = "gpt2", _split_name(tokenizer["pre_tokenizer"])
            if not pre:
                return {}, "tokenizer.json splits text in a way that has no GGUF name here: the file has no tokenizer"
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
            "pre": (STRING, pre),
            "tokens": (ARRAY, tokens),
            "token_type": (ARRAY, types),
        }
        if name == "gpt2":
            said["merges"] = (ARRAY, [m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
        said |= special_tokens(config, said_of_it, vocabulary, model.get("unk_token"))
        if name == "bert":
            said |= {key: (UINT32, vocabulary[token]) for token, key in _WORDPIECE.items() if token in vocabulary}
        "".join([*tokens, *said.get("merges", (ARRAY, []))[1]]).encode()  # half a surrogate pair is no character
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return {}, f"tokenizer.json must be a tokenizer's: {type(error).__name__} {error}"
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}, ""


def _word(text: str, kind: int) -> str:
    """A token as GGUF's WordPiece has it: what begins a word is marked instead of what goes on."""
    if kind == _CONTROL:
        return text
    return text.removeprefix("##") if text.startswith("##") else "\u2581" + text


def _split_name(splitter: Mapping[str, Any]) -> str:
    """llama.cpp's name of a way to split text into words; "" where it is not known here, for another name would split
    text otherwise than the model was trained with."""
    parts = splitter.get("pretokenizers", [splitter])
    patterns = [str(part["pattern"].get("Regex")) for part in parts if part.get("type") == "Split"]
    own = any(part.get("type") == "ByteLevel" and part.get("use_regex", True) for part in parts)
    others = any(part.get("type") not in ("Split", "ByteLevel") for part in parts)
    if others or len(patterns) + own != 1:
        return ""
    return "gpt-2" if own else _PRE.get(patterns[0], "")


def special_tokens(
    config: Mapping[str, Any], said_of_it: Mapping[str, Any], vocabulary: Mapping[str, int], unknown: Any
) -> Fields:
    """Numbers of special tokens: the tokenizer's own, which end a turn of a chat, before the model's."""
    said: Fields = {}
    for key, (name, number_key) in _SPECIAL.items():
        token = said_of_it.get(key) or (unknown if key == "unk_token" else None)
        token = token.get("content") if isinstance(token, Mapping) else token
        number = vocabulary.get(token) if isinstance(token, str) else None
        number = config.get(number_key) if number is None else number
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**32:
            said[name] = (UINT32, number)
    return said


def chat_fields(template: Any) -> Fields:
    """The metadata of a chat template: a text, or several with names."""
    if isinstance(template, str):
        return {"tokenizer.chat_template": (STRING, template)}
    fields: Fields = {}
    for one in template if isinstance(template, list) else []:
        if isinstance(one, Mapping) and isinstance(one.get("template"), str):
            name = str(one.get("name"))
            fields[f"tokenizer.chat_template{'' if name == 'default' else '.' + name}"] = (STRING, one["template"])
    names = [key.removeprefix("tokenizer.chat_template.") for key in fields if key != "tokenizer.chat_template"]
    return fields | ({"tokenizer.chat_templates": (ARRAY, names)} if names else {})


# Of SentencePiece's tokenizer.model, whose numbers of types are those of GGUF.
_BPE = 2  # the trainer's model_type
_ADDED, _PADDING = -1000.0, -10000.0  # scores of tokens that no two others are merged to


def sentencepiece_fields(
    raw: bytes, tokenizer: Mapping[str, Any], config: Mapping[str, Any], said_of_it: Mapping[str, Any]
) -> tuple[Fields, str]:
    """The metadata of tokenizer.model, with the tokens of tokenizer.json that were added since, config.json and
    tokenizer_config.json; none and the reason where it merges no pairs."""
    try:
        tokens, scores, types, trainer, normalizer = _pieces(raw)
        if trainer.get(3, 1) != _BPE:
            return {}, "tokenizer.model must be of pairs that are merged (BPE) to have a GGUF form here, it is another"
        added = {int(token["id"]): token for token in tokenizer.get("added_tokens", [])}
        decoder = said_of_it.get("added_tokens_decoder") or {}
        added |= {int(number): token for number, token in decoder.items()}
        size = max(int(config.get("vocab_size", 0)), len(tokens), 1 + max(added, default=0))
        if size > MAX_TOKENS or min(added, default=0) < 0:
            raise ValueError(f"ids must be from 0 to {MAX_TOKENS}, got {size}")
        for number in range(len(tokens), size):
            tokens.append(f"[PAD{number}]")
            scores.append(_PADDING)
            types.append(_UNUSED)
        for number, token in added.items():
            text, kind = str(token["content"]), _CONTROL if token.get("special") else _USER_DEFINED
            if (tokens[number], types[number]) != (text, kind) and types[number] != 2:  # that of unknown text stays
                tokens[number], scores[number], types[number] = text, _ADDED, kind
        said: Fields = {
            "model": (STRING, "llama"),
            "pre": (STRING, "default"),
            "tokens": (ARRAY, tokens),
            "scores": (ARRAY, scores),
            "token_type": (ARRAY, types),
            "add_space_prefix": (BOOL, bool(normalizer.get(3, 1))),
        }
        vocabulary = {text: number for number, text in enumerate(tokens)}
        unknown = next((text for text, kind in zip(tokens, types, strict=True) if kind == 2), None)
        said |= special_tokens(config, said_of_it, vocabulary, unknown)
        for key in ("add_bos_token", "add_eos_token"):
            if isinstance(said_of_it.get(key), bool):
                said[key] = (BOOL, said_of_it[key])
        "".join(tokens).encode()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
        return {}, f"tokenizer.model must be SentencePiece's: {type(error).__name__} {error}"
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}, ""


def _pieces(raw: bytes) -> tuple[list[str], list[float], list[int], dict[int, Any], dict[int, Any]]:
    """Tokens with their scores and types, and what the trainer and the normalizer were told."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    specs: dict[int, dict[int, Any]] = {2: {}, 3: {}}
    for number, value in _message(raw):
        if number == 1:
            piece = dict(_message(value))
            tokens.append(bytes(piece[1]).decode("utf-8"))
            scores.append(float(struct.unpack("<f", piece.get(2, bytes(4)))[0]))
            types.append(int(piece.get(3, 1)))
        elif number in specs:
            specs[number] = dict(_message(value))
    if not tokens or len(tokens) > MAX_TOKENS or not set(types) <= set(range(1, 7)):
        raise ValueError("there are no tokens, or there are more or others than SentencePiece makes")
    return tokens, scores, types, specs[2], specs[3]


def _message(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a message: their numbers, and integers or bytes."""
    at = 0
    while at < len(raw):
        key, at = _integer(raw, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _integer(raw, at)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            length, at = _integer(raw, at)
        if length is None or at + length > len(raw):
            raise ValueError(f"a field at byte {at} does not end in the file")
        yield number, raw[at : at + length]
        at += length


def _integer(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (raw[at] & 127) << shift
        at += 1
        if raw[at - 1] < 128:
            return value, at
    raise ValueError(f"a number at byte {at} does not end")
