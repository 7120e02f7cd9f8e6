# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear layers with weights in breccia's own format."""

from __future__ import annotations

import torch
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method

from breccia._serving.linear import LinearMethod

__all__ = ["BrecciaLinearMethod"]


@register_weight_loader_v2_supported_method
class BrecciaLinearMethod(LinearMethod, LinearMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by one layer's weight."""

    parameter = parameter

    def say_block(self, layer: torch.nn.Module, block: list[int]) -> None:
        """The layer has it, where vLLM's loaders look for it."""
        layer.weight_block_size = block
