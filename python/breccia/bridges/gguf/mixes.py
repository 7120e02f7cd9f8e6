# SPDX-License-Identifier: Apache-2.0
"""Which type each tensor of a file gets: llama-quantize's mixes, in which some tensors of some layers have more bits,
and what it takes for rows that are no whole super-blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from breccia.bridges.gguf.blocks import TYPES

_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(_exps|_shexp)?\.weight")
# Where a row is no whole super-block. For the first two llama-quantize has Q4_0 since 2026, of as many bytes.
_INSTEAD = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LARGE_LLAMAS = ("llama", "qwen2")  # with 80 layers they are of 70 billion, 8 heads of which share a value
Rule = tuple[str, Callable[[int, int], bool]]  # a type, and in which of so many layers a tensor has it


class Model(Protocol):
    """What a mix asks of a model; ``experts`` of a layer, 0 where it has none."""

    architecture: str
    depth: int
    routed: int
    tied: bool

    def inside(self, name: str) -> str | None: ...


def _always(layer: int, layers: int) -> bool:
    return True


def _first(part: int) -> Callable[[int, int], bool]:
    return lambda layer, layers: layer < layers // part


def _before(count: int) -> Callable[[int, int], bool]:
    return lambda layer, layers: layer < count


def _more(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and each third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


_V, _DOWN, _OUT = "attn_v", "ffn_down", "attn_output"
# Name of a mix → the type of most, and the rules of others, of which the first that holds counts.
MIXES: dict[str, tuple[str, Mapping[str, Sequence[Rule]]]] = {
    "q3_k_s": ("Q3_K", {}),
    "q3_k_m": (
        "Q3_K",
        {
            _V: (("Q5_K", _before(2)), ("Q4_K", _always)),
            _DOWN: (("Q5_K", _first(16)), ("Q4_K", _always)),
            _OUT: (("Q4_K", _always),),
        },
    ),
    "q3_k_l": ("Q3_K", dict.fromkeys((_V, _DOWN, _OUT), (("Q5_K", _always),))),
    "q4_k_s": ("Q4_K", {_V: (("Q5_K", _before(4)),), _DOWN: (("Q5_K", _first(8)),)}),
    "q4_k_m": ("Q4_K", dict.fromkeys((_V, _DOWN), (("Q6_K", _more),))),
    "q5_k_s": ("Q5_K", {}),
    "q5_k_m": ("Q5_K", dict.fromkeys((_V, _DOWN), (("Q6_K", _more),))),
}


def type_in_mix(mix: str, inside: str, model: Model) -> str:
    """The type that a tensor, by its name in GGUF, has in a mix, if its rows are whole blocks."""
    base, rules = MIXES[mix]
    if inside == ("token_embd.weight" if model.tied else "output.weight"):
        return "Q6_K"
    found = _LAYER.fullmatch(inside)
    if found is None:
        return base
    part = _V if found[2] == "attn_qkv" else found[2]
    if model.routed == 8 and part in (_V, "attn_k"):
        return "Q8_0"
    if model.routed == 8 and part == _OUT:
        return "Q5_K" if base in ("Q3_K", "Q4_K") and mix != "q3_k_l" else base
    kind = next((kind for kind, holds in rules.get(part, ()) if holds(int(found[1]), model.depth)), base)
    large = model.depth == 80 and model.architecture in _LARGE_LLAMAS
    return "Q5_K" if large and part == _V and kind in ("Q3_K", "Q4_K") else kind


def fitting(kind: str, columns: int) -> str:
    """The type, or the one in its place where rows are no whole blocks of it."""
    return kind if columns % TYPES[kind][1] == 0 else _INSTEAD.get(kind, kind)
