# SPDX-License-Identifier: Apache-2.0
"""MLX's quantized weights: ``weight`` uint32 words with ``scales`` and, in affine mode, ``biases``.

affine: value = code · scale + bias, in the float domain. mxfp4, mxfp8 and nvfp4 store the codes of the
formats of those names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia.bridges._common import (
    SCALE_NAMES,
    STORED_SCALES,
    Array,
    as_numpy,
    codes,
    float32,
    from_words,
    get,
    global_scale,
    group_size_of,
    offset_codes,
    packed_codes,
    row_blocks,
    words,
)
from breccia.bridges._outside import OutsideTensor
from breccia.bridges._parts import Found, Part, materialize, part, rows_only
from breccia.layouts import PerBlockMN
from breccia.recipes import (
    INT4Scaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.scaled_tensor import ScaledTensor

NAME = "mlx"
PEER = "mlx.core"
EXTRA = "mlx"
RECIPES: dict[str, ScalingRecipe] = {
    "mxfp4": MXFP4BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(two_level=False),
    "int4": INT4Scaling(group_size=64, signed=False, symmetric=False, scale_dtype="fp16"),
}
_NUMPY = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

__all__ = ["from_mlx", "to_mlx"]


def from_mlx(parts: Mapping[str, Any], *, mode: str | None = None) -> ScaledTensor | OutsideTensor:
    """The tensors of one module.

    Args:
        parts: ``weight``, ``scales``, in affine mode ``biases``, for NVFP4 perhaps ``global_scale``.
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4"; told from dtypes and shapes if None.

    Returns:
        A ScaledTensor; an OutsideTensor with the biases in affine mode.

    Raises:
        ValueError: a tensor is missing or has a shape that does not fit.
    """
    weight, scales = get(parts, "weight", NAME), get(parts, "scales", NAME)
    raw = words(weight, "weight")
    if mode is None:
        mode = "affine" if "biases" in parts else _mode(raw.shape[-1], scales.shape[-1])
    if mode == "affine":
        return _affine(parts, raw, scales)
    scale = codes(scales, "scales")
    if mode == "mxfp8":
        return ScaledTensor(raw, scale, MXFP8BlockScaling(), PerBlockMN(1, 32))
    shape = (*raw.shape[:-1], raw.shape[-1] * 2)
    if mode == "mxfp4":
        return ScaledTensor(raw, scale, MXFP4BlockScaling(), PerBlockMN(1, 32), shape=shape)
    if mode != "nvfp4":
        raise ValueError(f"mode must be 'affine', 'mxfp4', 'mxfp8' or 'nvfp4', got {mode!r}")
    second = None
    if "global_scale" in parts:  # MLX keeps the tensor's amax
        second = np.asarray(get(parts, "global_scale", NAME), np.float32).reshape(()) / np.float32(448 * 6)
    recipe = NVFP4BlockScaling(two_level=second is not None)
    return ScaledTensor(raw, scale, recipe, PerBlockMN(1, 16), global_scale=second, shape=shape)


def _mode(row_bytes: int, groups: int) -> str:
    for mode, nbytes in (("mxfp4", 16), ("mxfp8", 32), ("nvfp4", 8)):
        if row_bytes == groups * nbytes:
            return mode
    raise ValueError(f"{NAME}: scales must have one entry per 16 or 32 elements of {row_bytes} bytes, got {groups}")


def _affine(parts: Mapping[str, Any], raw: Array, scales: Array) -> OutsideTensor:
    biases = get(parts, "biases", NAME)
    if biases.shape != scales.shape:
        raise ValueError(f"{NAME}: biases must be shaped like scales {scales.shape}, got {biases.shape}")
    # Bits are told by the group size: MLX's are 32, 64 and 128.
    size = raw.shape[-1] * 2 // scales.shape[-1]
    if size not in (32, 64, 128):
        raise ValueError(f"{NAME}: affine weights must have 4 bits and groups of 32, 64 or 128, got {size} per group")
    columns = raw.shape[-1] * 2
    recipe = INT4Scaling(group_size=size, signed=False, scale_dtype=SCALE_NAMES[scales.dtype.name])
    scaled = ScaledTensor(raw, scales, recipe, row_blocks(size, columns), shape=(*raw.shape[:-1], columns))
    arithmetic = "bfloat16" if scales.dtype == np.uint16 else scales.dtype.name
    return OutsideTensor(scaled, bias=biases, arithmetic=arithmetic)


def to_mlx(scaled: ScaledTensor | OutsideTensor) -> dict[str, Array]:
    """The inverse of `from_mlx`. INT4 becomes affine: bias = -zero point · scale, in
    the scale's dtype where that is exact and in float32 where it is not.

    Raises:
        ValueError: the format has no place for such a tensor.
    """
    return materialize(lay_out(scaled))


@rows_only
def lay_out(scaled: ScaledTensor | OutsideTensor) -> dict[str, Part]:
    """`to_mlx`, each tensor made when it is asked for."""
    if isinstance(scaled, OutsideTensor):
        inner, bias = scaled.scaled, scaled.bias
        if scaled.columns is not None or bias is None:
            raise ValueError("scaled must have its columns in order: MLX stores no g_idx")
        return {
            "weight": Part("U32", _words_shape(inner), lambda: from_words(offset_codes(inner), "<u4")),
            "scales": part(as_numpy(inner.scale, "scale"), STORED_SCALES[as_numpy(inner.scale, "scale").dtype.name]),
            "biases": part(bias, STORED_SCALES[bias.dtype.name]),
        }
    recipe = scaled.recipe
    if isinstance(recipe, INT4Scaling):
        return _to_affine(scaled)
    if isinstance(recipe, MXFP8BlockScaling) and recipe.fp8_format == "E4M3":
        data = codes(scaled.data, "data")
        shape = (*data.shape[:-1], data.shape[-1] // 4)
        return {
            "weight": Part("U32", shape, lambda: from_words(data, "<u4")),
            "scales": part(codes(scaled.scale, "scale"), "U8"),
        }
    if isinstance(recipe, (MXFP4BlockScaling, NVFP4BlockScaling)):
        result = {
            "weight": Part("U32", _words_shape(scaled), lambda: from_words(packed_codes(scaled), "<u4")),
            "scales": part(codes(scaled.scale, "scale"), "U8"),
        }
        if scaled.global_scale is not None:
            result["global_scale"] = Part("F32", (), lambda: _amax(scaled))
        return result
    raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")


def _amax(scaled: ScaledTensor) -> Array:
    second = global_scale(scaled, "multiplier")
    assert second is not None
    second = second.reshape(())
    exact = np.float32(448 * 6)
    first = np.asarray(second * exact, np.float32)
    for candidate in (first, np.nextafter(first, np.float32(0)), np.nextafter(first, np.float32(np.inf))):
        if candidate / exact == second:
            return np.asarray(candidate, np.float32)
    return first


def _words_shape(scaled: ScaledTensor) -> tuple[int, ...]:
    return (*scaled.shape[:-1], -(-scaled.shape[-1] // 8))


def _to_affine(scaled: ScaledTensor) -> dict[str, Part]:
    scale = as_numpy(scaled.scale, "scale")
    signed = scaled.recipe.element == "int4"

    def wide() -> Array:
        zero: Any = 8.0 if signed else 0.0
        if scaled.zero_point is not None:
            zero = zero + as_numpy(scaled.zero_point, "zero_point").astype(np.float32)
        return np.asarray(-zero * float32(scale), np.float32)

    return {
        "weight": Part("U32", _words_shape(scaled), lambda: from_words(offset_codes(scaled), "<u4")),
        "scales": Part("F32", tuple(scale.shape), lambda: float32(scale)),
        "biases": Part("F32", tuple(scale.shape), wide),
    }


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the format holds a recipe's bytes as they are."""
    if isinstance(recipe, INT4Scaling):
        return recipe.group_size in (32, 64, 128)
    if isinstance(recipe, MXFP8BlockScaling):
        return recipe.fp8_format == "E4M3"
    return isinstance(recipe, (MXFP4BlockScaling, NVFP4BlockScaling))


def find(name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
    """Recognise the weight that ``name`` belongs to, from the headers alone."""
    if not name.endswith(".scales"):
        return None
    prefix = name.removesuffix("scales")
    weight, scales, biases = entries.get(prefix + "weight"), entries[name], entries.get(prefix + "biases")
    if weight is None or weight.dtype != "U32" or len(weight.shape) < 2:
        return None
    row = weight.shape[-1] * 4
    parts = {"weight": weight.name, "scales": name}
    if prefix + "global_scale" in entries:
        parts["global_scale"] = prefix + "global_scale"
    if biases is None:
        mode = _mode(row, scales.shape[-1])
        shape = (*weight.shape[:-1], row * (1 if mode == "mxfp8" else 2))
        recipes: dict[str, ScalingRecipe] = {
            "mxfp4": MXFP4BlockScaling(),
            "mxfp8": MXFP8BlockScaling(),
            "nvfp4": NVFP4BlockScaling(two_level="global_scale" in parts),
        }
        layout = PerBlockMN(1, 16 if mode == "nvfp4" else 32)
        return Found(prefix + "weight", NAME, mode, parts, shape, recipes[mode], layout, options={"mode": mode})
    parts["biases"] = biases.name
    shape = (*weight.shape[:-1], row * 2)
    size = group_size_of(shape[-1], scales.shape[-1], name)
    findings = () if size in (32, 64, 128) else (f"{size} columns per group: not 4 bits, which is all that is read",)
    return Found(
        prefix + "weight",
        NAME,
        "affine",
        parts,
        shape,
        None,
        row_blocks(size, shape[-1]),
        _NUMPY[scales.dtype],
        options={"mode": "affine"},
        findings=findings,
    )


def config(recipe: ScalingRecipe, ignored: list[str], originals: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a checkpoint written here."""
    match recipe:
        case MXFP4BlockScaling():
            said: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        case MXFP8BlockScaling():
            said = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
        case NVFP4BlockScaling():
            said = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
        case _:
            said = {"group_size": getattr(recipe, "group_size", 64), "bits": 4, "mode": "affine"}
    return {"quantization": said, "quantization_config": said}
