# SPDX-License-Identifier: Apache-2.0
"""What quantizing a weight loses, as the start of a low-rank adapter: after LoftQ (Li et al., 2023, arXiv 2310.08659),
whose first step this is."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import frameworks, verbs
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.inputs import is_integer, side_array

__all__ = ["lora_init"]


def lora_init(w: Any, recipe: ScalingRecipe | str | ScaledTensor, rank: int, importance: Any = None) -> tuple[Any, Any]:
    """The matrices of that rank whose product is nearest to what quantizing a weight loses.

    ``dequantize(cast(w, recipe)) + B @ A`` is nearer to ``w`` than the codes alone, by singular values of the error.
    With PEFT, ``lora_alpha`` equal to the rank multiplies by 1.

    Args:
        w: float array ``(N, K)``, the weight before it is quantized.
        recipe: what it is quantized to, or its name; or the codes that it was quantized to.
        rank: of the product, 1 to min(N, K).
        importance: ``(K,)``, what an error in each column counts, such as the mean square of the layer's inputs; None
            counts all alike. A column of 0 counts as the least that is not.

    Returns:
        A ``(rank, K)`` and B ``(N, rank)``, float32, in the framework of ``w``.

    Raises:
        TypeError: ``w`` is not an array of floats, or ``rank`` is no integer.
        ValueError: ``w`` is not a matrix or has no finite error, the rank is too large, or ``importance`` is not one
            number of 0 or more for each column.
    """
    if isinstance(w, ScaledTensor):
        raise TypeError("w must be the weight before it is quantized, an array of floats, got a ScaledTensor")
    if not is_integer(rank):
        raise TypeError(f"rank must be an integer, got {rank!r}")
    shape = tuple(getattr(w, "shape", ()))
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"w must be a matrix (N, K), got shape {shape}")
    if not 1 <= rank <= min(shape):
        raise ValueError(f"rank must be 1 to {min(shape)} for w of shape {shape}, got {rank}")
    codes = recipe if isinstance(recipe, ScaledTensor) else verbs.cast(w, resolve(recipe))
    if codes.shape != shape:
        raise ValueError(f"recipe must be codes of w's shape {shape}, got {codes.shape}")
    framework = frameworks.common(w, codes.data)
    error = framework.namespace.astype(w, "float32") - verbs.dequantize(codes)
    on_torch = type(error).__module__.partition(".")[0] == "torch"
    error = error.detach() if on_torch else np.asarray(frameworks.on_host(error)[0])
    root = _root(importance, shape[1])
    if root is not None:
        error = error * _like(root, error, on_torch)
    if not bool(abs(error).max() < np.inf):
        raise ValueError("w must be finite and have a finite error, it holds NaN or infinity")
    a, b = _nearest(error, rank, on_torch)
    if root is not None:
        a = a / _like(root, a, on_torch)
    if on_torch:
        return a.contiguous(), b.contiguous()
    return tuple(framework.from_dlpack(np.ascontiguousarray(x), "float32") for x in (a, b))


def _nearest(error: Any, rank: int, on_torch: bool) -> tuple[Any, Any]:
    """A and B, equally long, of the nearest product, largest first. By the eigenvectors of the smaller of E Eᵀ and EᵀE
    in double precision, in less time than a decomposition of E; B A is a projection of E whatever their error."""
    if error.shape[0] > error.shape[1]:
        b, a = _nearest(error.T, rank, on_torch)
        return a.T, b.T
    xp: Any = np
    if on_torch:
        import torch

        xp = torch
    double = error.double() if on_torch else error.astype(np.float64)
    left = xp.flip(xp.linalg.eigh(double @ double.T)[1][:, -rank:], (1,))
    right = left.T @ double
    size = xp.linalg.norm(right, None, 1) ** 0.5
    a, b = right / xp.where(size > 0, size, 1.0)[:, None], left * size
    return (a.float(), b.float()) if on_torch else (a.astype(np.float32), b.astype(np.float32))


def _root(importance: Any, columns: int) -> np.ndarray[Any, Any] | None:
    """The square root of what each column counts, positive."""
    if importance is None:
        return None
    host: np.ndarray[Any, Any] = side_array(importance, "importance").astype(np.float64)
    if host.shape != (columns,):
        raise ValueError(f"importance must have shape ({columns},) for w of {columns} columns, got {host.shape}")
    if not (np.isfinite(host) & (host >= 0)).all():
        wrong = host[~(np.isfinite(host) & (host >= 0))][0]
        raise ValueError(f"importance must be of finite numbers of 0 or more, got {wrong} in it")
    positive = host[host > 0]
    least = positive.min() if positive.size else 1.0
    root: np.ndarray[Any, Any] = np.sqrt(np.maximum(host, least))
    return root


def _like(root: np.ndarray[Any, Any], like: Any, on_torch: bool) -> Any:
    if not on_torch:
        return root.astype(np.float32)
    import torch

    return torch.as_tensor(root, dtype=torch.float32, device=like.device)
