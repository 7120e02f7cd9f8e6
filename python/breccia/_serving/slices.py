# SPDX-License-Identifier: Apache-2.0
"""The tensors of a quantized weight in breccia's own files, as the layers of a serving program keep a slice of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from breccia.bridges import native
from breccia.bridges.parts import ghost
from breccia.layouts import Layout
from breccia.nn import QuantizedLinear
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

__all__ = ["ROLES", "Piece", "Slice", "bytewise", "layers_of", "product"]

ROLES = native.ROLES
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}


@dataclass(frozen=True)
class Piece:
    """One stored tensor of a slice.

    Attributes:
        shape: its shape.
        dtype: its dtype in memory; codes and scales of a byte are bytes, whatever the file calls them.
        signed: bytes that are signed integers.
        kind: "tensor" where it is one number, "channel" where it has one for each row, "group" where it has more, and
            "block" where several rows share them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    signed: bool
    kind: str


@dataclass(frozen=True)
class Slice:
    """A rectangle of a weight (N, K) that one process has; K is ``whole_columns``. Raises ValueError where it would cut
    a block, or a byte of two codes."""

    rows: int
    columns: int
    whole_columns: int
    recipe: ScalingRecipe

    def __post_init__(self) -> None:
        across = _block(self.layout)[1]
        if self.columns != self.whole_columns and (self.columns % across or self.columns % 2):
            raise ValueError(
                f"columns of a rank must be whole blocks of {across}, {self.columns} of {self.whole_columns} are not: "
                f"take a smaller tensor parallel size"
            )

    @property
    def layout(self) -> Layout:
        """How scales lie over the weight."""
        return self.recipe.layout

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale; 0 stands for all."""
        return _block(self.layout)

    def check_rows(self, widths: list[int]) -> None:
        """Refuse parts of a fused weight that would share a scale with their neighbours. Raises ValueError where they
        would."""
        down = self.block[0]
        if down > 1 and any(width % down for width in widths):
            raise ValueError(
                f"rows of each part of a fused layer must be whole blocks of {down}, they are {widths}: "
                f"take a smaller tensor parallel size, or another recipe"
            )

    def pieces(self) -> dict[str, Piece]:
        """The stored tensors, by role."""
        here = native.store("w", ghost((self.rows, self.columns), self.recipe))[0]
        whole = native.store("w", ghost((self.rows, self.whole_columns), self.recipe))[0]
        return {
            role: Piece(
                here[f"w.{role}"].shape,
                _dtype(role, here[f"w.{role}"].dtype),
                here[f"w.{role}"].dtype == "I8",
                self._kind(role, whole[f"w.{role}"].shape),
            )
            for role in ROLES
            if f"w.{role}" in here
        }

    def _kind(self, role: str, whole: tuple[int, ...]) -> str:
        if not whole:
            return "tensor"
        if role == "data":
            return "group"
        if self.block[0] > 1:
            return "block"
        return "channel" if whole[-1] == 1 else "group"


def _dtype(role: str, stored: str) -> torch.dtype:
    """That of a parameter: zero points are bytes, whatever their sign; exponents of groups are floats."""
    return torch.uint8 if role == "zero_point" and stored == "I8" else _DTYPES.get(stored, torch.uint8)


def _block(layout: Layout) -> tuple[int, int]:
    return layout.block.rows, layout.block.columns or 1


def bytewise(load: Callable[..., Any]) -> Callable[..., Any]:
    """A weight loader that is given bytes where the file has FP8, which a parameter of bytes would copy as numbers."""

    def loader(param: Any, loaded_weight: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        given = loaded_weight.view(torch.uint8) if loaded_weight.dtype.itemsize == 1 else loaded_weight
        return load(param, given, *arguments, **named)

    return loader


def product(layers: list[QuantizedLinear], x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What the layers of one weight make of an input, one after the other."""
    made = [one(x) for one in layers]
    y = made[0] if len(made) == 1 else torch.cat(made, -1)
    return y if bias is None else y + bias


def layers_of(
    held: Slice,
    parts: dict[str, torch.Tensor],
    widths: list[int],
    activations: ScalingRecipe | None,
    inputs: torch.Tensor | None = None,
) -> list[QuantizedLinear]:
    """Layers over stored tensors by role, which they view: one, or one for each part of a fused weight (rows in
    ``widths``) whose parts have numbers of their own for all their rows; ``inputs`` is the static scale of the inputs
    of each part. Their outputs, one after the other, are those of the weight."""
    single = {role: parts[role].reshape(-1) for role, piece in held.pieces().items() if piece.kind == "tensor"}
    every = [*single.values(), *([] if inputs is None else [inputs.reshape(-1)])]
    if all(bool((numbers == numbers[0]).all()) for numbers in every):
        bounds = [(0, held.rows, 0)]
    else:
        ends = [sum(widths[: i + 1]) for i in range(len(widths))]
        bounds = [(end - width, end, i) for i, (end, width) in enumerate(zip(ends, widths, strict=True))]
    scales = [None if inputs is None else inputs.reshape(-1)[number] for _, _, number in bounds]
    cuts = [_cut(held, parts, *one) for one in bounds]
    return [QuantizedLinear(c, None, activations, input_scale=s) for c, s in zip(cuts, scales, strict=True)]


def _cut(held: Slice, parts: dict[str, torch.Tensor], start: int, stop: int, number: int) -> ScaledTensor:
    down = max(held.block[0], 1)
    cut: dict[str, torch.Tensor] = {}
    for role, piece in held.pieces().items():
        if piece.kind == "tensor":
            cut[role] = parts[role].reshape(-1)[number].reshape(())
        elif piece.kind == "block":
            cut[role] = parts[role][start // down : -(-stop // down)]
        else:
            cut[role] = parts[role][start:stop]
        cut[role] = cut[role].view(torch.int8) if piece.signed and piece.dtype == torch.uint8 else cut[role]
    return ScaledTensor(
        cut["data"],
        cut["scale"],
        held.recipe,
        held.layout,
        cut.get("zero_point"),
        global_scale=cut.get("global_scale"),
        shape=(stop - start, held.columns),
    )
