# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says of quantization, as diffusers' own classes have it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from breccia import recipe_names, recipes
from breccia.recipes import NVFP4BlockScaling, ScalingRecipe

__all__ = ["BrecciaConfig"]


class _Method(str, enum.Enum):
    """diffusers asks for the ``value`` of a method's name."""

    BRECCIA = "breccia"


def _recipe(given: Any, argument: str) -> ScalingRecipe:
    return recipes.from_dict(dict(given)) if isinstance(given, Mapping) else recipe_names.resolve(given, argument)


class BrecciaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How to quantize a model on load, or how one was quantized that breccia wrote.

    Args:
        recipe: what weights are quantized to, a recipe or its name; NVFP4 by default.
        activations: what each layer's input is quantized to before the product, or None for products with the input
            as it is.
        modules_to_not_convert: names or patterns of modules to leave alone, beside embeddings, norms and what makes
            the output.
        ignore: modules that stayed in high precision, as a checkpoint says it.
        modules: recipes of modules that have another one, as a checkpoint says it.

    Raises:
        TypeError: an argument is neither a recipe nor a name, or there is no such argument.
        ValueError: there is no recipe of that name.
    """

    def __init__(
        self,
        recipe: ScalingRecipe | str | Mapping[str, Any] | None = None,
        *,
        activations: ScalingRecipe | str | Mapping[str, Any] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        modules: Mapping[str, Any] | None = None,
        quant_method: str = "breccia",
    ) -> None:
        if isinstance(modules_to_not_convert, str):
            raise TypeError(f"modules_to_not_convert must be a list of names, got {modules_to_not_convert!r}")
        self.quant_method: Any = _Method(quant_method)
        self.recipe = NVFP4BlockScaling() if recipe is None else _recipe(recipe, "recipe")
        self.activations = None if activations is None else _recipe(activations, "activations")
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.ignore = list(ignore)
        self.modules = {name: _recipe(said, f"modules[{name!r}]") for name, said in (modules or {}).items()}

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        said: dict[str, Any] = {
            "quant_method": self.quant_method.value,
            "recipe": self.recipe.to_dict(),
            "ignore": list(self.ignore),
        }
        if self.activations is not None:
            said["activations"] = self.activations.to_dict()
        if self.modules_to_not_convert:
            said["modules_to_not_convert"] = list(self.modules_to_not_convert)
        if self.modules:
            said["modules"] = {name: recipe.to_dict() for name, recipe in self.modules.items()}
        return said

    def to_diff_dict(self) -> dict[str, Any]:
        """The same: what is not said is not held."""
        return self.to_dict()


AUTO_QUANTIZATION_CONFIG_MAPPING["breccia"] = BrecciaConfig
