# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors, the format of llm-compressor and vLLM.

Its NVFP4 global scale divides: value = e2m1 · (weight_scale / weight_global_scale), which is the recipe's
``global_scale_form="divisor"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.common import Array, as_numpy, codes, get
from breccia.bridges.compressed_tensors import headers as _headers
from breccia.bridges.compressed_tensors import integers
from breccia.bridges.compressed_tensors.integers import NAME
from breccia.bridges.contract import FileFormat, Readers
from breccia.bridges.fp8 import fnuz_values, fp8_format_of, fp8_parts, fp8_recipe
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import code_part, scale_part
from breccia.bridges.parts import Found, Part, materialize, rows_only
from breccia.bridges.scales import global_scale, made, of_blocks, one_number
from breccia.bridges.written import Dialect
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.dialects import compressed_tensors as words
from breccia.schemes.value import KVCache
from breccia.value import sixes

EXTRA = "compressed-tensors"
RECIPES: dict[str, ScalingRecipe] = {
    "nvfp4": recipes.NVFP4BlockScaling(global_scale_form="divisor"),
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "fp8-tensor": recipes.Float8CurrentScaling(),
    "fp8-block": recipes.Float8BlockScaling(block_m=128, scale_format="bf16"),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "mxfp6": recipes.MXFP6BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "int4": recipes.INT4Scaling(scale_dtype="bf16"),
    "int4-asym": recipes.INT4Scaling(signed=False, symmetric=False, scale_dtype="bf16"),
    "int8": recipes.INT8Scaling(scale_dtype="bf16"),
}


__all__ = ["from_compressed_tensors", "to_compressed_tensors"]


def from_compressed_tensors(
    parts: Mapping[str, Any], kind: str | None = None, fp8_format: str | None = None, symmetric: bool = False
) -> ScaledTensor | OutsideTensor:
    """The tensors of one module, by the last part of their names.

    Args:
        parts: ``weight`` or ``weight_packed``, ``weight_scale`` and, where the format has them,
            ``weight_global_scale``, ``weight_zero_point``, ``weight_shape``, ``weight_g_idx``.
        kind: "fp8", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "int2", "int3", "int4", "int4-bytes" (a code to a byte), "int8"
            or "int8-packed"; told from the dtypes if None.
        fp8_format: "E4M3" or "E5M2"; told from the weight's dtype if None, E4M3 where that is of plain bytes.
        symmetric: whether zero points of integers must be 0, as config.json says.

    Returns:
        A ScaledTensor of the logical shape, that of ``weight_shape`` where it is there; an OutsideTensor where
        ``weight_g_idx`` gives columns another order.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit, or zero points are not what they must be.
    """
    scale = get(parts, "weight_scale", NAME)
    packed = "weight_packed" in parts
    weight = get(parts, "weight_packed" if packed else "weight", NAME, 1)
    kind = kind or _kind(weight, scale, packed)
    if kind == "nvfp4":
        second = get(parts, "weight_global_scale", NAME) if "weight_global_scale" in parts else None
        one = None if second is None else one_number(second, f"{NAME}: weight_global_scale")
        return of_blocks(weight, scale, _headers.nvfp4_recipe(one is not None), one)
    if kind == "mxfp4":
        return of_blocks(weight, scale, recipes.MXFP4BlockScaling())
    if kind == "mxfp6":
        return of_blocks(sixes.unpack(codes(weight, "weight_packed")), scale, recipes.MXFP6BlockScaling())
    fp8_format = fp8_format_of(weight, fp8_format)
    if kind == "mxfp8":
        return of_blocks(weight, scale, recipes.MXFP8BlockScaling(fp8_format=fp8_format))
    if kind in ("int2", "int3", "int4", "int8-packed"):
        return integers.packed_integers(parts, weight, scale, int(kind[3]), symmetric)
    if kind in ("int8", "int4-bytes"):
        zero = get(parts, "weight_zero_point", NAME) if "weight_zero_point" in parts else None
        zero = None if zero is None else integers.checked_zero_point(zero, 0, symmetric)
        return (integers.int8 if kind == "int8" else integers.int4_in_bytes)(codes(weight, "weight"), scale, zero)
    recipe8, layout, scale_shape = fp8_recipe(fp8_format, weight.shape, scale.shape, scale.dtype.name)
    return made(codes(weight, "weight"), scale.reshape(scale_shape), recipe8, layout)


def _kind(weight: Array, scale: Array, packed: bool) -> str:
    name = scale.dtype.name
    if packed and weight.dtype.itemsize == 4:
        return "int4"
    if packed and name == "float8_e4m3fn":
        return "nvfp4"
    if packed:
        return "mxfp6" if scale.ndim and weight.shape[-1] * 4 == scale.shape[-1] * 96 else "mxfp4"
    if name in ("uint8", "float8_e8m0fnu"):
        return "mxfp8"
    return "int8" if weight.dtype.name == "int8" else "fp8"


def to_compressed_tensors(scaled: ScaledTensor, *, packed: bool = True) -> dict[str, Array]:
    """The inverse of `from_compressed_tensors`.

    Args:
        scaled: what to convert.
        packed: integers in words (format "pack-quantized", of weights alone), or byte by byte ("int-quantized").

    Returns:
        Arrays by role, in the dtypes that the file has.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled, packed=packed))


@rows_only
def lay_out(scaled: ScaledTensor, *, packed: bool = True) -> dict[str, Part]:
    """`to_compressed_tensors`, each tensor made when it is asked for."""
    match recipe := scaled.recipe:
        case recipes.NVFP4BlockScaling():
            second = scaled.global_scale
            if second is not None and math.prod(second.shape) != 1:
                raise ValueError(f"scaled.global_scale must be one number for {NAME}, got shape {tuple(second.shape)}")
            return {
                "weight_packed": code_part(scaled),
                "weight_scale": scale_part(scaled, "F8_E4M3"),
                "weight_global_scale": Part("F32", (1,), lambda: _one_divisor(scaled)),
            }
        case recipes.MXFP4BlockScaling() | recipes.MXFP6BlockScaling() if carries(recipe):
            return {"weight_packed": code_part(scaled), "weight_scale": scale_part(scaled)}
        case recipes.MXFP8BlockScaling():
            return {"weight": code_part(scaled), "weight_scale": scale_part(scaled)}
        case recipes.INT4Scaling() if carries(recipe):
            return (integers.pack_int4 if packed else integers.store_int4)(scaled, as_numpy(scaled.scale, "scale"))
        case recipes.INT8Scaling():
            return (integers.pack_int8 if packed else integers.store_int8)(scaled, as_numpy(scaled.scale, "scale"))
        case recipes.DelayedScaling() | recipes.Float8CurrentScaling() | recipes.Float8BlockScaling():
            if as_numpy(scaled.scale, "scale").dtype.itemsize > 1:
                return fp8_parts(scaled, (1,))
    raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")


def _read(parts: Mapping[str, Any], found: Found) -> ScaledTensor | OutsideTensor | Array:
    said = found.record(_headers.Details)
    if found.kind == "fp8-fnuz":
        return fnuz_values(get(parts, "weight", NAME, 1), get(parts, "weight_scale", NAME), said.fp8_format)
    return from_compressed_tensors(parts, found.kind, said.fp8_format, said.symmetric)


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.scale_format != "e8m0" and recipe.block_m in (1, recipe.block_k)
    if isinstance(recipe, recipes.INT4Scaling):
        return recipe.signed or not recipe.symmetric
    return not isinstance(recipe, recipes.MXFP6BlockScaling) or recipe.fp6_format == "E2M3"


def _one_divisor(scaled: ScaledTensor) -> Array:
    second = global_scale(scaled, "divisor")
    return np.ones(1, np.float32) if second is None else second.reshape(1)


BRIDGE = FileFormat(
    name=NAME,
    opens_in=("vLLM", "SGLang", "transformers with compressed-tensors"),
    refused={"mxfp6": ("vLLM",)},  # "No compressed-tensors compatible scheme was found", 0.32
    peer="compressed_tensors",
    extra=EXTRA,
    recipes=RECIPES,
    anchors=("weight_scale",),
    input_scales=True,
    output_scales=True,
    readers=Readers(
        shared_global_scale=True,
        bfloat16_scales=True,  # transformers rounds scales to the model's dtype
        misread_experts={
            "nvfp4": "transformers leaves out their second scales: read them by vLLM or SGLang",
            "mxfp8": "transformers does not load them: read them by vLLM or SGLang",
        },
    ),
    find=_headers.find,
    refine=_headers.refine,
    row_axis=0,
    shape_role="weight_shape",
    read=_read,
    carries=carries,
    lay_out=lambda scaled, place: lay_out(scaled, packed=not _headers.has_inputs(scaled.recipe, place.activations)),
    input_scale=_headers.input_scale,
    cache_scales={which: (f"{{}}.{which}_scale", (1,)) for which in "kv"},
    caches=(KVCache("float8_e4m3fn"), KVCache("int8")),
    dialect=Dialect(
        read=words.scheme,
        write=_headers.config,
        file="quant_model_description",
        of_file=_headers.of_modelslim,
        **words.SAID,
    ),
)
