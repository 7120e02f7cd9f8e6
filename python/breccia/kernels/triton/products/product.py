# SPDX-License-Identifier: Apache-2.0
"""A product, as the kernels that may take it look at it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from breccia.kernels.triton import recipes
from breccia.kernels.triton.products import configs
from breccia.kernels.triton.recipes import Source
from breccia.scaled_tensor import ScaledTensor

HOPPER, BLACKWELL = 9, 10  # the major numbers of their compute capabilities; those after the latter have its units


@dataclass
class Fp8:
    """FP8 rows (M, K) and weights (N, K), each with a scale for all, one per row, or (`blocks`) one per 1 x 128 or
    128 x 128; float32."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    blocks: bool
    fast: bool = False  # leave sums to the tensor cores' short accumulator

    @property
    def mode(self) -> str:
        return "block" if self.blocks else "fast" if self.fast else "precise"


@dataclass
class Integers:
    """INT8 rows (M, K) and weights (N, K), each with a scale for all or one per row, and perhaps as many zero points of
    int8."""

    x: torch.Tensor
    w: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    x_zero: torch.Tensor | None = None
    w_zero: torch.Tensor | None = None


@dataclass
class Product:
    """A product as the paths look at it. What it is not stays None."""

    dtype: torch.dtype
    bias: Any = None
    fp8: Fp8 | None = None  # both sides are FP8
    ints: Integers | None = None  # both sides are INT8
    pair: tuple[recipes.Operand, recipes.Operand] | None = None  # (..., M, K) and a weight (N, K), both quantized
    rows: torch.Tensor | None = None  # (M, K) of 16-bit floats, to be multiplied by w
    w: recipes.Operand | None = None  # a weight (N, K), or with offsets one per expert
    offsets: torch.Tensor | None = None  # rows offsets[e] to offsets[e + 1] are expert e's
    operands: tuple[Any, Any] | None = None  # (..., M, K) and (..., K, N), floats or ScaledTensors

    @cached_property
    def device(self) -> torch.device:
        first: Any = self.rows if self.fp8 is None else self.fp8.x
        if first is None:
            assert self.operands is not None
            first = self.operands[0]
            first = first.data if isinstance(first, ScaledTensor) else first
        device: torch.device = first.device
        return device

    @cached_property
    def major(self) -> int:
        """Of the compute capability, 0 where there is none."""
        return int(torch.cuda.get_device_capability(self.device)[0]) if self.device.type == "cuda" else 0

    @cached_property
    def on_hopper(self) -> bool:
        return self.major == HOPPER

    @cached_property
    def source(self) -> Source:
        """The weight, its scales with the axes that kernels want."""
        w = self.w
        assert w is not None
        scale, block = w.scale, w.block
        if self.offsets is not None:
            scale = scale if scale.ndim == 3 else scale.reshape(-1, 1, 1).expand(w.shape[0], 1, 1)
        elif scale.numel() <= 1:
            scale, block = scale.reshape(1, 1), (0, 0)
        return Source(w.codes, scale, w.element, w.sfmt, w.shape, block, w.packed, w.zero_point, w.global_scale)

    @cached_property
    def kind(self) -> str | None:
        """The name of the weight's format to the Hopper kernels that decode inside the product."""
        if self.rows is None or self.w is None or self.w.zero_point is not None:
            return None
        from breccia.kernels.triton.products.weights_matmul import kind_of, takes

        kind = kind_of(self.w.element, self.w.sfmt, self.source.block)
        return kind if takes(self.rows, self.w.codes, kind) else None

    def configured(self, choice: str) -> bool:
        """Whether `configs.weight_only` wants rows by a weight to run so."""
        if self.rows is None or self.w is None or self.offsets is not None:
            return False
        return configs.weight_only(self.rows.shape[0], self.w.shape[-2], self.w.shape[-1], self.w.element) == choice

    def few_rows(self, most: int) -> bool:
        """Whether at most so many rows meet a weight whose scales `gemv` finds."""
        rows, w = self.rows, self.w
        if rows is None or w is None or self.offsets is not None or rows.shape[0] > most or w.zero_point is not None:
            return False
        cols = self.source.block[1]
        powers = cols & (cols - 1) == 0 and (w.sfmt != "float" or cols == 0 or cols >= 16)
        return powers and w.shape[-1] % 256 == 0
