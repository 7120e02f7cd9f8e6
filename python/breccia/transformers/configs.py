# SPDX-License-Identifier: Apache-2.0
"""What config.json says of quantization, as transformers' own classes have it."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from breccia._serving import models

__all__ = ["BrecciaConfig", "ModelOptConfig"]


class BrecciaConfig(models.BrecciaConfig, QuantizationConfigMixin):  # type: ignore[misc]
    """How to quantize a model on load, or how one was quantized that breccia wrote.

    Args:
        recipe: what weights are quantized to, a recipe or its name; NVFP4 by default.
        activations: what each layer's input is quantized to before the product, or None for products with the input
            as it is.
        modules_to_not_convert: names or patterns of modules to leave alone, beside embeddings, output layers, norms
            and routers.
        ignore: modules that stayed in high precision, as a checkpoint says it.
        modules: recipes of modules that have another one, as a checkpoint says it.
        scheme: a `breccia.ModelScheme` in the place of ``recipe`` and ``activations``: its rules say by the model's
            names which layers are quantized, to what, and what their inputs become.
        moments: name of a layer → its `breccia.moments.Moments`, for static scales of inputs that the scheme has not.
        inputs: how most quantized layers' inputs are quantized, as a checkpoint says it.
        module_inputs: that of layers with others, as a checkpoint says it.
        exact_rows: as `breccia.nn.QuantizedLinear` has it.
        gradients: as `breccia.nn.QuantizedLinear` has it.

    Raises:
        TypeError: an argument is neither a recipe nor a name, or there is no such argument.
        ValueError: there is no recipe of that name.
    """

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


class ModelOptConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What a checkpoint exported by NVIDIA's ModelOpt, or written as one, says: kept as it is."""

    def __init__(self, quant_method: str = "modelopt", **said: Any) -> None:
        self.quant_method: Any = quant_method
        self.said = dict(said)

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        return {"quant_method": self.quant_method, **self.said}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


for _name, _kind in (("breccia", BrecciaConfig), ("modelopt", ModelOptConfig)):
    if _name not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # a reload of this module
        register_quantization_config(_name)(_kind)
