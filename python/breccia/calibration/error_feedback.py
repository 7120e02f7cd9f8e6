# SPDX-License-Identifier: Apache-2.0
"""Rounding that makes good, in the columns still to be rounded, what rounding a column loses: GPTQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia import _core, frameworks
from breccia.frameworks import numpy
from breccia.moments import Moments
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor, as_array_is

__all__ = ["GptqReport", "gptq", "gptq_reported", "matrix_of_moments"]

_ORDERS = ("act", "natural")


@dataclass(frozen=True)
class GptqReport:
    """What became of a `gptq_reported`.

    Attributes:
        level: of the moments that were used: "full", "block" or "diag".
        damp: the damping that the moments took: more than asked for where they were not positive definite with that.
        dead: columns (of all experts) that no input reached; they are rounded to nearest.
        nearest: matrices, one or of the experts, that no damping made positive definite; they are rounded to nearest.
    """

    level: str
    damp: float
    dead: int
    nearest: int


def gptq(
    w: Any, moments: Any, recipe: ScalingRecipe | str, *, order: str = "act", damp: float = _core.GPTQ_DAMP
) -> ScaledTensor:
    """Quantize a weight for the inputs that it meets: GPTQ, columns ordered by activity and scales chosen first.

    Args:
        w: float array ``(N, K)``, or ``(E, N, K)`` of experts: the weight of ``x @ w.T``.
        moments: of the inputs x: a `breccia.moments.Moments`, of which the most detailed part is used; or an array
            ``(K, K)`` or ``(E, K, K)`` of sums or means of ``x.T @ x``; or the diagonal of that, ``(K,)`` or
            ``(E, K)``. A factor makes no difference.
        recipe: what to quantize to, or its name. Scales, zero points and the global scale are those of
            ``cast(w, recipe, importance=diagonal)``; so are the codes where the moments are diagonal.
        order: "act", columns by falling diagonal of the moments, or "natural".
        damp: what is added to the diagonal, in its mean; from 0 to 1, 0.02 by default. Where it does not make the
            moments positive definite, ten times as much does, up to 1.

    Returns:
        ScaledTensor of the shape, framework and device of ``w``. It is computed on the CPU: the bytes do not depend on
        the number of threads, and as those of `matmul` they may on the backend.

    Raises:
        TypeError: ``w`` or ``moments`` is no array of floats.
        ValueError: the shapes do not fit, moments are not finite or negative on the diagonal, or an option is not what
            it must be.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    ICLR 2023; order and static scales as its authors' ``--act-order --static-groups``.
    """
    return gptq_reported(w, moments, recipe, order=order, damp=damp)[0]


def gptq_reported(
    w: Any, moments: Any, recipe: ScalingRecipe | str, *, order: str = "act", damp: float = _core.GPTQ_DAMP
) -> tuple[ScaledTensor, GptqReport]:
    """`gptq`, and what it had to do.

    Args:
        w: see `gptq`.
        moments: see `gptq`.
        recipe: see `gptq`.
        order: see `gptq`.
        damp: see `gptq`.

    Returns:
        The tensor and the report.

    Raises:
        TypeError, ValueError: see `gptq`.
    """
    recipe = resolve(recipe)
    if order not in _ORDERS:
        raise ValueError(f"order must be 'act' or 'natural', got {order!r}")
    if isinstance(w, ScaledTensor):
        raise TypeError("w must be an array of floats, got a ScaledTensor: dequantize it first")
    level, matrix = matrix_of_moments(moments)
    made, damped, dead, nearest = _core.gptq(_host(w, "w"), matrix, _spec(recipe), order == "act", float(damp))
    scaled = numpy.tensor_of(made, recipe, _dtype_name(w))
    return as_array_is(scaled, w), GptqReport(level, damped, dead, nearest)


def _dtype_name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _host(array: Any, name: str) -> np.ndarray[Any, Any]:
    """Floats of any framework in the CPU's memory; those of 16 bits as float32, which holds them.

    Raises:
        TypeError: it is no array of floats.
    """
    dtype = _dtype_name(array) if hasattr(array, "dtype") else type(array).__name__
    if dtype not in ("float32", "float64", "float16", "bfloat16"):
        raise TypeError(f"{name} must be a float32, float64, float16 or bfloat16 array, got {dtype}")
    if hasattr(array, "detach"):  # torch: a GPU's too
        array = array.detach().cpu()
        return np.asarray(array.float() if dtype.endswith("16") else array)
    if dtype == "bfloat16" and not isinstance(array, np.ndarray):
        array = array.astype(frameworks.of(array).dtype("float32"))  # of MLX, which NumPy cannot read
    host = np.asarray(array)
    return host.astype(np.float32) if dtype.endswith("16") else host


def matrix_of_moments(moments: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """The level of moments, and the (…, K, K) of them."""
    if isinstance(moments, Moments):
        if moments.full is not None:
            return "full", moments.full
        if moments.block is not None:
            return "block", _of_blocks(moments.block)
        return "diag", _of_diagonal(moments.diag)
    array = _host(moments, "moments")
    square = array.ndim >= 2 and array.shape[-1] == array.shape[-2]
    return ("full", array) if square else ("diag", _of_diagonal(array))


def _of_diagonal(diagonal: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if diagonal.ndim not in (1, 2):
        raise ValueError(f"moments must be (K, K) or (E, K, K), or (K,) or (E, K), got shape {diagonal.shape}")
    out = np.zeros((*diagonal.shape, diagonal.shape[-1]), np.float32)
    np.einsum("...ii->...i", out)[...] = diagonal
    return out


def _of_blocks(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(…, K / g, g, g) as (…, K, K), zero between blocks."""
    *experts, count, group, _ = block.shape
    out = np.zeros((*experts, count, group, count, group), np.float32)
    each = np.arange(count)
    out[..., each, :, each, :] = np.moveaxis(block, -3, 0)
    return out.reshape(*experts, count * group, count * group)
