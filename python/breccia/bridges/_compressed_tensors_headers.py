# SPDX-License-Identifier: Apache-2.0
"""How compressed-tensors' checkpoints are recognised from headers, and what their config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from breccia.bridges._checks import FLOATS, check_axes
from breccia.bridges._common import FP8_DTYPES, fp8_recipe, group_size_of, row_blocks, scale_name
from breccia.bridges._compressed_tensors_integers import NAME, int8_recipe, stored_shape
from breccia.bridges._fnuz import FNUZ_DTYPES
from breccia.bridges._parts import Found
from breccia.bridges._written import Written
from breccia.layouts import Layout, PerBlockMN
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


def nvfp4_recipe(two_level: bool) -> NVFP4BlockScaling:
    """NVFP4 as this format stores it."""
    return NVFP4BlockScaling(two_level=two_level, global_scale_form="divisor" if two_level else "multiplier")


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    if not name.endswith("weight_scale"):
        return None
    prefix = name.removesuffix("weight_scale")
    scale = entries[name]
    packed = entries.get(prefix + "weight_packed")
    weight = packed or entries.get(prefix + "weight")
    if weight is None or prefix + "weight_scale_2" in entries:
        return None
    said = context.get("quantization_config") or {}
    if not packed and said.get("quant_method") == "modelopt":
        return None
    if said.get("quant_method") == "quark" and weight.dtype == "U8" and scale.dtype in ("U8", "F8_E8M0"):
        if "fp6_e3m2" in str(said):
            return None
        packed = weight  # Quark packs codes of 4 and 6 bits alike, under the name of others
    check_axes(1, weight)
    parts = {"weight_packed" if packed else "weight": weight.name, "weight_scale": name}
    for role in ("weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx"):
        if prefix + role in entries:
            parts[role] = prefix + role
    findings: list[str] = []
    bits = _bits(said)
    found = _find_packed(prefix, parts, weight, scale, bits, findings) if packed else _find_plain(parts, weight, scale)
    if found is None:
        return None
    kind, shape, recipe, layout, dtype = found
    if "weight_g_idx" in parts:
        recipe = layout = None
        findings.append("weight_g_idx: activation order is not supported in this format")
    options = {"kind": kind}
    if fp8_format := (FP8_DTYPES | FNUZ_DTYPES).get(weight.dtype):
        options["fp8_format"] = fp8_format
    if "weight_global_scale" in parts:
        parts["global_scale"] = parts["weight_global_scale"]
    return Found(
        prefix + "weight",
        NAME,
        kind,
        parts,
        shape,
        recipe,
        layout,
        dtype,
        options=options,
        findings=tuple(findings),
    )


_Kind = tuple[str, tuple[int, ...], ScalingRecipe | None, Layout | None, str]


def _bits(said: Mapping[str, Any]) -> int | None:
    """Width of packed integers, where config.json has one for all groups."""
    groups = said.get("config_groups")
    schemes = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    widths = [s.get("num_bits") for s in schemes if isinstance(s, dict)]
    return next((bits for bits in (4, 8) if widths and all(width == bits for width in widths)), None)


def _find_packed(
    prefix: str, parts: dict[str, str], weight: Any, scale: Any, said_bits: int | None, findings: list[str]
) -> _Kind | None:
    stored, groups = weight.shape, scale.shape[-1] if scale.shape else 1
    if groups == 0:
        raise ValueError(f"{scale.name} must have entries along each axis, got shape {scale.shape}")
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        shape = (*stored[:-1], stored[-1] * 2)
        if "weight_global_scale" not in parts:
            findings.append(f"{prefix}weight_global_scale is missing: NVFP4 values would be off by a constant factor")
        recipe = nvfp4_recipe("weight_global_scale" in parts)
        return "nvfp4", shape, recipe, PerBlockMN(1, 16), "uint8"
    if weight.dtype == "U8" and scale.dtype in ("U8", "F8_E8M0"):
        if stored[-1] * 2 == groups * 32:
            return "mxfp4", (*stored[:-1], stored[-1] * 2), MXFP4BlockScaling(), PerBlockMN(1, 32), "uint8"
        if stored[-1] * 4 == groups * 32 * 3:
            return "mxfp6", (*stored[:-1], groups * 32), MXFP6BlockScaling(), PerBlockMN(1, 32), "uint8"
        return None
    if weight.dtype == "I32" and scale.dtype in FLOATS:
        dtype = FLOATS[scale.dtype]
        symmetric = "weight_zero_point" not in parts
        columns = stored[-1] * 8
        # weight_shape is data; where headers and config.json leave 4 or 8 bits open, groups decide.
        bits = said_bits or (4 if groups == 1 or (columns % groups == 0 and columns // groups >= 16) else 8)
        columns = stored[-1] * 32 // bits
        if bits == 8:
            recipe8, layout8 = int8_recipe((*stored[:-1], columns), scale.shape, dtype, symmetric)
            return "int8-packed", (*stored[:-1], columns), recipe8, layout8, dtype
        size = group_size_of(columns, groups, "weight_scale")
        recipe4 = INT4Scaling(group_size=size, signed=symmetric, symmetric=symmetric, scale_dtype=scale_name(dtype))
        return "int4", (*stored[:-1], columns), recipe4, row_blocks(size, columns), dtype
    return None


def _find_plain(parts: dict[str, str], weight: Any, scale: Any) -> _Kind | None:
    if weight.dtype in FP8_DTYPES and scale.dtype in ("U8", "F8_E8M0"):
        if scale.shape != (*weight.shape[:-1], -(-weight.shape[-1] // 32)):
            return None
        recipe8 = MXFP8BlockScaling(fp8_format=FP8_DTYPES[weight.dtype])
        return "mxfp8", weight.shape, recipe8, PerBlockMN(1, 32), "uint8"
    if scale.dtype not in FLOATS:
        return None
    dtype = FLOATS[scale.dtype]
    if weight.dtype == "I8":
        recipe, layout = int8_recipe(weight.shape, scale.shape, dtype, "weight_zero_point" not in parts)
        return "int8", weight.shape, recipe, layout, dtype
    if weight.dtype in FNUZ_DTYPES:
        fp8_recipe(FNUZ_DTYPES[weight.dtype], weight.shape, scale.shape, dtype)  # raises what is wrong with the scale
        return "fp8-fnuz", weight.shape, None, None, dtype
    if weight.dtype in FP8_DTYPES:
        recipe, layout, _ = fp8_recipe(FP8_DTYPES[weight.dtype], weight.shape, scale.shape, dtype)
        return "fp8", weight.shape, recipe, layout, dtype
    return None


def refine(found: Found, array: Any) -> Found:
    """The shape and width of packed integers, which ``weight_shape`` says and headers do not."""
    if "weight_shape" not in found.parts or found.recipe is None:
        return found
    shape = stored_shape(array(found.parts["weight_shape"]))
    packed = array(found.parts["weight_packed"])
    cols = packed.shape[-1]
    scale = array(found.parts["weight_scale"])
    symmetric = "weight_zero_point" not in found.parts
    if len(shape) < 2 or min(shape) <= 0:
        raise ValueError(f"weight_shape must be a matrix's, got {shape}")
    if shape[:-1] != packed.shape[:-1] or cols not in (-(-shape[-1] // 8), -(-shape[-1] // 4)):
        raise ValueError(f"weight_shape must be that of {packed.shape} words of 8 or 4 integers, got {shape}")
    if -(-shape[-1] * 4 // 32) != cols:
        recipe, layout = int8_recipe(shape, scale.shape, scale.dtype.name, symmetric)
        return replace(found, shape=shape, recipe=recipe, layout=layout)
    if scale.ndim == 0:
        raise ValueError(f"{found.parts['weight_scale']} must have at least one axis, got shape ()")
    size = group_size_of(shape[-1], scale.shape[-1], "weight_scale")
    dtype = scale_name(scale.dtype.name)
    recipe = INT4Scaling(size, signed=symmetric, symmetric=symmetric, scale_dtype=dtype)
    return replace(found, shape=shape, recipe=recipe, layout=row_blocks(size, shape[-1]))


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: a group for each recipe, by the names of its modules where
    there are several (the class of a fused layer would else be found before the names of its parts)."""
    groups = written.groups()
    formats = [_format(recipe) for recipe, _ in groups]
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": written.ignored,
            "kv_cache_scheme": None,
            "config_groups": {
                f"group_{i}": {
                    "targets": ["Linear"] if len(groups) == 1 else modules,
                    "weights": _weights(recipe),
                    "input_activations": _inputs(recipe),
                    "format": fmt,
                }
                for i, ((recipe, modules), fmt) in enumerate(zip(groups, formats, strict=True))
            },
        }
    }


def _format(recipe: ScalingRecipe) -> str:
    match recipe:
        case NVFP4BlockScaling():
            return "nvfp4-pack-quantized"
        case MXFP4BlockScaling() | MXFP6BlockScaling():
            return f"{recipe.name}-pack-quantized"
        case MXFP8BlockScaling():
            return "mxfp8-quantized"
        case INT4Scaling() | INT8Scaling():
            return "pack-quantized"
        case _:
            return "float-quantized"


def _weights(recipe: ScalingRecipe) -> dict[str, Any]:
    said: dict[str, Any] = {"dynamic": False, "symmetric": True, "observer": "minmax"}
    match recipe:
        case NVFP4BlockScaling():
            said |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            return said | {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        case MXFP4BlockScaling() | MXFP6BlockScaling() | MXFP8BlockScaling():
            bits = {"mxfp4": 4, "mxfp6": 6, "mxfp8": 8}[recipe.name]
            said |= {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
            return said | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        case INT4Scaling():
            said |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": recipe.group_size}
            return said | {"symmetric": recipe.symmetric}
        case INT8Scaling():
            said |= {"num_bits": 8, "type": "int", "symmetric": recipe.symmetric}
            return said | _strategy(recipe.group_size)
        case Float8BlockScaling() if recipe.block_m > 1:
            said |= {"num_bits": 8, "type": "float", "strategy": "block"}
            return said | {"block_structure": [recipe.block_m, recipe.block_k]}
        case Float8BlockScaling():
            return said | {"num_bits": 8, "type": "float", "strategy": "group", "group_size": recipe.block_k}
        case _:
            row = getattr(recipe, "granularity", "tensor") == "row"
            return said | {"num_bits": 8, "type": "float", "strategy": "channel" if row else "tensor"}


def _inputs(recipe: ScalingRecipe) -> dict[str, Any] | None:
    """How a program may quantize activations: of tiles alone, which vLLM loads with dynamic groups of activations and
    not as weights alone; the scheme is compressed-tensors' own FP8_BLOCK."""
    if not isinstance(recipe, Float8BlockScaling) or recipe.block_m == 1:
        return None
    said = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": recipe.block_k}
    return {**said, "symmetric": True, "dynamic": True}


def _strategy(group_size: int | None) -> dict[str, Any]:
    return {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
