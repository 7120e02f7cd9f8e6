# SPDX-License-Identifier: Apache-2.0
"""What the programs that load a format know, which decides what a conversion may write in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from breccia.recipes import ScalingRecipe

# The layers that vLLM and SGLang make of several, and of which.
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("qkv_proj", ("query", "key", "value")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
_WHOLES = {part: whole for whole, parts in _FUSED for part in parts}
_PART = re.compile(rf"(.*\.)?({'|'.join(_WHOLES)})\.weight")


def fused_layer(weight: str) -> str | None:
    """The layer that servers make of that of a weight and others; None where they leave it by itself."""
    match = _PART.fullmatch(weight)
    return None if match is None else (match[1] or "") + _WHOLES[match[2]]


def fused_layers(layers: Collection[str]) -> list[str]:
    """The names of layers that servers make of some of these alone."""
    there, wholes = set(layers), []
    for whole, parts in _FUSED:
        prefixes = (layer.removesuffix(parts[0]) for layer in layers if f".{layer}".endswith(f".{parts[0]}"))
        wholes += [prefix + whole for prefix in prefixes if all(prefix + part in there for part in parts)]
    return wholes


@dataclass(frozen=True)
class Readers:
    """What the programs that load a format know, beside matrices of linear layers.

    Attributes:
        fused_experts: all experts of a layer in one tensor.
        turned_experts: (config.json) → whether they load all experts of a layer in one tensor with inputs before
            outputs, where the model's files have them so.
        single_experts: experts in tensors of their own.
        experts_together: whether they want all experts of a layer in one tensor.
        gates_apart: whether they want the gates of gpt-oss' experts apart from the others, which its makers keep in
            turn.
        embeddings: quantized embeddings.
        turned_weights: matrices with inputs before outputs, which are written transposed.
        bfloat16_scales: whether they round float scales to bfloat16.
        shared_global_scale: whether they keep one global scale for all parts of a layer that they fuse.
        pre_scales: factors of a layer's inputs (``pre_quant_scale``); other formats get them in the weights.
        static_inputs: what the programs of most users do with static scales of inputs, in words; "" where they
            quantize by them.
        one_level: why NVFP4 is written in one level, for a note; "" where they know the second scale.
        misread_experts: what a program of many users does wrong with experts in tensors of their own, by the recipe's
            name.
        misread: what a program of many users does wrong with a tensor, a sentence for the report; called with its
            logical shape and the recipe that it is written in; "" where all read it right.
    """

    fused_experts: bool = False
    turned_experts: Callable[[Mapping[str, object]], bool] = lambda model: False
    single_experts: bool = True
    experts_together: bool = False
    gates_apart: bool = False
    embeddings: bool = False
    turned_weights: bool = False
    bfloat16_scales: bool = False
    shared_global_scale: bool = False
    pre_scales: bool = False
    static_inputs: str = ""
    one_level: str = ""
    misread_experts: Mapping[str, str] = field(default_factory=dict)
    misread: Callable[[tuple[int, ...], ScalingRecipe], str] = lambda shape, recipe: ""
