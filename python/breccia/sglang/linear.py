# SPDX-License-Identifier: Apache-2.0
"""SGLang's linear layers with weights in breccia's own format."""

from __future__ import annotations

import torch
from sglang.srt.layers import linear, parameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from breccia._serving.linear import LinearMethod
from breccia._serving.slices import ROLES
from breccia.recipes import ScalingRecipe

__all__ = ["BrecciaLinearMethod", "Stored"]


class Stored(torch.nn.Module):  # type: ignore[misc]
    """The stored tensors of a weight, in the place where SGLang has a weight in one."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the codes, which SGLang asks for to see what it may pack."""
        return next(iter(self.parameters())).dtype


class BrecciaLinearMethod(LinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by one layer's weight, whose parameters are in a module of the name that they have
    in files."""

    parameter = parameter

    def __init__(self, recipe: ScalingRecipe, activations: ScalingRecipe | None, static: bool = False) -> None:
        super().__init__(recipe, activations, {role: role for role in ROLES}, static)
        self.quant_config = self  # where SGLang's loaders look for `weight_block_size`
        self.weight_block_size = [1, 1]

    def home(self, layer: torch.nn.Module) -> torch.nn.Module:
        """The module "weight" of the layer."""
        if "weight" not in layer._modules:
            layer.weight = Stored()
        return layer._modules["weight"]

    def say_block(self, layer: torch.nn.Module, block: list[int]) -> None:
        """SGLang's loaders ask the method."""
        self.weight_block_size = block


if BrecciaLinearMethod.__name__ not in linear.WEIGHT_LOADER_V2_SUPPORTED:
    linear.WEIGHT_LOADER_V2_SUPPORTED.append(BrecciaLinearMethod.__name__)
