# SPDX-License-Identifier: Apache-2.0
"""What the bridges share: bytes of foreign arrays, and parts by their names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from breccia import frameworks
from breccia.bridges.checks import StoredTypeError
from breccia.layouts import _spec
from breccia.peers import require
from breccia.scaled_tensor import ScaledTensor, check_kernels
from breccia.value.inputs import refuse_mask

Array: TypeAlias = "np.ndarray[Any, Any]"


def as_numpy(x: Any, argument: str) -> Array:
    """A CPU array of any framework as NumPy's, sharing memory where the framework can."""
    if isinstance(x, np.ndarray):
        refuse_mask(x, argument)
        array: Array = x
    elif type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "detach"):
        array = _from_torch(x)
    elif not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{argument} must be an array, got {type(x).__name__}")
    elif str(x.dtype) == "mlx.core.bfloat16":  # which NumPy cannot take
        array = _coded(frameworks.on_host(x)[0], "bfloat16")
    else:
        array = np.asarray(x)
    if array.dtype.kind == "c":
        raise StoredTypeError(f"{argument} must have real numbers, got dtype {array.dtype}")
    return array


def _from_torch(x: Any) -> Array:
    import torch

    x = x.detach().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":
        raw: Array = x.contiguous().view(torch.uint8).numpy()
        return raw
    if name.startswith("float8") or name == "bfloat16":
        width = torch.uint8 if name.startswith("float8") else torch.int16
        # A 0-D tensor cannot change its type's width; through 1-D it can.
        return _coded(x.contiguous().reshape(-1).view(width).numpy().reshape(tuple(x.shape)), name)
    array: Array = x.numpy()
    return array


def _coded(plain: Array, name: str) -> Array:
    """Bytes or half-words in ml_dtypes' type of that name, where it is installed."""
    try:
        import ml_dtypes
    except ImportError:
        return plain.view(np.uint8 if plain.dtype.itemsize == 1 else np.uint16)
    return plain.view(getattr(ml_dtypes, name))


def to_torch(array: Array) -> Any:
    """A NumPy array as torch's, ml_dtypes' types included."""
    import torch

    array = np.ascontiguousarray(array) if array.ndim else array.copy()
    if not array.flags.writeable:
        array = array.copy()
    name = array.dtype.name
    if not name.startswith(("float8", "bfloat16")):
        return torch.from_numpy(array)
    width = np.uint8 if array.dtype.itemsize == 1 else np.int16
    return torch.from_numpy(array.reshape(-1).view(width)).view(getattr(torch, name)).reshape(array.shape)


def codes(x: Any, argument: str) -> Array:
    """An array of one-byte items as ``uint8``. Raises StoredTypeError where its items are wider."""
    array = as_numpy(x, argument)
    if array.dtype.itemsize != 1:
        raise StoredTypeError(f"{argument} must have one-byte items, got dtype {array.dtype}")
    return array if array.dtype == np.uint8 else np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)


def check_parts(parts: Any, bridge: str) -> None:
    """The tensors of a module come by their names. Raises TypeError where they do not."""
    if not isinstance(parts, Mapping):
        raise TypeError(f"{bridge}: parts must map names to tensors, got {type(parts).__name__}")


def get(parts: Mapping[str, Any], name: str, bridge: str, axes: int = 0) -> Array:
    """A part that must be there and have so many axes or more. Raises TypeError where the parts are no mapping."""
    check_parts(parts, bridge)
    if name not in parts:
        raise ValueError(f"{bridge}: {name!r} must be among the tensors, got {', '.join(sorted(parts)) or 'none'}")
    array = as_numpy(parts[name], name)
    if array.ndim < axes:
        raise ValueError(f"{bridge}: {name!r} must have at least {axes} axes, got shape {array.shape}")
    return array


def get_matrix(parts: Mapping[str, Any], name: str, bridge: str) -> Array:
    """A part that must be there and be a matrix. Raises ValueError where it is not."""
    array = get(parts, name, bridge)
    if array.ndim != 2:
        raise ValueError(f"{bridge}: {name!r} must be a matrix, got shape {array.shape}")
    return array


def check_upright(scaled: ScaledTensor, argument: str = "scaled") -> None:
    """Checkpoints store rows. Raises TypeError where it is no ScaledTensor, or of another library's recipe or layout,
    ValueError where it is a transposed view."""
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"{argument} must be a ScaledTensor, got {type(scaled).__name__}")
    check_kernels(scaled)
    if _spec(scaled.layout).axis != -1:
        raise ValueError(f"{argument} must not be a transposed view: pass .mT of it")


def check_matrix(scaled: ScaledTensor, bridge: str) -> None:
    """Formats of words that run down the columns hold matrices alone. Raises ValueError where the tensor is none."""
    if scaled.ndim != 2:
        raise ValueError(f"scaled must be a matrix for {bridge}, got shape {scaled.shape}")


def float32(array: Array) -> Array:
    """Scales as float32; bfloat16 may come as ``uint16``."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def bfloat16_bits(values: Array) -> Array:
    """Float32 numbers rounded to nearest even, as ``uint16``: without ml_dtypes."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40
    return rounded


def turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """With the last two axes, where there are two, in the other order."""
    return (*shape[:-2], *shape[:-3:-1])


def float_dtype(dtype: Any) -> Any:
    """A dtype by its name, bfloat16 being ml_dtypes'."""
    if dtype == "bfloat16":
        return require("ml_dtypes", "ml_dtypes").bfloat16
    return dtype


def unswizzle(scale: Array, rows: int, columns: int) -> Array:
    """Undo cuBLAS's 128 × 4 tiling of block scales (docs/formats.md): (rows, columns) in row order."""
    tiles_m, tiles_k = -(-rows // 128), -(-columns // 4)
    if scale.size != tiles_m * tiles_k * 512:
        raise ValueError(
            f"scale must have {tiles_m * tiles_k * 512} bytes for {rows} x {columns} tiled scales, got {scale.size}"
        )
    tiles = scale.reshape(tiles_m, tiles_k, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(tiles_m * 128, tiles_k * 4)[:rows, :columns])


def swizzle(scale: Array) -> Array:
    """The inverse of `unswizzle`, flat; what pads the last tiles is zero."""
    padded = _filled_up(scale, 128, 4)
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(-1)


def _filled_up(scale: Array, rows: int, columns: int) -> Array:
    """Codes (rows, columns) with zeros behind them, up to whole tiles of so many rows and columns."""
    padded = np.zeros((-(-scale.shape[0] // rows) * rows, -(-scale.shape[1] // columns) * columns), np.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = codes(scale, "scale")
    return padded


def to_aiter_scales(scale: Array) -> Array:
    """E8M0 scales in the order that AITER's products on MI355 read: `e8m0_shuffle` of amd-aiter 0.1.7, whose tiles are
    of 32 rows and 8 block columns (docs/formats.md).

    Args:
        scale: codes (rows, columns) in row order: those of a ScaledTensor of MXFP4 or MXFP8.

    Returns:
        uint8 (rows, columns), rows filled up to a multiple of 256 and columns to one of 8 with zeros.

    Raises:
        ValueError: ``scale`` is not of two axes.
    """
    if scale.ndim != 2:
        raise ValueError(f"scale must be (rows, columns), got shape {tuple(scale.shape)}")
    padded = _filled_up(scale, 256, 8)
    tiles = padded.reshape(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4).transpose(0, 3, 5, 2, 4, 1)
    return np.ascontiguousarray(tiles).reshape(padded.shape)


def from_aiter_scales(scale: Array, rows: int, columns: int) -> Array:
    """The inverse of `to_aiter_scales`: uint8 (rows, columns) in row order.

    Raises:
        ValueError: ``scale`` is not of as many bytes as scales of that shape have in AITER's order.
    """
    shape = -(-rows // 256) * 256, -(-columns // 8) * 8
    if scale.size != math.prod(shape):
        raise ValueError(
            f"scale must have {math.prod(shape)} bytes for {rows} x {columns} scales in AITER's order, got {scale.size}"
        )
    tiles = codes(scale, "scale").reshape(shape[0] // 32, shape[1] // 8, 4, 16, 2, 2).transpose(0, 5, 3, 1, 4, 2)
    return np.ascontiguousarray(tiles.reshape(shape)[:rows, :columns])
