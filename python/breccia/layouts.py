# SPDX-License-Identifier: Apache-2.0
"""How a scale array maps onto a data array.

A layout is a grid of blocks over the last two axes of the data, as plain data. Shapes below are of
data ``(..., M, K)``. ``axis`` is the axis along which blocks and packed codes run: -1, or -2 in a
transposed view.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from breccia import _core

__all__ = ["Layout", "PerBlockK", "PerBlockMN", "PerChannel", "PerTensor"]


@dataclass(frozen=True)
class Layout:
    """Base of the four layouts. Immutable, hashable, comparable."""

    name: ClassVar[str] = ""

    @property
    def _spec(self) -> _core.Layout:
        raise TypeError("Layout is abstract: use PerTensor, PerBlockK, PerChannel or PerBlockMN")

    @property
    def T(self) -> Layout:  # noqa: N802 (NumPy's name)
        """The layout of the transposed view."""
        return from_spec(self._spec.T)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale `breccia.cast` makes for a tensor of logical ``shape``."""
        return self._spec.scale_shape(shape)

    def validate(self, data: Any, scale: Any) -> None:
        """Check that ``scale`` fits ``data`` (one code per element).

        Raises:
            ValueError: it does not; the message has the shape it must have.
        """
        self._spec.validate(data.shape, scale.shape)


@dataclass(frozen=True)
class PerTensor(Layout):
    """One scale for the whole tensor: shape ``()``, or any shape of one element."""

    name: ClassVar[str] = "per_tensor"
    axis: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        _check_axis(self.axis)

    @property
    def _spec(self) -> _core.Layout:
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

    def __post_init__(self) -> None:
        _ = self._spec

    @property
    def _spec(self) -> _core.Layout:
        return _core.Layout.per_block_k(self.block_size, self.axis)


@dataclass(frozen=True)
class PerChannel(Layout):
    """One scale per row: shape ``(..., M, 1)`` or ``(..., M)``."""

    name: ClassVar[str] = "per_channel"
    axis: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        _ = self._spec

    @property
    def _spec(self) -> _core.Layout:
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

    def __post_init__(self) -> None:
        _ = self._spec

    @property
    def _spec(self) -> _core.Layout:
        return _core.Layout.per_block_mn(self.block_m, self.block_n, self.axis)


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


def _check_axis(axis: int) -> None:
    if axis not in (-1, -2):
        raise ValueError(f"axis must be -1 or -2, got {axis}")
