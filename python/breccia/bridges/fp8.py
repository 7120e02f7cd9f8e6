# SPDX-License-Identifier: Apache-2.0
"""FP8 weights of other libraries: what their codes are called, and which recipe a scale of that shape tells."""

from __future__ import annotations

import math

from breccia.bridges.common import Array, as_numpy, codes
from breccia.bridges.parts import Part, part
from breccia.bridges.scales import SCALE_NAMES, STORED_SCALES, group_size_of, row_blocks
from breccia.formats import decode
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import Float8BlockScaling, Float8CurrentScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

FP8_DTYPES = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_FP8_NAMES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}
FP8_CODES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
# What safetensors calls FP8 codes. It has no names for other elements of vendors.
FP8_STORED = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


def fp8_format_of(weight: Array, said: str | None = None) -> str:
    """The format of FP8 codes: what the header said, else what the array's dtype says (E4M3 where those are bytes)."""
    if weight.dtype.name.endswith("fnuz"):
        raise ValueError(f"weight must be of E4M3 or E5M2, got {weight.dtype}: breccia.bridges.from_fnuz reads it")
    return said or FP8_CODES.get(weight.dtype.name, "E4M3")


def of_a_vendor(recipe: ScalingRecipe) -> bool:
    """Whether codes are of an FP8 element that is neither E4M3 nor E5M2 of the OCP."""
    return isinstance(recipe, ScalingRecipe) and recipe.element.startswith("float8") and recipe.element not in FP8_CODES


def is_of_tensor(recipe: ScalingRecipe) -> bool:
    """Whether a recipe is E4M3 with one scale."""
    one = recipe.name == "delayed" or getattr(recipe, "granularity", "") == "tensor"
    return one and recipe.element == "float8_e4m3fn"


def fp8_stored(recipe: ScalingRecipe) -> str:
    """What safetensors calls the codes of an FP8 recipe, in the formats of other programs."""
    if of_a_vendor(recipe):
        raise ValueError(f"scaled must be of E4M3 or E5M2, whose codes the format has, got {recipe.element}")
    return FP8_STORED[recipe.element]


def fp8_parts(scaled: ScaledTensor, one: tuple[int, ...] = ()) -> dict[str, Part]:
    """``weight`` and ``weight_scale`` of FP8 with float scales: of shape ``one`` where there is one scale, and with an
    axis of 1 for columns, where there is one per row, as long as ``one``."""
    scale = as_numpy(scaled.scale, "scale")
    if scaled.layout.one_scale:
        scale = scale.reshape(one)
    elif scaled.layout.block == (1, 0):
        scale = scale.reshape(*scaled.shape[:-1], *one)
    return {
        "weight": part(codes(scaled.data, "data"), fp8_stored(scaled.recipe)),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
    }


def fp8_values(raw: Array, fp8_format: str) -> Array:
    """The numbers that FP8 codes stand for, as float32."""
    return decode(codes(raw, "raw"), _FP8_NAMES[fp8_format])


def fp8_recipe(
    fp8_format: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], scale_dtype: str
) -> tuple[ScalingRecipe, Layout, tuple[int, ...]]:
    """Recipe, layout and the scale's shape in that layout, for an FP8 weight and the shape its scale is stored in."""
    if not shape:
        raise ValueError("weight.shape must have at least one axis, got ()")
    rows, columns = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[-1])
    if math.prod(scale_shape) == 1 and rows * columns != 1:
        return Float8CurrentScaling(fp8_format=fp8_format), PerTensor(), ()
    batch = shape[:-2]
    scale_format = SCALE_NAMES.get(scale_dtype, "e8m0")
    scale_format = "fp32" if scale_format == "fp16" else scale_format
    if scale_shape in ((*batch, rows, 1), (*batch, rows)):
        return Float8CurrentScaling(fp8_format=fp8_format, granularity="row"), PerChannel(), scale_shape
    if len(scale_shape) == len(batch) + 4 and scale_shape[-3] == scale_shape[-1] == 1:  # (N/128, 1, K/128, 1)
        scale_shape = (*batch, scale_shape[-4], scale_shape[-2])
    if scale_shape[:-1] == (*batch, rows):
        size = group_size_of(columns, scale_shape[-1], "scale")
        recipe = Float8BlockScaling(fp8_format=fp8_format, block_k=size, scale_format=scale_format)
        return recipe, row_blocks(size, columns), scale_shape
    for size in (128, 64, 256, 32, 16, 512):
        if scale_shape == (*batch, -(-rows // size), -(-columns // size)):
            recipe = Float8BlockScaling(fp8_format=fp8_format, block_k=size, block_m=size, scale_format=scale_format)
            return recipe, PerBlockMN(size, size), scale_shape
    raise ValueError(
        f"scale.shape must be that of one scale per tensor, row, block of a row or square tile of {shape}, "
        f"got {scale_shape}"
    )
