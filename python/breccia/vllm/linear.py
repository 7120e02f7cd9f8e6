# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear layers with weights in breccia's own format: fused ones and slices of tensor parallelism, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from breccia.recipes import ScalingRecipe
from breccia.served.slices import Slice, bytewise, layers_of, product

__all__ = ["BrecciaLinearMethod"]

_KINDS = {
    "channel": (parameter.ChannelQuantScaleParameter, {"output_dim": 0}),
    "group": (parameter.GroupQuantScaleParameter, {"output_dim": 0, "input_dim": 1}),
    "block": (parameter.BlockQuantScaleParameter, {"output_dim": 0, "input_dim": 1}),
}


@register_weight_loader_v2_supported_method
class BrecciaLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by one layer's weight.

    Args:
        recipe: what it is quantized to.
        activations: what inputs are quantized to, or None for products with inputs as they are.
        names: of parameters, by role.
    """

    def __init__(self, recipe: ScalingRecipe, activations: ScalingRecipe | None, names: Mapping[str, str]) -> None:
        self.recipe = recipe
        self.activations = activations
        self.names = names

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
        """Parameters of vLLM's classes for the stored tensors.

        Raises:
            ValueError: slices would cut blocks.
        """
        held = Slice(sum(output_partition_sizes), input_size_per_partition, input_size, self.recipe)
        if len(output_partition_sizes) > 1 or held.rows != output_size:
            held.check_rows(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.weight_block_size = list(held.block)
        load = bytewise(extra["weight_loader"])
        for role, piece in held.pieces().items():
            if piece.kind == "tensor":
                numbers = torch.empty(len(output_partition_sizes), dtype=piece.dtype)
                made = parameter.PerTensorScaleParameter(data=numbers, weight_loader=load)
            else:
                kind, dims = _KINDS[piece.kind] if role != "data" else (parameter.ModelWeightParameter, _BOTH)
                made = kind(data=torch.empty(piece.shape, dtype=piece.dtype), weight_loader=load, **dims)
            layer.register_parameter(self.names[role], made)
        layer.__dict__["breccia_held"] = held

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Views of the filled parameters, as layers of breccia's."""
        held = layer.__dict__["breccia_held"]
        parts = {role: getattr(layer, self.names[role]).data for role in held.pieces()}
        layer.__dict__["breccia_layers"] = layers_of(held, parts, layer.logical_widths, self.activations)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``."""
        return product(layer.__dict__["breccia_layers"], x, bias)


_BOTH = {"output_dim": 0, "input_dim": 1}
