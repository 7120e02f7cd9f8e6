# SPDX-License-Identifier: Apache-2.0
"""The verbs on the portable backend: plain C++, the byte-exact reference for every other backend. On CPUs alone: a
tensor elsewhere would get another backend's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import _core, verbs
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

__all__ = ["cast", "dequantize", "matmul", "requantize"]


def cast(x: Any, recipe: ScalingRecipe) -> ScaledTensor:
    """See `breccia.cast`."""
    _check(x=x)
    with _core.BackendScope("portable"):
        return verbs.cast(x, recipe)


def dequantize(scaled: ScaledTensor, dtype: Any = "float32", out: Any = None) -> Any:
    """See `breccia.dequantize`."""
    _check(scaled=scaled)
    with _core.BackendScope("portable"):
        return verbs.dequantize(scaled, dtype, out)


def matmul(a: Any, b: Any, out_dtype: Any = np.float32) -> Any:
    """See `breccia.matmul`."""
    _check(a=a, b=b)
    with _core.BackendScope("portable"):
        return verbs.matmul(a, b, out_dtype)


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """See `breccia.requantize`."""
    _check(scaled=scaled)
    with _core.BackendScope("portable"):
        return verbs.requantize(scaled, recipe)


def _check(**arguments: Any) -> None:
    """Raise TypeError for an array that is not in a CPU's memory."""
    for name, given in arguments.items():
        array = given.data if isinstance(given, ScaledTensor) else given
        device = getattr(array, "device", None)
        kind = getattr(device, "type", getattr(device, "platform", "cpu"))  # torch's and JAX's name for it
        if kind != "cpu":
            raise TypeError(f"{name} must be on a CPU, where the reference runs, got one on {device}")
