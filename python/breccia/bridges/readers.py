# SPDX-License-Identifier: Apache-2.0
"""What the programs that load a format know, which decides what a conversion may write in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from breccia.recipes import ScalingRecipe

__all__ = ["Readers"]


@dataclass(frozen=True)
class Readers:
    """What the programs that load a format know, beside matrices of linear layers.

    Attributes:
        fused_experts: all experts of a layer in one tensor with inputs before outputs.
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
