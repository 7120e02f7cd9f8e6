# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors, the format of llm-compressor and vLLM.

Its NVFP4 global scale divides: value = e2m1 · weight_scale / weight_global_scale. Here it is the
multiplier whose reciprocal is that number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from breccia.bridges._common import (
    SCALE_NAMES,
    STORED_SCALES,
    Array,
    as_numpy,
    check_upright,
    codes,
    fp8_recipe,
    from_words,
    get,
    group_size_of,
    int4_from_offset,
    integer_zero_point,
    offset_codes,
    pack_nibbles,
    packed_codes,
    row_blocks,
    unpack_nibbles,
    words,
)
from breccia.bridges._parts import Found, Part, materialize, part
from breccia.layouts import Layout, PerBlockMN, PerChannel, PerTensor
from breccia.recipes import (
    DelayedScaling,
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

NAME = "compressed-tensors"
PEER = "compressed_tensors"
EXTRA = "compressed-tensors"
RECIPES: dict[str, ScalingRecipe] = {
    "nvfp4": NVFP4BlockScaling(),
    "fp8": Float8CurrentScaling(granularity="row"),
    "fp8-tensor": Float8CurrentScaling(),
    "fp8-block": Float8BlockScaling(block_m=128),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "int4": INT4Scaling(scale_dtype="bf16"),
    "int4-asym": INT4Scaling(signed=False, symmetric=False, scale_dtype="bf16"),
    "int8": INT8Scaling(),
}

__all__ = ["from_compressed_tensors", "to_compressed_tensors"]


def from_compressed_tensors(parts: Mapping[str, Any], kind: str | None = None) -> ScaledTensor:
    """The tensors of one module, by the last part of their names.

    Args:
        parts: ``weight`` or ``weight_packed``, ``weight_scale`` and, where the format has them,
            ``weight_global_scale``, ``weight_zero_point``, ``weight_shape``.
        kind: "fp8", "nvfp4", "mxfp4", "mxfp6", "mxfp8", "int4", "int8" or "int8-packed"; told from the
            dtypes if None.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit.
    """
    scale = get(parts, "weight_scale", NAME)
    packed = "weight_packed" in parts
    weight = get(parts, "weight_packed" if packed else "weight", NAME)
    if "weight_g_idx" in parts:
        raise ValueError(f"{NAME}: weight_g_idx must be absent: activation order is not stored by this format any more")
    kind = kind or _kind(weight, scale, packed)
    if kind == "nvfp4":
        divisor = get(parts, "weight_global_scale", NAME) if "weight_global_scale" in parts else None
        recipe = NVFP4BlockScaling(two_level=divisor is not None)
        multiplier = None if divisor is None else reciprocal(np.asarray(divisor, np.float32).reshape(()))
        return ScaledTensor(
            codes(weight, "weight_packed"),
            codes(scale, "weight_scale"),
            recipe,
            PerBlockMN(1, 16),
            global_scale=multiplier,
            shape=(*weight.shape[:-1], weight.shape[-1] * 2),
        )
    if kind == "mxfp4":
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        return ScaledTensor(weight, codes(scale, "weight_scale"), MXFP4BlockScaling(), PerBlockMN(1, 32), shape=shape)
    if kind == "mxfp6":
        return ScaledTensor(
            _unpack6(codes(weight, "weight_packed")),
            codes(scale, "weight_scale"),
            MXFP6BlockScaling(),
            PerBlockMN(1, 32),
        )
    if kind == "mxfp8":
        return ScaledTensor(
            codes(weight, "weight"), codes(scale, "weight_scale"), MXFP8BlockScaling(), PerBlockMN(1, 32)
        )
    if kind in ("int4", "int8-packed"):
        return _integers(parts, weight, scale, kind)
    if kind == "int8":
        return _int8(codes(weight, "weight"), scale, parts.get("weight_zero_point"))
    fp8_format = "E5M2" if weight.dtype.name == "float8_e5m2" else "E4M3"
    recipe8, layout, scale_shape = fp8_recipe(fp8_format, weight.shape, scale.shape, scale.dtype.name)
    return ScaledTensor(codes(weight, "weight"), scale.reshape(scale_shape), recipe8, layout)


def _kind(weight: Array, scale: Array, packed: bool) -> str:
    name = scale.dtype.name
    if packed and weight.dtype.itemsize == 4:
        return "int4"
    if packed and name == "float8_e4m3fn":
        return "nvfp4"
    if packed:
        return "mxfp6" if weight.shape[-1] * 4 == scale.shape[-1] * 96 else "mxfp4"
    if name in ("uint8", "float8_e8m0fnu"):
        return "mxfp8"
    return "int8" if weight.dtype.name == "int8" else "fp8"


def reciprocal(x: Array) -> Array:
    """The float32 whose own reciprocal is ``x``, so that the two spellings of a global scale turn into
    each other; 1 / x where there is none (above a power of two and below the next, up to half of the
    numbers have none)."""
    with np.errstate(divide="ignore"):
        first = np.float32(1) / x
        for candidate in (first, np.nextafter(first, np.float32(0)), np.nextafter(first, np.float32(np.inf))):
            if np.float32(1) / candidate == x:
                return np.asarray(candidate, np.float32)
    return np.asarray(first, np.float32)


def _unpack6(packed: Array) -> Array:
    b = packed.reshape(*packed.shape[:-1], -1, 3).astype(np.uint32)
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    codes6 = np.stack([word >> shift & 0x3F for shift in (0, 6, 12, 18)], axis=-1)
    return codes6.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def _pack6(values: Array) -> Array:
    c = values.reshape(*values.shape[:-1], -1, 4).astype(np.uint32)
    word = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    packed = np.stack([word, word >> 8, word >> 16], axis=-1).astype(np.uint8)
    return packed.reshape(*values.shape[:-1], -1)


def _integers(parts: Mapping[str, Any], weight: Array, scale: Array, kind: str) -> ScaledTensor:
    if "weight_shape" in parts:
        shape = tuple(int(n) for n in get(parts, "weight_shape", NAME).reshape(-1))
    else:
        shape = (*weight.shape[:-1], weight.shape[-1] * (8 if kind == "int4" else 4))
    bits = 4 if kind == "int4" and -(-shape[-1] * 4 // 32) == weight.shape[-1] else 8
    if shape[:-1] != weight.shape[:-1] or -(-shape[-1] * bits // 32) != weight.shape[-1]:
        raise ValueError(
            f"{NAME}: weight_packed must be {shape[:-1]} by {-(-shape[-1] * 4 // 32)} (4 bits) or "
            f"{-(-shape[-1] // 4)} (8 bits) words for weight_shape {shape}, got {weight.shape}"
        )
    stored = words(weight, "weight_packed")
    zero = None
    if "weight_zero_point" in parts:
        rows = words(np.swapaxes(get(parts, "weight_zero_point", NAME), -1, -2), "weight_zero_point")
        rows = unpack_nibbles(rows, shape[-2]) if bits == 4 else rows[..., : shape[-2]]
        zero = np.ascontiguousarray(np.swapaxes(rows, -1, -2))
    if bits == 4:
        return int4_from_offset(stored, scale, zero, shape)
    data = stored[..., : shape[-1]] ^ np.uint8(0x80)
    return _int8(data, scale, None if zero is None else (zero ^ np.uint8(0x80)).view(np.int8))


def _int8(data: Array, scale: Array, zero_point: Any) -> ScaledTensor:
    recipe, layout = _int8_recipe(data.shape, scale.shape, scale.dtype.name, zero_point is None)
    if isinstance(layout, PerTensor):
        scale = scale.reshape(())
    zero = None if zero_point is None else as_numpy(zero_point, "weight_zero_point").reshape(scale.shape)
    return ScaledTensor(data, scale, recipe, layout, zero)


def _int8_recipe(
    shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: str, symmetric: bool
) -> tuple[ScalingRecipe, Layout]:
    name = SCALE_NAMES[dtype]
    if scale_shape in ((), (1,)):
        return INT8Scaling(scale_dtype=name, symmetric=symmetric), PerTensor()
    if scale_shape[-1] == 1 or len(scale_shape) < len(shape):
        return INT8Scaling(scale_dtype=name, symmetric=symmetric), PerChannel()
    size = group_size_of(shape[-1], scale_shape[-1], "weight_scale")
    return INT8Scaling(group_size=size, scale_dtype=name, symmetric=symmetric), row_blocks(size, shape[-1])


def to_compressed_tensors(scaled: ScaledTensor) -> dict[str, Array]:
    """The inverse of `from_compressed_tensors`.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled))


def lay_out(scaled: ScaledTensor) -> dict[str, Part]:
    """`to_compressed_tensors`, each tensor made when it is asked for."""
    recipe = scaled.recipe
    check_upright(scaled)
    scale = as_numpy(scaled.scale, "scale")
    if isinstance(recipe, NVFP4BlockScaling):
        return {
            "weight_packed": part(packed_codes(scaled), "U8"),
            "weight_scale": part(codes(scale, "scale"), "F8_E4M3"),
            "weight_global_scale": Part("F32", (1,), lambda: _divisor(scaled)),
        }
    if isinstance(recipe, MXFP4BlockScaling):
        return {
            "weight_packed": part(packed_codes(scaled), "U8"),
            "weight_scale": part(codes(scale, "scale"), "U8"),
        }
    if isinstance(recipe, MXFP6BlockScaling) and recipe.fp6_format == "E2M3":
        data = codes(scaled.data, "data")
        shape = (*data.shape[:-1], data.shape[-1] * 3 // 4)
        return {
            "weight_packed": Part("U8", shape, lambda: _pack6(data)),
            "weight_scale": part(codes(scale, "scale"), "U8"),
        }
    stored = "F8_E5M2" if recipe.element == "float8_e5m2" else "F8_E4M3"
    if isinstance(recipe, MXFP8BlockScaling):
        return {
            "weight": part(codes(scaled.data, "data"), stored),
            "weight_scale": part(codes(scale, "scale"), "U8"),
        }
    if isinstance(recipe, INT4Scaling):
        return _pack_int4(scaled, scale)
    if isinstance(recipe, INT8Scaling):
        return _store_int8(scaled, scale)
    if isinstance(recipe, (DelayedScaling, Float8CurrentScaling, Float8BlockScaling)) and scale.dtype.itemsize > 1:
        if isinstance(scaled.layout, PerTensor):
            scale = scale.reshape(1)
        if isinstance(scaled.layout, PerChannel) and scale.ndim < scaled.ndim:
            scale = scale[..., None]
        return {
            "weight": part(codes(scaled.data, "data"), stored),
            "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
        }
    raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")


def _divisor(scaled: ScaledTensor) -> Array:
    if scaled.global_scale is None:
        return np.ones(1, np.float32)
    multiplier = as_numpy(scaled.global_scale, "global_scale")
    if multiplier.size != 1:
        raise ValueError(
            f"global_scale must be one number for {NAME}, got {multiplier.shape}: store experts one by one"
        )
    return reciprocal(multiplier.reshape(())).reshape(1)


def _pack_int4(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    shape = scaled.shape
    result = {
        "weight_packed": Part("I32", (*shape[:-1], -(-shape[-1] // 8)), lambda: from_words(_whole_words(scaled))),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
        "weight_shape": part(np.array(shape, np.int64), "I64"),
    }
    if scaled.zero_point is not None:

        def zeros() -> Array:
            zero = integer_zero_point(scaled)
            assert zero is not None
            return np.swapaxes(from_words(pack_nibbles(np.swapaxes(zero & 15, -1, -2))), -1, -2)

        result["weight_zero_point"] = Part("I32", (*shape[:-2], -(-shape[-2] // 8), scaled.scale.shape[-1]), zeros)
    return result


def _whole_words(scaled: ScaledTensor) -> Array:
    return offset_codes(scaled)


def _store_int8(scaled: ScaledTensor, scale: Array) -> dict[str, Part]:
    if isinstance(scaled.layout, PerTensor):
        scale = scale.reshape(1)
    result = {
        "weight": part(codes(scaled.data, "data"), "I8"),
        "weight_scale": part(scale, STORED_SCALES[scale.dtype.name]),
    }
    if scaled.zero_point is not None:
        result["weight_zero_point"] = part(codes(scaled.zero_point, "zero_point").reshape(scale.shape), "I8")
    return result


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, Float8BlockScaling):
        return recipe.scale_format != "e8m0"
    return not isinstance(recipe, MXFP6BlockScaling) or recipe.fp6_format == "E2M3"


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
    if not packed and (context.get("quantization_config") or {}).get("quant_method") == "modelopt":
        return None
    parts = {"weight_packed" if packed else "weight": weight.name, "weight_scale": name}
    for role in ("weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx"):
        if prefix + role in entries:
            parts[role] = prefix + role
    findings: list[str] = []
    found = _find_packed(prefix, parts, weight, scale, findings) if packed else _find_plain(parts, weight, scale)
    if found is None:
        return None
    kind, shape, recipe, layout, dtype = found
    if "weight_g_idx" in parts:
        recipe = layout = None
        findings.append("weight_g_idx: activation order is not supported in this format")
    options = {"kind": kind}
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
_NUMPY = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _find_packed(prefix: str, parts: dict[str, str], weight: Any, scale: Any, findings: list[str]) -> _Kind | None:
    stored, groups = weight.shape, scale.shape[-1] if scale.shape else 1
    if weight.dtype == "U8" and scale.dtype == "F8_E4M3":
        shape = (*stored[:-1], stored[-1] * 2)
        if "weight_global_scale" not in parts:
            findings.append(f"{prefix}weight_global_scale is missing: NVFP4 values would be off by a constant factor")
        recipe = NVFP4BlockScaling(two_level="weight_global_scale" in parts)
        return "nvfp4", shape, recipe, PerBlockMN(1, 16), "uint8"
    if weight.dtype == "U8" and scale.dtype in ("U8", "F8_E8M0"):
        if stored[-1] * 2 == groups * 32:
            return "mxfp4", (*stored[:-1], stored[-1] * 2), MXFP4BlockScaling(), PerBlockMN(1, 32), "uint8"
        if stored[-1] * 4 == groups * 32 * 3:
            return "mxfp6", (*stored[:-1], groups * 32), MXFP6BlockScaling(), PerBlockMN(1, 32), "uint8"
        return None
    if weight.dtype == "I32" and scale.dtype in _NUMPY:
        dtype = _NUMPY[scale.dtype]
        symmetric = "weight_zero_point" not in parts
        columns = stored[-1] * 8
        # weight_shape is data; where headers leave 4 or 8 bits open, power-of-two groups decide.
        bits = 4 if groups == 1 or (columns % groups == 0 and columns // groups >= 16) else 8
        columns = stored[-1] * 32 // bits
        size = group_size_of(columns, groups, "weight_scale")
        recipe4 = INT4Scaling(group_size=size, signed=symmetric, symmetric=symmetric, scale_dtype=SCALE_NAMES[dtype])
        return "int4", (*stored[:-1], columns), recipe4, row_blocks(size, columns), dtype
    return None


def _find_plain(parts: dict[str, str], weight: Any, scale: Any) -> _Kind | None:
    if weight.dtype in ("F8_E4M3", "F8_E5M2") and scale.dtype in ("U8", "F8_E8M0"):
        if scale.shape != (*weight.shape[:-1], -(-weight.shape[-1] // 32)):
            return None
        fp8 = "E4M3" if weight.dtype == "F8_E4M3" else "E5M2"
        return "mxfp8", weight.shape, MXFP8BlockScaling(fp8_format=fp8), PerBlockMN(1, 32), "uint8"
    if scale.dtype not in _NUMPY:
        return None
    dtype = _NUMPY[scale.dtype]
    if weight.dtype == "I8":
        recipe, layout = _int8_recipe(weight.shape, scale.shape, dtype, "weight_zero_point" not in parts)
        return "int8", weight.shape, recipe, layout, dtype
    if weight.dtype in ("F8_E4M3", "F8_E5M2"):
        fp8 = "E4M3" if weight.dtype == "F8_E4M3" else "E5M2"
        recipe, layout, _ = fp8_recipe(fp8, weight.shape, scale.shape, dtype)
        return "fp8", weight.shape, recipe, layout, dtype
    return None


def refine(found: Found, array: Any) -> Found:
    """The shape and width of packed integers, which ``weight_shape`` says and headers do not."""
    if "weight_shape" not in found.parts or found.recipe is None:
        return found
    shape = tuple(int(n) for n in array(found.parts["weight_shape"]).reshape(-1))
    cols = array(found.parts["weight_packed"]).shape[-1]
    scale = array(found.parts["weight_scale"])
    symmetric = "weight_zero_point" not in found.parts
    if len(shape) < 2 or min(shape) <= 0:
        raise ValueError(f"weight_shape must be a matrix's, got {shape}")
    if -(-shape[-1] * 4 // 32) != cols:
        recipe, layout = _int8_recipe(shape, scale.shape, scale.dtype.name, symmetric)
        return replace(found, shape=shape, recipe=recipe, layout=layout)
    size = group_size_of(shape[-1], scale.shape[-1], "weight_scale")
    dtype = SCALE_NAMES[scale.dtype.name]
    recipe = INT4Scaling(size, signed=symmetric, symmetric=symmetric, scale_dtype=dtype)
    return replace(found, shape=shape, recipe=recipe, layout=row_blocks(size, shape[-1]))


def config(recipe: ScalingRecipe, ignored: list[str], originals: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a checkpoint written here."""
    weights: dict[str, Any] = {"dynamic": False, "symmetric": True, "observer": "minmax"}
    fmt = "float-quantized"
    match recipe:
        case NVFP4BlockScaling():
            fmt = "nvfp4-pack-quantized"
            weights |= {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        case MXFP4BlockScaling() | MXFP6BlockScaling() | MXFP8BlockScaling():
            bits = {"mxfp4": 4, "mxfp6": 6, "mxfp8": 8}[recipe.name]
            fmt = f"{recipe.name}-pack-quantized" if bits < 8 else "mxfp8-quantized"
            weights |= {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        case INT4Scaling():
            fmt = "pack-quantized"
            weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": recipe.group_size}
            weights["symmetric"] = recipe.symmetric
        case INT8Scaling():
            fmt = "int-quantized"
            weights |= {"num_bits": 8, "type": "int", "symmetric": recipe.symmetric}
            weights |= _strategy(recipe.group_size)
        case Float8BlockScaling() if recipe.block_m > 1:
            weights |= {"num_bits": 8, "type": "float", "strategy": "block"}
            weights["block_structure"] = [recipe.block_m, recipe.block_k]
        case Float8BlockScaling():
            weights |= {"num_bits": 8, "type": "float", "strategy": "group", "group_size": recipe.block_k}
        case _:
            row = getattr(recipe, "granularity", "tensor") == "row"
            weights |= {"num_bits": 8, "type": "float", "strategy": "channel" if row else "tensor"}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": fmt,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": ignored,
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "format": fmt,
                }
            },
        }
    }


def _strategy(group_size: int | None) -> dict[str, Any]:
    return {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
