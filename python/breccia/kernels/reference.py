# SPDX-License-Identifier: Apache-2.0
"""The verbs on the portable backend: plain C++, the byte-exact reference for every other backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import _core, verbs
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

__all__ = ["cast", "dequantize", "matmul", "requantize"]


def cast(x: Any, recipe: ScalingRecipe) -> ScaledTensor:
    """See `breccia.cast`."""
    with _core.BackendScope("portable"):
        return verbs.cast(x, recipe)


def dequantize(scaled: ScaledTensor, dtype: Any = "float32", out: Any = None) -> Any:
    """See `breccia.dequantize`."""
    with _core.BackendScope("portable"):
        return verbs.dequantize(scaled, dtype, out)


def matmul(a: Any, b: Any, out_dtype: Any = np.float32) -> Any:
    """See `breccia.matmul`."""
    with _core.BackendScope("portable"):
        return verbs.matmul(a, b, out_dtype)


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    """See `breccia.requantize`."""
    with _core.BackendScope("portable"):
        return verbs.requantize(scaled, recipe)
