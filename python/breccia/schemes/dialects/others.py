# SPDX-License-Identifier: Apache-2.0
"""Formats whose configuration says little beside the weights: MLX, torchao, breccia's own; and checkpoints of which
nothing but tensors tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from breccia import recipes
from breccia.bridges.checks import mapping
from breccia.bridges.extra_state import ENDING, from_extra_state
from breccia.recipes import ScalingRecipe
from breccia.schemes.dialects.common import LINEAR, Said, fp8, names, scales_of, skipped, weights_as_stored
from breccia.schemes.inputs import inputs_for
from breccia.schemes.matching import Match
from breccia.schemes.rules import MXFP8_DYNAMIC, NVFP4_DYNAMIC, inputs_said, rules_of
from breccia.schemes.value import UNSAID, Activations, ModelScheme, Rule, StoredScale

TORCHAO = (
    "quant_method quant_type quant_type_kwargs modules_to_not_convert include_input_output_embeddings "
    "untie_embedding_weights"
)
MLX = "bits group_size mode quantize_activations"
ENDINGS = {".input_scale": ("input", "multiplier")}
_TORCHAO = dict.fromkeys(("._weight_act_per_tensor_scale", "._weight_act_quant_scale"), ("input", "multiplier"))


def scheme(said: Said) -> ModelScheme:
    """The scheme of a checkpoint."""
    told = said.quantization
    method = str(told.get("quant_method", "mlx" if "bits" in told else ""))
    if method == "breccia":
        return ModelScheme(tuple(_own(told, said)), UNSAID, scales_of(said, ENDINGS), method)
    if method == "comfyui" or any(name.endswith(".comfy_quant") for name in said.entries):
        return ModelScheme(tuple(_comfyui(told, said)), UNSAID, scales_of(said, ENDINGS), "comfyui")
    if method == "torchao":
        rules = [*skipped(Match("name", n) for n in names(told.get("modules_to_not_convert"), "torchao: modules"))]
        stored = weights_as_stored(said, _torchao(told))
        return ModelScheme((*rules, *stored), None, scales_of(said, _TORCHAO), method, json.dumps(told))
    if method == "mlx":
        return ModelScheme(tuple(weights_as_stored(said, _mlx(told))), UNSAID, (), method, json.dumps(dict(told)))
    states = _states(said) if not method else {}
    rules = weights_as_stored(said, UNSAID, lambda module: module not in states)
    rules += [Rule((Match("name", m),), said.weights.get(m), fp8("tensor", "static")) for m in states]
    return ModelScheme(tuple(rules), UNSAID, (*scales_of(said, ENDINGS), *states.values()), method)


def _states(said: Said) -> dict[str, StoredScale]:
    """Static scales of inputs in what TransformerEngine keeps beside weights, of layers with one product."""
    found = {}
    for name, entry in said.entries.items():
        module = name.removesuffix(ENDING)
        if module == name or entry.dtype != "U8" or f"{module}.weight" not in said.entries:
            continue
        try:
            scales = from_extra_state(said.array(said.stored.get(name, name)))
        except ValueError:
            continue  # a conversion says that it leaves the state out
        if len(scales) == 1:
            found[module] = StoredScale(module, "input", scales, "divisor", name, entry.dtype, tuple(entry.shape))
    return found


def _recipe(fields: Any, key: str) -> ScalingRecipe:
    try:
        return recipes.from_dict(mapping(fields, key))
    except TypeError as error:  # a field that is unknown, or of the wrong type
        raise ValueError(f"{key} must have the fields of a recipe: {error}") from None


def _own(told: Mapping[str, Any], said: Said) -> list[Rule]:
    """breccia's own: one recipe and one form of inputs, others by module, patterns that are ignored."""
    activations = told.get("activations")
    most: Activations | None = inputs_said(told.get("inputs"))
    if activations is not None:
        most = inputs_of(_recipe(activations, "activations"))
    left = names(told.get("ignore"), "ignore") + names(told.get("modules_to_not_convert"), "modules_to_not_convert")
    rules = skipped(Match("glob", one) for one in left)
    apart = {m: inputs_said(one) for m, one in mapping(told.get("module_inputs") or {}, "module_inputs").items()}
    own = {m: _recipe(one, "modules") for m, one in mapping(told.get("modules") or {}, "modules").items()}
    every = None if told.get("recipe") is None else _recipe(told["recipe"], "recipe")
    rules += rules_of({m: (own.get(m, every or said.weights.get(m)), apart.get(m, most)) for m in {**own, **apart}})
    return [*rules, *(weights_as_stored(said, most) if every is None else [Rule(LINEAR, every, most)])]


def _comfyui(told: Mapping[str, Any], said: Said) -> list[Rule]:
    """What config.json says of inputs where breccia wrote it; else what each layer's own JSON and tensors mean."""
    most, here = inputs_said(told.get("inputs")), "inputs" in told or "module_inputs" in told
    apart = {m: inputs_said(one) for m, one in mapping(told.get("module_inputs") or {}, "module_inputs").items()}
    meanings = {}
    for module, weights in said.weights.items():
        own = f"{module}.comfy_quant" in said.entries and not here
        meanings[module] = weights, _of_layer(module, weights, said) if own else apart.get(module, most)
    return rules_of(meanings)


def _of_layer(module: str, weights: Any, said: Said) -> Activations | None:
    """FP8 without a static scale is cast with the scale 1; others make scales of the inputs."""
    try:
        layer = json.loads(bytes(said.array(f"{module}.comfy_quant")))
    except (ValueError, RecursionError):
        return None
    if not isinstance(layer, dict) or layer.get("full_precision_matrix_mult") is True:
        return None
    static = f"{module}.input_scale" in said.entries
    fp8 = str(layer.get("format", "")).startswith("float8")
    try:
        return inputs_for(weights, "static" if static or fp8 else "dynamic")
    except ValueError:
        return None


def inputs_of(recipe: recipes.ScalingRecipe) -> Activations:
    """Dynamic activations in the form of a recipe that inputs are cast to each time."""
    sizes = (getattr(recipe, field, None) for field in ("group_size", "block_size", "block_k"))
    size = next((one for one in sizes if one), None)
    granularity = getattr(recipe, "granularity", "row" if recipe.name == "int8" else "tensor")
    per = "group" if size else "token" if granularity == "row" else "tensor"
    scale = recipes.scale_format(recipe) or "float32"
    return Activations(recipe.element, per, "dynamic", size, getattr(recipe, "symmetric", True), scale)


def _mlx(told: Mapping[str, Any]) -> Activations | None:
    if told.get("quantize_activations") is not True:
        return None
    return NVFP4_DYNAMIC if told.get("mode") == "nvfp4" else MXFP8_DYNAMIC


def _torchao(told: Mapping[str, Any]) -> Activations | None:
    """By the name of the configuration's class, of weights whose own tensors say nothing."""
    text = json.dumps(told.get("quant_type") or {})
    if "DynamicActivation" not in text:
        return None
    if "NVFP4" in text:
        return NVFP4_DYNAMIC
    if "MX" in text:
        return MXFP8_DYNAMIC
    if "Float8" in text:
        return fp8("token" if "PerRow" in text else "tensor", "dynamic")
    return Activations("int8", "token", "dynamic", symmetric="ASYMMETRIC" not in text)
