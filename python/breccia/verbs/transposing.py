# SPDX-License-Identifier: Apache-2.0
"""The transpose of codes whose scales are powers of two, blocks along the other axis, without floats: after
FP8-Flow-MoE (arXiv:2511.02302)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breccia import formats
from breccia.recipes import Float8BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from breccia.scaled_tensor import ScaledTensor, as_array_is, from_buffer

__all__ = ["Transposed", "transpose"]

_NAN = 255  # the code of E8M0 that is no number


class Transposed(NamedTuple):
    """What `transpose` returns.

    Attributes:
        value: a ScaledTensor (K, M) of the recipe that there was.
        rounded: how many values are not what they were.
        lost: of those, how many are zero.
    """

    value: ScaledTensor
    rounded: int
    lost: int


def transpose(scaled: ScaledTensor) -> Transposed:
    """A matrix whose blocks run along K as its transpose, whose blocks run along M.

    Each tile of g × g numbers gets the largest of its g scales, and codes of rows with smaller ones move down by the
    difference of exponents: a code to a code, by a table. A value changes where its bits fall below the least of the
    format; it is rounded to nearest, ties to even. `cast` of dequantized values would round every value again.

    Args:
        scaled: (M, K), with E8M0 scales of blocks of 1 × g: of `MXFP8BlockScaling`, `MXFP6BlockScaling`, or
            `Float8BlockScaling` with ``scale_format="e8m0"`` and ``block_m=1``. M and K are multiples of g.

    Returns:
        A `Transposed`, in the framework and on the device of ``scaled``.

    Raises:
        TypeError: ``scaled`` is not such a ScaledTensor.
        ValueError: M is no multiple of g, or a scale is NaN where the format has no code for it.
    """
    group = _group(scaled)
    rows, columns = scaled.shape
    if rows % group:
        raise ValueError(
            f"scaled must have a multiple of {group} rows, as its blocks are to run along them, got {rows}"
        )
    here = scaled.cpu().to("numpy")
    element = here.recipe.element
    codes, scales = (np.asarray(part).view(np.uint8) for part in (here.data, here.scale))
    table, changed = _shifts(element)
    exponents = scales.reshape(rows // group, group, columns // group).astype(np.int16)
    if (nan := exponents == _NAN).any() and not formats.finfo(element).has_nan:
        raise ValueError(f"scaled must have scales that are numbers, as {element} has no code for NaN")
    shared = np.where(nan, -1, exponents).max(1, keepdims=True)
    shared[shared < 0] = _NAN  # nothing but NaN
    down = np.where(nan, 0, np.minimum(shared - exponents, len(table) - 1)).reshape(rows, -1).repeat(group, 1)
    if nan.any():
        code = formats.encode(np.full((), np.nan, np.float32), element)
        codes = np.where(nan.reshape(rows, -1).repeat(group, 1), code, codes)
    moved = table[down, codes]
    new_scales = np.ascontiguousarray(shared[:, 0].T.repeat(group, 0).astype(np.uint8))
    data = np.ascontiguousarray(moved.T).view(np.asarray(here.data).dtype)
    made = from_buffer(
        data,
        new_scales.view(np.asarray(here.scale).dtype),
        here.recipe,
        here.layout,
        original_dtype=here.original_dtype,
    )
    how = changed[down, codes]
    return Transposed(as_array_is(made, scaled.data), int(np.count_nonzero(how)), int(np.count_nonzero(how == 2)))


def _group(scaled: Any) -> int:
    """g of a value that has one."""
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"scaled must be a ScaledTensor, got {type(scaled).__name__}")
    recipe = scaled.recipe
    if scaled.ndim == 2 and scaled.layout == recipe.layout:
        if isinstance(recipe, (MXFP8BlockScaling, MXFP6BlockScaling)):
            return recipe.block_size
        if isinstance(recipe, Float8BlockScaling) and recipe.scale_format == "e8m0" and recipe.block_m == 1:
            return recipe.block_k
    raise TypeError(
        "scaled must be a matrix of MXFP8BlockScaling, MXFP6BlockScaling or Float8BlockScaling with E8M0 scales of "
        f"single rows, got {recipe} of shape {tuple(scaled.shape)}"
    )


@functools.cache
def _shifts(element: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """[d, code]: the code of its value times 2^-d, and whether that is another value (1) or zero (2)."""
    about = formats.finfo(element)
    steps = int(np.log2(about.max / about.smallest)) + 3  # after which nothing is left
    codes = np.arange(1 << about.bits, dtype=np.uint8)
    values = formats.decode(codes, element)
    exact = np.ldexp(values, -np.arange(steps)[:, None])
    table = formats.encode(exact.astype(np.float32), element)
    table = np.where(np.isfinite(values), table, codes)  # infinity and NaN stay
    found = formats.decode(table, element)
    other = np.isfinite(values) & (found != exact)
    return table, other.astype(np.uint8) + (other & (found == 0))
