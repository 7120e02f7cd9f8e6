# SPDX-License-Identifier: Apache-2.0
"""Which torchao class a ScaledTensor becomes, with its buffers and attributes: what its constructors take
and its safetensors layout stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.common import Array, as_numpy, check_upright, codes, float32, global_scale
from breccia.bridges.integers import turned
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.packing import code_part, packed_codes, scale_part, unpack_nibbles
from breccia.bridges.parts import Part, part
from breccia.bridges.torchao.inputs import AUTO, torch_dtype
from breccia.scaled_tensor import ScaledTensor

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
