# SPDX-License-Identifier: Apache-2.0
"""What SGLang is told of checkpoints in breccia's own format: ``quant_method`` "breccia" of config.json.

Importing this module imports SGLang and adds the class to its lists, for which it has no function.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import quantization
from sglang.srt.layers.quantization.base_config import QuantizationConfig

from breccia.served.modules import Modules

__all__ = ["BrecciaConfig"]


class BrecciaConfig(Modules, QuantizationConfig):  # type: ignore[misc]
    """Which modules of a checkpoint are quantized, and to what."""

    def get_scaled_act_names(self) -> list[str]:
        """None: no activation function has a scale."""
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """What makes and fills a layer's weight; None where SGLang's own does.

        Raises:
            ValueError: the layer is quantized and must not be here.
        """
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, LinearBase):
            recipe = self.recipe_of(prefix, self.parts(prefix))
            if recipe is None:
                return UnquantizedLinearMethod()
            from breccia.sglang.linear import BrecciaLinearMethod

            return BrecciaLinearMethod(recipe, self.activations)
        if isinstance(layer, FusedMoE) and not self._is_alone(prefix):
            raise ValueError(f"{prefix} must stay in high precision for SGLang: convert with --exclude '*.experts.*'")
        if isinstance(layer, ParallelLMHead) and self.recipe_of(prefix, [prefix]) is not None:
            raise ValueError(f"{prefix} must stay in high precision for SGLang: convert with --exclude '{prefix}.*'")
        return None

    def _is_alone(self, prefix: str) -> bool:
        """Whether modules below a prefix stayed in high precision."""
        return any(name == prefix or name.startswith(f"{prefix}.") for name in self.ignore)


for _methods in (
    quantization.BASE_QUANTIZATION_METHODS,
    quantization.QUANTIZATION_METHODS,
    quantization.CPU_QUANTIZATION_METHODS,
):
    _methods["breccia"] = BrecciaConfig
