# SPDX-License-Identifier: Apache-2.0
"""What comes before a linear layer, quantized: ``cast(rms_norm(x))`` and ``cast(silu(gate) * up)`` as one call.

On a GPU each is one kernel where a scale follows from a piece of one row: FP8 in blocks or per row, MX, NVFP4 of one
level, INT8 and INT4. Elsewhere torch computes the values, and `breccia.cast` quantizes them. The results are for
inference: no gradient flows through them.
"""

from __future__ import annotations

from typing import Any

import torch

from breccia.frameworks import torch as verbs
from breccia.frameworks.torch.tensors import FLOATS
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

__all__ = ["rms_norm", "silu_mul"]


def silu_mul(gate: Any, up: Any, recipe: ScalingRecipe | str) -> ScaledTensor:
    """Quantize ``torch.nn.functional.silu(gate) * up``: the input of a SwiGLU block's last layer.

    Args:
        gate: ``(..., K)`` of floats.
        up: the same shape and dtype.
        recipe: what to quantize to, or its name.

    Returns:
        ScaledTensor ``(..., K)``: the bytes of ``breccia.cast(torch.nn.functional.silu(gate) * up, recipe)``.

    Raises:
        TypeError: ``gate`` or ``up`` is not a tensor of floats, or their dtypes differ.
        ValueError: their shapes differ or do not suit the recipe.
    """
    recipe = resolve(recipe)
    _check_floats("gate", gate)
    _check_like("up", up, "gate", gate)
    return verbs.silu_mul(gate, up, recipe)


def rms_norm(
    x: Any, weight: Any, recipe: ScalingRecipe | str, eps: float = 1e-6, *, residual: Any = None
) -> ScaledTensor | tuple[ScaledTensor, Any]:
    """Quantize ``torch.nn.functional.rms_norm(x, (K,), weight, eps)``, x · weight / sqrt(mean(x²) + eps).

    Args:
        x: ``(..., K)`` of floats.
        weight: ``(K,)`` of the same dtype.
        recipe: what to quantize to, or its name.
        eps: what is added to the mean of the squares.
        residual: a tensor like ``x`` to add to it first, as decoders do; None for none.

    Returns:
        ScaledTensor ``(..., K)``, quantized from the norm rounded to the dtype of ``x``. Squares are added in float32,
        in an order of the kernel's own: values may differ from torch's by a unit in the last place of that dtype.
        With ``residual`` a pair: the ScaledTensor, and ``x + residual``.

    Raises:
        TypeError: an operand is not a tensor of floats, or their dtypes differ.
        ValueError: the shapes do not match or do not suit the recipe.
    """
    recipe = resolve(recipe)
    _check_floats("x", x)
    _check_floats("weight", weight)
    if x.ndim < 1 or tuple(weight.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"weight must be {tuple(x.shape[-1:])} for x of shape {tuple(x.shape)}, got shape "
                         f"{tuple(weight.shape)}")  # fmt: skip
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must have the dtype of x, {x.dtype}, got {weight.dtype}")
    _check_device("weight", weight, "x", x)
    if residual is not None:
        _check_like("residual", residual, "x", x)
    made: ScaledTensor | tuple[ScaledTensor, Any] = verbs.rms_norm(x, weight, recipe, float(eps), residual)
    return made


def _check_floats(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a float32, float64, float16 or bfloat16 tensor, got {got}")


def _check_like(name: str, tensor: Any, other_name: str, other: Any) -> None:
    _check_floats(name, tensor)
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {tensor.dtype}")
    if tensor.shape != other.shape:
        raise ValueError(f"{name} must have the shape of {other_name}, {tuple(other.shape)}, got {tuple(tensor.shape)}")
    _check_device(name, tensor, other_name, other)


def _check_device(name: str, tensor: Any, other_name: str, other: Any) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}")
