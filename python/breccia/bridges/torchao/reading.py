# SPDX-License-Identifier: Apache-2.0
"""torchao's tensors from their parts and attributes, wherever those come from: a tensor object or a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import StoredTypeError, flag, numbers, shown
from breccia.bridges.common import Array, as_numpy, codes, get, made, of_blocks, row_blocks, scale_name, unswizzle
from breccia.bridges.fp8 import fp8_format_of, fp8_recipe
from breccia.bridges.outside import OutsideTensor
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

NAME = "torchao"


def dtype_name(value: Any) -> str:
    if isinstance(value, dict):  # as torchao's JSON spells it
        value = value.get("_data", "")
    return str(value).removeprefix("torch.")


KINDS = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "MXTensor", "NVFP4Tensor")


def check_kind(kind: Any) -> None:
    """Refuses a class that is not read here."""
    if kind not in KINDS:
        raise StoredTypeError(f"tensor must be one of torchao's plain tensor classes, got {shown(kind)}")


def _swizzled(attributes: Mapping[str, Any]) -> bool:
    return flag(attributes.get("is_swizzled_scales"), f"{NAME}: is_swizzled_scales")


def _block(attributes: Mapping[str, Any], axes: int) -> tuple[int, ...]:
    """``block_size``, which has a number for each axis."""
    return numbers(attributes.get("block_size"), f"{NAME}: block_size", axes)


def from_parts(kind: str, parts: Mapping[str, Any], attributes: Mapping[str, Any]) -> ScaledTensor | OutsideTensor:
    check_kind(kind)
    for needed in ("qdata", "scale"):
        if needed not in parts:
            raise ValueError(f"{NAME}: {kind} must have {needed!r}, got {', '.join(sorted(parts))}")
    if "act_pre_scale" in parts:
        raise ValueError(f"{NAME}: act_pre_scale must be absent: it scales the layer's input, not this tensor")
    qdata, scale = get(parts, "qdata", NAME, 1), get(parts, "scale", NAME)
    match kind:
        case "Float8Tensor":
            fp8_format = fp8_format_of(qdata, attributes.get("fp8_format"))
            recipe, layout = float8(fp8_format, qdata.shape, scale, attributes.get("block_size"))
            if layout.one_scale:
                scale = scale.reshape(())
            return made(codes(qdata, "qdata"), scale, recipe, layout)
        case "Int8Tensor":
            return _int8(qdata, scale, parts.get("zero_point"), _block(attributes, qdata.ndim))
        case "IntxUnpackedToInt8Tensor":
            return _intx(qdata, scale, parts.get("zero_point"), attributes)
        case "Int4Tensor":
            return _int4(qdata, scale, parts, attributes)
        case "MXTensor":
            return _mx(qdata, scale, attributes)
        case "NVFP4Tensor":
            shape = (*qdata.shape[:-1], qdata.shape[-1] * 2)
            second = parts.get("per_tensor_scale")
            second = None if second is None else np.asarray(as_numpy(second, "per_tensor_scale"), np.float32)
            rows = _rows(codes(scale, "scale"), shape, 16, _swizzled(attributes))
            return of_blocks(
                codes(qdata, "qdata"), rows, recipes.NVFP4BlockScaling(two_level=second is not None), second
            )
    raise AssertionError(kind)


def _rows(scale: Array, shape: tuple[int, ...], block: int, swizzled: bool) -> Array:
    groups = shape[-1] // block
    if not swizzled:
        return scale.reshape(*shape[:-1], groups)
    rows = int(np.prod(shape[:-1]))
    return unswizzle(scale.reshape(-1), rows, groups).reshape(*shape[:-1], groups)


def float8(fp8: str, shape: tuple[int, ...], scale: Array, block_size: Any) -> tuple[ScalingRecipe, Layout]:
    if block_size is None or scale.size == 1:
        recipe, layout, _ = fp8_recipe(fp8, shape, scale.shape, scale.dtype.name)
        return recipe, layout
    block = list(numbers(block_size, f"{NAME}: block_size"))
    if len(block) != len(shape) or len(block) < 2:
        raise ValueError(f"{NAME}: block_size must have a number per axis of {shape}, got {block}")
    if tuple(block[:-2]) != (1,) * (len(block) - 2):
        raise ValueError(f"{NAME}: block_size must be 1 along leading axes, got {block}")
    if block[-1] == shape[-1] and block[-2] == 1:
        return recipes.Float8CurrentScaling(fp8_format=fp8, granularity="row"), PerChannel()
    recipe = recipes.Float8BlockScaling(fp8_format=fp8, block_m=block[-2], block_k=block[-1])
    return recipe, row_blocks(block[-1], shape[-1]) if block[-2] == 1 else PerBlockMN(block[-2], block[-1])


def _zeros(zero_point: Any) -> Array | None:
    """Zero points, where one is not zero."""
    zero = None if zero_point is None else as_numpy(zero_point, "zero_point")
    return zero if zero is not None and zero.any() else None


def _int8(qdata: Array, scale: Array, zero_point: Any, block: tuple[int, ...]) -> ScaledTensor:
    size = block[-1]
    name = scale_name(scale.dtype.name)
    zero = _zeros(zero_point)
    symmetric = zero is None
    if scale.size == 1 and qdata.shape[0] != 1:
        recipe, layout = recipes.INT8Scaling(scale_dtype=name, symmetric=symmetric), PerTensor()
        return made(qdata, scale.reshape(()), recipe, layout, None if zero is None else zero.reshape(()))
    if size == qdata.shape[-1]:
        return made(qdata, scale, recipes.INT8Scaling(scale_dtype=name, symmetric=symmetric), PerChannel(), zero)
    recipe = recipes.INT8Scaling(group_size=size, scale_dtype=name, symmetric=symmetric)
    return made(qdata, scale, recipe, row_blocks(size, qdata.shape[-1]), zero)


def _intx(qdata: Array, scale: Array, zero_point: Any, attributes: Mapping[str, Any]) -> ScaledTensor:
    target = dtype_name(attributes.get("target_dtype"))
    zero = _zeros(zero_point)
    size = _block(attributes, qdata.ndim)[-1]
    layout = row_blocks(size, qdata.shape[-1])
    if target == "int8":
        recipe8 = recipes.INT8Scaling(group_size=size, scale_dtype=scale_name(scale.dtype.name), symmetric=zero is None)
        return made(qdata, scale, recipe8, layout, zero)
    if target not in ("int1", "int2", "int3", "int4"):
        raise StoredTypeError(f"tensor has target_dtype {target}: only int1 to int4 and int8 have a recipe")
    recipe = recipes.INT4Scaling(
        group_size=size,
        signed=zero is None,
        symmetric=zero is None,
        scale_dtype=scale_name(scale.dtype.name),
    )
    nibbles = qdata.view(np.uint8)
    if zero is None:
        return made(nibbles & 15, scale, recipe, layout, shape=qdata.shape)
    unsigned = zero.astype(np.uint8) + np.uint8(8) if zero.dtype.kind in "iu" else zero.astype(np.float32) + 8
    return made((nibbles + np.uint8(8)) & 15, scale, recipe, layout, unsigned, shape=qdata.shape)


def _int4(qdata: Array, scale: Array, parts: Mapping[str, Any], attributes: Mapping[str, Any]) -> OutsideTensor:
    shape = numbers(attributes.get("shape"), f"{NAME}: shape")
    size = _block(attributes, len(shape))[-1]
    scale = np.ascontiguousarray(np.swapaxes(scale, -1, -2))
    bias = np.ascontiguousarray(np.swapaxes(get(parts, "zero_point", NAME, 2), -1, -2))
    recipe = recipes.INT4Scaling(group_size=size, scale_dtype=scale_name(scale.dtype.name))
    scaled = made(codes(qdata, "qdata"), scale, recipe, row_blocks(size, shape[-1]), shape=shape)
    return OutsideTensor(scaled, bias=bias)


def mx_recipe(attributes: Mapping[str, Any]) -> ScalingRecipe:
    """What the attributes of an MXTensor say that it is. Raises StoredTypeError where that is of another element."""
    match element := dtype_name(attributes.get("elem_dtype")):
        case "float8_e4m3fn" | "float8_e5m2":
            return recipes.MXFP8BlockScaling(fp8_format=element)
        case "fp6_e2m3" | "fp6_e3m2":
            return recipes.MXFP6BlockScaling(fp6_format=element[4:])
        case "float4_e2m1fn_x2":
            return recipes.MXFP4BlockScaling()
    raise StoredTypeError(f"tensor has elem_dtype {element}, which must be an FP8, FP6 or FP4 type")


def _mx(qdata: Array, scale: Array, attributes: Mapping[str, Any]) -> ScaledTensor:
    recipe = mx_recipe(attributes)
    shape = (*qdata.shape[:-1], qdata.shape[-1] * (2 if recipe.name == "mxfp4" else 1))
    if attributes.get("block_size", 32) != 32:
        raise ValueError(f"{NAME}: block_size must be 32, got {shown(attributes['block_size'])}")
    return of_blocks(codes(qdata, "qdata"), _rows(codes(scale, "scale"), shape, 32, _swizzled(attributes)), recipe)
