# SPDX-License-Identifier: Apache-2.0
"""What transformers and diffusers have in common: a model's quantization as config.json says it, and which modules are
quantized on load."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from breccia import recipe_names
from breccia import recipes as recipes_of
from breccia._serving.modules import listed
from breccia.bridges import native
from breccia.bridges.parts import ghost
from breccia.nn import QuantizedLinear
from breccia.recipes import NVFP4BlockScaling, ScalingRecipe
from breccia.schemes.inputs import Layer, inputs_in, recipe_of_inputs
from breccia.schemes.rules import inputs_said
from breccia.schemes.value import Activations, ModelScheme, Rule
from breccia.verbs import dequantize

__all__ = ["BrecciaConfig", "check_patterns", "dense", "fits", "is_alone"]


def _recipe(given: Any, argument: str) -> ScalingRecipe:
    return recipes_of.from_dict(dict(given)) if isinstance(given, Mapping) else recipe_names.resolve(given, argument)


class BrecciaConfig:
    """A base of libraries' own classes, which document the arguments."""

    def __init__(
        self,
        recipe: ScalingRecipe | str | Mapping[str, Any] | None = None,
        *,
        activations: ScalingRecipe | str | Mapping[str, Any] | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        modules: Mapping[str, Any] | None = None,
        scheme: ModelScheme | None = None,
        moments: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        module_inputs: Mapping[str, Any] | None = None,
        exact_rows: int = 0,
        gradients: Any = None,
        quant_method: str = "breccia",
    ) -> None:
        self.quant_method: Any = quant_method
        self.recipe = NVFP4BlockScaling() if recipe is None else _recipe(recipe, "recipe")
        self.activations = None if activations is None else _recipe(activations, "activations")
        named = listed(modules_to_not_convert, "modules_to_not_convert")
        self.modules_to_not_convert = None if modules_to_not_convert is None else named
        self.ignore = listed(ignore, "ignore")
        self.modules = {name: _recipe(said, f"modules[{name!r}]") for name, said in (modules or {}).items()}
        if scheme is not None and not isinstance(scheme, ModelScheme):
            raise TypeError(f"scheme must be a breccia.ModelScheme, got {type(scheme).__name__}")
        if scheme is not None and (recipe is not None or activations is not None):
            raise ValueError("recipe and activations must be left out with a scheme, which says them")
        self.scheme, self.moments = scheme, moments
        self.inputs, self.module_inputs = inputs, dict(module_inputs or {})
        self.exact_rows = exact_rows
        self.gradients = _recipe(gradients, "gradients") if isinstance(gradients, Mapping) else gradients

    def take(self, model: torch.nn.Module) -> Any:
        """Say what the layers of a model are that `breccia.quantize_` has changed.

        Args:
            model: with `QuantizedLinear` layers.

        Returns:
            The configuration itself.
        """
        linear = (torch.nn.Linear, QuantizedLinear)
        every = {name: layer for name, layer in model.named_modules() if isinstance(layer, linear)}
        layers = {name: layer for name, layer in every.items() if isinstance(layer, QuantizedLinear)}
        self.ignore = [name for name in every if name not in layers]
        first = next(iter(layers.values()))
        self.exact_rows, self.gradients = first.exact_rows, first.gradients
        inputs = {}
        static = any(hasattr(layer, "input_scale") for layer in layers.values())
        if not static and all(layer.activations == first.activations for layer in layers.values()):
            self.activations = first.activations
        else:
            self.activations = None
            for name, layer in layers.items():
                if layer.activations is not None:
                    try:
                        inputs[name] = inputs_in(layer.activations, hasattr(layer, "input_scale"))
                    except ValueError as error:
                        warnings.warn(
                            f"the model's config does not say what inputs of {name} are: {error}", stacklevel=2
                        )
        self._say({name: layer.recipe for name, layer in layers.items()}, inputs)
        return self

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        said: dict[str, Any] = {
            "quant_method": getattr(self.quant_method, "value", self.quant_method),
            "recipe": self.recipe.to_dict(),
            "ignore": list(self.ignore),
        }
        if self.activations is not None:
            said["activations"] = self.activations.to_dict()
        if self.modules_to_not_convert is not None:
            said["modules_to_not_convert"] = list(self.modules_to_not_convert)
        if self.modules:
            said["modules"] = {name: recipe.to_dict() for name, recipe in self.modules.items()}
        if self.inputs is not None:
            said["inputs"] = dict(self.inputs)
        if self.module_inputs:
            said["module_inputs"] = dict(self.module_inputs)
        if self.exact_rows:
            said["exact_rows"] = self.exact_rows
        if self.gradients is not None:
            said["gradients"] = getattr(self.gradients, "to_dict", lambda: self.gradients)()
        return said

    def inputs_of(self, module: str) -> ScalingRecipe | None:
        """What the inputs of a module of a checkpoint are quantized to, by scales made of them; None for products with
        inputs as they are. Raises ValueError where they are by a static scale."""
        said = None if self.activations is not None else inputs_said(self.module_inputs.get(module, self.inputs))
        if said is None:
            return self.activations
        if said.when != "dynamic":
            raise ValueError(
                f"inputs of {module} must be quantized by scales made of them, they are {said}: "
                f"convert with --set '*=kept,inputs=none'"
            )
        return recipe_of_inputs(said)

    def say(self, layers: Mapping[str, tuple[Layer, Rule | None]]) -> None:
        """Take what layers of a scheme became, for config.json: name → its recipes, and its rule."""
        recipes = {name: one.weight for name, (one, _) in layers.items() if one.weight is not None}
        inputs = {name: one.inputs for name, (_, one) in layers.items() if one and isinstance(one.inputs, Activations)}
        self._say(recipes, inputs)

    def _say(self, recipes: Mapping[str, ScalingRecipe], inputs: Mapping[str, Activations]) -> None:
        said = native.said_of(recipes, inputs)
        self.recipe = recipes_of.from_dict(said["recipe"])
        self.modules = {name: recipes_of.from_dict(one) for name, one in said.get("modules", {}).items()}
        self.inputs, self.module_inputs = said.get("inputs"), said.get("module_inputs", {})


def is_alone(path: str, patterns: Iterable[str]) -> bool:
    """Whether a module or one around it was named, by its whole name, its last part or a pattern."""
    parts = path.split(".")
    around = {".".join(parts[: i + 1]) for i in range(len(parts))} | set(parts)
    return any(pattern in around or fnmatchcase(path, pattern) for pattern in patterns)


def check_patterns(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Raises ValueError where a pattern of modules to leave alone names none."""
    names = [path for path, _ in model.named_modules() if path]
    for pattern in patterns:
        if not any(is_alone(path, [pattern]) for path in names):
            raise ValueError(f"modules_to_not_convert must name modules of the model, {pattern!r} is none")


def fits(name: str, shape: tuple[int, ...], recipe: ScalingRecipe, logger: Any) -> bool:
    """Whether a weight's shape suits the recipe; the logger is warned of one that does not."""
    try:
        ghost(shape, recipe)
    except ValueError as error:
        logger.warning(f"{name} is left as it is: {error}")
        return False
    return True


def dense(layer: QuantizedLinear, dtype: Any) -> torch.nn.Linear:
    """An ordinary layer of the weight's values, in a dtype or, with None, in that it was quantized from."""
    made = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = torch.nn.Parameter(dequantize(layer.weight, dtype or layer.weight.original_dtype))
    made.bias = layer.bias
    return made.train(layer.training)
