# SPDX-License-Identifier: Apache-2.0
"""torchao's tensor subclasses, and the safetensors layout it saves them in.

The classes are told by name and attributes: reading one needs torch only as far as the tensor itself
does; the layout needs neither torch nor torchao.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from breccia.bridges._common import (
    SCALE_NAMES,
    Array,
    as_numpy,
    codes,
    fp8_recipe,
    in_torch,
    require,
    row_blocks,
    to_torch,
    unswizzle,
)
from breccia.bridges._outside import OutsideTensor
from breccia.bridges._parts import Found, Part
from breccia.bridges._torchao_parts import describe
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    INT4Scaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.scaled_tensor import ScaledTensor

NAME = "torchao"
PEER = "torchao"
EXTRA = "torchao"
RECIPES: dict[str, ScalingRecipe] = {
    "fp8": Float8CurrentScaling(granularity="row"),
    "fp8-tensor": Float8CurrentScaling(),
    "fp8-block": Float8BlockScaling(block_m=128),
    "fp8-row-block": Float8BlockScaling(),
    "int8": INT8Scaling(),
    "int4": INT4Scaling(group_size=32, scale_dtype="bf16"),
    "int4-asym": INT4Scaling(group_size=32, signed=False, symmetric=False, scale_dtype="bf16"),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
_OPAQUE = {
    "Int4PreshuffledTensor": "CUDA-packed",
    "Int4OpaqueTensor": "CPU-packed",
    "Int4TilePackedTo4dTensor": "CUDA-packed",
    "Int4PlainInt32Tensor": "packed for its device",
    "IntxOpaqueTensor": "CPU-packed",
    "NF4Tensor": "a codebook",
}

__all__ = ["from_torchao", "to_torchao"]


def from_torchao(tensor: Any, recipe: ScalingRecipe | None = None) -> ScaledTensor | OutsideTensor:
    """Wrap a torchao tensor's buffers; tiled (swizzled) scales are put in row order.

    Args:
        tensor: Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, MXTensor or NVFP4Tensor.
        recipe: recorded instead of the one the buffers say, where the caller knows more.

    Returns:
        A ScaledTensor in torch; for Int4Tensor, whose zero points are floats, an OutsideTensor in NumPy.

    Raises:
        TypeError: not a torchao tensor, or one whose bytes are opaque; the message names the way out.
    """
    kind = type(tensor).__name__
    if kind in _OPAQUE:
        raise TypeError(
            f"tensor is {kind}, whose data is {_OPAQUE[kind]}: quantize to a plain class "
            f"(int4: IntxWeightOnlyConfig; else dequantize it) first"
        )
    names = getattr(tensor, "tensor_data_names", None)
    if names is None:
        raise TypeError(f"tensor must be one of torchao's tensor classes, got {kind}")
    names = [*names, *getattr(tensor, "optional_tensor_data_names", [])]
    parts = {n: getattr(tensor, n) for n in names if getattr(tensor, n, None) is not None}
    attributes: dict[str, Any] = {}
    for n in [*tensor.tensor_attribute_names, *getattr(tensor, "optional_tensor_attribute_names", [])]:
        attributes[n] = getattr(tensor, n, None)
    attributes["shape"] = tuple(tensor.shape)
    made = _from_parts(kind, parts, attributes)
    if not isinstance(made, OutsideTensor):
        return in_torch(made, tensor.device, recipe)
    if recipe is not None:
        raise ValueError(f"recipe must be None for {kind}: its float zero points have no recipe")
    return made


def _dtype_name(value: Any) -> str:
    if isinstance(value, dict):  # as torchao's JSON spells it
        value = value.get("_data", "")
    return str(value).removeprefix("torch.")


def _from_parts(kind: str, parts: Mapping[str, Any], attributes: Mapping[str, Any]) -> ScaledTensor | OutsideTensor:
    for needed in ("qdata", "scale"):
        if needed not in parts:
            raise ValueError(f"{NAME}: {kind} must have {needed!r}, got {', '.join(sorted(parts))}")
    if "act_pre_scale" in parts:
        raise ValueError(f"{NAME}: act_pre_scale must be absent: it scales the layer's input, not this tensor")
    qdata, scale = as_numpy(parts["qdata"], "qdata"), as_numpy(parts["scale"], "scale")
    match kind:
        case "Float8Tensor":
            fp8_format = "E5M2" if qdata.dtype.name == "float8_e5m2" else "E4M3"
            recipe, layout = _float8(fp8_format, qdata.shape, scale, attributes.get("block_size"))
            if isinstance(layout, PerTensor):
                scale = scale.reshape(())
            return ScaledTensor(codes(qdata, "qdata"), scale, recipe, layout)
        case "Int8Tensor":
            return _int8(qdata, scale, parts.get("zero_point"), attributes["block_size"])
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
            return ScaledTensor(
                codes(qdata, "qdata"),
                _rows(codes(scale, "scale"), shape, 16, bool(attributes.get("is_swizzled_scales"))),
                NVFP4BlockScaling(two_level=second is not None),
                PerBlockMN(1, 16),
                global_scale=second,
                shape=shape,
            )
    raise TypeError(f"tensor must be one of torchao's plain tensor classes, got {kind}")


def _rows(scale: Array, shape: tuple[int, ...], block: int, swizzled: bool) -> Array:
    groups = shape[-1] // block
    if not swizzled:
        return scale.reshape(*shape[:-1], groups)
    rows = int(np.prod(shape[:-1]))
    return unswizzle(scale.reshape(-1), rows, groups).reshape(*shape[:-1], groups)


def _float8(fp8: str, shape: tuple[int, ...], scale: Array, block_size: Any) -> tuple[ScalingRecipe, Layout]:
    if block_size is None or scale.size == 1:
        recipe, layout, _ = fp8_recipe(fp8, shape, scale.shape, scale.dtype.name)
        return recipe, layout
    block = [int(b) for b in block_size]
    if tuple(block[:-2]) != (1,) * (len(block) - 2):
        raise ValueError(f"{NAME}: block_size must be 1 along leading axes, got {block}")
    if block[-1] == shape[-1] and block[-2] == 1:
        return Float8CurrentScaling(fp8_format=fp8, granularity="row"), PerChannel()
    recipe = Float8BlockScaling(fp8_format=fp8, block_m=block[-2], block_k=block[-1])
    return recipe, row_blocks(block[-1], shape[-1]) if block[-2] == 1 else PerBlockMN(block[-2], block[-1])


def _int8(qdata: Array, scale: Array, zero_point: Any, block_size: Any) -> ScaledTensor:
    size = int(block_size[-1])
    name = SCALE_NAMES[scale.dtype.name]
    zero = None if zero_point is None else as_numpy(zero_point, "zero_point")
    if zero is not None and not zero.any():
        zero = None
    symmetric = zero is None
    if scale.size == 1 and qdata.shape[0] != 1:
        recipe, layout = INT8Scaling(scale_dtype=name, symmetric=symmetric), PerTensor()
        return ScaledTensor(qdata, scale.reshape(()), recipe, layout, None if zero is None else zero.reshape(()))
    if size == qdata.shape[-1]:
        return ScaledTensor(qdata, scale, INT8Scaling(scale_dtype=name, symmetric=symmetric), PerChannel(), zero)
    recipe = INT8Scaling(group_size=size, scale_dtype=name, symmetric=symmetric)
    return ScaledTensor(qdata, scale, recipe, row_blocks(size, qdata.shape[-1]), zero)


def _intx(qdata: Array, scale: Array, zero_point: Any, attributes: Mapping[str, Any]) -> ScaledTensor:
    target = _dtype_name(attributes["target_dtype"])
    zero = None if zero_point is None else as_numpy(zero_point, "zero_point")
    if zero is not None and not zero.any():
        zero = None
    size = int(attributes["block_size"][-1])
    layout = row_blocks(size, qdata.shape[-1])
    if target == "int8":
        recipe8 = INT8Scaling(group_size=size, scale_dtype=SCALE_NAMES[scale.dtype.name], symmetric=zero is None)
        return ScaledTensor(qdata, scale, recipe8, layout, zero)
    if target not in ("int1", "int2", "int3", "int4"):
        raise TypeError(f"tensor has target_dtype {target}: only int1 to int4 and int8 have a recipe")
    recipe = INT4Scaling(
        group_size=size,
        signed=zero is None,
        symmetric=zero is None,
        scale_dtype=SCALE_NAMES[scale.dtype.name],
    )
    nibbles = qdata.view(np.uint8)
    if zero is None:
        return ScaledTensor(nibbles & 15, scale, recipe, layout, shape=qdata.shape)
    unsigned = zero.astype(np.uint8) + np.uint8(8) if zero.dtype.kind in "iu" else zero.astype(np.float32) + 8
    return ScaledTensor((nibbles + np.uint8(8)) & 15, scale, recipe, layout, unsigned, shape=qdata.shape)


def _int4(qdata: Array, scale: Array, parts: Mapping[str, Any], attributes: Mapping[str, Any]) -> OutsideTensor:
    shape = tuple(int(n) for n in attributes["shape"])
    size = int(attributes["block_size"][-1])
    scale = np.ascontiguousarray(np.swapaxes(scale, -1, -2))
    bias = np.ascontiguousarray(np.swapaxes(as_numpy(parts["zero_point"], "zero_point"), -1, -2))
    recipe = INT4Scaling(group_size=size, scale_dtype=SCALE_NAMES[scale.dtype.name])
    scaled = ScaledTensor(codes(qdata, "qdata"), scale, recipe, row_blocks(size, shape[-1]), shape=shape)
    return OutsideTensor(scaled, bias=bias)


def _mx(qdata: Array, scale: Array, attributes: Mapping[str, Any]) -> ScaledTensor:
    element = attributes["elem_dtype"]
    element = element if element in ("fp6_e2m3", "fp6_e3m2") else _dtype_name(element)
    shape = qdata.shape
    recipe: ScalingRecipe
    match element:
        case "float8_e4m3fn":
            recipe = MXFP8BlockScaling()
        case "float8_e5m2":
            recipe = MXFP8BlockScaling(fp8_format="E5M2")
        case "fp6_e2m3" | "fp6_e3m2":
            recipe = MXFP6BlockScaling(fp6_format=element[4:].upper())
        case "float4_e2m1fn_x2":
            recipe = MXFP4BlockScaling()
            shape = (*qdata.shape[:-1], qdata.shape[-1] * 2)
        case _:
            raise TypeError(f"tensor has elem_dtype {element}, which must be an FP8, FP6 or FP4 type")
    if int(attributes.get("block_size", 32)) != 32:
        raise ValueError(f"{NAME}: block_size must be 32, got {attributes['block_size']}")
    rows = _rows(codes(scale, "scale"), shape, 32, bool(attributes.get("is_swizzled_scales")))
    return ScaledTensor(codes(qdata, "qdata"), rows, recipe, PerBlockMN(1, 32), shape=shape)


def to_torchao(scaled: ScaledTensor | OutsideTensor, dtype: Any = None) -> Any:
    """The torchao tensor of the same bytes, on the CPU.

    Args:
        scaled: what to convert.
        dtype: torch dtype its operations pretend to have (default: bfloat16).

    Raises:
        ImportError: torchao is not installed.
        ValueError: torchao has no class for it.
    """
    require("torchao", EXTRA)
    import torch

    high = torch.bfloat16 if dtype is None else dtype
    kind, parts, attributes = describe(scaled, str(high).removeprefix("torch."))
    arrays = {name: value.make().reshape(value.shape) for name, value in parts.items()}
    tensors = {name: to_torch(arrays[name], _TORCH.get(value.dtype)) for name, value in parts.items()}
    values = {k: _object(v) for k, v in attributes.items()}
    return _class(kind)(**tensors, **values)


_TORCH = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
}


def _class(kind: str) -> Any:
    if kind == "MXTensor":
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        return MXTensor
    if kind == "NVFP4Tensor":
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        return NVFP4Tensor
    return getattr(require("torchao.quantization", EXTRA), kind)


def _object(value: Any) -> Any:
    """An attribute of the JSON form as torchao's own object."""
    if not isinstance(value, dict):
        return value
    if value["_type"] == "torch.dtype":
        import torch

        return getattr(torch, value["_data"])
    from torchao.quantization.quantize_.common import KernelPreference

    return KernelPreference[value["_data"]]


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, Float8BlockScaling):
        return recipe.scale_format == "fp32"
    if isinstance(recipe, INT4Scaling):
        return recipe.signed or not recipe.symmetric
    return True


# --- torchao's safetensors layout: torchao.prototype.safetensors, read and written without it ---


def store(name: str, scaled: ScaledTensor | OutsideTensor, high: str = "bfloat16") -> tuple[dict[str, Part], str]:
    """Stored tensors of a logical one, by full name, and its entry in the header's metadata."""
    kind, parts, attributes = describe(scaled, high)
    module, _, last = name.rpartition(".")
    entry = {"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)}
    return {f"{module}._{last}_{role}": value for role, value in parts.items()}, json.dumps(entry)


def load(parts: Mapping[str, Any], *, kind: str, attributes: Mapping[str, Any]) -> ScaledTensor | OutsideTensor:
    """The logical tensor of its stored ones, by role."""
    return _from_parts(kind, parts, attributes)


def find_all(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> list[Found]:
    """The logical tensors that a header's metadata describes.

    Raises:
        ValueError: the metadata is torchao's but not of its form.
    """
    if "tensor_names" not in metadata:
        return []
    try:
        names = json.loads(metadata["tensor_names"])
        described = {name: json.loads(metadata[name]) for name in names if name in metadata}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"metadata 'tensor_names' must be {NAME}'s JSON: {error}") from None
    found = []
    for name, entry in described.items():
        kind = entry.get("_type") if isinstance(entry, dict) else None
        if kind in (None, "Tensor"):
            continue
        module, _, last = name.rpartition(".")
        parts = {role: f"{module}._{last}_{role}" for role in entry.get("_tensor_data_names", [])}
        missing = [full for full in parts.values() if full not in entries]
        if missing or "qdata" not in parts or "scale" not in parts:
            raise ValueError(
                f"tensor {name!r}: {missing or 'qdata and scale'} must be in the file, as its metadata says"
            )
        found.append(_found(name, kind, parts, entry["_data"], entries))
    return found


def _found(
    name: str, kind: str, parts: dict[str, str], attributes: dict[str, Any], entries: Mapping[str, Any]
) -> Found:
    qdata, scale = entries[parts["qdata"]], entries[parts["scale"]]
    shape = tuple(qdata.shape)
    options = {"kind": kind, "attributes": attributes}
    recipe: ScalingRecipe | None = None
    layout: Layout | None = None
    dtype = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(scale.dtype, "uint8")
    if kind == "NVFP4Tensor":
        shape = (*shape[:-1], shape[-1] * 2)
        recipe, layout = NVFP4BlockScaling(two_level="per_tensor_scale" in parts), PerBlockMN(1, 16)
        if "per_tensor_scale" in parts:
            parts = {**parts, "global_scale": parts["per_tensor_scale"]}
    elif kind == "MXTensor":
        element = attributes["elem_dtype"]
        element = element if isinstance(element, str) else _dtype_name(element)
        layout = PerBlockMN(1, 32)
        if element == "float4_e2m1fn_x2":
            recipe, shape = MXFP4BlockScaling(), (*shape[:-1], shape[-1] * 2)
        elif element.startswith("fp6"):
            recipe = MXFP6BlockScaling(fp6_format=element[4:].upper())
        else:
            recipe = MXFP8BlockScaling(fp8_format="E5M2" if "e5m2" in element else "E4M3")
    elif kind == "Float8Tensor":
        fp8 = "E5M2" if qdata.dtype == "F8_E5M2" else "E4M3"
        recipe, layout = _float8(fp8, shape, np.empty(scale.shape, np.float32), attributes.get("block_size"))
    elif kind == "Int4Tensor":
        shape = tuple(attributes["shape"])
    swizzled = ("scales are tiled for cuBLAS (swizzled)",) if attributes.get("is_swizzled_scales") else ()
    return Found(name, NAME, kind, parts, shape, recipe, layout, dtype, options=options, findings=swizzled)


def refine(found: Found, array: Any) -> Found:
    """Whether a tensor of integers has zero points other than zero, which its header does not say."""
    kind = found.options["kind"]
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        return found
    zero = array(found.parts["zero_point"]) if "zero_point" in found.parts else None
    scale, shape = array(found.parts["scale"]), found.shape
    # One row is enough to know the recipe: everything but the zero points is in the attributes.
    ghost = {"qdata": np.empty(shape, np.int8), "scale": scale, **({} if zero is None else {"zero_point": zero})}
    made = _from_parts(kind, ghost, found.options["attributes"])
    assert isinstance(made, ScaledTensor)
    return replace(found, recipe=made.recipe, layout=made.layout, scale_dtype=scale.dtype.name)


def config(recipe: ScalingRecipe, ignored: list[str], originals: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a checkpoint written here: the method; classes are in the files' headers."""
    return {"quantization_config": {"quant_method": "torchao", "modules_to_not_convert": ignored}}
