# SPDX-License-Identifier: Apache-2.0
"""How a scale array maps onto a data array.

A layout is a grid of blocks over the last two axes of the data, as plain data. Shapes below are of
data ``(..., M, K)``. ``axis`` is the axis along which blocks and packed codes run: -1, or -2 in a
transposed view.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from breccia import _core

__all__ = ["Block", "Layout", "PerBlockK", "PerBlockMN", "PerChannel", "PerTensor"]


class Block(NamedTuple):
    """Rows and columns that share a scale; 0 stands for all of them."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Layout:
    """Base of the four layouts. Immutable, hashable, comparable."""

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, value in _fields(self).items():
            if not hasattr(value, "__index__"):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            self.__dict__[name] = operator.index(value)
        spec = self._make_spec()
        twin = object.__new__(type(self))
        swapped = {**_fields(self), "axis": spec.T.axis}
        if "block_m" in swapped:
            swapped["block_m"], swapped["block_n"] = swapped["block_n"], swapped["block_m"]
        # Not fields: the core's form, the transposed layout, a block and a name, made once.
        rows, columns = (0, 0) if isinstance(self, PerTensor) else (spec.block_m, spec.block_n)
        if spec.axis == -2 and "block_m" not in swapped:
            rows, columns = columns, rows
        for layout, other, core in ((self, twin, spec), (twin, self, spec.T)):
            layout.__dict__.update(swapped if layout is twin else {}, _spec=core, _twin=other)
            layout.__dict__["_block"] = Block(rows, columns) if layout is self else Block(columns, rows)
            layout.__dict__["_key"] = json.dumps({"name": self.name, **_fields(layout)})

    def _make_spec(self) -> _core.Layout:
        raise TypeError("Layout is abstract: use PerTensor, PerBlockK, PerChannel or PerBlockMN")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(_fields(self).values())

    @property
    def T(self) -> Layout:  # noqa: N802 (NumPy's name)
        """The layout of the transposed view."""
        twin: Layout = self.__dict__["_twin"]
        return twin

    @property
    def block(self) -> Block:
        """Rows and columns of the data that share a scale; 0 stands for all of them."""
        block: Block = self._block  # type: ignore[attr-defined]
        return block

    @property
    def one_scale(self) -> bool:
        """Whether the whole tensor has one scale."""
        return self.block == (0, 0)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale `breccia.cast` makes for a tensor of logical ``shape``.

        Args:
            shape: logical.

        Returns:
            The shape of ``scale``.
        """
        return _spec(self).scale_shape(shape)

    def validate(self, data: Any, scale: Any) -> None:
        """Check that ``scale`` fits ``data`` (one code per element).

        Args:
            data: an array of the logical shape.
            scale: an array.

        Raises:
            TypeError: one is no array.
            ValueError: it does not; the message has the shape it must have.
        """
        for name, array in (("data", data), ("scale", scale)):
            if not hasattr(array, "shape"):
                raise TypeError(f"{name} must be array-like with .shape, got {type(array).__name__}")
        _spec(self).validate(data.shape, scale.shape)


@dataclass(frozen=True)
class PerTensor(Layout):
    """One scale for the whole tensor: shape ``()``."""

    name: ClassVar[str] = "per_tensor"
    axis: int = field(default=-1, repr=False)

    def _make_spec(self) -> _core.Layout:
        if self.axis not in (-1, -2):
            raise ValueError(f"axis must be -1 or -2, got {self.axis!r}")
        spec = _core.Layout.per_tensor()
        return spec if self.axis == -1 else spec.T


@dataclass(frozen=True)
class PerBlockK(Layout):
    """One scale per ``block_size`` elements of a row: shape ``(..., M, K / block_size)``.

    Raises:
        ValueError: ``block_size`` is not positive.
    """

    name: ClassVar[str] = "per_block_k"
    block_size: int = 128
    axis: int = field(default=-1, repr=False)

    def _make_spec(self) -> _core.Layout:
        return _core.Layout.per_block_k(self.block_size, self.axis)


@dataclass(frozen=True)
class PerChannel(Layout):
    """One scale per row: shape ``(..., M, 1)`` or ``(..., M)``."""

    name: ClassVar[str] = "per_channel"
    axis: int = field(default=-1, repr=False)

    def _make_spec(self) -> _core.Layout:
        return _core.Layout.per_channel(self.axis)


@dataclass(frozen=True)
class PerBlockMN(Layout):
    """One scale per ``block_m`` × ``block_n`` tile: shape ``(..., ceil(M / block_m), ceil(K / block_n))``.

    Raises:
        ValueError: a block size is not positive.
    """

    name: ClassVar[str] = "per_block_mn"
    block_m: int = 1
    block_n: int = 32
    axis: int = field(default=-1, repr=False)

    def _make_spec(self) -> _core.Layout:
        return _core.Layout.per_block_mn(self.block_m, self.block_n, self.axis)


def all_layouts() -> list[type[Layout]]:
    """Every layout class of this module."""
    return [kind for kind in Layout.__subclasses__() if kind.__module__ == __name__]


def from_spec(spec: _core.Layout) -> Layout:
    """The Python face of a core layout."""
    match spec.kind:
        case "PerTensor":
            return PerTensor(spec.axis)
        case "PerBlockK":
            return PerBlockK(spec.block_n, spec.axis)
        case "PerChannel":
            return PerChannel(spec.axis)
        case _:
            return PerBlockMN(spec.block_m, spec.block_n, spec.axis)


def _spec(layout: Layout) -> _core.Layout:
    spec: _core.Layout = layout._spec  # type: ignore[attr-defined]
    return spec


def _fields(layout: Layout) -> dict[str, Any]:
    return {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}
