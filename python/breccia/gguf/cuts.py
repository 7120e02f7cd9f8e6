# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model that a format keeps as two: what each of the two is of the whole, and the whole of both.

Rows of gates and others in turn: ``gate = whole[:, ::2]``, ``up = whole[:, 1::2]``.
Keys and values of latent attention, K and V rows a head: ``k[h] = whole[h * (K + V) :][:K].T`` and
``v[h] = whole[h * (K + V) + K :][:V]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia.bridges.common import float32
from breccia.bridges.outside import OutsideTensor
from breccia.layouts import Layout
from breccia.scaled_tensor import ScaledTensor


@dataclass(frozen=True)
class Alternate:
    """Every second index of the second axis: (E, 2N, …) → (E, N, …)."""

    start: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this half. Raises ValueError where the whole has no halves."""
        if len(whole) < 2 or whole[1] % 2:
            raise ValueError(f"gates and others in turn must be of an even number along the second axis, got {whole}")
        return (whole[0], whole[1] // 2, *whole[2:])

    def whole_shape(self, half: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole."""
        return (half[0], 2 * half[1], *half[2:])

    def of(self, whole: Any) -> Any:
        """This half of a tensor: codes and scales where they are of rows, values elsewhere."""
        if isinstance(whole, ScaledTensor) and keeps_codes(whole.layout):
            return _each(lambda arrays: np.ascontiguousarray(arrays[0][:, self.start :: 2]), [whole])
        return _values(whole)[:, self.start :: 2]

    def together(self, halves: Sequence[Any]) -> Any:
        """The whole of both halves, gates first."""

        def in_turn(arrays: list[Any]) -> Any:
            return np.stack(arrays, axis=2).reshape(self.whole_shape(arrays[0].shape))

        first, other = halves
        scaled = isinstance(first, ScaledTensor) and isinstance(other, ScaledTensor)
        if scaled and first.recipe == other.recipe and keeps_codes(first.layout):
            return _each(in_turn, [first, other])
        return in_turn([_values(half) for half in halves])


@dataclass(frozen=True)
class Heads:
    """Keys, transposed in each head, or values: (heads * (K + V), R) → (heads, R, K) or (heads, V, R)."""

    heads: int
    keys: int
    values: int
    of_keys: bool

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the keys, or of the values. Raises ValueError where the whole has not as many rows."""
        rows = self.heads * (self.keys + self.values)
        if len(whole) != 2 or whole[0] != rows:
            raise ValueError(f"rows of keys and values must be {rows} = heads * (keys + values), got shape {whole}")
        return (self.heads, whole[1], self.keys) if self.of_keys else (self.heads, self.values, whole[1])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole."""
        return (self.heads * (self.keys + self.values), part[1 if self.of_keys else 2])

    def of(self, whole: Any) -> Any:
        """The keys or the values, as numbers."""
        array = _values(whole)
        by_head = array.reshape(self.heads, self.keys + self.values, array.shape[1])
        return by_head[:, : self.keys].swapaxes(1, 2) if self.of_keys else by_head[:, self.keys :]

    def together(self, parts: Sequence[Any]) -> Any:
        """The whole of keys and values."""
        keys, values = (_values(part) for part in parts)
        if keys.dtype != values.dtype:
            keys, values = float32(keys), float32(values)
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


@dataclass(frozen=True)
class All:
    """All of a tensor, which has another name."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The whole's own shape."""
        return whole

    def whole_shape(self, half: tuple[int, ...]) -> tuple[int, ...]:
        """The same."""
        return half

    def of(self, whole: Any) -> Any:
        """The tensor."""
        return whole

    def together(self, halves: Sequence[Any]) -> Any:
        """The tensor."""
        return halves[0]


Cut = All | Alternate | Heads


def keeps_codes(layout: Layout | None) -> bool:
    """Whether halves of a quantized tensor's rows are quantized as the whole is."""
    return layout is not None and layout.block.rows == 1 and layout.block.columns > 0


def _each(make: Any, tensors: list[ScaledTensor]) -> ScaledTensor:
    """A tensor whose codes and scales are made of those of others."""
    first = tensors[0]
    second = first.global_scale
    if second is not None and any(not np.array_equal(one.global_scale, second) for one in tensors):
        raise ValueError("halves must have the same global scales, they have others")
    data = make([one.data for one in tensors])
    zero = None if first.zero_point is None else make([one.zero_point for one in tensors])
    shape = (*data.shape[:2], *first.shape[2:])
    scale = make([one.scale for one in tensors])
    return ScaledTensor(data, scale, first.recipe, first.layout, zero, global_scale=second, shape=shape)


def _values(tensor: Any) -> Any:
    return tensor.dequantize() if isinstance(tensor, (OutsideTensor, ScaledTensor)) else tensor
