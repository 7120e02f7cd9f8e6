# SPDX-License-Identifier: Apache-2.0
"""The transpose of codes whose scales are powers of two, blocks along the other axis, without floats: after
FP8-Flow-MoE (arXiv:2511.02302)."""

from __future__ import annotations

from typing import Any, NamedTuple

from breccia import _core, frameworks
from breccia.recipes import Float8BlockScaling, MXFP6BlockScaling, MXFP8BlockScaling
from breccia.scaled_tensor import ScaledTensor, as_array_is, ready


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

    On a GPU a kernel makes the same bytes, and the call waits for its counts.
    """
    group = _group(scaled)
    scaled = ready(scaled)
    kernel = getattr(frameworks.of(scaled.data), "transpose", None)
    made = None if kernel is None else kernel(scaled, group)
    if made is not None:
        return Transposed(*made)
    on_cpu: Any = frameworks.named("numpy")
    cast, rounded, lost = _core.transpose(scaled.cpu().to("numpy")._core)
    return Transposed(as_array_is(on_cpu.tensor_of(cast, scaled.recipe), scaled.data), rounded, lost)


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
