# SPDX-License-Identifier: Apache-2.0
"""A ScaledTensor as one run of bytes.

    | data | scale | zero point | global scale |      each part begins at a multiple of 16 bytes

The sizes follow from the form of the tensor and from its extent along the axis that is cut, so that ranks which know
those need no header.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS
from breccia.value.slicing import block_along

_ALIGNMENT = 16


class Slot(NamedTuple):
    """Where one part lies, and what it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class Wire:
    """The bytes of a tensor like ``like`` whose axis ``dim``, counted from the end, is ``extent`` long."""

    def __init__(self, like: ScaledTensor, dim: int, extent: int) -> None:
        self.like, self.dim, self.extent = like, dim, extent
        self.slots: list[Slot | None] = []
        at = 0
        for name in PARTS:
            part = getattr(like, name)
            if part is None:
                self.slots.append(None)
                continue
            shape = self._shape_of(name, tuple(part.shape))
            size = math.prod(shape) * part.dtype.itemsize
            self.slots.append(Slot(shape, part.dtype, at, at + size))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.bytes = at

    def _shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis, like = self.dim + self.like.ndim, self.like
        if name == "data":
            per = 2 if like.is_packed and self.dim == -1 else 1
        elif axis >= len(shape):  # one for all, or one per row without its axis of 1
            return shape
        elif name == "global_scale":  # one for all, or one for each matrix of a batch
            if self.dim >= -2 or (shape[axis] == 1 and like.data.shape[axis] != 1):
                return shape
            per = 1
        elif like.layout.name == "per_channel" and self.dim == -1:
            return shape
        else:
            per = block_along(like.layout, False, self.dim)
        return (*shape[:axis], -(-self.extent // per), *shape[axis + 1 :])

    def write(self, scaled: ScaledTensor, buffer: torch.Tensor) -> None:
        """Copy the tensor's parts to the buffer's bytes."""
        for name, slot in zip(PARTS, self.slots, strict=True):
            if slot is not None:
                buffer[slot.begin : slot.end].copy_(bytes_of(getattr(scaled, name)))

    def read(self, buffer: torch.Tensor) -> ScaledTensor:
        """The tensor whose parts lie in the buffer."""
        parts = zip(PARTS, self.slots, strict=True)
        return self.of({name: _part(buffer, slot) for name, slot in parts if slot is not None})

    def of(self, parts: dict[str, torch.Tensor]) -> ScaledTensor:
        """The tensor made of these parts."""
        form = self.like._form.with_columns(self.extent) if self.dim == -1 else self.like._form
        return ScaledTensor._of(form, **parts)


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    part = part.detach().reshape(1) if part.ndim == 0 else part.detach()
    if part.dtype.itemsize == 1:
        return part.view(torch.uint8).contiguous().reshape(-1)
    return part.contiguous().view(torch.uint8).reshape(-1)


def _part(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    return buffer[slot.begin : slot.end].view(slot.dtype).reshape(slot.shape)
