# SPDX-License-Identifier: Apache-2.0
"""Recipes, activations and roles of layers in the few words of a table."""

from __future__ import annotations

import re
from typing import Any

from breccia import recipes
from breccia.recipes import ScalingRecipe

_ELEMENTS = {
    "float8_e4m3fn": "FP8",
    "float8_e4m3fnuz": "FP8 fnuz",
    "float8_e5m2": "FP8 E5M2",
    "float6_e2m3fn": "FP6",
    "float6_e3m2fn": "FP6 E3M2",
    "float4_e2m1fn": "FP4",
    "int8": "INT8",
    "uint8": "UINT8",
    "int4": "INT4",
}


def recipe_label(recipe: ScalingRecipe | str | None) -> str:
    """Such as "FP8 128 × 128", "NVFP4", "INT4 g128"."""
    match recipe:
        case None:
            return "high precision"
        case str():
            return recipe
        case recipes.Float8BlockScaling():
            return f"{_ELEMENTS[recipe.element]} {recipe.block_m} × {recipe.block_k}"
        case recipes.Float8CurrentScaling():
            return _ELEMENTS[recipe.element] + (" per row" if recipe.granularity == "row" else "")
        case recipes.DelayedScaling():
            return _ELEMENTS[recipe.element]
        case recipes.INT4Scaling():
            return f"INT4 g{recipe.group_size}" + ("" if recipe.symmetric else " with zero points")
        case recipes.INT8Scaling():
            size = "per row" if recipe.group_size is None else f"g{recipe.group_size}"
            return f"INT8 {size}" + ("" if recipe.symmetric else " with zero points")
    return recipe.name.upper()


def activations_label(said: Any) -> str:
    """An `Activations` or a `KVCache`, such as "FP8 static", "FP8 per token dynamic", "NVFP4 local", "FP8 g128 dynamic,
    powers of two"."""
    scale = getattr(said, "scale", "float8_e4m3fn" if said.size == 16 else "float32")
    name = _ELEMENTS.get(said.element, said.element)
    if said.element == "float4_e2m1fn" and scale == "float8_e4m3fn":
        return f"NVFP4 {said.when}" + (" in two levels" if getattr(said, "two_level", False) else "")
    if scale == "float8_e8m0fnu" and said.size == 32:
        return f"MX{name.split()[0]} {said.when}"
    per = {"tensor": "", "group": f" g{said.size}"}.get(said.per, f" per {said.per}")
    text = f"{name}{per} {said.when}"
    text += "" if said.symmetric else " with zero points"
    text += ", powers of two" if scale == "float8_e8m0fnu" else ""
    bound = getattr(said, "bound", None)
    return text if bound is None else f"{text} up to {bound:g}"


# Roles of layers by the parts of their names; the first that matches.
_ROLES = (
    ("experts", re.compile(r"(^|\.)experts(\.|$)")),
    ("router", re.compile(r"(^|\.)(gate|router)$")),
    ("attention", re.compile(r"(^|\.)(self_attn|attn|attention|self_attention|cross_attn)(\.|$)")),
    ("embeddings", re.compile(r"(^|\.)(embed_tokens|wte|wpe|tok_embeddings|\w*embeddings?)(\.|$)")),
    ("head", re.compile(r"(^|\.)(lm_head|output|embed_out)$")),
    ("norms", re.compile(r"norm\w*$")),
    ("mlp", re.compile(r"(^|\.)(mlp|feed_forward|ffn)(\.|$)")),
)


def role_of(name: str) -> str:
    """What a module does in its model, by its name: "experts", "router", "attention", "embeddings", "head", "norms",
    "mlp" or "others"."""
    return next((role for role, pattern in _ROLES if pattern.search(name)), "others")
