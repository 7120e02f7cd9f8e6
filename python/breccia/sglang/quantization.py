# SPDX-License-Identifier: Apache-2.0
"""What SGLang is told of checkpoints in breccia's own format: ``quant_method`` "breccia" of config.json.

Importing this module imports SGLang and adds the class to its lists, for which it has no function.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import quantization
from sglang.srt.layers.quantization.base_config import QuantizationConfig

from breccia._serving.modules import Modules
from breccia.recipes import ScalingRecipe

__all__ = ["BrecciaConfig"]

_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class BrecciaConfig(Modules, QuantizationConfig):  # type: ignore[misc]
    """Which modules of a checkpoint are quantized, and to what."""

    def get_scaled_act_names(self) -> list[str]:
        """None: no activation function has a scale."""
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What makes and fills a layer's weight; None where SGLang's own does. Raises ValueError where a layer is
        quantized in a way that does not go together with what SGLang makes of it."""
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, LinearBase):
            recipe = self.recipe_of(prefix, self.parts(prefix))
            if recipe is None:
                return UnquantizedLinearMethod()
            if prefix.endswith("kv_b_proj"):
                raise ValueError(
                    f"{prefix} must stay in high precision, for SGLang cuts its values into two weights: convert with "
                    f"--exclude '*.kv_b_proj.*'"
                )
            return self._linear(recipe, prefix, self.parts(prefix))
        if isinstance(layer, FusedMoE):
            recipe = self.recipe_of_experts(prefix, layer.num_global_routed_experts, _EXPERT)
            if recipe is None:
                return None
            from breccia.sglang.experts import BrecciaExpertsMethod

            return BrecciaExpertsMethod(recipe, self.inputs_of_experts(prefix), layer)
        if isinstance(layer, ParallelLMHead) and (recipe := self.recipe_of_head(prefix)) is not None:
            return self._linear(recipe, prefix, [prefix])
        return None

    def _linear(self, recipe: ScalingRecipe, prefix: str, names: list[str]) -> Any:
        from breccia.sglang.linear import BrecciaLinearMethod

        return BrecciaLinearMethod(recipe, *self.inputs_of(prefix, names))


for _methods in (
    quantization.BASE_QUANTIZATION_METHODS,
    quantization.QUANTIZATION_METHODS,
    quantization.CPU_QUANTIZATION_METHODS,
):
    _methods["breccia"] = BrecciaConfig
