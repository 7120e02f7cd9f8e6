# SPDX-License-Identifier: Apache-2.0
"""A value's parts as the core sees them, which checks that they fit."""

from __future__ import annotations

from typing import Any

from breccia import _core, frameworks, layouts, recipes


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
