# SPDX-License-Identifier: Apache-2.0
"""Dynamic range expansion: groups of values raised to a power, so that they fill the range of an element format.

COAT, arXiv:2410.19313, section 4: 128 neighbours of an optimizer's moment differ by a few powers of two, where E4M3
has codes for nearly eighteen. x → sign(x) · |x|^k with k > 1 spreads them over all codes; reading takes the k-th root,
which divides the relative error of a code by k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from breccia import formats
from breccia.recipes import Float8BlockScaling, INT8Scaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs import cast, dequantize

__all__ = ["ExpandedTensor", "expand"]

MOST = 256.0  # of an exponent, for groups whose numbers are all but equal; float16 holds it


@dataclass(frozen=True, eq=False)
class ExpandedTensor:
    """Values x as codes of m · sign(x) · (|x| / m)^k, where m is the largest |x| of a group and k its exponent.

    Attributes:
        codes: a ScaledTensor (rows, K) of the expanded values, whose scales are of float32 and of groups along K.
        exponents: k of each group, float16, of the shape of ``codes.scale``. Where k is 1, so in groups of zeros and
            in those with an infinity or a NaN, the values are those of the codes.
    """

    codes: ScaledTensor
    exponents: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, K)."""
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and exponents."""
        return sum(part.nbytes for part in (self.codes.data, self.codes.scale, self.exponents))

    def dequantize(self) -> torch.Tensor:
        """The values that codes, scales and exponents stand for.

        Returns:
            float32 (rows, K).
        """
        group, largest, _ = _facts(self.codes.recipe)
        values = _grouped(dequantize(self.codes), group)
        exponents = self.exponents.float().unsqueeze(-1)
        top = (self.codes.scale * largest).unsqueeze(-1)
        halves = (
            (values.abs() / top).log2_().div_(exponents).mul_(0.5).exp2_()
        )  # of the root's logarithm: none underflows
        roots = (halves * top).mul_(halves).copysign_(values)
        return _but_plain(exponents, values, roots).reshape(self.shape)


def expand(x: torch.Tensor, recipe: ScalingRecipe | None = None) -> ExpandedTensor:
    """Quantize a matrix with an exponent for each group, so that the group's range is that of the element format.

    With r = (largest |x|) / (least |x| above zero) of a group, k = log(R) / log(r), where R is the same ratio of the
    element format: 229376 for E4M3. So the least number that is not zero keeps a code that is not zero. k is rounded to
    float16 before it is used, and at most 256.

    Args:
        x: float tensor (rows, K).
        recipe: `Float8BlockScaling` of scales in float32 of one row each, by default with ``block_k=128``; or a
            symmetric `INT8Scaling` of scales in float32 with a ``group_size``.

    Returns:
        An `ExpandedTensor`. A group with an infinity or a NaN has k = 1 and the codes that `breccia.cast` gives.

    Raises:
        TypeError: the recipe is another one, or ``x`` is not a float tensor.
        ValueError: ``x`` is not a matrix of whole groups, or the recipe's scales are not as above.
    """
    recipe = Float8BlockScaling(block_k=128) if recipe is None else recipe
    group, _, span = _facts(recipe)
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 2 or x.shape[1] % group:
        raise ValueError(f"x must be a matrix whose rows are of groups of {group}, got shape {tuple(x.shape)}")
    values = _grouped(x.detach().float(), group)
    size = values.abs()
    top = size.amax(-1, keepdim=True)
    least = size.amin(-1, keepdim=True)
    if bool((least == 0).any()):
        least = torch.where(size > 0, size, torch.inf).amin(-1, keepdim=True)
    largest = top.log2()
    exponents = (span / (largest - least.log2())).clamp_(max=MOST).half()
    exponents = torch.where(torch.isfinite(top) & (top > 0), exponents, 1)
    powers = size.log2_().sub_(largest).mul_(exponents.float()).exp2_().mul_(top).copysign_(values)
    wide = _but_plain(exponents, values, powers).reshape(x.shape)
    return ExpandedTensor(cast(wide, recipe), exponents.squeeze(-1))


def _but_plain(exponents: torch.Tensor, values: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Powers, and where the exponent is 1 the values."""
    plain = exponents == 1
    return torch.where(plain, values, powers) if bool(plain.any()) else powers


def _facts(recipe: ScalingRecipe) -> tuple[int, float, float]:
    """Numbers in a group, the largest value of a code, and powers of two from the least to the largest."""
    if isinstance(recipe, Float8BlockScaling):
        group, scale = recipe.block_k, recipe.scale_format if recipe.block_m == 1 else "squares"
    elif isinstance(recipe, INT8Scaling):
        group, scale = recipe.group_size or 0, recipe.scale_dtype if recipe.symmetric else "asymmetric"
    else:
        raise TypeError(f"recipe must be Float8BlockScaling or INT8Scaling, got {type(recipe).__name__}")
    if not group or scale != "fp32":
        raise ValueError(f"recipe must have groups of one row with scales in float32, and be symmetric, got {recipe}")
    about = formats.finfo(recipe.element)
    return group, about.max, math.log2(about.max / about.smallest)


def _grouped(x: torch.Tensor, group: int) -> torch.Tensor:
    """(rows, K) as (rows, K / group, group)."""
    return x.reshape(x.shape[0], -1, group)
