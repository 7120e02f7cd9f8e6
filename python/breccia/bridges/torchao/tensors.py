# SPDX-License-Identifier: Apache-2.0
"""torchao's tensors from their parts and attributes, wherever those come from, a tensor object or a file; and which
class a ScaledTensor becomes, with its buffers and attributes: what its constructors take and its safetensors layout
stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.checks import StoredTypeError, flag, numbers, shown
from breccia.bridges.common import Array, as_numpy, check_upright, codes, float32, get, unswizzle
from breccia.bridges.fp8 import fp8_format_of, fp8_recipe
from breccia.bridges.integers import turned
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import code_part, packed_codes, scale_part, unpack_nibbles
from breccia.bridges.parts import Part, part
from breccia.bridges.scales import global_scale, made, of_blocks, row_blocks, scale_name
from breccia.bridges.torchao.inputs import AUTO, torch_dtype
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


Described = tuple[str, dict[str, Part], dict[str, Any]]


def describe(scaled: ScaledTensor | OutsideTensor, high: str) -> Described:
    """Class name, buffers and attributes, the attributes as torchao's JSON spells them."""
    if isinstance(scaled, OutsideTensor):
        return _int4_tensor(scaled)
    check_upright(scaled)
    scale = as_numpy(scaled.scale, "scale")
    match scaled.recipe:
        case recipes.DelayedScaling() | recipes.Float8CurrentScaling() | recipes.Float8BlockScaling() if (
            scale.dtype.itemsize > 1
        ):
            return _float8_tensor(scaled, scale, high)
        case recipes.INT8Scaling():
            return _int8_tensor(scaled, scale, high)
        case recipes.INT4Scaling():
            return _intx_tensor(scaled, scale, high)
        case recipes.NVFP4BlockScaling():
            return _nvfp4_tensor(scaled, scale, high)
        case recipes.MXFP8BlockScaling() | recipes.MXFP6BlockScaling() | recipes.MXFP4BlockScaling():
            return _mx_tensor(scaled, scale, high)
    raise ValueError(f"scaled must have a recipe that torchao can store, got {scaled.recipe}")


def _float8_tensor(scaled: ScaledTensor, scale: Array, high: str) -> Described:
    shape = scaled.shape
    if scaled.layout.one_scale:
        scale = scale.reshape((1,) * len(shape))
    elif scale.ndim < len(shape):
        scale = scale[..., None]
    parts = {"qdata": code_part(scaled), "scale": Part("F32", tuple(scale.shape), lambda: float32(scale))}
    attributes = {
        "block_size": _block_size(scaled),
        "mm_config": None,
        "act_quant_kwargs": None,
        "kernel_preference": AUTO,
        "dtype": torch_dtype(high),
    }
    return "Float8Tensor", parts, attributes


def _int8_tensor(scaled: ScaledTensor, scale: Array, high: str) -> Described:
    parts = {"qdata": code_part(scaled), "scale": scale_part(scaled)}
    if scaled.zero_point is not None:
        parts["zero_point"] = part(codes(scaled.zero_point, "zero_point"), "I8")
    attributes = {
        "block_size": _block_size(scaled),
        "dtype": torch_dtype(high),
        "act_quant_kwargs": None,
        "reduce_range": False,
    }
    return "Int8Tensor", _signed(parts), attributes


def _nvfp4_tensor(scaled: ScaledTensor, scale: Array, high: str) -> Described:
    parts = {"qdata": code_part(scaled), "scale": scale_part(scaled, "F8_E4M3")}
    second = global_scale(scaled, "multiplier")
    if second is not None:
        parts["per_tensor_scale"] = part(second.reshape(()) if second.size == 1 else second, "F32")
    attributes = {
        "block_size": 16,
        "orig_dtype": torch_dtype(high),
        "is_swizzled_scales": False,
        "use_triton_kernel": False,
        "act_quant_kwargs": None,
    }
    return "NVFP4Tensor", parts, attributes


_MX_ELEMENTS = {"float6_e2m3fn": "fp6_e2m3", "float6_e3m2fn": "fp6_e3m2", "float4_e2m1fn": "float4_e2m1fn_x2"}


def _mx_tensor(scaled: ScaledTensor, scale: Array, high: str) -> Described:
    element = _MX_ELEMENTS.get(scaled.recipe.element, scaled.recipe.element)
    sixes = isinstance(scaled.recipe, recipes.MXFP6BlockScaling)  # a byte each
    data = part(codes(scaled.data, "data"), "U8") if sixes else code_part(scaled)
    parts = {"qdata": data, "scale": scale_part(scaled, "F8_E8M0")}
    attributes = {
        "elem_dtype": element if element.startswith("fp6") else torch_dtype(element),
        "block_size": 32,
        "orig_dtype": torch_dtype(high),
        "kernel_preference": AUTO,
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
    }
    return "MXTensor", parts, attributes


def _signed(parts: dict[str, Part]) -> dict[str, Part]:
    def as_int8(p: Part) -> Part:
        return Part(p.dtype, p.shape, lambda: p.make().view(np.int8)) if p.dtype == "I8" else p

    return {name: as_int8(p) for name, p in parts.items()}


def _block_size(scaled: ScaledTensor) -> list[int]:
    shape, block = scaled.shape, scaled.layout.block
    if scaled.layout.one_scale:
        return list(shape)
    return [*[1] * (len(shape) - 2), block.rows, block.columns or shape[-1]]


def _intx_tensor(scaled: ScaledTensor, scale: Array, high: str) -> Described:
    shape = scaled.shape
    signed = scaled.recipe.element == "int4"
    if not signed and scaled.zero_point is None:
        raise ValueError(f"scaled must be signed or have zero points for torchao, got {scaled.recipe}")

    def qdata() -> Array:
        nibbles = unpack_nibbles(packed_codes(scaled), shape[-1])
        return ((nibbles ^ 8) if signed else nibbles).astype(np.int8) - np.int8(8)

    def zeros() -> Array:
        if scaled.zero_point is None:
            return np.zeros(scale.shape, np.int8)
        return as_numpy(scaled.zero_point, "zero_point").astype(np.int8) - np.int8(0 if signed else 8)

    parts = {
        "qdata": Part("I8", shape, qdata),
        "scale": scale_part(scaled),
        "zero_point": Part("I8", tuple(scale.shape), zeros),
    }
    return (
        "IntxUnpackedToInt8Tensor",
        parts,
        {
            "target_dtype": torch_dtype("int4"),
            "block_size": _block_size(scaled),
            "dtype": torch_dtype(high),
            "activation_quantization": None,
        },
    )


def _int4_tensor(outside: OutsideTensor) -> Described:
    scaled, bias = outside.scaled, outside.bias
    if outside.columns is not None or bias is None or scaled.recipe.element != "int4":
        raise ValueError(f"scaled must be signed INT4 with a bias and its columns in order for torchao, got {outside}")
    parts = {
        "qdata": Part("I8", (*scaled.shape[:-1], scaled.shape[-1] // 2), lambda: packed_codes(scaled).view(np.int8)),
        "scale": turned(as_numpy(scaled.scale, "scale")),
        "zero_point": turned(bias),
    }
    return "Int4Tensor", parts, {"block_size": _block_size(scaled), "shape": list(scaled.shape)}
