# SPDX-License-Identifier: Apache-2.0
"""NVFP4 of weights alone, of compressed-tensors and ModelOpt: vLLM asks for Marlin by name, which a CPU has not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from breccia.recipes import NVFP4BlockScaling

__all__ = ["names_and_recipe"]

_PACKED = {"data": "weight_packed", "scale": "weight_scale", "global_scale": "weight_global_scale"}
_MODELOPT = {"data": "weight", "scale": "weight_scale", "global_scale": "weight_scale_2"}
_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


def names_and_recipe(said: Mapping[str, Any]) -> tuple[dict[str, str], NVFP4BlockScaling] | None:
    """What the stored tensors of a weight are called, by role, and its recipe; None where ``quantization_config`` is of
    another format, has scales of inputs, several groups or quantized caches."""
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    if any(said.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo", "transform_config")):
        return None
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"] or group.get("input_activations"):
        return None
    weights = group.get("weights")
    if not isinstance(weights, Mapping) or any(weights.get(key) != value for key, value in _WEIGHTS.items()):
        return None
    if said.get("quant_method") == "compressed-tensors" and said.get("format") == "nvfp4-pack-quantized":
        return _PACKED, NVFP4BlockScaling(global_scale_form="divisor")
    if said.get("quant_method") == "modelopt" and said.get("quant_algo") == "W4A16_NVFP4":
        return _MODELOPT, NVFP4BlockScaling()
    return None
