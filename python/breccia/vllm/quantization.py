# SPDX-License-Identifier: Apache-2.0
"""What vLLM is told of checkpoints in breccia's own format, ``quant_method`` "breccia" of config.json, and of NVFP4 of
weights alone on a CPU.

Importing this module imports vLLM and registers the class with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from breccia._serving.modules import Modules, listed
from breccia._serving.slices import ROLES
from breccia.vllm.weights_alone import names_and_recipe

__all__ = ["BrecciaConfig"]


@register_quantization_config("breccia")
class BrecciaConfig(Modules, QuantizationConfig):  # type: ignore[misc]
    """Which modules of a checkpoint are quantized, and to what.

    Attributes:
        names: what parameters of the stored tensors of a weight are called, by role.
    """

    names: Mapping[str, str] = MappingProxyType({role: f"weight_{role}" for role in ROLES})

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: Any, hf_config: Any = None) -> str | None:
        """Take over, on a CPU, what vLLM has nothing for there and no place for a kernel."""
        alone = current_platform.is_cpu() and names_and_recipe(hf_quant_cfg or {}) is not None
        return "breccia" if alone and user_quant in (None, "breccia") else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Of the object that config.json has, in breccia's own format or in one that was taken over. Raises ValueError
        where it does not say what it must."""
        taken = names_and_recipe(config)
        if taken is None:
            return super().from_config(config)
        made = cls(taken[1], listed(config.get("ignore"), "ignore of quantization_config"), {})
        made.names = taken[0]
        return made

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Names of stored tensors as names of parameters, in which torch has no dots."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_suffix={f".weight.{role}": f".weight_{role}" for role in ROLES})

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take names as a model of vLLM has them."""
        self.ignore = hf_to_vllm_mapper.apply_list(self.ignore)
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)
        self.module_inputs = hf_to_vllm_mapper.apply_dict(self.module_inputs)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What makes and fills a layer's weight; None where vLLM's own does."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, LinearBase):
            recipe = self.recipe_of(prefix, self.parts(prefix))
            if recipe is None:
                return UnquantizedLinearMethod()
            from breccia.vllm.linear import BrecciaLinearMethod

            inputs, static = self.inputs_of(prefix, self.parts(prefix))
            return BrecciaLinearMethod(recipe, inputs, self.names, static)
        if isinstance(layer, RoutedExperts):
            names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
            kind, path = tuple(name for name in names if name), prefix.removesuffix(".routed_experts")
            recipe = self.recipe_of_experts(path, layer.moe_config.num_logical_experts, (kind,))
            if recipe is None:
                return None
            from breccia.vllm.experts import BrecciaExpertsMethod

            return BrecciaExpertsMethod(recipe, self.inputs_of_experts(path), self.names, layer.moe_config)
        if isinstance(layer, ParallelLMHead) and (recipe := self.recipe_of_head(prefix)) is not None:
            from breccia.vllm.linear import BrecciaLinearMethod

            inputs, static = self.inputs_of(prefix, [prefix])
            return BrecciaLinearMethod(recipe, inputs, self.names, static)
        return None
