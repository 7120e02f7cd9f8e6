# SPDX-License-Identifier: Apache-2.0
"""When two ScaledTensors are the same value, and the hash that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import frameworks

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


def key(scaled: ScaledTensor) -> int:
    """A hash of everything but the bytes, so that it costs nothing and holds for traced arrays too."""
    try:
        return hash((scaled.recipe, scaled.layout, scaled.shape))
    except TypeError:  # another library's recipe may have no hash
        return hash((type(scaled.recipe), type(scaled.layout), scaled.shape))
