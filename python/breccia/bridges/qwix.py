# SPDX-License-Identifier: Apache-2.0
"""Qwix's `QArray`, how JAX programs for TPUs hold quantized weights: value = (qvalue - zero_point) · scale, where scale
has the axes of qvalue, each of them divided by the length of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import recipes
from breccia.bridges.common import Array, as_numpy, check_upright, codes, float32
from breccia.bridges.contract import FileFormat
from breccia.bridges.scales import made, scale_name
from breccia.formats import decode, encode, unpack
from breccia.layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor
from breccia.peers import require
from breccia.recipes import ScalingRecipe, scale_format
from breccia.scaled_tensor import ScaledTensor

NAME = "qwix"
EXTRA = "qwix"
RECIPES: dict[str, ScalingRecipe] = {
    "int8": recipes.INT8Scaling(),
    "int4": recipes.INT4Scaling(),
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(two_level=False),
}
# The qtypes that say what scales are, the recipe of each and the length of its tiles.
_BLOCKS: dict[str, ScalingRecipe] = {key: RECIPES[key] for key in ("mxfp8", "mxfp4", "nvfp4")}
_MIDDLE = 8  # of unsigned 4-bit codes, which int4 of JAX has no dtype for

__all__ = ["from_qwix", "to_qwix"]


def from_qwix(array: Any) -> ScaledTensor:
    """A `qwix.QArray` with its codes and scales. Nothing is quantized anew.

    Args:
        array: a QArray of two axes or more, with one tile along the axes before the last two for each index of them:
            int8, int4 (and int2 … int7, which these hold), FP8 of any element, "mxfp8", "mxfp4" or "nvfp4".

    Returns:
        A ScaledTensor of JAX arrays, of the shape of ``array``. Where tiles run along the last axis but one, as those
        of a kernel (K, N) do, it is the transposed view of one whose rows are in blocks.

    Raises:
        TypeError: ``array`` is no QArray, or has a dtype that no recipe has.
        ValueError: tiles of the scale are not as above, or scales of "mxfp8" and "mxfp4" are no powers of two, or those
            of "nvfp4" no numbers of E4M3.
    """
    for role in ("qvalue", "scale"):
        if not hasattr(getattr(array, role, None), "dtype"):
            raise TypeError(f"array must be a QArray with arrays, got {type(array).__name__} without {role}")
    qvalue, scale = as_numpy(array.qvalue, "array.qvalue"), as_numpy(array.scale, "array.scale")
    zero = None if array.zero_point is None else as_numpy(array.zero_point, "array.zero_point")
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"array.zero_point must be of the shape of array.scale, {scale.shape}, got {zero.shape}")
    rows, columns = _tile(qvalue.shape, scale.shape)
    turned = columns == 1 and rows > 1 and scale.size > 1
    if turned:
        qvalue, scale = np.swapaxes(qvalue, -1, -2), np.swapaxes(scale, -1, -2)
        zero = None if zero is None else np.swapaxes(zero, -1, -2)
        rows, columns = columns, rows
    layout = _layout(qvalue.shape, scale, rows, columns)
    if layout.one_scale:
        scale, zero = scale.reshape(()), None if zero is None else zero.reshape(())
    kind = array.qtype if isinstance(array.qtype, str) else ""
    if kind in _BLOCKS:
        upright = _of_blocks(kind, qvalue, scale, (rows, columns))
    else:
        upright = _of_numbers(kind, qvalue, scale, zero, layout, columns)
    moved = upright.to("jax")
    return moved.mT if turned else moved


def to_qwix(scaled: ScaledTensor) -> Any:
    """The inverse of `from_qwix`: the codes under scales as numbers.

    Args:
        scaled: of any framework; MXFP6 has no dtype in JAX, and NVFP4 must be of one level.

    Returns:
        A `qwix.QArray` of JAX arrays of the shape of ``scaled``. Its scales have their dtype, and E8M0 and E4M3 ones
        that of float32, which `qwix.dequantize` gives. Unsigned codes of 4 bits are int4, with zero points 8 less.

    Raises:
        ImportError: Qwix is not installed.
        TypeError: ``scaled`` is no ScaledTensor of breccia's recipes.
        ValueError: QArray cannot hold the recipe, or the last block of an axis is short.
    """
    turned = isinstance(scaled, ScaledTensor) and getattr(scaled.layout, "axis", -1) == -2
    upright = scaled.mT if turned else scaled
    check_upright(upright)
    if not BRIDGE.carries(scaled.recipe):
        raise ValueError(f"scaled must have a recipe that {NAME} can hold, got {scaled.recipe}")
    qwix = require("qwix", EXTRA)
    jnp = require("jax.numpy", "jax")
    scale, zero = _scale_of(upright), None
    qvalue = _qvalue_of(upright)
    if upright.zero_point is not None or upright.recipe.element == "uint4":
        zero = _zero_of(upright, scale.shape, qvalue.dtype)
    if any(n % tiles for n, tiles in zip(qvalue.shape, scale.shape, strict=True)):
        raise ValueError(f"scaled must be of whole blocks, got shape {scaled.shape} in {scaled.layout}")
    kind = next((key for key, one in _BLOCKS.items() if _is_of(upright, one)), None)

    def there(part: Array) -> Any:
        return jnp.asarray(np.ascontiguousarray(np.swapaxes(part, -1, -2) if turned else part))

    zeros = None if zero is None else there(zero)
    return qwix.QArray(there(qvalue), there(scale), zeros, kind or qvalue.dtype)


def carries(recipe: ScalingRecipe) -> bool:
    """Whether the class holds a recipe's bytes as they are."""
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return not recipe.two_level
    return not isinstance(recipe, recipes.MXFP6BlockScaling)


def _tile(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that share a scale. Raises ValueError where they are no tiles of the last two axes."""
    axes = len(shape)
    one = all(n == 1 for n in scale_shape)
    whole = len(scale_shape) == axes and all(s and n % s == 0 for n, s in zip(shape, scale_shape, strict=True))
    if axes < 2 or not whole or not (one or scale_shape[:-2] == shape[:-2]):
        raise ValueError(
            f"array.scale must have tiles of the last two axes of a matrix or a batch, for shape {shape}, "
            f"got {scale_shape}"
        )
    return shape[-2] // scale_shape[-2], shape[-1] // scale_shape[-1]


def _layout(shape: tuple[int, ...], scale: Array, rows: int, columns: int) -> Layout:
    if scale.size == 1:
        return PerTensor()
    if rows == 1:
        return PerChannel() if columns == shape[-1] else PerBlockK(columns)
    return PerBlockMN(rows, columns)


def _of_blocks(kind: str, qvalue: Array, scale: Array, tile: tuple[int, int]) -> ScaledTensor:
    """MX and NVFP4, whose scales are codes here."""
    recipe = _BLOCKS[kind]
    if tile != recipe.layout.block:
        raise ValueError(f"array.scale must have tiles of {recipe.layout.block} for {kind}, got {tile}")
    form, wanted = str(scale_format(recipe)), float32(scale)
    stored = encode(wanted, form)
    if not np.array_equal(decode(stored, form), wanted, equal_nan=True):
        raise ValueError(f"array.scale must have numbers of {form} for {kind}, some are others")
    return made(codes(qvalue, "array.qvalue"), stored, recipe, recipe.layout, shape=qvalue.shape)


def _of_numbers(
    kind: str, qvalue: Array, scale: Array, zero: Array | None, layout: Layout, columns: int
) -> ScaledTensor:
    """FP8 and integers, whose scales are numbers. Raises TypeError where no recipe has such codes."""
    name = qvalue.dtype.name
    if kind == "nf4":
        raise TypeError("array.qtype must be of numbers under a scale, got 'nf4', which is of a codebook")
    if name.startswith("float8") and zero is None:
        fmt, rows = name, layout.block.rows
        scale_type = "bf16" if scale.dtype.name == "bfloat16" else "fp32"
        recipe: ScalingRecipe = recipes.Float8CurrentScaling(fmt, granularity="tensor" if layout.one_scale else "row")
        if not layout.one_scale and layout.block != (1, 0):
            recipe = recipes.Float8BlockScaling(fmt, block_k=columns, block_m=max(rows, 1), scale_format=scale_type)
        return made(codes(qvalue, "array.qvalue"), scale, recipe, layout)
    dtype = scale_name(scale.dtype.name)
    if name == "int8":
        size = None if layout.block in ((0, 0), (1, 0)) else columns
        recipe8 = recipes.INT8Scaling(group_size=size, scale_dtype=dtype, symmetric=zero is None)
        return made(qvalue, scale, recipe8, layout, None if zero is None else zero.astype(np.int8))
    if name == "int4":
        nibbles = qvalue.astype(np.int8)
        if zero is None:
            recipe4 = recipes.INT4Scaling(group_size=columns, scale_dtype=dtype)
            return made(nibbles.view(np.uint8) & 15, scale, recipe4, layout, shape=qvalue.shape)
        recipe4 = recipes.INT4Scaling(group_size=columns, scale_dtype=dtype, signed=False, symmetric=False)
        unsigned, middle = ((part.astype(np.int8) + _MIDDLE).astype(np.uint8) for part in (nibbles, zero))
        return made(unsigned, scale, recipe4, layout, middle, shape=qvalue.shape)
    raise TypeError(f"array.qvalue must be of FP8, int8 or int4, got {name} of qtype {kind or name}")


def _is_of(upright: ScaledTensor, recipe: ScalingRecipe) -> bool:
    """Whether a tensor has the codes and blocks of one of `_BLOCKS`."""
    same = type(upright.recipe) is type(recipe) and upright.recipe.element == recipe.element
    return same and bool(upright.layout.block == recipe.layout.block)


def _scale_of(upright: ScaledTensor) -> Array:
    """As numbers, with the axes of the tensor."""
    form, scale = scale_format(upright.recipe), as_numpy(upright.scale, "scale")
    if form is not None and scale.dtype.itemsize == 1:
        scale = decode(codes(scale, "scale"), form)
    if upright.layout.one_scale:
        return scale.reshape((1,) * upright.ndim)
    return scale if scale.ndim == upright.ndim else scale[..., None]


def _qvalue_of(upright: ScaledTensor) -> Array:
    """One code for each element, in the dtype that JAX has for it."""
    ml_dtypes = require("ml_dtypes", "ml_dtypes")
    raw, element = codes(upright.data, "data"), upright.recipe.element
    if upright.is_packed:
        raw = unpack(raw, upright.shape[-1])
    if element == "uint4":
        return ((raw & 15).astype(np.int8) - _MIDDLE).astype(ml_dtypes.int4)
    if element == "int4":
        return (((raw & 15) ^ 8).astype(np.int8) - 8).astype(ml_dtypes.int4)
    return raw.view(np.int8 if element == "int8" else getattr(ml_dtypes, element))


def _zero_of(upright: ScaledTensor, shape: tuple[int, ...], dtype: Any) -> Array:
    given = upright.zero_point
    zero = np.zeros(shape, np.uint8) if given is None else codes(given, "zero_point").reshape(shape)
    moved: Array = zero.view(np.int8) - np.int8(_MIDDLE if upright.recipe.element == "uint4" else 0)
    return moved.astype(dtype)


BRIDGE = FileFormat(
    name=NAME,
    peer="qwix",
    extra=EXTRA,
    recipes=RECIPES,
    carries=carries,
    vendors_elements=True,
)
