# SPDX-License-Identifier: Apache-2.0
"""ONNX models whose weights are codes: initializers behind DequantizeLinear, by tensor, by row, or in blocks of a row.

NVFP4 has two such nodes in a row, of which the first makes the scales. Where products sum over a weight's rows, blocks
lie along them, and it is read as a transposed view. What lies in blocks along another axis is read as its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.common import Array, as_numpy, get, turned_shape
from breccia.bridges.contract import BY_COLUMNS, BY_ROWS, FileFormat, Place, Readers
from breccia.bridges.integers import integer_zero_point
from breccia.bridges.onnx.model_file import NAME, ONNX
from breccia.bridges.onnx.nodes import HALVES, Node, swapped_codes
from breccia.bridges.packing import code_part, float_part, pack_nibbles, packed_codes, scale_part
from breccia.bridges.parts import Found, Part, part, rows_only
from breccia.bridges.scales import one_global_scale
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

EXTRA = "onnx"
RECIPES: dict[str, ScalingRecipe] = {
    "int4": recipes.INT4Scaling(scale_dtype="fp32"),  # runtimes fuse no other scales with products of float32
    "int4-asym": recipes.INT4Scaling(signed=False, symmetric=False, scale_dtype="fp32"),
    "int8": recipes.INT8Scaling(),
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "fp8-tensor": recipes.Float8CurrentScaling(),
    "fp8-block": recipes.Float8BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
_ROLES = {"codes": "quantized", "scale": "scale", "zero_point": "zero_point", "global_scale": "scale_scale"}

__all__: list[str] = []


def read(parts: Mapping[str, Any], found: Found) -> ScaledTensor | Array:
    """A tensor of a file: ``codes``, ``scale``, and perhaps ``zero_point`` and ``global_scale``. Raises ValueError
    where they do not fit."""
    zero, second = parts.get("zero_point"), parts.get("global_scale")
    return found.record(Node).tensor(get(parts, "codes", NAME), get(parts, "scale", NAME), zero, second)


@rows_only
def _inputs(scaled: ScaledTensor, whole: bool) -> dict[str, Part]:
    """The node's inputs by role; a part's dtype is ONNX's where two elements share a byte. ``whole``: no rows are
    written alone."""
    recipe, scale = scaled.recipe, as_numpy(scaled.scale, "scale")
    if not BRIDGE.carries(recipe):
        raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")
    if isinstance(recipe, (recipes.INT4Scaling, recipes.MXFP4BlockScaling, recipes.NVFP4BlockScaling)):
        if scaled.shape[-1] % 2:
            raise ValueError(f"scaled must have an even number of columns for {NAME}, got shape {scaled.shape}")
        element = "FLOAT4E2M1"
        if isinstance(recipe, recipes.INT4Scaling):
            element = "INT4" if recipe.signed else "UINT4"
        data = Part(element, scaled.shape, lambda: packed_codes(scaled))
    else:
        data = code_part(scaled)
    result = {"codes": data}
    if (
        isinstance(recipe, (recipes.MXFP4BlockScaling, recipes.MXFP8BlockScaling))
        or getattr(recipe, "scale_format", "") == "e8m0"
    ):
        return {**result, "scale": scale_part(scaled, "F8_E8M0")}
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return {
            **result,
            "scale": scale_part(scaled, "F8_E4M3"),
            "global_scale": part(one_global_scale(scaled, NAME), "F32"),
        }
    if scaled.layout.one_scale:
        scale = scale.reshape(())
    elif scaled.layout.block == (1, 0):  # along an axis of a matrix, in blocks as long as a row in batches
        scale = scale.reshape(scaled.shape[:1] if scaled.ndim == 2 else (*scaled.shape[:-1], 1))
    result["scale"] = float_part(scale)
    if not getattr(recipe, "symmetric", True):
        result["zero_point"] = _zero_point(scaled, scale.shape, whole)
    return result


def _turned(one: Part, shape: tuple[int, ...]) -> Part:
    """A part of an upright tensor for its transpose; ``shape`` of its elements."""
    if len(one.shape) < 2:
        return one
    halves = one.dtype in HALVES
    return Part(one.dtype, turned_shape(shape), lambda: swapped_codes(np.asarray(one.make()), shape, halves))


def _zero_point(scaled: ScaledTensor, shape: tuple[int, ...], whole: bool) -> Part:
    if isinstance(scaled.recipe, recipes.INT8Scaling):
        zero = as_numpy(scaled.zero_point, "zero_point")
        if zero.dtype != np.int8:
            raise ValueError(f"zero_point must be int8 for {NAME}, got {zero.dtype}")
        return part(zero.reshape(shape), "I8")
    if shape[-1] % 2 and not whole:  # two rows share a byte
        if shape[0] % 2:
            raise ValueError(f"scaled must have an even number of rows or of groups for {NAME}, got {shape}")
        shape = (shape[0] // 2, *shape[1:-1], shape[-1] * 2)

    return Part("UINT4", shape, lambda: pack_nibbles(integer_zero_point(scaled, 15).reshape(-1)))


def store(name: str, scaled: ScaledTensor, place: Place) -> tuple[dict[str, Part], dict[str, str]]:
    """Initializers by name, and what the container makes nodes of. Where a graph multiplies by the tensor, blocks lie
    along what the products sum over, the first axis of what is stored, as runtimes fuse them."""
    turned = bool(place.product)
    if place.product == BY_COLUMNS and scaled.layout.axis == -2:  # an upright view of blocks along the outputs
        scaled, turned = scaled.mT, False
    parts = _inputs(scaled, whole=turned)
    named = {role: f"{name}_{_ROLES[role]}" for role in parts}
    shape, scale = scaled.shape, parts["scale"].shape
    last = len(shape) - 1
    blocks = len(scale) == len(shape) and len(shape) > 1
    size = getattr(scaled.layout, "block_k", 0) or -(-shape[-1] // scale[-1]) if blocks else 0
    axis = last if blocks else 0
    if turned:
        parts = {role: _turned(one, shape if role == "codes" else scale) for role, one in parts.items()}
        axis = last - 1 if blocks else last if scale else 0
    said = {"parts": named, "axis": axis, "block_size": size, "swap": turned and place.product == BY_ROWS}
    if "zero_point" in parts:
        said["dims"] = {named["zero_point"]: parts["scale"].shape}  # of which the part's rows may be two together
    return {named[role]: one for role, one in parts.items()}, {name: json.dumps(said)}


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.INT4Scaling):
        return recipe.signed == recipe.symmetric
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.block_m == 1
    return recipe.name in ("delayed", "current", "int8", "mxfp4", "mxfp8", "nvfp4")


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("OpenVINO", "ONNX Runtime"),
    refused=dict.fromkeys(("mxfp4", "mxfp8", "nvfp4"), ("ONNX Runtime",)),  # "NOT_IMPLEMENTED", 1.32
    peer="onnx",
    extra=EXTRA,
    recipes=RECIPES,
    container=ONNX,
    readers=Readers(embeddings=True, fused_experts=True),
    read=read,
    keeps=lambda found: found.recipe is None,
    carries=carries,
    store=store,
)
