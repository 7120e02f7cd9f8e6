# SPDX-License-Identifier: Apache-2.0
"""SentencePiece's tokenizers in GGUF: a model that it made, and the numbers that it gives texts."""

import base64
import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from breccia.checkpoint import convert
from breccia.gguf.tokenizer import sentencepiece_fields
from tiny_models import SIZES, transformers

SAID = json.loads((Path(__file__).parent / "data" / "sentencepiece.json").read_text())
RAW = base64.b64decode(SAID["model"])


def fields(raw: bytes = RAW, tokenizer: Any = None, config: Any = None, said: Any = None) -> dict[str, Any]:
    found, trouble = sentencepiece_fields(raw, tokenizer or {}, config or {}, said or {})
    assert not trouble, trouble
    return {key.removeprefix("tokenizer.ggml."): value for key, (_, value) in found.items()}


def merged(text: str, said: dict[str, Any]) -> list[int]:
    """How llama.cpp's kind "llama" numbers a text without special tokens: neighbours whose join has the best score are
    joined first; what is no token is its bytes."""
    numbers = {token: i for i, token in enumerate(said["tokens"])}
    parts = list(("▁" if said["add_space_prefix"] else "") + text.replace(" ", "▁"))
    while True:
        joins = [(said["scores"][numbers[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in numbers]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [numbers[part]] if part in numbers else [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def test_texts_have_the_numbers_of_sentencepiece() -> None:
    said = fields()
    assert [[token, score] for token, score in zip(said["tokens"], said["scores"], strict=True)] == SAID["pieces"]
    assert said["model"] == "llama"
    assert said["token_type"][:5] == [2, 3, 3, 4, 6]
    plain = {text: ids for text, ids in SAID["ids"].items() if "<|turn|>" not in text}
    assert len(plain) == 3
    for text, ids in plain.items():
        assert merged(text, said) == ids


def test_a_file_has_them_and_transformers_reads_them(tmp_path: Path) -> None:
    """The tokenizer that it makes of the file gives SentencePiece's numbers."""
    gguf, torch = pytest.importorskip("gguf"), pytest.importorskip("torch")
    config = transformers().MistralConfig(**{**SIZES, "vocab_size": 500, "sliding_window": None})
    torch.manual_seed(0)
    transformers().MistralForCausalLM(config).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.model").write_bytes(RAW)
    token = {"content": "<|end|>", "special": True}
    said = {"eos_token": "<|end|>", "bos_token": "<s>", "add_bos_token": True, "chat_template": "{{ messages }}"}
    text = json.dumps({**said, "added_tokens_decoder": {"480": token}})
    (tmp_path / "in" / "tokenizer_config.json").write_text(text)
    report = convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:f16")
    assert not report["notes"]
    found = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()}
    assert found["tokenizer.ggml.tokens"][:480] == [token for token, _ in SAID["pieces"]]
    assert found["tokenizer.ggml.tokens"][480:482] == ["<|end|>", "[PAD481]"]
    assert found["tokenizer.ggml.scores"] == pytest.approx([s for _, s in SAID["pieces"]] + [-1000] + [-10000] * 19)
    assert found["tokenizer.ggml.token_type"][480:] == [3] + [5] * 19
    assert found["tokenizer.ggml.eos_token_id"] == 480
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.unknown_token_id"]) == (1, 0)
    assert found["tokenizer.ggml.add_bos_token"] is found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = transformers().AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    for text, ids in SAID["ids"].items():
        if text[0] not in "< ":  # it takes away a space at the beginning
            assert made.encode(text, add_special_tokens=False) == ids
    report = convert(tmp_path / "a.gguf", f"{tmp_path}/out/", "bf16")
    assert not report["notes"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_added_tokens_take_their_places() -> None:
    tokenizer = {"added_tokens": [{"id": 0, "content": "<unk>", "special": True}, {"id": 482, "content": "new"}]}
    said = fields(tokenizer=tokenizer, config={"vocab_size": 100}, said={"unk_token": "<unk>"})
    assert len(said["tokens"]) == len(said["scores"]) == len(said["token_type"]) == 483
    assert said["tokens"][480:] == ["[PAD480]", "[PAD481]", "new"]
    assert said["token_type"][480:] == [5, 5, 4]
    assert (said["tokens"][0], said["token_type"][0]) == ("<unk>", 2)


def unigram() -> bytes:
    """The model with another kind of trainer: field 3 of field 2."""
    at = RAW.rindex(b"\x18\x02")
    return RAW[:at] + b"\x18\x01" + RAW[at + 2 :]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "tokenizer.model must be SentencePiece's: ValueError there are no tokens"),
        (RAW[:-1], "tokenizer.model must be SentencePiece's: ValueError a field at byte"),
        (b"{}", "tokenizer.model must be SentencePiece's: "),
        (b"\x0a\x03\x0a\x01\xff", "tokenizer.model must be SentencePiece's: UnicodeDecodeError"),
        (b"\x0a\x02\x18\x01", "tokenizer.model must be SentencePiece's: KeyError"),
        (b"\xff" * 20, "tokenizer.model must be SentencePiece's: ValueError a number at byte 10 does not end"),
        (unigram(), "tokenizer.model must be of pairs that are merged"),
    ],
)
def test_what_is_not_one_is_said(raw: bytes, reason: str) -> None:
    found, trouble = sentencepiece_fields(raw, {}, {}, {})
    assert not found
    assert trouble.startswith(reason)


def test_any_byte_may_be_wrong() -> None:
    for at in range(0, len(RAW), 37):
        found, trouble = sentencepiece_fields(RAW[:at] + bytes([RAW[at] ^ 0xFF]) + RAW[at + 1 :], {}, {}, {})
        assert bool(found) != bool(trouble)
    for said in (
        {"added_tokens_decoder": {"-1": {"content": "a"}}},
        {"added_tokens_decoder": {"99999999": {"content": "a"}}},
    ):
        assert sentencepiece_fields(RAW, {}, {}, said)[1].startswith(
            "tokenizer.model must be SentencePiece's: ValueError ids"
        )
