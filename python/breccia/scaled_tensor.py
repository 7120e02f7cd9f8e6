# SPDX-License-Identifier: Apache-2.0
"""The value type."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from breccia import _core, frameworks, layouts, recipes

__all__ = ["ScaledTensor", "from_buffer"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ScaledTensor:
    """A block-scaled low-precision tensor: value = (decode(data) - zero_point) · scale · global_scale.

    Immutable; holds the arrays it is given without copying them. Every invariant is checked once,
    on construction.

    Args:
        data: codes; ``uint8``, or the framework's own low-precision dtype. 4-bit codes are two per
            byte, the element of even index in the low nibble; one code per byte is accepted too
            (which of the two follows from ``shape``, else from ``scale.shape`` and the layout).
        scale: dequantization scales in the shape ``layout`` demands; E8M0 and E4M3 scales as codes.
        recipe: what the codes and scales mean.
        layout: how scales map onto data.
        zero_point: integer-coded recipes only; shaped like ``scale``.
        global_scale: float32 second-level scale, one element or one per matrix of a batch.
        shape: logical shape, where packed data leaves it open (an odd number of columns).
        original_dtype: name of the dtype the values came from.

    Raises:
        TypeError: an argument is not an array, or has a dtype the recipe has no meaning for.
        ValueError: shapes do not fit, or a required part is missing.
    """

    data: Any
    scale: Any
    recipe: recipes.ScalingRecipe
    layout: layouts.Layout
    zero_point: Any = None
    global_scale: Any = None

    def __init__(
        self,
        data: Any,
        scale: Any,
        recipe: recipes.ScalingRecipe,
        layout: layouts.Layout,
        zero_point: Any = None,
        *,
        global_scale: Any = None,
        shape: tuple[int, ...] | None = None,
        original_dtype: str = "float32",
    ) -> None:
        for argument, array in (("data", data), ("scale", scale), ("zero_point", zero_point)):
            required = argument != "zero_point"
            if (array is not None or required) and not (hasattr(array, "shape") and hasattr(array, "dtype")):
                raise TypeError(f"{argument} must be array-like with .shape and .dtype, got {type(array).__name__}")
        if recipe is None:
            raise ValueError("recipe is required (see breccia.recipes)")
        if layout is None:
            raise ValueError("layout is required (see breccia.layouts)")
        if not isinstance(recipe, recipes.ScalingRecipe):
            raise TypeError(f"recipe must be a ScalingRecipe, got {type(recipe).__name__}")
        if not isinstance(layout, layouts.Layout):
            raise TypeError(f"layout must be a Layout, got {type(layout).__name__}")
        read = frameworks.of(data).to_core
        core = _core.ScaledTensor(
            read(data, "data"),
            read(scale, "scale"),
            recipes._spec(recipe),
            layout._spec,
            None if zero_point is None else read(zero_point, "zero_point"),
            None if global_scale is None else read(global_scale, "global_scale"),
            None if shape is None else list(shape),
            original_dtype,
        )
        self._fill(core, data, scale, recipe, layout, zero_point, global_scale)

    def _fill(self, core: _core.ScaledTensor, *values: Any) -> None:
        # The class is frozen: attributes are set past its __setattr__, once.
        self.__dict__.update(zip(_FIELDS, values, strict=True), _core=core)

    @classmethod
    def _from_core(cls, core: _core.ScaledTensor, *values: Any) -> ScaledTensor:
        """Wrap what the core has made and checked; ``values`` in the order of the fields."""
        self = object.__new__(cls)
        self._fill(core, *values)
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: counts values, not bytes."""
        return self._core.shape  # type: ignore[no-any-return, attr-defined]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data, scale, zero point and global scale."""
        return self._core.nbytes  # type: ignore[no-any-return, attr-defined]

    @property
    def data_dtype(self) -> Any:
        """dtype of ``data``."""
        return self.data.dtype

    @property
    def scale_dtype(self) -> Any:
        """dtype of ``scale``."""
        return self.scale.dtype

    @property
    def original_dtype(self) -> str:
        """Name of the dtype the values were cast from."""
        return self._core.original_dtype  # type: ignore[no-any-return, attr-defined]

    @property
    def is_packed(self) -> bool:
        """Whether a byte of ``data`` holds two codes."""
        return self._core.is_packed  # type: ignore[no-any-return, attr-defined]

    @property
    def mT(self) -> ScaledTensor:  # noqa: N802 (NumPy's name)
        """The last two axes swapped: a view, no copy. A 1-D tensor is its own transpose."""
        if self.ndim < 2:
            return self
        core: _core.ScaledTensor = self._core.T  # type: ignore[attr-defined]
        swap = frameworks.of(self.data).swap_last_axes
        per_tensor = isinstance(self.layout, layouts.PerTensor)

        def turn(array: Any) -> Any:
            if array is None or per_tensor:
                return array
            if array.ndim < self.ndim:  # one scale per row, without its constant axis
                array = array[..., None] if self.layout._spec.axis == -1 else array[..., None, :]
            return swap(array)

        return ScaledTensor._from_core(
            core,
            swap(self.data),
            turn(self.scale),
            self.recipe,
            self.layout.T,
            turn(self.zero_point),
            self.global_scale,
        )

    @property
    def T(self) -> ScaledTensor:  # noqa: N802 (NumPy's name)
        """Transpose of a 1-D or 2-D tensor: a view, no copy. Use ``mT`` for batches.

        Raises:
            ValueError: more than two axes.
        """
        if self.ndim > 2:
            raise ValueError(f"T needs at most 2 axes, got shape {self.shape}; use mT for a batch of matrices")
        return self.mT

    def __repr__(self) -> str:
        return (
            f"breccia.ScaledTensor(shape={self.shape}, data_dtype={self.data_dtype}, "
            f"scale_shape={tuple(self.scale.shape)}, recipe={type(self.recipe).__name__}, "
            f"layout={type(self.layout).__name__})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        values = tuple(getattr(self, name) for name in _FIELDS)
        return _rebuild, (*values, self.shape, self.original_dtype)


_FIELDS = tuple(field.name for field in dataclasses.fields(ScaledTensor))


def _rebuild(
    data: Any,
    scale: Any,
    recipe: recipes.ScalingRecipe,
    layout: layouts.Layout,
    zero_point: Any,
    global_scale: Any,
    shape: tuple[int, ...],
    original_dtype: str,
) -> ScaledTensor:
    return ScaledTensor(
        data,
        scale,
        recipe,
        layout,
        zero_point,
        global_scale=global_scale,
        shape=shape,
        original_dtype=original_dtype,
    )


def from_buffer(
    data: Any,
    scale: Any,
    recipe: recipes.ScalingRecipe,
    layout: layouts.Layout,
    zero_point: Any = None,
    *,
    global_scale: Any = None,
    shape: tuple[int, ...] | None = None,
    original_dtype: str = "float32",
) -> ScaledTensor:
    """Wrap buffers that are already quantized, without copying: see `ScaledTensor` for the arguments
    and errors."""
    return _rebuild(data, scale, recipe, layout, zero_point, global_scale, shape, original_dtype)  # type: ignore[arg-type]
