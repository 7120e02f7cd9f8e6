# SPDX-License-Identifier: Apache-2.0
"""All that a ScaledTensor is but its arrays."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe

PARTS = ("data", "scale", "zero_point", "global_scale")  # the arrays of a ScaledTensor, in order


def axis_of(layout: Any) -> int:
    """The axis along which data is packed and blocks run, counted from the end."""
    axis: int = getattr(layout, "axis", -1)
    return axis


def logical_shape(stored: Any, layout: Any, packing: str) -> tuple[int, ...]:
    """The shape of values whose data has the shape ``stored``; ``packing`` as in `Form`."""
    shape = list(stored)
    if packing != "one":
        axis = getattr(layout, "axis", -1)
        shape[axis] = 2 * shape[axis] - (1 if packing == "odd" else 0)
    return tuple(shape)


@functools.lru_cache(maxsize=256)
def _text(recipe: Any, layout: Any, original_dtype: str, shape: tuple[int, ...]) -> str:
    """See `Form.text`."""
    said = {
        "recipe": {"name": getattr(recipe, "name", ""), "fields": _fields(recipe)},
        "layout": {"name": getattr(layout, "name", ""), "fields": _fields(layout)},
        "shape": list(shape),
        "original_dtype": original_dtype,
    }
    return json.dumps(said)


class Form(NamedTuple):
    """What the arrays of a ScaledTensor mean. A tuple, so that trees of torch and JAX compare, hash and store it."""

    recipe: Any
    layout: Any
    packing: str  # "one" code per byte of data, "two", or "odd": two of which the last is unused
    original_dtype: str
    parts: tuple[str, ...] = PARTS[:2]  # the arrays that there are, by their names and in their order

    @property
    def axis(self) -> int:
        """See `axis_of`."""
        return axis_of(self.layout)

    @property
    def has_kernels(self) -> bool:
        """Whether recipe and layout are breccia's own."""
        return isinstance(self.recipe, ScalingRecipe) and isinstance(self.layout, Layout)

    def text(self, shape: Sequence[int]) -> str:
        """What the parts of a tensor of that shape mean, as JSON: an object of recipe, layout, shape and dtype."""
        try:
            return _text(self.recipe, self.layout, self.original_dtype, tuple(shape))
        except TypeError:  # of another library, and not to be hashed
            return _text.__wrapped__(self.recipe, self.layout, self.original_dtype, tuple(shape))

    def place(self, arrays: Any) -> list[Any]:
        """Four arrays, None where there is none, of those that there are."""
        given = iter(arrays)
        return [next(given) if name in self.parts else None for name in PARTS]

    def with_columns(self, columns: int) -> Form:
        """The form of as many rows, stored alike, that have so many columns."""
        return self if self.packing == "one" else self._replace(packing=packing_for(4, columns))

    def check_kernels(self) -> None:
        """Refuses a recipe or layout of another library, which the message names."""
        if not (isinstance(self.recipe, ScalingRecipe) and isinstance(self.layout, Layout)):
            part = "layout" if isinstance(self.recipe, ScalingRecipe) else "recipe"
            raise TypeError(f"breccia has no kernels for {part} {type(getattr(self, part)).__name__}")


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields, but for the usual axis, which no file has; of another library's object what it prints."""
    if not dataclasses.is_dataclass(value):
        return {"": repr(value)}
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {name: given for name, given in fields.items() if (name, given) != ("axis", -1)}


def parts_there(zero_point: Any, global_scale: Any) -> tuple[str, ...]:
    """`Form.parts` of a tensor that has these, where they are not None (or False)."""
    if global_scale is None or global_scale is False:
        return PARTS[:2] if zero_point is None or zero_point is False else PARTS[:3]
    return (*PARTS[:2], PARTS[3]) if zero_point is None or zero_point is False else PARTS


def packing_for(bits: int, columns: int) -> str:
    """How ``breccia.cast`` stores rows of ``columns`` codes of so many bits: see `Form.packing`."""
    if bits != 4:
        return "one"
    return "odd" if columns % 2 else "two"


def cast_form(recipe: ScalingRecipe, shape: Any, original_dtype: str) -> Form:
    """The form of what ``breccia.cast`` makes of an array of that shape and dtype."""
    bits, has_zero_point, two_level = recipe._traits  # type: ignore[attr-defined]
    packing = packing_for(bits, shape[-1] if shape else 1)
    return Form(recipe, recipe.layout, packing, original_dtype, parts_there(has_zero_point, two_level))


def foreign_packing(data: Any, scale: Any, layout: Any, shape: tuple[int, ...] | None) -> str:
    """How ``data`` of another library's recipe or layout stores its codes (see `Form`), once the layout's own check has
    passed."""
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


def transposed_layout(layout: Any) -> Any:
    """The layout of the transposed view."""
    if not hasattr(layout, "T"):
        raise TypeError(f"layout {type(layout).__name__} must have an attribute T to be transposed")
    return layout.T
