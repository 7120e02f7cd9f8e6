# SPDX-License-Identifier: Apache-2.0
"""What the names of tensors tell of a model as transformers builds it: parts that share weights, layers that servers
fuse, experts kept in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["tied_heads"]

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
    there = set(names)
    heads = set()
    for name in there:
        for pattern, head in _TIED:
            match = pattern.fullmatch(name)
            if match is not None and f"{(module := head.format(at=match['at']))}.weight" not in there:
                heads.add(module)
    return heads
