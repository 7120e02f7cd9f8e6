# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays, ml_dtypes included: the core reads them in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from breccia import _core
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor

_FLOATS = ("float32", "float64", "float16", "bfloat16")


def to_core(array: Any, argument: str) -> Any:
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(f"{argument} must be a NumPy array like data, got {type(array).__name__}")
    array = np.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def swap_last_axes(array: Any) -> Any:
    return np.swapaxes(array, -1, -2)


def cast(x: Any, recipe: ScalingRecipe) -> ScaledTensor:
    core, data, scale, zero_point, global_scale = _core.cast(_floats(x, "x"), _spec(recipe))
    return ScaledTensor._from_core(core, data, scale, recipe, recipe.layout, zero_point, global_scale)


def dequantize(scaled: ScaledTensor, dtype: Any, out: Any) -> Any:
    if out is None:
        return _core.dequantize(_tensor(scaled), _dtype_name(dtype))
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    _core.dequantize_into(_tensor(scaled), out)
    return out


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    core, data, scale, zero_point, global_scale = _core.requantize(_tensor(scaled), _spec(recipe))
    return ScaledTensor._from_core(core, data, scale, recipe, recipe.layout, zero_point, global_scale)


def matmul(a: Any, b: Any, out_dtype: Any) -> Any:
    return _core.matmul(_operand(a, "a"), _operand(b, "b"), _dtype_name(out_dtype))


def _operand(x: Any, argument: str) -> Any:
    return _tensor(x) if isinstance(x, ScaledTensor) else _floats(x, argument)


def _tensor(scaled: ScaledTensor) -> _core.ScaledTensor:
    core: _core.ScaledTensor = scaled._core  # type: ignore[attr-defined]
    return core


def _floats(x: Any, argument: str) -> np.ndarray[Any, Any]:
    """``x`` as an array of floats in the machine's byte order; integers and booleans as float32."""
    array = np.asarray(x)
    if array.dtype.kind in "iub" and array.dtype.name not in _FLOATS:
        array = array.astype(np.float32)
    if array.dtype.name not in _FLOATS:
        raise TypeError(
            f"{argument} must be a float32, float64, float16 or bfloat16 array (or integers), got dtype {array.dtype}"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str) and dtype in _FLOATS:
        return dtype
    try:
        name = np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _FLOATS:
        raise TypeError(f"dtype must be float32, float64, float16 or bfloat16, got {dtype!r}")
    return name
