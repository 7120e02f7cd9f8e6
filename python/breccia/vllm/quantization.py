# SPDX-License-Identifier: Apache-2.0
"""What vLLM is told of checkpoints in breccia's own format: ``quant_method`` "breccia" of config.json.

Importing this module imports vLLM and registers the class with it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from breccia import recipes
from breccia.recipes import ScalingRecipe
from breccia.vllm.stored import ROLES

__all__ = ["BrecciaConfig"]


@register_quantization_config("breccia")
class BrecciaConfig(QuantizationConfig):  # type: ignore[misc]
    """Which modules of a checkpoint are quantized, and to what.

    Args:
        recipe: of most modules.
        ignore: modules that stay in high precision.
        modules: recipes of modules that have another one.
        activations: what inputs are quantized to before each product, or None.
    """

    def __init__(
        self,
        recipe: ScalingRecipe,
        ignore: list[str],
        modules: dict[str, ScalingRecipe],
        activations: ScalingRecipe | None = None,
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.ignore = ignore
        self.modules = modules
        self.activations = activations

    def get_name(self) -> str:
        """The name in config.json."""
        return "breccia"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of inputs."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU, as vLLM counts them."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside config.json."""
        return []

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Names of stored tensors as names of parameters, in which torch has no dots."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_suffix={f".weight.{role}": f".weight_{role}" for role in ROLES})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BrecciaConfig:
        """Of the object that config.json has.

        Raises:
            ValueError: it does not say what it must.
        """
        if not isinstance(config.get("recipe"), dict):
            raise ValueError(f"quantization_config must have a recipe, as breccia writes it, got {config}")
        said = config.get("activations")
        return cls(
            recipes.from_dict(config["recipe"]),
            list(config.get("ignore") or ()),
            {name: recipes.from_dict(one) for name, one in (config.get("modules") or {}).items()},
            None if said is None else recipes.from_dict(said),
        )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take names as a model of vLLM has them."""
        self.ignore = hf_to_vllm_mapper.apply_list(self.ignore)
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What makes and fills a layer's weight; None where vLLM's own does."""
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, LinearBase):
            recipe = self._recipe_of(prefix, self._parts(prefix))
            if recipe is None:
                return UnquantizedLinearMethod()
            from breccia.vllm.linear import BrecciaLinearMethod

            return BrecciaLinearMethod(recipe, self.activations)
        if isinstance(layer, RoutedExperts):
            recipe = self._recipe_of(prefix, self._experts(layer, prefix))
            if recipe is None:
                return None
            from breccia.vllm.experts import BrecciaExpertsMethod

            return BrecciaExpertsMethod(recipe, self.activations, layer.moe_config)
        if isinstance(layer, ParallelLMHead) and self._recipe_of(prefix, [prefix]) is not None:
            raise ValueError(f"{prefix} must stay in high precision for vLLM: convert with --exclude '{prefix}.*'")
        return None

    def _parts(self, prefix: str) -> list[str]:
        """The modules of the checkpoint that a layer holds."""
        path, _, last = prefix.rpartition(".")
        return [f"{path}.{part}" if path else part for part in self.packed_modules_mapping.get(last, [last])]

    def _experts(self, layer: Any, prefix: str) -> list[str]:
        names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
        path = prefix.removesuffix(".routed_experts")
        return [f"{path}.{i}.{name}" for i in range(layer.moe_config.num_logical_experts) for name in names if name]

    def _recipe_of(self, prefix: str, names: list[str]) -> ScalingRecipe | None:
        """The recipe of a layer of these modules, None where none is quantized.

        Raises:
            ValueError: they differ.
        """
        ignored = set(self.ignore)
        found = {name: None if name in ignored else self.modules.get(name, self.recipe) for name in names}
        kinds = list(dict.fromkeys(found.values()))
        if len(kinds) > 1:
            odd = next(name for name, one in found.items() if one != kinds[0])
            raise ValueError(
                f"modules that vLLM fuses into {prefix} must have one recipe, {names[0]} has {kinds[0]} and {odd} has "
                f"{found[odd]}: convert them alike"
            )
        return kinds[0]
