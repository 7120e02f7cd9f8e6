# SPDX-License-Identifier: Apache-2.0
"""A linear layer with a weight in breccia's own format, as serving programs make, fill and multiply by one: fused ones
and slices of tensor parallelism, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from breccia._serving.slices import Slice, bytewise, layers_of, product
from breccia.recipes import ScalingRecipe

__all__ = ["LinearMethod"]

_BOTH = {"output_dim": 0, "input_dim": 1}
_KINDS = {
    "channel": ("ChannelQuantScaleParameter", {"output_dim": 0}),
    "group": ("GroupQuantScaleParameter", _BOTH),
    "block": ("BlockQuantScaleParameter", _BOTH),
}


class LinearMethod(ABC):
    """Makes, fills and multiplies by one layer's weight; a base of programs' own classes for that. Without
    ``activations`` inputs stay as they are; ``names`` are those of parameters, by role; ``static``: whether files have
    ``input_scale`` for each part of the layer."""

    parameter: Any  # the program's module of parameters' classes, whose names programs share

    def __init__(
        self,
        recipe: ScalingRecipe,
        activations: ScalingRecipe | None,
        names: Mapping[str, str],
        static: bool = False,
    ) -> None:
        self.recipe = recipe
        self.static = static
        self.activations = activations
        self.names = names

    def home(self, layer: torch.nn.Module) -> torch.nn.Module:
        """The module that has the parameters."""
        return layer

    @abstractmethod
    def say_block(self, layer: torch.nn.Module, block: list[int]) -> None:
        """Tell the program's loaders which rows and columns share a scale."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters of the program's classes for the stored tensors. Raises ValueError where slices would cut
        blocks."""
        held = Slice(sum(output_partition_sizes), input_size_per_partition, input_size, self.recipe)
        if len(output_partition_sizes) > 1 or held.rows != output_size:
            held.check_rows(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        self.say_block(layer, list(held.block))
        load = bytewise(extra["weight_loader"])
        for role, piece in held.pieces().items():
            if piece.kind == "tensor":
                numbers = torch.empty(len(output_partition_sizes), dtype=piece.dtype)
                made = self.parameter.PerTensorScaleParameter(data=numbers, weight_loader=load)
            else:
                kind, dims = _KINDS[piece.kind] if role != "data" else ("ModelWeightParameter", _BOTH)
                stored = torch.empty(piece.shape, dtype=piece.dtype)
                made = getattr(self.parameter, kind)(data=stored, weight_loader=load, **dims)
            self.home(layer).register_parameter(self.names[role], made)
        if self.static:
            numbers = torch.empty(len(output_partition_sizes), dtype=torch.float32)
            made = self.parameter.PerTensorScaleParameter(data=numbers, weight_loader=extra["weight_loader"])
            layer.register_parameter("input_scale", made)
        layer.__dict__["breccia_held"] = held

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Views of the filled parameters, as layers of breccia's."""
        held = layer.__dict__["breccia_held"]
        parts = {role: getattr(self.home(layer), self.names[role]).data for role in held.pieces()}
        scales = layer.input_scale.data if self.static else None
        layer.__dict__["breccia_layers"] = layers_of(held, parts, layer.logical_widths, self.activations, scales)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``."""
        return product(layer.__dict__["breccia_layers"], x, bias)
