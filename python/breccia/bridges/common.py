# SPDX-License-Identifier: Apache-2.0
"""What the bridges share: bytes of foreign arrays, parts by their names, and scales as others order and name them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from breccia import frameworks
from breccia.bridges.checks import StoredTypeError
from breccia.formats import finfo
from breccia.layouts import Layout, PerBlockK, PerBlockMN, _spec
from breccia.peers import require
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe, global_divides
from breccia.scaled_tensor import ScaledTensor, check_kernels
from breccia.value.inputs import refuse_mask

Array: TypeAlias = "np.ndarray[Any, Any]"

SCALE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "uint16": "bf16", "float32": "fp32"}
STORED_SCALES = {"float16": "F16", "bfloat16": "BF16", "uint16": "BF16", "float32": "F32"}


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


def in_torch(made: ScaledTensor, device: Any, recipe: ScalingRecipe | str | None) -> ScaledTensor:
    """A tensor read from torch's buffers, back in torch and on their device, with another recipe's name if
    one is given."""
    made = (made if recipe is None else dataclasses.replace(made, recipe=resolve(recipe))).to("torch")
    return made if device is None or str(device) == "cpu" else made.to(device)


def codes(x: Any, argument: str) -> Array:
    """An array of one-byte items as ``uint8``. Raises StoredTypeError where its items are wider."""
    array = as_numpy(x, argument)
    if array.dtype.itemsize != 1:
        raise StoredTypeError(f"{argument} must have one-byte items, got dtype {array.dtype}")
    return array if array.dtype == np.uint8 else np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)


def scale_name(dtype: str) -> str:
    """The recipes' name of a scale's dtype. Raises ValueError where integers have no scales of that dtype."""
    if dtype not in SCALE_NAMES:
        raise ValueError(f"scales must be float16, bfloat16 or float32, got dtype {dtype}")
    return SCALE_NAMES[dtype]


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


def _inverse(guess: Array, function: Callable[[Array], Array], x: Array) -> Array:
    """The float32 numbers, a guess or a neighbour of it, of which ``function`` is ``x``; the guess where none is."""
    guess = np.asarray(guess, np.float32)
    for other in (np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.float32(np.inf))):
        guess = np.where((function(other) == x) & (function(guess) != x), other, guess)
    return guess


def reciprocal(x: Array) -> Array:
    """The float32 numbers whose own reciprocals are ``x``, so that the two forms of a global scale turn
    into each other; 1 / x where there is none (above a power of two and below the next, up to half of the
    numbers have none)."""
    # 1 / 0 and 1 / a subnormal number are infinite; a plan's tensors hold anything, signalling NaN among it.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return _inverse(np.float32(1) / x, lambda number: np.float32(1) / number, x)


def amax_of_scale(second: Array) -> Array:
    """The amax that programs divide by 448 · 6 to get a global scale, a multiplier, of NVFP4."""
    exact = np.float32(448 * 6)
    return _inverse(second * exact, lambda amax: amax / exact, second)


def global_scale(scaled: ScaledTensor, form: str) -> Array | None:
    """The global scale as a "multiplier" or a "divisor" of block scales, whichever the tensor has."""
    if scaled.global_scale is None:
        return None
    second = as_numpy(scaled.global_scale, "global_scale")
    return second if global_divides(scaled.recipe) == (form == "divisor") else reciprocal(second)


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


def row_blocks(group_size: int, columns: int) -> Layout:
    """One scale per ``group_size`` elements of a row, the last group short where it must be."""
    return PerBlockK(group_size) if columns % group_size == 0 else PerBlockMN(1, group_size)


def turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """With the last two axes, where there are two, in the other order."""
    return (*shape[:-2], *shape[:-3:-1])


def group_size_of(columns: int, groups: int, argument: str) -> int:
    """Elements per scale of a row. Raises ValueError where no size that checkpoints use gives that number of groups."""
    if groups > 0 and columns % groups == 0:
        return columns // groups
    for size in (16, 32, 64, 128, 256, 512, 1024):
        if -(-columns // size) == groups:
            return size
    raise ValueError(f"{argument} must have one entry per group of {columns} columns, got {groups}")


def made(*arguments: Any, **options: Any) -> ScaledTensor:
    """``ScaledTensor(...)`` of stored arrays. Raises ValueError where they do not fit, StoredTypeError where one has a
    dtype that no ScaledTensor has."""
    try:
        return ScaledTensor(*arguments, **options)
    except TypeError as error:
        raise StoredTypeError(str(error)) from error


def of_blocks(weight: Array, scale: Array, recipe: ScalingRecipe, second: Array | None = None) -> ScaledTensor:
    """A weight of MX or NVFP4: codes of 4 bits are packed, each row has a scale per block, and perhaps there is a
    global scale."""
    columns = weight.shape[-1] * (2 if finfo(recipe.element).bits == 4 else 1)
    layout = PerBlockMN(1, recipe.layout.block.columns)
    stored, scales = codes(weight, "weight"), codes(scale, "weight_scale")
    return made(stored, scales, recipe, layout, global_scale=second, shape=(*weight.shape[:-1], columns))


def one_number(array: Array, what: str) -> Array:
    """A scale of a whole tensor, float32 of no axes. Raises ValueError where there are more numbers."""
    if array.size != 1:
        raise ValueError(f"{what} must be one number, got shape {array.shape}")
    return float32(array).reshape(())


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


def float_dtype(dtype: Any) -> Any:
    """A dtype by its name, bfloat16 being ml_dtypes'."""
    if dtype == "bfloat16":
        return require("ml_dtypes", "ml_dtypes").bfloat16
    return dtype
