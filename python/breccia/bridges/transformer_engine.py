# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's quantized tensors (2.x): Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor,
NVFP4Tensor, and the storage classes behind them.

They are told by their attributes, so that reading one imports nothing. TransformerEngine pads scales
(rows to 128, columns to 4), tiles them for cuBLAS, and stores the scales of 1-D FP8 blocks transposed:
all that is undone here and redone on the way back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.common import Array, as_numpy, check_upright, codes, float32, swizzle, to_torch, unswizzle
from breccia.bridges.contract import FileFormat
from breccia.bridges.packing import packed_codes
from breccia.bridges.scales import amax_of_scale, in_torch, one_global_scale, row_blocks
from breccia.layouts import PerBlockMN, PerTensor
from breccia.peers import require
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

NAME = "transformer_engine"
EXTRA = "te"
RECIPES: dict[str, ScalingRecipe] = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block-2d": recipes.Float8BlockScaling(block_m=128),
    "block-1d": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}

__all__ = ["from_transformer_engine", "to_transformer_engine"]


def from_transformer_engine(te_t: Any, recipe: ScalingRecipe | str | None = None) -> ScaledTensor:
    """Wrap a TransformerEngine tensor's buffers.

    Args:
        te_t: one of the four tensor classes or their storages. Row-wise data is taken where it is there,
            else column-wise data, which gives the same values in FP8 (and, for MXFP8 and NVFP4, those of
            the column-wise quantization).
        recipe: recorded instead of the one the buffers say (a Float8Tensor does not know whether its
            scale was delayed or current).

    Returns:
        A ScaledTensor in torch, on the tensor's device.

    Raises:
        TypeError: not a TransformerEngine tensor of these classes.
        ValueError: it holds no data, or its scales do not fit.
    """
    if hasattr(te_t, "_scale_inv") and hasattr(te_t, "_data"):
        made = _from_tensor(te_t)
    elif hasattr(te_t, "_is_2D_scaled"):
        made = _from_blockwise(te_t)
    elif hasattr(te_t, "_fp4_dtype"):
        made = _from_nvfp4(te_t)
    elif hasattr(te_t, "_rowwise_scale_inv") and hasattr(te_t, "_fp8_dtype"):
        made = _from_mxfp8(te_t)
    else:
        raise TypeError(
            f"te_t must be Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor or NVFP4Tensor, got {type(te_t).__name__}"
        )
    return in_torch(made, getattr(te_t, "device", None), recipe)


def _fp8_format(dtype: Any) -> str:
    name = getattr(dtype, "name", str(dtype))
    for fp8 in ("E4M3", "E5M2"):
        if fp8 in name.upper():
            return fp8
    raise ValueError(f"te_t: FP8 dtype must be kFloat8E4M3 or kFloat8E5M2, got {dtype}")


def _from_tensor(te_t: Any) -> ScaledTensor:
    fp8 = _fp8_format(te_t._fp8_dtype)
    scale = as_numpy(te_t._scale_inv, "_scale_inv").reshape(())
    if te_t._data is not None:
        data = codes(te_t._data, "_data")
    elif te_t._transpose is not None and not te_t._transpose_invalid:
        data = np.ascontiguousarray(np.moveaxis(codes(te_t._transpose, "_transpose"), 0, -1))
    else:
        raise ValueError("te_t must hold data: _data is None and there is no valid _transpose")
    return ScaledTensor(data, scale, recipes.DelayedScaling(fp8_format=fp8), PerTensor())


def _side(te_t: Any) -> tuple[Array, Array, bool]:
    if te_t._rowwise_data is not None:
        return (
            codes(te_t._rowwise_data, "_rowwise_data"),
            as_numpy(te_t._rowwise_scale_inv, "_rowwise_scale_inv"),
            True,
        )
    if te_t._columnwise_data is None:
        raise ValueError("te_t must hold data: both _rowwise_data and _columnwise_data are None")
    scale = as_numpy(te_t._columnwise_scale_inv, "_columnwise_scale_inv")
    return codes(te_t._columnwise_data, "_columnwise_data"), scale, False


def _from_blockwise(te_t: Any) -> ScaledTensor:
    fp8 = _fp8_format(te_t._fp8_dtype)
    data, scale, rowwise = _side(te_t)
    matrix = data.reshape(-1, data.shape[-1])
    rows, columns = matrix.shape
    if te_t._is_2D_scaled:
        grid = (-(-rows // 128), -(-columns // 128))
        recipe, layout = recipes.Float8BlockScaling(fp8_format=fp8, block_m=128), PerBlockMN(128, 128)
        scale = scale[: grid[0], : grid[1]]
        made = ScaledTensor(matrix, np.ascontiguousarray(scale), recipe, layout)
    else:
        scale = np.ascontiguousarray(scale[: -(-columns // 128), :rows].T)
        made = ScaledTensor(matrix, scale, recipes.Float8BlockScaling(fp8_format=fp8), row_blocks(128, columns))
    # Column-wise data is the transpose, quantized along its own rows.
    return made if rowwise else made.T


def _from_mxfp8(te_t: Any) -> ScaledTensor:
    recipe = recipes.MXFP8BlockScaling(fp8_format=_fp8_format(te_t._fp8_dtype))
    data, scale, rowwise = _side(te_t)
    matrix = data.reshape(-1, data.shape[-1])
    if not rowwise:  # blocks run down the columns of untransposed data
        matrix, scale = matrix.T, scale.T
    groups = -(-matrix.shape[1] // 32)
    scale = _unpadded(codes(scale, "scale_inv"), matrix.shape[0], groups, bool(te_t._with_gemm_swizzled_scales))
    made = ScaledTensor(matrix, scale, recipe, PerBlockMN(1, 32))
    return made if rowwise else made.T


def _from_nvfp4(te_t: Any) -> ScaledTensor:
    if getattr(te_t, "_row_scaled_nvfp4", False):
        raise ValueError("te_t must have one amax per tensor, it has one per row (row_scaled_nvfp4)")
    data, scale, rowwise = _side(te_t)
    matrix = data.reshape(-1, data.shape[-1])
    rows, columns = matrix.shape[0], matrix.shape[1] * 2
    scale = _unpadded(codes(scale, "scale_inv"), rows, -(-columns // 16), bool(te_t._with_gemm_swizzled_scales))
    amax = as_numpy(te_t._amax_rowwise if rowwise else te_t._amax_columnwise, "amax").astype(np.float32)
    e4m3_max = int(getattr(te_t, "_nvfp4_e4m3_max", 448))
    second = np.asarray(amax.reshape(()) / np.float32(6 * e4m3_max), np.float32)
    made = ScaledTensor(
        matrix, scale, recipes.NVFP4BlockScaling(), PerBlockMN(1, 16), global_scale=second, shape=(rows, columns)
    )
    return made if rowwise else made.T


def _unpadded(scale: Array, rows: int, groups: int, swizzled: bool) -> Array:
    if swizzled:
        return unswizzle(scale.reshape(-1), rows, groups)
    if scale.shape[0] < rows or scale.shape[1] < groups:
        raise ValueError(f"te_t: scale must be at least ({rows}, {groups}), got {scale.shape}")
    return np.ascontiguousarray(scale[:rows, :groups])


def to_transformer_engine(
    scaled: ScaledTensor, dtype: Any = None, device: Any = "cpu", *, swizzled: bool = False
) -> Any:
    """The TransformerEngine tensor of the same bytes, with row-wise usage only (column-wise data would
    have to be quantized anew).

    Args:
        scaled: per-tensor FP8, FP8 in blocks of 128, MXFP8 or two-level NVFP4.
        dtype: torch dtype its operations pretend to have (default: bfloat16).
        device: where to put it.
        swizzled: tile MXFP8 and NVFP4 scales for cuBLAS.

    Returns:
        A Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor or NVFP4Tensor of the logical shape.

    Raises:
        ImportError: TransformerEngine is not installed.
        ValueError: it has no class for such a tensor.
    """
    require("transformer_engine.pytorch.tensor", EXTRA)
    import torch

    check_upright(scaled)
    common = {
        "shape": torch.Size(scaled.shape),
        "dtype": torch.bfloat16 if dtype is None else dtype,
        "device": torch.device(device),
    }
    kind, buffers = _buffers(scaled, swizzled)
    element = _element(scaled.recipe.element)
    made = getattr(require("transformer_engine.pytorch.tensor", EXTRA), kind)
    fields = {name: value if value is None else to_torch(value).to(device) for name, value in buffers.items()}
    return made(**common, **fields, **_settings(scaled, kind, element, swizzled), quantizer=None)


def _buffers(scaled: ScaledTensor, swizzled: bool) -> tuple[str, dict[str, Array | None]]:
    """The class of a tensor and its buffers. Raises ValueError where there is no class for it."""
    recipe, shape = scaled.recipe, scaled.shape
    scale = as_numpy(scaled.scale, "scale")
    if scaled.layout.one_scale and isinstance(recipe, (recipes.DelayedScaling, recipes.Float8CurrentScaling)):
        return "Float8Tensor", {"data": codes(scaled.data, "data"), "fp8_scale_inv": float32(scale).reshape(1)}
    none: dict[str, Array | None] = {"columnwise_data": None, "columnwise_scale_inv": None}
    if isinstance(recipe, recipes.Float8BlockScaling) and recipe.block_k == 128 and recipe.block_m in (1, 128):
        flat = _float_scale(scale).reshape(-1, scale.shape[-1])
        padded = _padded(flat if recipe.block_m == 128 else flat.T, 1, 4)
        rows = {"rowwise_data": codes(scaled.data, "data"), "rowwise_scale_inv": padded}
        return "Float8BlockwiseQTensor", none | rows
    if scale.dtype.itemsize == 1:
        tiles = _grid(codes(scale, "scale").reshape(int(np.prod(shape[:-1])), -1), swizzled)
        if isinstance(recipe, recipes.MXFP8BlockScaling):
            return "MXFP8Tensor", {**none, "rowwise_data": codes(scaled.data, "data"), "rowwise_scale_inv": tiles}
        if isinstance(recipe, recipes.NVFP4BlockScaling):
            data = packed_codes(scaled).reshape(*shape[:-1], shape[-1] // 2)
            amax = amax_of_scale(one_global_scale(scaled, NAME).reshape(1))
            rows = {"rowwise_data": data, "rowwise_scale_inv": tiles, "amax_rowwise": amax}
            return "NVFP4Tensor", none | rows | {"amax_columnwise": None}
    raise ValueError(f"scaled must have a recipe that {NAME} can store, got {recipe}")


def _settings(scaled: ScaledTensor, kind: str, element: Any, swizzled: bool) -> dict[str, Any]:
    """What a class takes beside buffers."""
    settings: dict[str, Any] = {"fp4_dtype" if kind == "NVFP4Tensor" else "fp8_dtype": element}
    if kind == "Float8BlockwiseQTensor":
        settings["is_2D_scaled"] = getattr(scaled.recipe, "block_m", 1) == 128
    if kind in ("MXFP8Tensor", "NVFP4Tensor"):
        settings["with_gemm_swizzled_scales"] = swizzled
    return settings


def _float_scale(scale: Array) -> Array:
    if scale.dtype.itemsize > 1:
        return float32(scale)
    from breccia.formats import decode

    return decode(codes(scale, "scale"), "float8_e8m0fnu")


def _padded(scale: Array, rows: int, columns: int) -> Array:
    return np.pad(scale, [(0, -scale.shape[0] % rows), (0, -scale.shape[1] % columns)])


def _grid(scale: Array, swizzled: bool) -> Array:
    padded = _padded(scale, 128, 4)
    return swizzle(scale).reshape(padded.shape) if swizzled else padded


def _element(element: str) -> Any:
    names = {"float8_e4m3fn": "kFloat8E4M3", "float8_e5m2": "kFloat8E5M2", "float4_e2m1fn": "kFloat4E2M1"}
    if element not in names:
        raise ValueError(f"scaled must hold FP8 or FP4 codes, got {element}")
    return getattr(require("transformer_engine.pytorch.constants", EXTRA).DType, names[element])


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the classes hold a recipe's bytes as they are."""
    if isinstance(recipe, recipes.Float8BlockScaling):
        return recipe.block_k == 128 and recipe.block_m in (1, 128) and recipe.scale_format == "fp32"
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return recipe.two_level
    return (
        isinstance(recipe, (recipes.DelayedScaling, recipes.MXFP8BlockScaling))
        or recipe == recipes.Float8CurrentScaling()
    )


BRIDGE = FileFormat(
    name=NAME,
    peer="transformer_engine",
    extra=EXTRA,
    recipes=RECIPES,
    carries=carries,
)
