# SPDX-License-Identifier: Apache-2.0
"""Tensors whose recipe or layout is another library's object: what can be known of them without kernels."""

from __future__ import annotations

from typing import Any


def packing(data: Any, scale: Any, layout: Any, shape: tuple[int, ...] | None) -> str:
    """How ``data`` stores its codes (see `breccia.value.form.Form`), once the layout's own check has passed."""
    stored = tuple(data.shape)
    if not stored:
        raise ValueError("data must be at least 1-D, got 0-D")
    validate = getattr(layout, "validate", None)
    if validate is not None:
        validate(data, scale)
    if shape is None or tuple(shape) == stored:
        return "one"
    axis = getattr(layout, "axis", -1)
    for name, columns in (("two", 2 * stored[axis]), ("odd", 2 * stored[axis] - 1)):
        packed = list(stored)
        packed[axis] = columns
        if tuple(shape) == tuple(packed):
            return name
    raise ValueError(f"shape {tuple(shape)} must be the logical shape of data, whose stored shape is {stored}")


def transposed(layout: Any) -> Any:
    """The layout of the transposed view."""
    if not hasattr(layout, "T"):
        raise TypeError(f"layout {type(layout).__name__} must have an attribute T to be transposed")
    return layout.T
