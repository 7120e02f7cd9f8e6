# SPDX-License-Identifier: Apache-2.0
"""FP8 as vLLM, DeepSeek and transformers say it (``quant_method: fp8``), FBGEMM's, and gpt-oss' MXFP4."""

from __future__ import annotations

import json
from typing import Any

from breccia.bridges.checks import numbers, real
from breccia.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP4BlockScaling
from breccia.schemes.dialects import modelopt
from breccia.schemes.dialects.common import LINEAR, Said, component, fp8, names, scales_of, skipped, weights_as_stored
from breccia.schemes.matching import Match
from breccia.schemes.rules import MXFP8_DYNAMIC
from breccia.schemes.value import UNSAID, Activations, KVCache, ModelScheme, Rule, Unsaid

ENDINGS = {
    ".input_scale": ("input", "multiplier"),
    ".activation_scale": ("input", "multiplier"),
    ".k_scale": ("k", "multiplier"),
    ".v_scale": ("v", "multiplier"),
    ".kv_scale": ("kv", "multiplier"),
}
SAID: dict[str, Any] = {
    "words": "quant_method activation_scheme weight_block_size modules_to_not_convert modules_to_convert "
    "ignored_layers fmt scale_fmt activation_scale_ub dequantize expert_dtype kv_cache_scheme moe_quant_algo",
}


def scheme(said: Said) -> ModelScheme:
    """The scheme that ``quantization_config`` describes."""
    told = said.quantization
    left = names(told.get("modules_to_not_convert") or told.get("ignored_layers"), "modules_to_not_convert")
    rules = skipped(map(component, left))
    method = told.get("quant_method")
    if method == "mxfp4":
        rules += weights_as_stored(said, UNSAID)
    elif method == "mxfp8":
        rules += weights_as_stored(said, MXFP8_DYNAMIC)
    else:
        experts = (Match("regex", r"(.*\.)?experts\..*"),)
        if algorithm := told.get("moe_quant_algo"):
            rules.append(Rule(experts, *modelopt.meaning(str(algorithm).upper(), told, said)))
        elif said.config.get("expert_dtype") == "fp4":
            rules.append(Rule(experts, MXFP4BlockScaling(), UNSAID))
        rules.append(Rule(LINEAR, *_fp8(said)))
    raw = {key: value for key, value in told.items() if key not in SAID["words"].split()}
    return ModelScheme(tuple(rules), _cache(told), scales_of(said, ENDINGS), str(method), json.dumps(raw))


def _cache(told: Any) -> KVCache | Unsaid:
    """AutoFP8 says "static" of caches of FP8; others leave them to the program."""
    how = told.get("kv_cache_scheme")
    if how not in (None, "static"):
        raise ValueError(f'fp8: kv_cache_scheme must be "static" or null, got {str(how)[:80]!r}')
    return UNSAID if how is None else KVCache("float8_e4m3fn")


def _fp8(said: Said) -> tuple[Any, Activations]:
    told = said.quantization
    if told.get("quant_method") == "fbgemm_fp8":
        bound = told.get("activation_scale_ub")
        limit = None if bound is None else real(bound, "fbgemm_fp8: activation_scale_ub")
        return Float8CurrentScaling(granularity="row"), fp8("token", "dynamic", bound=limit)
    block, how = told.get("weight_block_size"), told.get("activation_scheme", "dynamic")
    if how not in ("dynamic", "static"):
        raise ValueError(f'fp8: activation_scheme must be "dynamic" or "static", got {str(how)[:80]!r}')
    if block is None:
        return Float8CurrentScaling(), fp8("tensor", "static") if how == "static" else fp8("token", "dynamic")
    rows, columns = numbers(block, "fp8: weight_block_size", 2)
    powers = told.get("scale_fmt") == "ue8m0"
    weights = Float8BlockScaling(block_m=rows, block_k=columns, scale_format="e8m0" if powers else "fp32")
    scale = "float8_e8m0fnu" if powers else "float32"
    return weights, fp8("group", "dynamic", size=columns, scale=scale)
