# SPDX-License-Identifier: Apache-2.0
"""SGLang's routed experts (mixture of experts) with weights in breccia's own format."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_model

from breccia._serving.experts import ExpertsMethod
from breccia.recipes import ScalingRecipe
from breccia.sglang.linear import Stored

__all__ = ["BrecciaExpertsMethod"]


class BrecciaExpertsMethod(ExpertsMethod, FusedMoEMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by the weights of one layer's experts, whose parameters are in modules "w13_weight"
    and "w2_weight" by the names that they have in files. Raises ValueError where the layer computes something else than
    experts gated by SiLU without bias."""

    def __init__(self, recipe: ScalingRecipe, activations: ScalingRecipe | None, layer: Any) -> None:
        super().__init__(recipe, activations)
        said = layer.moe_runner_config
        limits = (said.gemm1_alpha, said.gemm1_beta, said.gemm1_clamp_limit, said.swiglu_limit)
        plain = said.activation == "silu" and said.is_gated and not said.no_combine and not layer.with_bias
        if not plain or any(limit is not None for limit in limits):
            raise ValueError(
                f"experts of {layer.layer_name} must be gated by silu without bias or limit, they have "
                f"{said.activation}{' without a gate' * (not said.is_gated)}{', a bias' * layer.with_bias}: convert "
                f"with --exclude '*.experts.*'"
            )

    def place(self, layer: torch.nn.Module, matrix: str, role: str) -> tuple[torch.nn.Module, str]:
        """A module of the layer for each matrix."""
        name = f"{matrix}_weight"
        if name not in layer._modules:
            layer.add_module(name, Stored())
        return layer._modules[name], role

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
        filled = layer.__dict__["breccia_filled"] = set()
        given = extra["weight_loader"]

        def load(param: Any, loaded_weight: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            filled.add(id(param))
            return given(param, loaded_weight, *arguments, **named)

        whole = extra["moe_intermediate_size"]
        self.make(layer, num_experts, hidden_size, intermediate_size_per_partition, whole, load)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """None: no runner of SGLang's runs."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Views of the filled parameters, as layers of breccia's. Raises ValueError where the model's loader passed
        over the checkpoint's tensors."""
        if not layer.__dict__["breccia_filled"] and get_model().load_format != "dummy":
            raise ValueError(
                f"experts of {layer.layer_name} must be kept one by one in the checkpoint, no tensor of one was "
                f"loaded: convert with --exclude '*.experts.*'"
            )
        super().process_weights_after_loading(layer)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """The sum of what the chosen experts make of each row, by their weights."""
        x, chosen, said = dispatch_output.hidden_states, dispatch_output.topk_output, layer.moe_runner_config
        before = bool(said.apply_router_weight_on_input)
        y = self.chosen(layer, x, chosen.topk_weights, chosen.topk_ids, said.activation, before)
        # On GPUs SGLang's runners multiply by this factor, elsewhere its models do.
        if x.is_cuda and said.routed_scaling_factor is not None:
            y = y * said.routed_scaling_factor
        return StandardCombineInput(hidden_states=y)
