# SPDX-License-Identifier: Apache-2.0
"""SentencePiece's tokenizer.model, a message of protocol buffers, as GGUF's metadata."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from breccia.gguf.tokenizer import special_tokens
from breccia.gguf.types import ARRAY, BOOL, MAX_TOKENS, STRING, Fields

__all__ = ["sentencepiece_fields"]

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # the numbers of types are those of GGUF
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
