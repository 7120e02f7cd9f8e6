# SPDX-License-Identifier: Apache-2.0
"""Formats whose configuration says little beside the weights: MLX, torchao, breccia's own; and checkpoints of which
nothing but tensors tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from breccia import recipes
from breccia.bridges.checks import mapping
from breccia.schemes.dialects.common import LINEAR, Said, fp8, names, scales_of, skipped, weights_as_stored
from breccia.schemes.matching import Match
from breccia.schemes.value import UNSAID, Activations, ModelScheme, Rule

METHODS = ("torchao", "breccia", "mlx", "")

ENDINGS = {".input_scale": ("input", "multiplier")}


def scheme(said: Said) -> ModelScheme:
    """The scheme of a checkpoint.

    Raises:
        ValueError: its configuration is not of its form.
    """
    told = said.quantization
    method = str(told.get("quant_method", "mlx" if "bits" in told else ""))
    if method == "breccia":
        return ModelScheme(tuple(_own(told, said)), UNSAID, (), method)
    if method == "torchao":
        rules = [*skipped(Match("name", n) for n in names(told.get("modules_to_not_convert"), "torchao: modules"))]
        return ModelScheme((*rules, *weights_as_stored(said, _torchao(told))), None, (), method, json.dumps(told))
    if method == "mlx":
        return ModelScheme(tuple(weights_as_stored(said, _mlx(told))), UNSAID, (), method, json.dumps(dict(told)))
    return ModelScheme(tuple(weights_as_stored(said, UNSAID)), UNSAID, scales_of(said, ENDINGS), method)


def _own(told: Mapping[str, Any], said: Said) -> list[Rule]:
    """breccia's own: one recipe, others by module, patterns that are ignored."""
    activations = told.get("activations")
    inputs = None if activations is None else inputs_of(recipes.from_dict(mapping(activations, "activations")))
    left = names(told.get("ignore"), "ignore") + names(told.get("modules_to_not_convert"), "modules_to_not_convert")
    rules = skipped(Match("glob", one) for one in left)
    for module, part in mapping(told.get("modules") or {}, "modules").items():
        rules.append(Rule((Match("name", module),), recipes.from_dict(mapping(part, "modules")), inputs))
    if told.get("recipe") is None:
        return rules + weights_as_stored(said, inputs)
    return [*rules, Rule(LINEAR, recipes.from_dict(mapping(told["recipe"], "recipe")), inputs)]


def inputs_of(recipe: recipes.ScalingRecipe) -> Activations:
    """Inputs that are cast to a recipe each time.

    Args:
        recipe: of the inputs.

    Returns:
        Dynamic activations of that form.
    """
    sizes = (getattr(recipe, field, None) for field in ("group_size", "block_size", "block_k"))
    size = next((one for one in sizes if one), None)
    granularity = getattr(recipe, "granularity", "row" if recipe.name == "int8" else "tensor")
    per = "group" if size else "token" if granularity == "row" else "tensor"
    scale = recipes.scale_format(recipe) or "float32"
    return Activations(recipe.element, per, "dynamic", size, getattr(recipe, "symmetric", True), scale)


def _mlx(told: Mapping[str, Any]) -> Activations | None:
    if told.get("quantize_activations") is not True:
        return None
    if told.get("mode") == "nvfp4":
        return Activations("float4_e2m1fn", "group", "dynamic", 16, scale="float8_e4m3fn")
    return fp8("group", "dynamic", size=32, scale="float8_e8m0fnu")


def _torchao(told: Mapping[str, Any]) -> Activations | None:
    """By the name of the configuration's class."""
    text = json.dumps(told.get("quant_type") or {})
    if "DynamicActivation" not in text:
        return None
    if "NVFP4" in text:
        return Activations("float4_e2m1fn", "group", "dynamic", 16, scale="float8_e4m3fn")
    if "MX" in text:
        return fp8("group", "dynamic", size=32, scale="float8_e8m0fnu")
    if "Float8" in text:
        return fp8("token" if "PerRow" in text else "tensor", "dynamic")
    return Activations("int8", "token", "dynamic", symmetric="ASYMMETRIC" not in text)
