# SPDX-License-Identifier: Apache-2.0
"""Text files as rows of tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia.checkpoint.arguments import path_of

__all__ = ["Rows", "rows_of_text"]


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, int64 (n, length); how many tokens the text has, and SHA-256 of its bytes."""

    rows: np.ndarray[Any, Any]
    available: int
    digest: str


def rows_of_text(paths: Sequence[str | os.PathLike[str]], tokenizer: Any, length: int, tokens: int | None) -> Rows:
    """Text of UTF-8 files, one after the other, cut into rows of equal length, so many tokens at most, rounded up to a
    row (None: all); what is left at the end is not used. Where the tokenizer begins a text with a token of its own,
    every row begins with that. Raises ValueError where a file is not UTF-8, or the text has less than one row."""
    digest, text = hashlib.sha256(), []
    for path in paths:
        raw = path_of(path, "text").read_bytes()
        digest.update(raw)
        try:
            text.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be text in UTF-8: {error}") from None
    ids: list[int] = []
    for part in text:
        ids += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    first = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] else []
    own = length - len(first)
    if own < 1 or len(ids) < own:
        raise ValueError(f"text must have at least one row of {own} tokens, it has {len(ids)}")
    count = len(ids) // own if tokens is None else min(len(ids) // own, -(-tokens // length))
    rows = [first + ids[start : start + own] for start in range(0, count * own, own)]
    return Rows(np.asarray(rows, np.int64), len(ids), digest.hexdigest())
