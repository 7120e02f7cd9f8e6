# SPDX-License-Identifier: Apache-2.0
"""SGLang's linear layers with weights in breccia's own format: fused ones and slices of tensor parallelism, too."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import linear, parameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from breccia.recipes import ScalingRecipe
from breccia.served.slices import Slice, bytewise, layers_of, product

__all__ = ["BrecciaLinearMethod"]

_BOTH = {"output_dim": 0, "input_dim": 1}
_KINDS = {
    "channel": (parameter.ChannelQuantScaleParameter, {"output_dim": 0}),
    "group": (parameter.GroupQuantScaleParameter, _BOTH),
    "block": (parameter.BlockQuantScaleParameter, _BOTH),
}


class BrecciaLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by one layer's weight.

    Args:
        recipe: what it is quantized to.
        activations: what inputs are quantized to, or None for products with inputs as they are.
    """

    def __init__(self, recipe: ScalingRecipe, activations: ScalingRecipe | None) -> None:
        self.recipe = recipe
        self.activations = activations
        self.quant_config = self  # where SGLang's loaders look for `weight_block_size`
        self.weight_block_size = [1, 1]

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
        """Parameters of SGLang's classes for the stored tensors, in a module of the name that they have in files.

        Raises:
            ValueError: slices would cut blocks.
        """
        held = Slice(sum(output_partition_sizes), input_size_per_partition, input_size, self.recipe)
        if len(output_partition_sizes) > 1 or held.rows != output_size:
            held.check_rows(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        self.weight_block_size = list(held.block)
        load = bytewise(extra["weight_loader"])
        layer.weight = torch.nn.Module()
        for role, piece in held.pieces().items():
            if piece.kind == "tensor":
                numbers = torch.empty(len(output_partition_sizes), dtype=piece.dtype)
                made = parameter.PerTensorScaleParameter(data=numbers, weight_loader=load)
            else:
                kind, dims = _KINDS[piece.kind] if role != "data" else (parameter.ModelWeightParameter, _BOTH)
                made = kind(data=torch.empty(piece.shape, dtype=piece.dtype), weight_loader=load, **dims)
            layer.weight.register_parameter(role, made)
        layer.__dict__["breccia_held"] = held

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Views of the filled parameters, as layers of breccia's."""
        held = layer.__dict__["breccia_held"]
        parts = {role: getattr(layer.weight, role).data for role in held.pieces()}
        layer.__dict__["breccia_layers"] = layers_of(held, parts, layer.logical_widths, self.activations)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``."""
        return product(layer.__dict__["breccia_layers"], x, bias)


if BrecciaLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(BrecciaLinearMethod.__name__)
