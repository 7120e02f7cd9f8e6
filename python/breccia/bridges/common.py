# SPDX-License-Identifier: Apache-2.0
"""What the bridges share: bytes of foreign arrays, nibbles, tiled scales, and how a bridge describes
tensors of a checkpoint without reading them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from breccia import frameworks
from breccia._inputs import refuse_mask
from breccia.bridges.checks import StoredTypeError
from breccia.formats import decode
from breccia.layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor, _spec
from breccia.peers import require
from breccia.recipe_names import resolve
from breccia.recipes import Float8BlockScaling, Float8CurrentScaling, ScalingRecipe, global_divides
from breccia.scaled_tensor import ScaledTensor, check_kernels

Array: TypeAlias = "np.ndarray[Any, Any]"

FP8_DTYPES = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_FP8_NAMES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}
FP8_CODES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
SCALE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "uint16": "bf16", "float32": "fp32"}
STORED_SCALES = {"float16": "F16", "bfloat16": "BF16", "uint16": "BF16", "float32": "F32"}


def as_numpy(x: Any, argument: str) -> Array:
    """A CPU array of any framework as NumPy's, sharing memory where the framework can.

    Raises:
        TypeError: it is not an array.
        StoredTypeError: its numbers are complex, which no format stores: a conversion would drop their imaginary part.
    """
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


def to_torch(array: Array, dtype: str | None = None) -> Any:
    """A NumPy array as torch's, ml_dtypes' types included; ``dtype`` reads codes as that torch type."""
    import torch

    array = np.ascontiguousarray(array) if array.ndim else array.copy()
    name = dtype or (array.dtype.name if array.dtype.name.startswith(("float8", "bfloat16")) else None)
    if not array.flags.writeable:
        array = array.copy()
    if name is None:
        return torch.from_numpy(array)
    width = np.uint8 if array.dtype.itemsize == 1 else np.int16
    return torch.from_numpy(array.reshape(-1).view(width)).view(getattr(torch, name)).reshape(array.shape)


def in_torch(made: ScaledTensor, device: Any, recipe: ScalingRecipe | str | None) -> ScaledTensor:
    """A tensor read from torch's buffers, back in torch and on their device, with another recipe's name if
    one is given."""
    if recipe is not None:
        made = ScaledTensor(
            made.data,
            made.scale,
            resolve(recipe),
            made.layout,
            made.zero_point,
            global_scale=made.global_scale,
            shape=made.shape,
        )
    made = made.to("torch")
    return made if device is None or str(device) == "cpu" else made.to(device)


def codes(x: Any, argument: str) -> Array:
    """An array of one-byte items as ``uint8``.

    Raises:
        TypeError: its items are wider.
    """
    array = as_numpy(x, argument)
    if array.dtype.itemsize != 1:
        raise StoredTypeError(f"{argument} must have one-byte items, got dtype {array.dtype}")
    return array if array.dtype == np.uint8 else np.ascontiguousarray(array).view(np.uint8).reshape(array.shape)


def word_matrix(x: Any, argument: str) -> NDArray[np.uint32]:
    """32-bit words as the core reads them.

    Raises:
        TypeError: its items are not 32-bit integers.
    """
    array = as_numpy(x, argument)
    if array.dtype.kind not in "iu" or array.dtype.itemsize != 4:
        raise StoredTypeError(f"{argument} must be an int32 or uint32 array, got dtype {array.dtype}")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).view("<u4")


def words(x: Any, argument: str) -> Array:
    """An array of 32-bit words as little-endian bytes, four per word along the last axis.

    Raises:
        TypeError: its items are not 32-bit integers.
    """
    return word_matrix(x, argument).view(np.uint8)


def from_words(packed: Array, dtype: str = "<i4") -> Array:
    """The inverse of `words`: rows are filled up with zeros to whole words."""
    missing = -packed.shape[-1] % 4
    if missing:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    return np.ascontiguousarray(packed).view(dtype)


def scale_name(dtype: str) -> str:
    """The recipes' name of a scale's dtype.

    Raises:
        ValueError: integers have no scales of that dtype.
    """
    if dtype not in SCALE_NAMES:
        raise ValueError(f"scales must be float16, bfloat16 or float32, got dtype {dtype}")
    return SCALE_NAMES[dtype]


def check_parts(parts: Any, bridge: str) -> None:
    """The tensors of a module come by their names.

    Raises:
        TypeError: they do not.
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f"{bridge}: parts must map names to tensors, got {type(parts).__name__}")


def get(parts: Mapping[str, Any], name: str, bridge: str, axes: int = 0) -> Array:
    """A part that must be there and have so many axes or more.

    Raises:
        TypeError: the parts are no mapping.
        ValueError: it is not, or has fewer.
    """
    check_parts(parts, bridge)
    if name not in parts:
        raise ValueError(f"{bridge}: {name!r} must be among the tensors, got {', '.join(sorted(parts)) or 'none'}")
    array = as_numpy(parts[name], name)
    if array.ndim < axes:
        raise ValueError(f"{bridge}: {name!r} must have at least {axes} axes, got shape {array.shape}")
    return array


def get_matrix(parts: Mapping[str, Any], name: str, bridge: str) -> Array:
    """A part that must be there and be a matrix.

    Raises:
        ValueError: it is not.
    """
    array = get(parts, name, bridge)
    if array.ndim != 2:
        raise ValueError(f"{bridge}: {name!r} must be a matrix, got shape {array.shape}")
    return array


def unpack_nibbles(packed: Array, n: int) -> Array:
    """``n`` codes per row, one per byte."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], -1)[..., :n]


def unpack_bits(packed: Array, bits: int) -> Array:
    """Codes of ``bits`` bits, one after another from the low bit of the first byte on, one per byte."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    padded = np.zeros((*stream.shape[:-1], 8), np.uint8)
    padded[..., :bits] = stream
    return np.packbits(padded, axis=-1, bitorder="little")[..., 0]


def unpack_sixes(packed: Array) -> Array:
    """Codes of 6 bits, one per byte, of which four share three bytes, from the low bit on."""
    b = packed.reshape(*packed.shape[:-1], -1, 3).astype(np.uint32)
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    codes6 = np.stack([word >> shift & 0x3F for shift in (0, 6, 12, 18)], axis=-1)
    return codes6.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def pack_sixes(values: Array) -> Array:
    """The inverse of `unpack_sixes`."""
    c = values.reshape(*values.shape[:-1], -1, 4).astype(np.uint32)
    word = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    packed = np.stack([word, word >> 8, word >> 16], axis=-1).astype(np.uint8)
    return packed.reshape(*values.shape[:-1], -1)


def pack_nibbles(values: Array) -> Array:
    """Two codes per byte, the even element low; an odd row's last high nibble is zero."""
    if values.shape[-1] % 2:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
    packed: Array = values[..., ::2] | (values[..., 1::2] << 4)
    return packed


def reciprocal(x: Array) -> Array:
    """The float32 numbers whose own reciprocals are ``x``, so that the two forms of a global scale turn
    into each other; 1 / x where there is none (above a power of two and below the next, up to half of the
    numbers have none)."""
    with np.errstate(divide="ignore", over="ignore"):  # 1 / 0 and 1 / a subnormal number are infinite
        result: Array = np.float32(1) / x
        for other in (np.nextafter(result, np.float32(0)), np.nextafter(result, np.float32(np.inf))):
            better = (np.float32(1) / other == x) & (np.float32(1) / result != x)
            result = np.where(better, other, result)
    return np.asarray(result, np.float32)


def global_scale(scaled: ScaledTensor, form: str) -> Array | None:
    """The global scale as a "multiplier" or a "divisor" of block scales, whichever the tensor has."""
    if scaled.global_scale is None:
        return None
    second = as_numpy(scaled.global_scale, "global_scale")
    return second if global_divides(scaled.recipe) == (form == "divisor") else reciprocal(second)


def check_upright(scaled: ScaledTensor, argument: str = "scaled") -> None:
    """Checkpoints store rows.

    Raises:
        TypeError: it is no ScaledTensor, or the recipe or layout is another library's.
        ValueError: the tensor is a transposed view.
    """
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"{argument} must be a ScaledTensor, got {type(scaled).__name__}")
    check_kernels(scaled)
    if _spec(scaled.layout).axis != -1:
        raise ValueError(f"{argument} must not be a transposed view: pass .mT of it")


def check_matrix(scaled: ScaledTensor, bridge: str) -> None:
    """Formats of words that run down the columns hold matrices alone.

    Raises:
        ValueError: the tensor is none.
    """
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


def packed_codes(scaled: ScaledTensor) -> Array:
    """4-bit data as packed bytes, whichever way the tensor stores it."""
    data = codes(scaled.data, "data")
    check_upright(scaled)
    return np.ascontiguousarray(data) if scaled.is_packed else pack_nibbles(data & 15)


def row_blocks(group_size: int, columns: int) -> Layout:
    """One scale per ``group_size`` elements of a row, the last group short where it must be."""
    return PerBlockK(group_size) if columns % group_size == 0 else PerBlockMN(1, group_size)


def group_size_of(columns: int, groups: int, argument: str) -> int:
    """Elements per scale of a row.

    Raises:
        ValueError: no size that checkpoints use gives that number of groups.
    """
    if groups > 0 and columns % groups == 0:
        return columns // groups
    for size in (16, 32, 64, 128, 256, 512, 1024):
        if -(-columns // size) == groups:
            return size
    raise ValueError(f"{argument} must have one entry per group of {columns} columns, got {groups}")


def fp8_format_of(weight: Array, said: str | None = None) -> str:
    """The format of FP8 codes: what the header said, else what the array's dtype says (E4M3 where those are bytes).

    Raises:
        ValueError: they are of AMD's fnuz, which means other numbers by the same bits.
    """
    if weight.dtype.name.endswith("fnuz"):
        raise ValueError(f"weight must be of E4M3 or E5M2, got {weight.dtype}: breccia.bridges.from_fnuz reads it")
    return said or FP8_CODES.get(weight.dtype.name, "E4M3")


def fp8_values(raw: Array, fp8_format: str) -> Array:
    """The numbers that FP8 codes stand for, as float32."""
    return decode(codes(raw, "raw"), _FP8_NAMES[fp8_format])


def fp8_recipe(
    fp8_format: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], scale_dtype: str
) -> tuple[ScalingRecipe, Layout, tuple[int, ...]]:
    """Recipe, layout and the scale's shape in that layout, for an FP8 weight and the shape its scale
    is stored in.

    Raises:
        ValueError: the scale's shape fits no granularity.
    """
    if not shape:
        raise ValueError("weight.shape must have at least one axis, got ()")
    rows, columns = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[-1])
    if math.prod(scale_shape) == 1 and rows * columns != 1:
        return Float8CurrentScaling(fp8_format=fp8_format), PerTensor(), ()
    batch = shape[:-2]
    scale_format = SCALE_NAMES.get(scale_dtype, "e8m0")
    scale_format = "fp32" if scale_format == "fp16" else scale_format
    if scale_shape in ((*batch, rows, 1), (*batch, rows)):
        return Float8CurrentScaling(fp8_format=fp8_format, granularity="row"), PerChannel(), scale_shape
    if len(scale_shape) == len(batch) + 4 and scale_shape[-3] == scale_shape[-1] == 1:  # (N/128, 1, K/128, 1)
        scale_shape = (*batch, scale_shape[-4], scale_shape[-2])
    if scale_shape[:-1] == (*batch, rows):
        size = group_size_of(columns, scale_shape[-1], "scale")
        recipe = Float8BlockScaling(fp8_format=fp8_format, block_k=size, scale_format=scale_format)
        return recipe, row_blocks(size, columns), scale_shape
    for size in (128, 64, 256, 32, 16, 512):
        if scale_shape == (*batch, -(-rows // size), -(-columns // size)):
            recipe = Float8BlockScaling(fp8_format=fp8_format, block_k=size, block_m=size, scale_format=scale_format)
            return recipe, PerBlockMN(size, size), scale_shape
    raise ValueError(
        f"scale.shape must be that of one scale per tensor, row, block of a row or square tile of {shape}, "
        f"got {scale_shape}"
    )


def made(*arguments: Any, **options: Any) -> ScaledTensor:
    """``ScaledTensor(...)`` of stored arrays.

    Raises:
        ValueError: they do not fit.
        StoredTypeError: one has a dtype that no ScaledTensor has.
    """
    try:
        return ScaledTensor(*arguments, **options)
    except TypeError as error:
        raise StoredTypeError(str(error)) from error


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
    rows, columns = scale.shape
    tiles_m, tiles_k = -(-rows // 128), -(-columns // 4)
    padded = np.zeros((tiles_m * 128, tiles_k * 4), np.uint8)
    padded[:rows, :columns] = codes(scale, "scale")
    return np.ascontiguousarray(padded.reshape(tiles_m, 4, 32, tiles_k, 4).transpose(0, 3, 2, 1, 4)).reshape(-1)


def float_dtype(dtype: Any) -> Any:
    """A dtype by its name, bfloat16 being ml_dtypes'."""
    if dtype == "bfloat16":
        return require("ml_dtypes", "ml_dtypes").bfloat16
    return dtype
