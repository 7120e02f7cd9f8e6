# SPDX-License-Identifier: Apache-2.0
"""MLX arrays: the core reads them, and writes into memory MLX allocated, in place. Codes are ``uint8``: MLX has no
low-precision dtypes.

`to_quantized` and `from_quantized` hand tensors to ``mx.quantized_matmul`` and take those of ``mx.quantize``.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np

from breccia import _core, recipes
from breccia.kernels.whole_array.namespace import Namespace
from breccia.recipes import ScalingRecipe, _spec, global_divides
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS, cast_form
from breccia.value.inputs import FLOATS, float_name
from breccia.verbs.cast_options import CastOptions

__all__ = ["from_quantized", "to_quantized"]


class Mlx(Namespace):
    """The part of `Namespace` that `breccia.delayed` and `breccia.verbs.grouped` use."""

    def astype(self, x: Any, dtype: str) -> Any:
        return x.astype(getattr(mx, dtype))

    def constant(self, value: Any, dtype: str, like: Any) -> Any:
        return mx.array(value, getattr(mx, dtype))


namespace = Mlx(mx)
_DTYPES = {name: getattr(mx, name) for name in (*FLOATS, "uint8", "int8", "uint16")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_INTEGERS = (mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64)
# MLX mode -> (recipe, elements of a group, bits of an element).
_MODES: dict[str, tuple[ScalingRecipe, int, int]] = {
    "mxfp4": (recipes.MXFP4BlockScaling(), 32, 4),
    "mxfp8": (recipes.MXFP8BlockScaling(), 32, 8),
    "nvfp4": (recipes.NVFP4BlockScaling(), 16, 4),
}


def to_core(array: Any, argument: str) -> Any:
    if not isinstance(array, mx.array):
        raise TypeError(f"{argument} must be an MLX array like data, got {type(array).__name__}")
    if array.dtype not in _NAMES:
        raise TypeError(f"{argument} must be of a dtype the core has, got {array.dtype}")
    return _host(array)


def place(array: Any) -> Any:
    return None  # one memory for all devices


def dtype(name: str) -> Any:
    return _DTYPES.get(name, name)


def swap_last_axes(array: Any) -> Any:
    return mx.swapaxes(array, -1, -2)


def native(array: Any, fmt: str) -> Any:
    return array


def to_dlpack(array: Any) -> tuple[Any, str]:
    name = _NAMES[array.dtype]
    return (array.view(mx.uint16) if name == "bfloat16" else array), name


def from_dlpack(exporter: Any, name: str) -> Any:
    array = mx.from_dlpack(exporter)
    # MLX 0.32 imports int8 as uint8.
    return array.view(_DTYPES[name]) if name in ("bfloat16", "int8") else array


class _Unpickled:
    """An array that `copy.deepcopy` takes and pickle does not, as MLX's own."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._array, memo)

    def __reduce__(self) -> Any:
        raise TypeError("MLX arrays do not pickle: move the tensor first, as in scaled.to('numpy')")


def to_pickle(array: Any) -> tuple[Any, str]:
    return _Unpickled(array), _NAMES[array.dtype]


def from_pickle(array: Any, name: str) -> Any:
    return array


def to_device(array: Any, device: Any) -> Any:
    raise ValueError(f"target must be a framework, got {device!r}: MLX arrays live in unified memory")


def cast(x: Any, recipe: ScalingRecipe, **options: Any) -> ScaledTensor:
    x = _floats(x, "x")
    spec = _spec(recipe)
    made, memory = _allocate(_core.plan_cast(list(x.shape), spec))
    _core.cast_into(_host(x), spec, *memory, **options)
    return ScaledTensor._of(cast_form(recipe, x.shape, _NAMES[x.dtype]), *made)


def cast_with(x: Any, recipe: ScalingRecipe, options: CastOptions) -> ScaledTensor:
    return cast(x, recipe, **options.core_arguments)


def cast_scaled(x: Any, recipe: ScalingRecipe, factor: Any, options: CastOptions) -> ScaledTensor:
    return cast(x, recipe, factor=float(np.asarray(factor)), **options.core_arguments)


def dequantize(scaled: ScaledTensor, dtype: Any, out: Any) -> Any:
    if out is not None:
        raise TypeError("out must be None: MLX arrays are written by MLX alone")
    made, memory = _empty(scaled.shape, float_name(dtype))
    if 0 not in scaled.shape:
        _core.dequantize_into(scaled._core, memory)
    return made


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> ScaledTensor:
    spec = _spec(recipe)
    made, memory = _allocate(_core.plan_cast(list(scaled.shape), spec))
    _core.requantize_into(scaled._core, spec, *memory)
    return ScaledTensor._of(cast_form(recipe, scaled.shape, scaled.original_dtype), *made)


def matmul(a: Any, b: Any, out_dtype: Any, precision: str) -> Any:
    left, right = _operand(a, "a"), _operand(b, "b")
    made, memory = _empty(_core.matmul_shape(list(a.shape), list(b.shape)), float_name(out_dtype))
    _core.matmul_into(left, right, memory, precision)
    return made


def direct_linear(x: Any, w: ScaledTensor, out_dtype: Any, precision: str, bias: Any = None) -> Any:
    """``x @ w.T + bias`` of arrays of floats; None for what `matmul` has more to say of."""
    if type(x) is not mx.array or x.ndim < 2 or w.data.ndim != 2 or _NAMES.get(x.dtype) not in FLOATS:
        return None
    count, depth = w.shape
    if x.shape[-1] != depth:
        return None
    if bias is not None and (type(bias) is not mx.array or _NAMES.get(bias.dtype) not in FLOATS):
        return None
    made, memory = _empty((*x.shape[:-1], count), float_name(out_dtype))
    _core.linear_into(_host(x), w._core, None if bias is None else _host(bias), memory, precision)
    return made


def straight_through(x: Any, recipe: ScalingRecipe, clip: tuple[Any, Any] | None) -> Any:
    x = _floats(x, "x")
    return dequantize(cast(x, recipe), _NAMES[x.dtype], None)


def linear(x: Any, w: Any, products: Any, seed: Any) -> Any:
    raise TypeError(f"x must be an array of torch, JAX or NumPy, got {type(x).__name__}: breccia.linear takes MLX's")


def to_quantized(scaled: ScaledTensor) -> tuple[Any, Any, dict[str, Any]]:
    """A weight as ``mx.quantized_matmul`` and ``mx.dequantize`` take it.

    Args:
        scaled: MXFP4, MXFP8 (E4M3) or NVFP4 tensor ``(…, N, K)`` of MLX arrays.

    Returns:
        (w, scales, arguments): ``uint32`` codes and ``uint8`` scales of the same bytes, and the keyword arguments
        that name the mode; for two-level NVFP4 also ``global_scale``.

    Raises:
        ValueError: MLX has no mode for the recipe.
    """
    for mode, (recipe, group, bits) in _MODES.items():
        like = scaled.recipe
        same = like.element == recipe.element and type(like) is type(recipe)
        if same and scaled.layout == recipe.layout and scaled.is_packed == (bits == 4):
            arguments: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
            if scaled.global_scale is not None:  # MLX wants the amax it was made from
                level, reach = scaled.global_scale, 448.0 * 6.0
                arguments["global_scale"] = reach / level if global_divides(like) else level * reach
            return mx.contiguous(scaled.data).view(mx.uint32), mx.contiguous(scaled.scale), arguments
    raise ValueError(f"scaled must be MXFP4, MXFP8 in E4M3 or NVFP4 for MLX, got {scaled!r}")


def from_quantized(w: Any, scales: Any, mode: str, global_scale: Any = None) -> ScaledTensor:
    """What ``mx.quantize(…, mode=mode)`` made, as a ScaledTensor of the same bytes.

    Args:
        w, scales: ``uint32 (…, N, K · bits / 32)`` and ``uint8 (…, N, K / group)``.
        mode: "mxfp4", "mxfp8" or "nvfp4".
        global_scale: the one given to ``mx.quantize``, if any: the amax of the tensor.

    Raises:
        ValueError: there is no such mode.
    """
    if mode not in _MODES:
        raise ValueError(f"mode must be 'mxfp4', 'mxfp8' or 'nvfp4', got {mode!r}")
    recipe: ScalingRecipe = _MODES[mode][0]
    if mode == "nvfp4" and global_scale is None:
        recipe = recipes.NVFP4BlockScaling(two_level=False)
    level = None if global_scale is None else global_scale / (448.0 * 6.0)
    return ScaledTensor(w.view(mx.uint8), scales, recipe, recipe.layout, global_scale=level)


def _host(array: Any) -> Any:
    """The same memory as a NumPy array; bfloat16 as that of ml_dtypes."""
    if array.dtype == mx.bfloat16:
        import ml_dtypes

        return np.asarray(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.asarray(array)


def _empty(shape: Any, name: str) -> tuple[Any, Any]:
    """An MLX array, and its memory for the core to write to."""
    plain = mx.zeros(tuple(shape), mx.uint16 if name == "bfloat16" else _DTYPES[name])
    mx.eval(plain)
    if 0 in shape:  # whose strides MLX leaves at zero
        return plain.view(_DTYPES[name]), np.empty(shape, "uint16" if name == "bfloat16" else name)
    host = np.asarray(plain)
    if name != "bfloat16":
        return plain, host
    strides = list(host.strides)
    return plain.view(mx.bfloat16), _core.Array(host.ctypes.data, list(host.shape), strides, "bfloat16")


def _allocate(plan: Any) -> tuple[list[Any], list[Any]]:
    pairs = [(None, None) if plan[part] is None else _empty(*plan[part]) for part in PARTS]
    return [made for made, _ in pairs], [memory for _, memory in pairs]


def _operand(x: Any, argument: str) -> Any:
    return x._core if isinstance(x, ScaledTensor) else _host(_floats(x, argument))


def _floats(x: Any, argument: str) -> Any:
    """``x`` as floats; integers and booleans as float32."""
    if _NAMES.get(x.dtype) in FLOATS:
        return x
    if x.dtype in _INTEGERS:
        return x.astype(mx.float32)
    raise TypeError(
        f"{argument} must be a float32, float64, float16 or bfloat16 array (or integers), got dtype {x.dtype}"
    )
