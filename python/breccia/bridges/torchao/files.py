# SPDX-License-Identifier: Apache-2.0
"""The safetensors layout that torchao saves its tensors in (torchao.prototype.safetensors), without torchao."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import check_axes, mapping, numbers, shown
from breccia.bridges.contract import Place
from breccia.bridges.fp8 import FP8_DTYPES
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part
from breccia.bridges.torchao.inputs import STATIC, inputs_beside, quantizer_of, said_of_inputs
from breccia.bridges.torchao.tensors import NAME, check_kind, describe, float8, from_parts, mx_recipe
from breccia.bridges.written import INT8_INPUTS, NVFP4_INPUTS, InputScale, Written
from breccia.checkpoint.files.bounded_json import loads
from breccia.layouts import Layout, PerBlockMN
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.inputs import inputs_for
from breccia.schemes.value import Activations

_STATIC = tuple(f"._weight_{role}" for role in STATIC.values())
_OPTIONAL = ("zero_point", "per_tensor_scale", "act_pre_scale")  # parts that change the values


def store(
    name: str, scaled: ScaledTensor | OutsideTensor, high: str = "bfloat16", inputs: Activations | None = None
) -> tuple[dict[str, Part], str]:
    """Stored tensors of a logical one, by full name, and its entry in the header's metadata, which says how its layer's
    inputs are quantized, too."""
    kind, parts, attributes = describe(scaled, high)
    names = list(parts)
    if inputs is not None and not isinstance(scaled, OutsideTensor):
        attributes |= (said := said_of_inputs(kind, scaled.recipe, inputs))
        names += [STATIC[kind]] if said and inputs.when != "dynamic" else []
    module, _, last = name.rpartition(".")
    entry = {"_type": kind, "_data": attributes, "_tensor_data_names": names}
    return {f"{module}._{last}_{role}": value for role, value in parts.items()}, json.dumps(entry)


def store_in_checkpoint(
    name: str, scaled: ScaledTensor | OutsideTensor, place: Place
) -> tuple[dict[str, Part], dict[str, str]]:
    """As `store`, with the entry's name."""
    inputs = place.activations
    if place.inputs and isinstance(scaled, ScaledTensor):
        inputs = inputs_for(scaled.recipe, "static")
    parts, text = store(name, scaled, inputs=inputs)
    return parts, {name: text}


def plain_metadata(name: str) -> dict[str, str]:
    """The entry of a tensor that is not of torchao's classes."""
    return {name: json.dumps({"_type": "Tensor"})}


def header(names: Sequence[str], recipes: Mapping[str, ScalingRecipe], inputs: frozenset[str]) -> dict[str, str]:
    """The entry that lists all tensors; a static scale of inputs is one of its weight's."""
    return {"tensor_names": json.dumps([name for name in names if not name.endswith(_STATIC)])}


@dataclass(frozen=True, slots=True)
class Details:
    """What the header's metadata says of a tensor: the attributes of its class, and how its layer's inputs are."""

    attributes: Mapping[str, Any]
    inputs: Activations | None = None


def load(parts: Mapping[str, Any], found: Found) -> ScaledTensor | OutsideTensor:
    """The logical tensor of its stored ones, by role."""
    return from_parts(found.kind, parts, found.record(Details).attributes)


def find_all(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> list[Found]:
    """The logical tensors that a header's metadata describes."""
    if "tensor_names" not in metadata:
        return []
    try:
        names = loads(metadata["tensor_names"])
        described = {name: loads(metadata[name]) for name in names if name in metadata}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"metadata 'tensor_names' must be {NAME}'s JSON: {error}") from None
    found = []
    for name, entry in described.items():
        kind = entry.get("_type") if isinstance(entry, dict) else None
        if kind is None or kind == "Tensor":
            continue
        module, _, last = name.rpartition(".")
        roles = entry.get("_tensor_data_names")
        if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
            raise ValueError(f"tensor {name!r}: _tensor_data_names must be a list of names, got {shown(roles)}")
        parts = {role: f"{module}._{last}_{role}" for role in roles}
        for role in _OPTIONAL:
            if role not in parts and f"{module}._{last}_{role}" in entries:
                raise ValueError(f"tensor {name!r}: _tensor_data_names must have {role!r}, which is in the file")
        missing = [full for full in parts.values() if full not in entries]
        if missing or "qdata" not in parts or "scale" not in parts:
            raise ValueError(
                f"tensor {name!r}: {missing or 'qdata and scale'} must be in the file, as its metadata says"
            )
        attributes = mapping(entry.get("_data"), f"tensor {name!r}: _data")
        check_axes(1, entries[parts["qdata"]])
        check_kind(kind)
        inputs = inputs_beside(kind, attributes, STATIC.get(kind) in parts)
        # A scale of the inputs is no part of the weight; with a zero point, it is of no other format.
        parts.pop("act_quant_zero_point" if "act_quant_zero_point" in parts else STATIC.get(kind, ""), None)
        one = _found(name, kind, parts, dict(attributes), entries)
        found.append(replace(one, details=replace(one.record(Details), inputs=inputs)))
    return found


def beside(found: Found, names: Collection[str]) -> Activations | None:
    """See `FileFormat.inputs_beside`."""
    return found.record(Details).inputs


def input_scale(recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
    """The static scale of a layer's inputs, a tensor of its weight's."""
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return InputScale(f"_weight_{STATIC['NVFP4Tensor']}", NVFP4_INPUTS)
    one = isinstance(recipe, recipes.INT8Scaling) and recipe.group_size is None
    return InputScale(f"_weight_{STATIC['Int8Tensor']}", INT8_INPUTS, shape=(1, 1)) if one else None


def _found(
    name: str, kind: str, parts: dict[str, str], attributes: dict[str, Any], entries: Mapping[str, Any]
) -> Found:
    check_kind(kind)
    qdata, scale = entries[parts["qdata"]], entries[parts["scale"]]
    shape = tuple(qdata.shape)
    recipe: ScalingRecipe | None = None
    layout: Layout | None = None
    dtype = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(scale.dtype, "uint8")
    if kind == "NVFP4Tensor":
        shape = (*shape[:-1], shape[-1] * 2)
        recipe, layout = recipes.NVFP4BlockScaling(two_level="per_tensor_scale" in parts), PerBlockMN(1, 16)
        if "per_tensor_scale" in parts:
            parts = {**parts, "global_scale": parts["per_tensor_scale"]}
    elif kind == "MXTensor":
        recipe, layout = mx_recipe(attributes), PerBlockMN(1, 32)
        shape = (*shape[:-1], shape[-1] * 2) if recipe.name == "mxfp4" else shape
    elif kind == "Float8Tensor":
        fp8 = FP8_DTYPES.get(qdata.dtype, "E4M3")
        attributes = {**attributes, "fp8_format": fp8}
        recipe, layout = float8(fp8, shape, np.empty(scale.shape, np.float32), attributes.get("block_size"))
    elif kind == "Int4Tensor":
        shape = numbers(attributes.get("shape"), f"{NAME}: shape")
    swizzled = ("scales are tiled for cuBLAS (swizzled)",) if attributes.get("is_swizzled_scales") else ()
    return Found(name, NAME, kind, parts, shape, recipe, layout, dtype, details=Details(attributes), findings=swizzled)


def refine(found: Found, array: Any) -> Found:
    """Whether a tensor of integers has zero points other than zero, which its header does not say."""
    kind = found.kind
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        return found
    zero = array(found.parts["zero_point"]) if "zero_point" in found.parts else None
    scale, shape = array(found.parts["scale"]), found.shape
    # One row is enough to know the recipe: everything but the zero points is in the attributes.
    ghost = {"qdata": np.empty(shape, np.int8), "scale": scale, **({} if zero is None else {"zero_point": zero})}
    made = from_parts(kind, ghost, found.record(Details).attributes)
    assert isinstance(made, ScaledTensor)
    return replace(found, recipe=made.recipe, layout=made.layout, scale_dtype=scale.dtype.name)


def config(written: Written) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: the method and how most modules could have been made, which
    transformers asks for; each tensor's class is in the files' headers."""
    recipe, modules = written.groups()[0]
    inputs = written.activations.get(modules[0])
    said: dict[str, Any] = {"quant_method": NAME, "quant_type": {"default": quantizer_of(recipe, inputs)}}
    return {"quantization_config": {**said, "modules_to_not_convert": written.ignored}}
