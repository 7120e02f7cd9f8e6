# SPDX-License-Identifier: Apache-2.0
"""AMD Quark's ``quantization_config``: a configuration for each layer, class of layers, or the whole model, in this
order, and what is excluded, which wins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from breccia import recipes
from breccia.bridges.checks import mapping, number
from breccia.recipes import ScalingRecipe
from breccia.schemes.dialects.common import LINEAR, Said, names, scales_of, skipped
from breccia.schemes.matching import Match
from breccia.schemes.value import Activations, KVCache, ModelScheme, Rule

ENDINGS = {
    ".input_scale": ("input", "multiplier"),
    ".input_scale_2": ("input", "multiplier"),
    ".k_proj.output_scale": ("k", "multiplier"),
    ".v_proj.output_scale": ("v", "multiplier"),
    ".q_proj.output_scale": ("q", "multiplier"),
    ".prob_output_scale": ("prob", "multiplier"),
}
_ELEMENTS = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4": "float4_e2m1fn",
    "fp6_e2m3": "float6_e2m3fn",
    "fp6_e3m2": "float6_e3m2fn",
    "int8": "int8",
    "uint8": "uint8",
    "int4": "int4",
    "uint4": "uint4",
}
_PER = {"per_tensor": "tensor", "per_channel": "token", "per_group": "group", "per_block": "block"}
SAID: dict[str, Any] = {
    "words": "quant_method global_quant_config layer_type_quant_config layer_quant_config exclude "
    "kv_cache_quant_config export weight input_tensors output_tensors bias target_device dtype qscheme ch_axis "
    "group_size block_size symmetric is_dynamic scale_format scale_type scale_calculation_mode round_method "
    "observer_cls mx_element_dtype is_scale_quant zero_point_type quant_mode version",
    "names": ("layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config"),
    "closed": ("export",),
}


def scheme(said: Said) -> ModelScheme:
    """The scheme that ``quantization_config`` describes."""
    told = said.quantization
    rules = skipped(_excluded(one) for one in names(told.get("exclude"), "quark: exclude"))
    for key, kind in (("layer_quant_config", "glob"), ("layer_type_quant_config", "class")):
        for pattern, part in mapping(told.get(key) or {}, f"quark: {key}").items():
            rules.append(Rule((Match(kind, pattern),), *_meaning(mapping(part, f"quark: {key}"))))
    if (every := told.get("global_quant_config")) is not None:
        rules.append(Rule(LINEAR, *_meaning(mapping(every, "quark: global_quant_config"))))
    raw = {key: value for key, value in told.items() if key not in SAID["words"].split()}
    return ModelScheme(tuple(rules), _cache(told), scales_of(said, ENDINGS), "quark", json.dumps(raw))


def _excluded(text: str) -> Match:
    if text.startswith("re:"):
        return Match("regex-start", text[3:])
    return Match("glob" if "*" in text else "name", text)


def _meaning(part: Mapping[str, Any]) -> tuple[Any, ...]:
    weights = part.get("weight")
    return (
        None if weights is None else _weight(weights),
        _activations(part.get("input_tensors")),
        _activations(part.get("output_tensors")),
    )


def _levels(part: Any) -> list[Mapping[str, Any]]:
    """A specification is one level, or a list of two: a tensor's and its blocks'."""
    every = part if isinstance(part, (list, tuple)) else [part]
    return [mapping(one, "quark: a specification") for one in every]


def _weight(part: Any) -> ScalingRecipe | str:
    levels = _levels(part)
    last = levels[-1]
    dtype, how = str(last.get("dtype")), str(last.get("qscheme"))
    size, symmetric = last.get("group_size"), last.get("symmetric", True) is not False
    if len(levels) > 1:
        kinds = {str(one.get("dtype")) for one in levels}
        return recipes.NVFP4BlockScaling() if "fp4" in kinds else " + ".join(sorted(kinds))
    if dtype == "fp4":
        return recipes.MXFP4BlockScaling()
    if dtype.startswith("fp6"):
        return recipes.MXFP6BlockScaling(fp6_format=dtype[4:].upper())
    if dtype.startswith("fp8") and how == "per_block":
        rows, columns = last.get("block_size") or (128, 128)
        return recipes.Float8BlockScaling(
            block_m=number(rows, "quark: block_size"), block_k=number(columns, "block_size")
        )
    if dtype.startswith("fp8") and how in ("per_tensor", "per_channel"):
        return recipes.Float8CurrentScaling(granularity="row" if how == "per_channel" else "tensor")
    if dtype.endswith("int4") and how == "per_group":
        return recipes.INT4Scaling(group_size=number(size, "quark: group_size"), symmetric=symmetric, signed=symmetric)
    if dtype == "int8" and how in ("per_channel", "per_group"):
        group = number(size, "quark: group_size") if how == "per_group" else None
        return recipes.INT8Scaling(group_size=group, symmetric=symmetric)
    return f"{dtype.upper()} {how.replace('_', ' ')}"


def _activations(part: Any) -> Activations | None:
    if part is None:
        return None
    levels = _levels(part)
    last = levels[-1]
    per = _known(last, "qscheme", _PER)
    two = len(levels) > 1
    when = "local" if two else "dynamic" if last.get("is_dynamic") else "static"
    scale = "float8_e4m3fn" if two else "float8_e8m0fnu" if last.get("scale_format") == "e8m0" else "float32"
    size = number(last.get("group_size"), "quark: group_size") if per == "group" else None
    element = _known(last, "dtype", _ELEMENTS)
    return Activations(element, per, when, size, last.get("symmetric", True) is not False, scale)


def _known(part: Mapping[str, Any], key: str, table: Mapping[str, str]) -> str:
    """What one of quark's words means."""
    word = str(part.get(key))
    if word not in table:
        raise ValueError(f"quark: {key} must be one of {', '.join(table)}, got {word[:80]!r}")
    return table[word]


def _cache(told: Mapping[str, Any]) -> KVCache | None:
    """The outputs of the layers that make keys and values: one form for all of them."""
    every = mapping(told.get("kv_cache_quant_config") or {}, "quark: kv_cache_quant_config")
    for part in every.values():
        outputs = mapping(part, "quark: kv_cache_quant_config").get("output_tensors")
        if outputs is not None:
            last = _levels(outputs)[-1]
            return KVCache(
                _known(last, "dtype", _ELEMENTS),
                _known(last, "qscheme", _PER),
                "dynamic" if last.get("is_dynamic") else "static",
            )
    return None
