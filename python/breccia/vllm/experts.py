# SPDX-License-Identifier: Apache-2.0
"""vLLM's routed experts (mixture of experts) with weights in breccia's own format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from breccia._serving.experts import ACTIVATIONS, ExpertsMethod
from breccia.recipes import ScalingRecipe

__all__ = ["BrecciaExpertsMethod"]


class BrecciaExpertsMethod(ExpertsMethod, FusedMoEMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by the weights of one layer's experts; ``names`` are those of parameters, by role,
    after "w13_" or "w2_". Raises ValueError where the layer computes something else than gated experts without bias."""

    def __init__(
        self, recipe: ScalingRecipe, activations: ScalingRecipe | None, names: Mapping[str, str], moe: Any
    ) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        ExpertsMethod.__init__(self, recipe, activations)
        self.names = names
        if moe.activation.value not in ACTIVATIONS or moe.has_bias or moe.swiglu_limit is not None:
            raise ValueError(
                f"experts must be gated by {', '.join(ACTIVATIONS)} without bias or limit, they have "
                f"{moe.activation.value}{', a bias' * moe.has_bias}: convert with --exclude '*.experts.*'"
            )

    def place(self, layer: torch.nn.Module, matrix: str, role: str) -> tuple[torch.nn.Module, str]:
        """The layer itself."""
        return layer, f"{matrix}_{self.names[role]}"

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters for the stored tensors of all experts. Raises ValueError where slices would cut blocks."""
        load, whole = extra.pop("weight_loader"), self.moe.intermediate_size
        self.make(layer, num_experts, hidden_size, intermediate_size_per_partition, whole, load, **extra)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM's runs."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum of what the chosen experts make of each row, by their weights."""
        # The map has numbers of the experts that this rank has, -1 for others.
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        before = bool(layer.apply_router_weight_on_input)
        return self.chosen(layer, x, topk_weights, ids, layer.activation.value, before)
