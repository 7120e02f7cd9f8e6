# SPDX-License-Identifier: Apache-2.0
"""Tensors that are more than a ScaledTensor can say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from breccia.bridges.common import Array, bfloat16_bits, float32, float_dtype
from breccia.scaled_tensor import ScaledTensor


@dataclass(frozen=True, eq=False)
class OutsideTensor:
    """A foreign tensor that has one thing more than a ScaledTensor can say.

    value = (dequantize(scaled) + bias of the block)[..., columns] where each is given: ``bias`` is a
    zero point in the float domain (MLX, GGUF Q4_1, torchao Int4Tensor), shaped like the scale;
    ``columns`` the places at which activation-ordered columns are stored (GPTQ). ``arithmetic`` is the
    dtype that the format rounds the product and the sum to ("float16", "bfloat16" or "float32").
    """

    scaled: ScaledTensor
    bias: Array | None = None
    columns: Array | None = None
    arithmetic: str = "float32"

    def __repr__(self) -> str:
        things = [f"{name} of {getattr(self, name).shape}" for name in ("bias", "columns") if self._has(name)]
        return f"OutsideTensor({', '.join([repr(self.scaled), *things])})"

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.scaled.shape

    @np.errstate(over="ignore", invalid="ignore")  # infinities of stored scales are values, not mistakes of the caller
    def dequantize(self, dtype: Any = "float32") -> Array:
        """The values, made in the format's arithmetic and rounded to ``dtype``.

        Args:
            dtype: of the result: "float32", "bfloat16" or another float dtype of NumPy.

        Returns:
            An array of the logical shape.
        """
        from breccia.verbs import dequantize

        values: Array = self._rounded(dequantize(self.scaled))
        if self.bias is not None:
            size = -(-self.shape[-1] // self.bias.shape[-1])
            size = getattr(self.scaled.layout, "block_size", size)
            # A sum of two numbers of at most 11 bits each, rounded by way of float32, is rounded once.
            values = self._rounded(values + np.repeat(float32(self.bias), size, axis=-1)[..., : self.shape[-1]])
        if self.columns is not None:
            values = values[..., self.columns]
        return values if dtype == "float32" else values.astype(float_dtype(dtype))

    def _rounded(self, values: Array) -> Array:
        if self.arithmetic == "float32":
            return values
        return float32(bfloat16_bits(values) if self.arithmetic == "bfloat16" else values.astype(np.float16))


def values(tensor: Any) -> Any:
    """Any loaded tensor as numbers; ``uint16`` is bfloat16."""
    if isinstance(tensor, (ScaledTensor, OutsideTensor)):
        return tensor.dequantize()
    return float32(tensor) if tensor.dtype == np.uint16 else tensor


def comparable(tensor: Any) -> Any:
    """A loaded tensor as the core takes it: as it is but for what a ScaledTensor cannot say."""
    return tensor.dequantize() if isinstance(tensor, OutsideTensor) else tensor
