# SPDX-License-Identifier: Apache-2.0
"""The arrays of a ScaledTensor: as the core sees them, as NumPy and pickle do, and when two tensors have the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import _core, frameworks, layouts, recipes
from breccia.value.inputs import FLOATS

if TYPE_CHECKING:
    from breccia.scaled_tensor import ScaledTensor

# Scales first: they are short, and differ where tensors differ.
_PARTS = ("scale", "global_scale", "zero_point", "data")


def equal(a: ScaledTensor, b: ScaledTensor) -> bool:
    """Whether two tensors have equal recipes, layouts and shapes, and the same bytes (NaN equals itself) in arrays of
    one framework and device. Codes may be bytes in one and of their own dtype in the other. An array that both share
    is not read."""
    if (a.shape, a.original_dtype) != (b.shape, b.original_dtype):
        return False
    if a.recipe != b.recipe or a.layout != b.layout:
        return False
    return all(_same(getattr(a, part), getattr(b, part), part != "zero_point") for part in _PARTS)


def _same(x: Any, y: Any, coded: bool) -> bool:
    if x is y:
        return True
    if x is None or y is None or x.shape != y.shape:
        return False
    if x.dtype != y.dtype and not (coded and _kind(x) == _kind(y)):
        return False
    framework = frameworks.of(x)
    if framework is not frameworks.of(y) or framework.place(x) != framework.place(y):
        return False
    return np.array_equal(_bytes(x), _bytes(y))


def _kind(array: Any) -> str:
    """The dtype, with one name for all codes of a byte, whose meaning is the recipe's, and one for bfloat16."""
    name = str(array.dtype).rpartition(".")[2]
    if array.itemsize == 1:
        return "byte"
    return "bfloat16" if name == "uint16" else name


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(frameworks.on_host(array)[0]).reshape(-1).view(np.uint8)


def hash_of(scaled: ScaledTensor) -> int:
    """A hash of everything but the bytes, so that it costs nothing and holds for traced arrays too."""
    try:
        return hash((scaled.recipe, scaled.layout, scaled.shape))
    except TypeError:  # another library's recipe may have no hash
        return hash((type(scaled.recipe), type(scaled.layout), scaled.shape))


def to_numpy(scaled: ScaledTensor, dtype: Any) -> Any:
    """The values as a NumPy array, float32 where ``dtype`` is None, wherever the tensor lies."""
    host = (scaled.to("cpu") if str(scaled.device).startswith("cuda") else scaled).to("numpy")
    known = dtype is None or getattr(dtype, "name", dtype) in FLOATS
    made = host.dequantize("float32" if dtype is None or not known else dtype)
    return made if known else made.astype(dtype)


def to_pickle(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays as (array, dtype name), for not every dtype survives every pickle; None stays."""
    pack = frameworks.of(arrays[0]).to_pickle
    return tuple(None if array is None else pack(array) for array in arrays)


def from_pickle(packed: tuple[Any, ...], layout: Any) -> list[Any]:
    """The arrays of `to_pickle`; version 0.2 also stored the scale of a whole tensor as an array of one element."""
    arrays: list[Any] = [part if part is None else frameworks.of(part[0]).from_pickle(*part) for part in packed]
    scale = arrays[1]
    if getattr(layout, "one_scale", False) and tuple(scale.shape) == (1,):
        arrays[1] = scale.reshape(())
    return arrays


def check_arrays(data: Any, scale: Any, zero_point: Any) -> None:
    """Refuses what is no array, whose framework need not be known."""
    for argument, array in (("data", data), ("scale", scale), ("zero_point", zero_point)):
        required = argument != "zero_point"
        if (array is not None or required) and not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"{argument} must be array-like with .shape and .dtype, got {type(array).__name__}")


def make_core(
    arrays: tuple[Any, Any, Any, Any], recipe: Any, layout: Any, shape: Any, original_dtype: str
) -> _core.ScaledTensor:
    """The core's tensor of data, scale, zero point and global scale, over their memory; the logical shape is told from
    the others where it is None."""
    data, scale, zero_point, global_scale = arrays
    frameworks.same_place(data, scale=scale, zero_point=zero_point, global_scale=global_scale)
    read = frameworks.of(data).to_core
    return _core.ScaledTensor(
        read(data, "data"),
        read(scale, "scale"),
        recipes._spec(recipe),
        layouts._spec(layout),
        None if zero_point is None else read(zero_point, "zero_point"),
        None if global_scale is None else read(global_scale, "global_scale"),
        None if shape is None else list(shape),
        original_dtype,
    )
