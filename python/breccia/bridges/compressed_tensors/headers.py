# SPDX-License-Identifier: Apache-2.0
"""How compressed-tensors' checkpoints are recognised from headers, and what their config.json says."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

from breccia import recipes
from breccia.bridges.checks import FLOATS, check_axes, shown
from breccia.bridges.compressed_tensors import integers
from breccia.bridges.compressed_tensors.integers import NAME
from breccia.bridges.fp8 import FNUZ_DTYPES, FP8_DTYPES, fp8_recipe
from breccia.bridges.integers import order_of_columns
from breccia.bridges.parts import Found
from breccia.bridges.written import FP8_INPUTS, INT8_INPUTS, NVFP4_INPUTS, InputScale, Written
from breccia.layouts import Layout, PerBlockMN
from breccia.recipes import ScalingRecipe
from breccia.schemes.dialects.compressed_tensors import target
from breccia.schemes.matching import Match
from breccia.schemes.value import Activations, KVCache

_OF_16, _OF_32 = PerBlockMN(1, 16), PerBlockMN(1, 32)


@functools.cache
def nvfp4_recipe(two_level: bool) -> recipes.NVFP4BlockScaling:
    """NVFP4 as this format stores it."""
    return recipes.NVFP4BlockScaling(two_level=two_level, global_scale_form="divisor" if two_level else "multiplier")


@dataclass(frozen=True, slots=True)
class Details:
    """What config.json and headers say of a tensor: see `from_compressed_tensors`."""

    fp8_format: str | None = None
    symmetric: bool = False


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    prefix = name.removesuffix("weight_scale")
    scale = entries[name]
    packed = entries.get(prefix + "weight_packed")
    weight = packed or entries.get(prefix + "weight")
    if weight is None or prefix + "weight_scale_2" in entries:
        return None
    said = context.get("quantization_config") or {}
    check_axes(1, weight)
    _check_formats(said)
    parts = {"weight_packed" if packed else "weight": weight.name, "weight_scale": name}
    for role in ("weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx"):
        if prefix + role in entries:
            parts[role] = prefix + role
    if weight.dtype == "I8" and prefix + "weight_offset" in entries and said.get("quant_method") != NAME:
        parts["weight_offset"] = prefix + "weight_offset"  # of ModelSlim, see `refine`
        if said.get("quant_method") == _MODELSLIM:
            raise ValueError(f"quant_model_description.json must say {', '.join(_TYPES)} alone, got {shown(said)}")
    findings: list[str] = []
    bits = _said_by_all(said, "num_bits")
    symmetric = _said_by_all(said, "symmetric")
    if symmetric is False and "weight_zero_point" not in parts and weight.dtype in ("I32", "I8"):
        raise ValueError(f"{prefix}weight_zero_point must be there where config.json says symmetric false, it is not")
    if weight.dtype == "F4" and scale.dtype in ("U8", "F8_E8M0", "F8_E4M3"):  # a type of its own for packed codes
        if weight.shape[-1] % 2:
            raise ValueError(f"{weight.name} must have an even number of columns, got shape {weight.shape}")
        packed = weight = SimpleNamespace(
            name=weight.name, dtype="U8", shape=(*weight.shape[:-1], weight.shape[-1] // 2)
        )
        parts = {"weight_packed": weight.name, **{role: name for role, name in parts.items() if role != "weight"}}
    if packed:
        found = _find_packed(prefix, parts, weight, scale, bits, findings)
    else:
        found = _find_plain(parts, weight, scale, _bits_in_bytes(prefix[:-1], said) if weight.dtype == "I8" else 8)
    if found is None:
        return None
    kind, shape, recipe, layout, dtype = found
    if "weight_g_idx" in parts:
        recipe = None  # the columns' order has no ScaledTensor form
        findings.append("columns are in order of activation (weight_g_idx)")
    fp8_format = (FP8_DTYPES | FNUZ_DTYPES).get(weight.dtype)
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
        details=Details(fp8_format, symmetric is True and "weight_zero_point" in parts),
        findings=tuple(findings),
    )


_Kind = tuple[str, tuple[int, ...], ScalingRecipe | None, Layout | None, str]


# Formats of files that are read here; "dense" and "mixed-precision" leave it to the groups.
_FORMATS = (
    "dense",
    "mixed-precision",
    "naive-quantized",
    "int-quantized",
    "float-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
)


def _groups(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = said.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _check_formats(said: Mapping[str, Any]) -> None:
    """Whether config.json names formats that are known: what an unknown one stores may look like a known one. Raises
    ValueError where it names another."""
    if said.get("quant_method") != NAME:
        return
    for name in (said.get("format"), *(group.get("format") for group in _groups(said))):
        if name is not None and name not in _FORMATS:
            raise ValueError(
                f"format must be one that is read here ({', '.join(_FORMATS)}), config.json says {shown(name)}"
            )


def _said_by_all(said: Mapping[str, Any], key: str) -> Any:
    """What config.json says of the weights of all groups; None where they differ, or it says nothing."""
    values = [group["weights"].get(key) for group in _groups(said) if isinstance(group.get("weights"), dict)]
    return values[0] if values and values.count(values[0]) == len(values) else None


def _bits_in_bytes(module: str, said: Mapping[str, Any]) -> int:
    """How many bits the codes of a module have that take a byte each: 4 or 8, as the group says that it is in."""
    groups = [one for one in _groups(said) if isinstance(one.get("weights"), dict)]
    if len(groups) > 1:
        ranked = [(target(str(one)), group) for group in groups for one in group.get("targets") or ()]
        ranked.sort(key=lambda pair: pair[0].kind == "class")
        groups = [next((group for match, group in ranked if match.matches(module, ("Linear",))), {"weights": {}})]
    return 4 if groups and groups[0]["weights"].get("num_bits") == 4 else 8


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
        two_levels = nvfp4_recipe("weight_global_scale" in parts)
        return "nvfp4", shape, two_levels, _OF_16, "uint8"
    if weight.dtype == "U8" and scale.dtype in ("U8", "F8_E8M0"):
        if stored[-1] * 2 == groups * 32:
            return "mxfp4", (*stored[:-1], stored[-1] * 2), recipes.MXFP4BlockScaling(), _OF_32, "uint8"
        if stored[-1] * 4 == groups * 32 * 3:
            return "mxfp6", (*stored[:-1], groups * 32), recipes.MXFP6BlockScaling(), _OF_32, "uint8"
        return None
    if weight.dtype == "I32" and scale.dtype in FLOATS:
        dtype = FLOATS[scale.dtype]
        symmetric = "weight_zero_point" not in parts
        columns = stored[-1] * 8
        if said_bits is not None and said_bits not in (2, 3, 4, 8):
            raise ValueError(f"packed integers must have 2, 3, 4 or 8 bits, config.json says {shown(said_bits)}")
        # weight_shape is data; where headers and config.json leave 4 or 8 bits open, groups decide.
        bits = said_bits or (4 if groups == 1 or (columns % groups == 0 and columns // groups >= 16) else 8)
        shape = (*stored[:-1], stored[-1] * 32 // bits)
        recipe, layout = integers.integer_recipe(bits, shape, scale.shape, dtype, symmetric)
        return "int8-packed" if bits == 8 else f"int{bits}", shape, recipe, layout, dtype
    return None


def _find_plain(parts: dict[str, str], weight: Any, scale: Any, bits: int) -> _Kind | None:
    if weight.dtype in FP8_DTYPES and scale.dtype in ("U8", "F8_E8M0"):
        if scale.shape != (*weight.shape[:-1], -(-weight.shape[-1] // 32)):
            return None
        recipe8 = recipes.MXFP8BlockScaling(fp8_format=FP8_DTYPES[weight.dtype])
        return "mxfp8", weight.shape, recipe8, _OF_32, "uint8"
    if scale.dtype not in FLOATS:
        return None
    dtype = FLOATS[scale.dtype]
    if weight.dtype == "I8":
        recipe, layout = integers.integer_recipe(
            bits, weight.shape, scale.shape, dtype, "weight_zero_point" not in parts
        )
        return "int8" if bits == 8 else "int4-bytes", weight.shape, recipe, layout, dtype
    if weight.dtype in FNUZ_DTYPES:
        fp8_recipe(FNUZ_DTYPES[weight.dtype], weight.shape, scale.shape, dtype)  # raises what is wrong with the scale
        return "fp8-fnuz", weight.shape, None, None, dtype
    if weight.dtype in FP8_DTYPES:
        recipe, layout, _ = fp8_recipe(FP8_DTYPES[weight.dtype], weight.shape, scale.shape, dtype)
        return "fp8", weight.shape, recipe, layout, dtype
    return None


def refine(found: Found, array: Any) -> Found:
    """The shape and width of packed integers, which ``weight_shape`` says and headers do not."""
    if not found.kind.startswith("int"):
        return found
    if "weight_offset" in found.parts and array(found.parts["weight_offset"]).any():
        raise ValueError(
            f"{found.parts['weight_offset']} stands beside a quantized weight and must be 0 everywhere: some programs "
            "add it to codes, others take it off"
        )
    roles = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    small = {role: array(found.parts[role]) for role in roles if role in found.parts}
    said = found.record(Details).symmetric
    if found.kind in ("int8", "int4-bytes") and said:
        integers.checked_zero_point(small["weight_zero_point"], 0, symmetric=True)
        scales, bits = small["weight_scale"].shape, 8 if found.kind == "int8" else 4
        recipe, layout = integers.integer_recipe(bits, found.shape, scales, found.scale_dtype, symmetric=True)
        return replace(found, recipe=recipe, layout=layout)
    if found.kind not in ("int2", "int3", "int4", "int8-packed"):
        return found
    stored, bits, shape = array(found.parts["weight_packed"]).shape, int(found.kind[3]), found.shape
    if "weight_shape" in small:
        shape = integers.stored_shape(small["weight_shape"])
        if len(shape) < 2 or min(shape) <= 0:
            raise ValueError(f"weight_shape must be a matrix's, got {shape}")
        bits = integers.bits_of(shape, stored, bits)
    scales = small["weight_scale"].shape
    zero = integers.zero_point_of(small, shape, bits, scales, said)
    recipe, layout = integers.integer_recipe(bits, shape, scales, found.scale_dtype, zero is None)
    groups = integers.spread(small["weight_scale"], shape).shape[-1]
    order, _ = order_of_columns(integers.given_order(small), shape[-1], groups, "weight_g_idx")
    kind = "int8-packed" if bits == 8 else f"int{bits}"
    return replace(found, kind=kind, shape=shape, recipe=recipe if order is None else None, layout=layout)


_MODELSLIM, _TYPES = "modelslim", ("W8A8_DYNAMIC", "W8A16", "FLOAT")


def of_modelslim(said: Mapping[str, Any]) -> dict[str, Any]:
    """What ModelSlim's file says: nothing more than headers do, where all weights are INT8 of rows or floats; else the
    types, of which no format here is."""
    types = {str(one) for name, one in said.items() if name.endswith(".weight")}
    others = sorted(types.difference(_TYPES))
    return {"quant_method": _MODELSLIM, "types": others} if others else {}


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: a group for each recipe, by the names of its modules where
    there are several (the class of a fused layer would else be found before the names of its parts)."""
    groups = _written_groups(written)
    formats = [_format(recipe, inputs) for recipe, _, inputs, *_ in groups]
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": [*written.ignored, *(text for one in written.patterns if (text := _ignored(one)))],
            "kv_cache_scheme": None if written.cache is None else _static(written.cache),
            "config_groups": {
                f"group_{i}": {
                    "targets": ["Linear"] if len(groups) == 1 else modules,
                    "weights": _weights(recipe) | ({"strategy": "channel", "group_size": None} if rows else {}),
                    "input_activations": inputs,
                    **({} if outputs is None else {"output_activations": outputs}),
                    "format": fmt,
                }
                for i, ((recipe, rows, inputs, outputs, modules), fmt) in enumerate(zip(groups, formats, strict=True))
            },
        }
    }


def _ignored(match: Match) -> str:
    """A pattern as an entry of ``ignore``, where ``re:`` matches from the start."""
    match match.kind:
        case "class":
            return match.pattern
        case "regex-start":
            return f"re:{match.pattern}"
        case "regex":
            return f"re:(?:{match.pattern})$"
        case "regex-search":
            return f"re:.*(?:{match.pattern})"
        case "glob" if not set("?[") & set(match.pattern):
            text = ".*".join(map(re.escape, match.pattern.split("*")))
            return f"re:{text}" if text.endswith(".*") else f"re:{text}$"
        case "under":
            return rf"re:{re.escape(match.pattern)}(\..*)?$"
        case "contains":
            return f"re:.*{re.escape(match.pattern)}"
    return ""


_Part: TypeAlias = "dict[str, Any] | None"


def _written_groups(written: Written) -> list[tuple[ScalingRecipe, bool, _Part, _Part, list[str]]]:
    """Modules of one recipe, whether it has a scale for each row, whose inputs and outputs are quantized alike."""
    groups: list[tuple[ScalingRecipe, bool, _Part, _Part, list[str]]] = []
    # Beside longer rows, a row of one group is a group: servers want one scheme for all parts of a fused layer.
    fours = {m: recipe for m, recipe in written.recipes.items() if isinstance(recipe, recipes.INT4Scaling)}
    rows = fours if fours.keys() <= written.rows else {}
    one: Any = next(iter(rows.values()), None)  # a recipe that says by its size of a group how long rows are
    alike_in_rows = {m: replace(recipe, group_size=one.group_size) for m, recipe in rows.items()}
    for recipe, modules in replace(written, recipes={**written.recipes, **alike_in_rows}).groups():
        alike: dict[str, list[str]] = {}
        for module in modules:
            inputs = _inputs(recipe, module in written.inputs, written.dynamic(module))
            outputs = written.outputs.get(module)
            said = module in rows, inputs, None if outputs is None else _static(outputs)
            alike.setdefault(json.dumps(said), []).append(module)
        groups += [(recipe, *json.loads(said), names) for said, names in alike.items()]
    return groups


def _static(said: Activations | KVCache) -> _Part:
    """Outputs, or a KV cache, that have one static scale."""
    number = _NUMBERS.get(said.element)
    return number and {**number, "symmetric": said.symmetric, "strategy": "tensor", "dynamic": False}


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The scale of inputs as files have it: that of NVFP4 divides."""
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return InputScale("input_global_scale", NVFP4_INPUTS, divides=True, shape=(1,))
    if isinstance(recipe, (recipes.DelayedScaling, recipes.Float8CurrentScaling)) and recipe.element == "float8_e4m3fn":
        return InputScale("input_scale", FP8_INPUTS, shape=(1,))
    one = isinstance(recipe, recipes.INT8Scaling) and recipe.group_size is None
    if one and '"symmetric": false' not in json.dumps(_inputs_said(said)).lower():
        return InputScale("input_scale", INT8_INPUTS, shape=(1,))
    return None


def _inputs_said(said: Mapping[str, Any]) -> list[Any]:
    return [group.get("input_activations") for group in _groups(said)]


def has_inputs(recipe: ScalingRecipe, activations: Activations | None) -> bool:
    """Whether a module's integers are stored byte by byte, as servers read those whose inputs are quantized, too."""
    if activations is None or activations.element != "int8":
        return False
    if isinstance(recipe, recipes.INT4Scaling):
        return activations.when == "dynamic" and _dynamic(activations) is not None
    return isinstance(recipe, recipes.INT8Scaling) and recipe.group_size is None


def _format(recipe: ScalingRecipe, inputs: Mapping[str, Any] | None) -> str:
    match recipe:
        case recipes.NVFP4BlockScaling():
            return "nvfp4-pack-quantized"
        case recipes.MXFP4BlockScaling() | recipes.MXFP6BlockScaling():
            return f"{recipe.name}-pack-quantized"
        case recipes.MXFP8BlockScaling():
            return "mxfp8-quantized"
        case recipes.INT8Scaling() if inputs is not None and inputs["type"] == "int" and recipe.group_size is None:
            return "int-quantized"
        case recipes.INT4Scaling() if inputs is not None and inputs["type"] == "int":
            return "int-quantized"
        case recipes.INT4Scaling() | recipes.INT8Scaling():
            return "pack-quantized"
        case _:
            return "float-quantized"


def _weights(recipe: ScalingRecipe) -> dict[str, Any]:
    rows, size = getattr(recipe, "block_m", 1), getattr(recipe, "block_size", None)
    by_row = getattr(recipe, "granularity", recipe.name) in ("row", "int8")
    strategy = "block" if rows > 1 else "group" if size else "channel" if by_row else "tensor"
    number = {"num_bits": recipe._traits[0], "type": "int" if recipe.name.startswith("int") else "float"}  # type: ignore[attr-defined]
    said = {"dynamic": False, "symmetric": getattr(recipe, "symmetric", True), "observer": "minmax", **number}
    said["strategy"] = "tensor_group" if recipe.name == "nvfp4" else strategy
    sizes: dict[str, dict[str, Any]] = {"block": {"block_structure": [rows, size]}, "group": {"group_size": size}}
    scale = "float8_e4m3fn" if recipe.name == "nvfp4" else "float8_e8m0fnu" if recipe.name.startswith("mx") else ""
    return said | sizes.get(strategy, {}) | _SCALES.get(scale, {})


def _inputs(recipe: ScalingRecipe, scaled: bool, dynamic: Activations | None) -> dict[str, Any] | None:
    """How programs quantize the inputs of a module: by its stored scale, or by scales made of them.

    Tiles have such in any case: vLLM loads them with dynamic groups of activations and not as weights alone, and
    compressed-tensors' own scheme FP8_BLOCK says so.
    """
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    if scaled and isinstance(recipe, recipes.NVFP4BlockScaling):
        four = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        return four | {"dynamic": "local"} | _SCALES["float8_e4m3fn"]
    if scaled and isinstance(recipe, recipes.INT8Scaling):
        return eight | {"type": "int", "strategy": "tensor", "dynamic": False}
    if scaled:
        return eight | {"strategy": "tensor", "dynamic": False}
    if isinstance(recipe, recipes.Float8BlockScaling) and recipe.block_m > 1:
        return eight | {"strategy": "group", "group_size": recipe.block_k, "dynamic": True}
    return None if dynamic is None else _dynamic(dynamic)


def _dynamic(said: Activations) -> dict[str, Any] | None:
    """Activations whose scales are made of them; None where compressed-tensors has no word for them."""
    number = _NUMBERS.get(said.element)
    if number is None or said.per not in ("tensor", "token", "group") or said.bound is not None:
        return None
    part: dict[str, Any] = {**number, "symmetric": said.symmetric, "dynamic": True, "strategy": said.per}
    if said.per == "group":
        part["group_size"] = said.size
    if said.scale == "float8_e4m3fn":
        part["strategy"] = "tensor_group"
    return part | _SCALES.get(said.scale, {})


_NUMBERS: dict[str, dict[str, Any]] = {
    "float8_e4m3fn": {"num_bits": 8, "type": "float"},
    "float4_e2m1fn": {"num_bits": 4, "type": "float"},
    "int8": {"num_bits": 8, "type": "int"},
    "int4": {"num_bits": 4, "type": "int"},
}
_SCALES = {  # of which dtypes codes of scales and zero points are
    "float8_e8m0fnu": {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
    "float8_e4m3fn": {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
}
