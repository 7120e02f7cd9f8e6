# SPDX-License-Identifier: Apache-2.0
"""All that a ScaledTensor is but its arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe

__all__ = ["PARTS", "Form", "axis_of", "cast_form", "packing_for"]

PARTS = ("data", "scale", "zero_point", "global_scale")  # the arrays of a ScaledTensor, in order


def axis_of(layout: Any) -> int:
    """The axis along which data is packed and blocks run, counted from the end."""
    axis: int = getattr(layout, "axis", -1)
    return axis


def _is_own(recipe: Any, layout: Any) -> bool:
    return isinstance(recipe, ScalingRecipe) and isinstance(layout, Layout)


class Form(NamedTuple):
    """What the arrays of a ScaledTensor mean. A tuple, so that trees of torch and JAX compare, hash and store it."""

    recipe: Any
    layout: Any
    packing: str  # "one" code per byte of data, "two", or "odd": two of which the last is unused
    original_dtype: str

    @property
    def axis(self) -> int:
        """See `axis_of`."""
        return axis_of(self.layout)

    @property
    def has_kernels(self) -> bool:
        """Whether recipe and layout are breccia's own."""
        return _is_own(self.recipe, self.layout)

    def shape_of(self, stored: Any) -> tuple[int, ...]:
        """The logical shape of data of the shape ``stored``."""
        shape = list(stored)
        if self.packing != "one":  # without properties, which torch's compiler does not follow in a tuple before 2.9
            axis = axis_of(self.layout)
            shape[axis] = 2 * shape[axis] - (self.packing == "odd")
        return tuple(shape)

    def with_columns(self, columns: int) -> Form:
        """The form of as many rows, stored alike, that have so many columns."""
        return self if self.packing == "one" else self._replace(packing=packing_for(4, columns))

    def check_kernels(self) -> None:
        """Refuse a recipe or layout of another library.

        Raises:
            TypeError: the message names it.
        """
        if not _is_own(self.recipe, self.layout):
            part = "layout" if isinstance(self.recipe, ScalingRecipe) else "recipe"
            raise TypeError(f"breccia has no kernels for {part} {type(getattr(self, part)).__name__}")


def packing_for(bits: int, columns: int) -> str:
    """How ``breccia.cast`` stores rows of ``columns`` codes of so many bits: see `Form.packing`."""
    if bits != 4:
        return "one"
    return "odd" if columns % 2 else "two"


def cast_form(recipe: ScalingRecipe, shape: Any, original_dtype: str) -> Form:
    """The form of what ``breccia.cast`` makes of an array of that shape and dtype."""
    packing = packing_for(recipe._traits[0], shape[-1] if shape else 1)  # type: ignore[attr-defined]
    return Form(recipe, recipe.layout, packing, original_dtype)
