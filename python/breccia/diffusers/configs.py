# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says of quantization, as diffusers' own classes have it."""

from __future__ import annotations

import enum
from typing import Any

from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from breccia._serving import models

__all__ = ["BrecciaConfig"]


class _Method(str, enum.Enum):
    """diffusers asks for the ``value`` of a method's name."""

    BRECCIA = "breccia"


class BrecciaConfig(models.BrecciaConfig, QuantizationConfigMixin):  # type: ignore[misc]
    """How to quantize a model on load, or how one was quantized that breccia wrote.

    Args:
        recipe: what weights are quantized to, a recipe or its name; NVFP4 by default.
        activations: what each layer's input is quantized to before the product, or None for products with the input
            as it is.
        modules_to_not_convert: names or patterns of modules to leave alone, beside embeddings, norms and what makes
            the output.
        ignore: modules that stayed in high precision, as a checkpoint says it.
        modules: recipes of modules that have another one, as a checkpoint says it.
        inputs: how most quantized layers' inputs are quantized, as a checkpoint says it.
        module_inputs: that of layers with others, as a checkpoint says it.
        exact_rows: as `breccia.nn.QuantizedLinear` has it.
        gradients: as `breccia.nn.QuantizedLinear` has it.

    Raises:
        TypeError: an argument is neither a recipe nor a name, or there is no such argument.
        ValueError: there is no recipe of that name.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.scheme is not None or self.moments is not None:
            raise ValueError("scheme and moments must be left out: diffusers' models are quantized to one recipe")
        self.quant_method = _Method(self.quant_method)
        self.modules_to_not_convert = self.modules_to_not_convert or None  # an empty list is not held

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: what is not said is not held."""
        return self.to_dict()


AUTO_QUANTIZATION_CONFIG_MAPPING["breccia"] = BrecciaConfig
