# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays, ml_dtypes included: the core reads them in place."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from breccia import _core
from breccia.kernels.whole_array.namespace import NumPy
from breccia.peers import require
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import cast_form
from breccia.value.inputs import FLOATS, check_float32, float_name, refuse_mask
from breccia.verbs.cast_options import CastOptions

_PLAIN = ("uint8", "int8")
_DLPACK = ("float32", "float64", "float16", "uint8", "int8", "uint16")
namespace = NumPy()


def to_core(array: Any, argument: str) -> Any:
    if not isinstance(array, (np.ndarray, np.generic)):
        raise TypeError(f"{argument} must be a NumPy array like data, got {type(array).__name__}")
    refuse_mask(array, argument)
    array = np.asarray(array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def place(array: Any) -> Any:
    return None


def dtype(name: str) -> Any:
    try:
        return np.dtype(name)
    except TypeError:  # bfloat16, before ml_dtypes is imported
        return name


def swap_last_axes(array: Any) -> Any:
    return np.swapaxes(array, -1, -2)


def native(array: Any, fmt: str) -> Any:
    """As an ml_dtypes array; 4-bit codes two per byte have no such type."""
    if array.dtype.itemsize != 1 or array.dtype.name == fmt or fmt in _PLAIN or fmt.endswith("_x2"):
        return array
    return array.view(getattr(_ml_dtypes(), fmt))


def pack_sixes(codes: Any) -> Any:
    """See `breccia.value.sixes`: here and of `unpack_sixes`, by the core."""
    return _core.pack_sixes(codes.view(np.uint8)).reshape(*codes.shape[:-1], codes.shape[-1] // 4 * 3)


def unpack_sixes(packed: Any) -> Any:
    return _core.unpack_sixes(packed).reshape(*packed.shape[:-1], packed.shape[-1] // 3 * 4)


def to_dlpack(array: Any) -> tuple[Any, str]:
    name = array.dtype.name
    if array.dtype.kind == "V" or name not in _DLPACK:  # ml_dtypes
        array = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
    if not array.flags.writeable:  # others may write to what they import, such as a mapped file's read-only pages
        array = np.array(array, order="K")  # of a scalar, too, which exports nothing
    # Half-words are bfloat16 scales, which NumPy itself has no type for.
    return array, "bfloat16" if name == "uint16" else name


def from_dlpack(exporter: Any, name: str) -> Any:
    array = np.from_dlpack(exporter)
    if name == "bfloat16":
        return array.view(_ml_dtypes().bfloat16)
    return array.view(np.int8) if name == "int8" else array


def to_pickle(array: Any) -> tuple[Any, str]:
    return array, array.dtype.name


def from_pickle(array: Any, name: str) -> Any:
    return array


def to_device(array: Any, device: Any) -> Any:
    if device != "cpu":
        raise ValueError(f"target must be 'numpy', 'torch', 'jax', 'mlx' or 'cpu' for NumPy arrays, got {device!r}")
    return array


def cast(x: Any, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    return tensor_of(_core.cast(floats(x, "x"), _spec(recipe), **options), recipe)


def cast_with(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return cast(x, recipe, **options.core_arguments)


def cast_scaled(x: Any, recipe: ScalingRecipe, factor: Any, options: CastOptions) -> ScaledTensor:
    return cast(x, recipe, factor=float(factor), **options.core_arguments)


def tensor_of(made: Any, recipe: ScalingRecipe, original_dtype: str | None = None) -> ScaledTensor:
    """What the core made, of an array of that type or of the one it was given: its tensor and the parts of that."""
    core, data, scale, zero_point, global_scale = made
    form = cast_form(recipe, core.shape, original_dtype or core.original_dtype)
    own = core if form.original_dtype == core.original_dtype else None
    return ScaledTensor._of(form, data, _scale(scale), zero_point, global_scale, own)


def dequantize(scaled: ScaledTensor, dtype: Any, out: Any) -> Any:
    if out is None:
        return _core.dequantize(scaled._core, _out_name(dtype))
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    refuse_mask(out, "out")
    _core.dequantize_into(scaled._core, out)
    return out


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    return tensor_of(_core.requantize(scaled._core, _spec(recipe)), recipe)


def matmul(a: Any, b: Any, out_dtype: Any, precision: str) -> Any:
    return _core.matmul(_operand(a, "a"), _operand(b, "b"), _out_name(out_dtype), precision)


def direct_linear(x: Any, w: ScaledTensor, out_dtype: Any, precision: str, bias: Any = None) -> Any:
    """``x @ w.T + bias`` of arrays of floats; None for what `matmul` has more to say of."""
    if type(x) is not np.ndarray or x.ndim < 2 or w.data.ndim != 2 or not _is_ready(x.dtype):
        return None
    if x.shape[-1] != w.shape[1]:
        return None
    if bias is not None and (type(bias) is not np.ndarray or not _is_ready(bias.dtype)):
        return None
    if x.dtype.itemsize == 8:
        check_float32(x, "x")
    return _core.linear(x, w._core, bias, _out_name(out_dtype), precision)


def grouped_matmul(x: Any, w_stack: ScaledTensor, offsets: Any, out_dtype: Any) -> Any:
    from breccia.verbs.grouped import checked_offsets

    ends = checked_offsets(offsets, x.shape[0])
    return _core.grouped_matmul(_operand(x, "x"), w_stack._core, ends, _out_name(out_dtype))


def straight_through(x: Any, recipe: ScalingRecipe, clip: tuple[Any, Any] | None) -> Any:
    array = floats(x, "x")
    return dequantize(cast(array, recipe), array.dtype.name, None)


def linear(x: Any, w: Any, products: Any, seed: Any) -> Any:
    return products.forward(floats(x, "x"), floats(w, "w"))


def _ml_dtypes() -> Any:
    return require("ml_dtypes", "ml_dtypes")


def _out_name(dtype: Any) -> str:
    """The name of a dtype of results, which NumPy has, for bfloat16 by ml_dtypes."""
    name = float_name(dtype)
    if name == "bfloat16":
        _ml_dtypes()
    return name


def _operand(x: Any, argument: str) -> Any:
    return x._core if isinstance(x, ScaledTensor) else floats(x, argument)


def _scale(scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Half-words as the bfloat16 numbers they are, where ml_dtypes has that type for NumPy."""
    if scale.dtype != np.uint16:
        return scale
    try:
        import ml_dtypes
    except ImportError:
        return scale
    return scale.view(ml_dtypes.bfloat16)


def floats(x: Any, argument: str) -> np.ndarray[Any, Any]:
    """``x`` as an array of floats in the machine's byte order; integers and booleans as float32."""
    if type(x) is not np.ndarray:
        refuse_mask(x, argument)
    array = np.asarray(x)
    if _is_ready(array.dtype):
        if array.dtype.itemsize == 8:
            check_float32(array, argument)
        return array
    if array.dtype.kind in "iub" and array.dtype.name not in FLOATS:
        array = array.astype(np.float32)
    if array.dtype.name not in FLOATS:
        raise TypeError(
            f"{argument} must be a float32, float64, float16 or bfloat16 array (or integers), got dtype {array.dtype}"
        )
    check_float32(array, argument)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@functools.cache
def _is_ready(dtype: Any) -> bool:
    # Remembered because a dtype takes longer to make its name than the core to cast a small array.
    return bool(dtype.isnative) and dtype.name in FLOATS
