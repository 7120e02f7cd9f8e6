# SPDX-License-Identifier: Apache-2.0
"""What "dynamic", "static" and "local" mean for the inputs of a layer whose weights have a recipe: what programs run
beside such weights."""

from __future__ import annotations

from breccia.recipes import (
    Float8BlockScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.schemes.labels import recipe_label
from breccia.schemes.rules import Activations

__all__ = ["WORDS", "inputs_for"]

WORDS = ("dynamic", "static", "local", "none")


def inputs_for(weights: ScalingRecipe | str, when: str) -> Activations:
    """Inputs as programs quantize them beside such weights.

    FP8 and INT8 have one scale for each token, or one static scale; FP8 in tiles 1 × 128 dynamic ones; MXFP8 and MXFP4
    their own blocks, MXFP6 those of MXFP8; NVFP4 its own blocks, of which "static" and "local" are one thing, for its
    blocks' scales are always made of the inputs; INT4 has INT8 per token.

    Args:
        weights: of the layer.
        when: "dynamic", "static" or "local".

    Returns:
        The activations.

    Raises:
        ValueError: no program quantizes the inputs of such a layer so.
    """
    if isinstance(weights, NVFP4BlockScaling):
        if when in ("static", "local"):
            return Activations("float4_e2m1fn", "group", "local", 16, scale="float8_e4m3fn")
        if when == "dynamic":
            return Activations("float4_e2m1fn", "group", "dynamic", 16, scale="float8_e4m3fn")
    if isinstance(weights, MXFP4BlockScaling) and when == "dynamic":
        return Activations("float4_e2m1fn", "group", "dynamic", 32, scale="float8_e8m0fnu")
    if isinstance(weights, (MXFP6BlockScaling, MXFP8BlockScaling)) and when == "dynamic":
        return Activations("float8_e4m3fn", "group", "dynamic", 32, scale="float8_e8m0fnu")
    if isinstance(weights, Float8BlockScaling) and when == "dynamic":
        return Activations("float8_e4m3fn", "group", "dynamic", weights.block_k)
    if isinstance(weights, (INT4Scaling, INT8Scaling)) and when in ("dynamic", "static"):
        return Activations("int8", "token" if when == "dynamic" else "tensor", when)
    blocks = (MXFP4BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling, Float8BlockScaling)
    eight = isinstance(weights, ScalingRecipe) and weights.element.startswith("float8")
    if eight and not isinstance(weights, blocks) and when in ("dynamic", "static"):
        return Activations("float8_e4m3fn", "token" if when == "dynamic" else "tensor", when)
    raise ValueError(f"inputs of weights in {recipe_label(weights)} must not be {when}: no program quantizes them so")
