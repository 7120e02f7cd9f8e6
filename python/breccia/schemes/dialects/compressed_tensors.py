# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' ``config_groups``, as ``compressed_tensors.quantization`` 0.20 defines them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from breccia import recipes
from breccia.bridges.checks import mapping, number
from breccia.recipes import ScalingRecipe
from breccia.schemes.dialects.common import Said, names, scales_of, skipped
from breccia.schemes.matching import Match
from breccia.schemes.value import Activations, KVCache, ModelScheme, Rule

ENDINGS = {
    ".input_scale": ("input", "multiplier"),
    ".input_global_scale": ("input", "divisor"),
    ".output_scale": ("output", "multiplier"),
    ".k_scale": ("k", "multiplier"),
    ".v_scale": ("v", "multiplier"),
    ".q_scale": ("q", "multiplier"),
}
_WHAT = "compressed-tensors: config_groups"
SAID: dict[str, Any] = {
    "words": "quant_method format ignore config_groups kv_cache_scheme quantization_status version "
    "global_compression_ratio sparsity_config transform_config targets weights input_activations "
    "output_activations num_bits type strategy group_size block_structure symmetric dynamic scale_dtype zp_dtype "
    "actorder observer observer_kwargs run_compressed dequantize use_optimized_inference",
    "closed": ("observer_kwargs", "transform_config"),
    "names": ("config_groups",),
}


def scheme(said: Said) -> ModelScheme:
    """The scheme that ``quantization_config`` describes."""
    told = said.quantization
    rules = skipped(target(one) for one in names(told.get("ignore"), "compressed-tensors: ignore"))
    ranked: list[tuple[int, str, Rule]] = []
    for name, group in mapping(told.get("config_groups") or {}, _WHAT).items():
        if not isinstance(group, Mapping):
            raise ValueError(f"{_WHAT}.{name} must be an object, presets by name are not read, got {str(group)[:80]}")
        meaning = _meaning(group, str(group.get("format") or told.get("format") or ""))
        for one in names(group.get("targets"), f"{_WHAT}.{name}.targets"):
            match = target(one)
            rank = ("name", "regex-start", "class").index(match.kind)
            # Expressions are tried in the order of the alphabet, names and classes have no order.
            ranked.append((rank, one if rank == 1 else "", Rule((match,), *meaning)))
    rules += _joined([rule for _, _, rule in sorted(ranked, key=lambda one: one[:2])])
    kv = told.get("kv_cache_scheme")
    raw = {key: value for key, value in told.items() if key not in SAID["words"].split() or key == "transform_config"}
    # What is of no weights, such as the classes of attention, and other caches than FP8's stay as they are said.
    apart = {name: group for name, group in (told.get("config_groups") or {}).items() if group.get("weights") is None}
    raw |= {"config_groups": apart} if apart else {}
    kept = None if kv is None else cache(mapping(kv, "compressed-tensors: kv_cache_scheme"))
    raw |= {} if kept in (None, KVCache("float8_e4m3fn")) else {"kv_cache_scheme": kv}
    return ModelScheme(
        tuple(rules),
        kept,
        scales_of(said, ENDINGS),
        "compressed-tensors",
        json.dumps(raw),
    )


def target(text: str) -> Match:
    """A target or an entry of ``ignore``: ``re:`` matches from the start; a name without dots may be a class."""
    if text.startswith("re:"):
        return Match("regex-start", text[3:])
    return Match("class", text) if text[:1].isupper() and "." not in text else Match("name", text)


def _joined(rules: list[Rule]) -> list[Rule]:
    """Neighbours of one meaning as one rule."""
    joined: list[Rule] = []
    for rule in rules:
        if joined and joined[-1].meaning == rule.meaning:
            joined[-1] = Rule(joined[-1].match + rule.match, *rule.meaning)
        else:
            joined.append(rule)
    return joined


def _meaning(group: Mapping[str, Any], form: str) -> tuple[Any, ...]:
    weights = group.get("weights")
    return (
        None if weights is None else weight(mapping(weights, f"{_WHAT}.weights"), form),
        activations(group.get("input_activations"), "input_activations"),
        activations(group.get("output_activations"), "output_activations"),
    )


def weight(part: Mapping[str, Any], form: str = "") -> ScalingRecipe | str:
    """The recipe of a group's ``weights``; the name of the format where no recipe makes it."""
    bits, kind, how = part.get("num_bits"), part.get("type"), part.get("strategy")
    size = part.get("group_size")
    symmetric = part.get("symmetric", True) is not False
    mx = "mx" in form or "uint8" in str(part.get("scale_dtype")) or "e8m0" in str(part.get("scale_dtype"))
    if kind == "float" and how == "tensor_group" and bits == 4:
        return recipes.NVFP4BlockScaling(global_scale_form="divisor")
    if kind == "float" and (bits in (4, 6) or (bits == 8 and mx)):
        return {4: recipes.MXFP4BlockScaling, 6: recipes.MXFP6BlockScaling, 8: recipes.MXFP8BlockScaling}[bits]()
    if kind == "float" and bits == 8:
        if how == "block":
            rows, columns = part.get("block_structure") or (128, 128)
            return recipes.Float8BlockScaling(block_m=number(rows, _WHAT), block_k=number(columns, _WHAT))
        if how == "group":
            return recipes.Float8BlockScaling(block_k=number(size, f"{_WHAT}.group_size"))
        return recipes.Float8CurrentScaling(granularity="row" if how == "channel" else "tensor")
    if kind == "int" and bits == 4 and how == "group":
        size = number(size, f"{_WHAT}.group_size")
        return recipes.INT4Scaling(group_size=size, symmetric=symmetric, signed=symmetric)
    if kind == "int" and bits == 8 and how in ("channel", "group"):
        return recipes.INT8Scaling(group_size=number(size, _WHAT) if how == "group" else None, symmetric=symmetric)
    return f"{'INT' if kind == 'int' else 'FP'}{bits} per {how}"


def activations(part: Any, what: str) -> Activations | None:
    """One of a group's ``input_activations`` or ``output_activations``."""
    if part is None:
        return None
    said = mapping(part, f"{_WHAT}.{what}")
    return Activations(**_shared(said), scale=_scale(said))


def cache(part: Mapping[str, Any]) -> KVCache:
    """A ``kv_cache_scheme``."""
    return KVCache(**_shared(part))


def _shared(part: Mapping[str, Any]) -> dict[str, Any]:
    dynamic, how = part.get("dynamic", False), part.get("strategy") or "tensor"
    kinds = {
        "tensor": "tensor",
        "token": "token",
        "channel": "token",
        "group": "group",
        "tensor_group": "group",
        "attn_head": "head",
    }
    if how not in kinds:
        raise ValueError(f"{_WHAT}: strategy of activations must be one of {', '.join(kinds)}, got {how!r}")
    per = kinds[how]
    return {
        "element": _element(part),
        "per": per,
        "when": {True: "dynamic", "local": "local"}.get(dynamic, "static"),
        "size": number(part.get("group_size"), f"{_WHAT}.group_size") if per == "group" else None,
        "symmetric": part.get("symmetric", True) is not False,
    }


def _element(part: Mapping[str, Any]) -> str:
    bits = number(part.get("num_bits", 8), f"{_WHAT}.num_bits")
    if part.get("type") == "float":
        return {4: "float4_e2m1fn", 6: "float6_e2m3fn", 8: "float8_e4m3fn"}.get(bits, f"float{bits}")
    return f"int{bits}"


def _scale(part: Mapping[str, Any]) -> str:
    if part.get("strategy") == "tensor_group":
        return "float8_e4m3fn"
    dtype = str(part.get("scale_dtype"))
    return "float8_e8m0fnu" if "uint8" in dtype or "e8m0" in dtype else "float32"
