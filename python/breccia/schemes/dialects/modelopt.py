# SPDX-License-Identifier: Apache-2.0
"""ModelOpt's ``quant_algo``, ``exclude_modules`` and ``quantized_layers``, as version 0.47 exports them.

``quant_algo`` decides; ``config_groups``, its mirror in config.json, says less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from breccia import recipes
from breccia.bridges.checks import mapping
from breccia.schemes.dialects.common import LINEAR, Said, fp8, names, scales_of, skipped
from breccia.schemes.matching import Match
from breccia.schemes.rules import MXFP4_DYNAMIC, MXFP8_DYNAMIC, NVFP4_LOCAL, rules_of
from breccia.schemes.value import Activations, KVCache, ModelScheme, Rule

ENDINGS = {
    ".input_scale": ("input", "multiplier"),
    "_input_scale": ("input", "multiplier"),
    ".k_proj.k_scale": ("k", "multiplier"),
    ".v_proj.v_scale": ("v", "multiplier"),
    ".k_scale": ("k", "multiplier"),
    ".v_scale": ("v", "multiplier"),
}
SAID: dict[str, Any] = {
    "words": "quant_method quant_algo group_size ignore exclude_modules quantized_layers kv_cache_quant_algo "
    "kv_cache_scheme config_groups has_zero_point pre_quant_scale lora_rank producer",
    "names": ("quantized_layers",),
    "closed": ("config_groups", "kv_cache_scheme", "producer"),  # the first says less than quant_algo
}
_STATIC = fp8("tensor", "static")

# Algorithm → weights, inputs, whether inputs have factors. INT4's group is added.
_ALGORITHMS: dict[str, tuple[Any, Activations | None, bool]] = {
    "FP8": (recipes.Float8CurrentScaling(), _STATIC, False),
    "FP8_PER_CHANNEL_PER_TOKEN": (recipes.Float8CurrentScaling(granularity="row"), fp8("token", "dynamic"), False),
    "FP8_PB_WO": (recipes.Float8BlockScaling(block_m=128), fp8("group", "dynamic", size=128), False),
    "FP8_PB_REAL": (recipes.Float8BlockScaling(block_m=128), fp8("group", "dynamic", size=128), False),
    "NVFP4": (recipes.NVFP4BlockScaling(), NVFP4_LOCAL, False),
    "W4A16_NVFP4": (recipes.NVFP4BlockScaling(), None, False),
    "NVFP4_AWQ": (recipes.NVFP4BlockScaling(), NVFP4_LOCAL, True),
    "NVFP4_SVD": (recipes.NVFP4BlockScaling(), NVFP4_LOCAL, True),
    "W4A8_NVFP4_FP8": (recipes.NVFP4BlockScaling(), _STATIC, False),
    "W4A8_MXFP4_FP8": (recipes.MXFP4BlockScaling(), _STATIC, False),
    "W4A16_AWQ": (recipes.INT4Scaling(), None, True),
    "W4A8_AWQ": (recipes.INT4Scaling(), _STATIC, True),
    "W8A16": (recipes.INT8Scaling(), None, False),
    "W8A8_SQ_PER_CHANNEL": (recipes.INT8Scaling(), Activations("int8", "tensor", "static"), True),
    "MXFP8": (recipes.MXFP8BlockScaling(), MXFP8_DYNAMIC, False),
    "MXFP4": (recipes.MXFP4BlockScaling(), MXFP4_DYNAMIC, False),
}
CACHES = {
    "FP8": KVCache("float8_e4m3fn"),
    "INT8": KVCache("int8"),
    "NVFP4": KVCache("float4_e2m1fn", "group", "local", 16),
    "NVFP4_AFFINE": KVCache("float4_e2m1fn", "group", "local", 16, affine=True),
}


def scheme(said: Said) -> ModelScheme:
    """The scheme that ``quant_algo`` names."""
    told = said.quantization
    excluded = names(told.get("exclude_modules") or told.get("ignore"), "modelopt: exclude_modules")
    algorithm = str(told.get("quant_algo") or "").upper()
    rules = skipped(Match("glob" if "*" in one else "name", one) for one in excluded)
    if algorithm == "MIXED_PRECISION":
        rules += _mixed(mapping(told.get("quantized_layers") or {}, "modelopt: quantized_layers"), said)
    elif algorithm:
        rules.append(Rule(LINEAR, *meaning(algorithm, told, said)))
    raw = {key: value for key, value in told.items() if key not in SAID["words"].split()}
    return ModelScheme(tuple(rules), _cache(told), scales_of(said, ENDINGS), "modelopt", json.dumps(raw))


def _mixed(layers: Mapping[str, Any], said: Said) -> list[Rule]:
    meanings = {}
    for module, one in layers.items():
        part = mapping(one, f"modelopt: quantized_layers[{module[:80]!r}]")
        meanings[module] = meaning(str(part.get("quant_algo")).upper(), part, said)
    return rules_of(meanings)


def meaning(algorithm: str, part: Mapping[str, Any], said: Said) -> tuple[Any, ...]:
    """What an algorithm says of the layers that have it, see `Rule`."""
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"modelopt: quant_algo must be one of {', '.join(_ALGORITHMS)}, got {algorithm[:80]!r}")
    weights, inputs, factor = _ALGORITHMS[algorithm]
    size = part.get("group_size")
    if isinstance(weights, recipes.INT4Scaling) and type(size) is int:
        weights = recipes.INT4Scaling(group_size=size)
    rank = part.get("lora_rank") if algorithm == "NVFP4_SVD" else None
    stored = any(name.endswith(".pre_quant_scale") for name in said.entries)
    return weights, inputs, None, factor and stored, rank


def _cache(told: Mapping[str, Any]) -> KVCache | None:
    """``kv_cache_quant_algo``, or ``kv_cache_scheme`` in config.json: an object of 8 bits is FP8, others a string."""
    algorithm = told.get("kv_cache_quant_algo")
    mirror = told.get("kv_cache_scheme")
    if algorithm is None and isinstance(mirror, Mapping):
        algorithm = "FP8" if mirror.get("type") == "float" else "INT8"
    elif algorithm is None:
        algorithm = mirror
    if algorithm is None:
        return None
    if str(algorithm).upper() not in CACHES:
        raise ValueError(f"modelopt: kv_cache_quant_algo must be one of {', '.join(CACHES)}, got {algorithm!r}")
    return CACHES[str(algorithm).upper()]
