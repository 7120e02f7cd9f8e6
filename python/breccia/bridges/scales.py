# SPDX-License-Identifier: Apache-2.0
"""Scales as others name and order them, and tensors of codes with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from breccia.bridges.checks import StoredTypeError
from breccia.bridges.common import Array, as_numpy, codes, float32
from breccia.formats import finfo
from breccia.layouts import Layout, PerBlockK, PerBlockMN
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe, global_divides
from breccia.scaled_tensor import ScaledTensor

SCALE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "uint16": "bf16", "float32": "fp32"}


STORED_SCALES = {"float16": "F16", "bfloat16": "BF16", "uint16": "BF16", "float32": "F32"}


def scale_name(dtype: str) -> str:
    """The recipes' name of a scale's dtype. Raises ValueError where integers have no scales of that dtype."""
    if dtype not in SCALE_NAMES:
        raise ValueError(f"scales must be float16, bfloat16 or float32, got dtype {dtype}")
    return SCALE_NAMES[dtype]


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


def one_global_scale(scaled: ScaledTensor, bridge: str) -> Array:
    """The global scale as a multiplier, float32 of no axes, 1 where there is none. Raises ValueError where there are
    several."""
    second = global_scale(scaled, "multiplier")
    if second is not None and second.size != 1:
        raise ValueError(f"global_scale must be one number for {bridge}, got shape {second.shape}")
    return np.asarray(1 if second is None else second, np.float32).reshape(())


def row_blocks(group_size: int, columns: int) -> Layout:
    """One scale per ``group_size`` elements of a row, the last group short where it must be."""
    return PerBlockK(group_size) if columns % group_size == 0 else PerBlockMN(1, group_size)


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


def in_torch(made: ScaledTensor, device: Any, recipe: ScalingRecipe | str | None) -> ScaledTensor:
    """A tensor read from torch's buffers, back in torch and on their device, with another recipe's name if
    one is given."""
    made = (made if recipe is None else dataclasses.replace(made, recipe=resolve(recipe))).to("torch")
    return made if device is None or str(device) == "cpu" else made.to(device)
