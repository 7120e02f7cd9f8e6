# SPDX-License-Identifier: Apache-2.0
"""A ScaledTensor as a NumPy array of its values, and as what pickle stores of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from breccia import frameworks
from breccia.value.inputs import FLOATS

if TYPE_CHECKING:
    from breccia.scaled_tensor import ScaledTensor


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
