# SPDX-License-Identifier: Apache-2.0
"""What a scheme makes of one linear layer that runs: recipes of weight and inputs, and the static scale of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import largest_code, recipe_of_inputs
from breccia.schemes.value import Activations, ModelScheme


class Layer(NamedTuple):
    """How a layer multiplies: recipes of its weight and its inputs, None where they stay as they are, and the static
    multiplier of the inputs' codes, None where scales are made of the inputs."""

    weight: ScalingRecipe | None = None
    inputs: ScalingRecipe | None = None
    scale: float | None = None


class Layers:
    """The layers of a scheme, with its static scales of inputs; ``moments`` (name of a layer → its
    `breccia.moments.Moments`) are for those that it has not."""

    def __init__(self, scheme: ModelScheme, moments: Mapping[str, Any] | None = None) -> None:
        self.scheme, self._moments = scheme, moments or {}
        self._scales = {one.module: max(one.multiplier) for one in scheme.scales if one.of == "input"}

    def of(self, name: str, kinds: Iterable[str] = ("Linear",)) -> Layer:
        """What the layer of a module is; without recipes where no rule matches, or its rule leaves the weight."""
        rule = self.scheme.rule(name, kinds)
        if rule is None or not isinstance(rule.weights, (ScalingRecipe, str)):
            return Layer()
        if isinstance(rule.weights, str):
            raise ValueError(f"{name}: weights must be in a recipe to run, the scheme says {rule.weights!r}")
        return Layer(rule.weights, *self.inputs(name, rule.inputs))

    def inputs(self, name: str, said: Any) -> tuple[ScalingRecipe | None, float | None]:
        """The recipe and the static scale of a layer's inputs, of what its rule says of them; None, None where they
        stay as they are. Raises ValueError as `of` does."""
        if not isinstance(said, Activations):
            return None, None
        try:
            recipe = recipe_of_inputs(said)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if said.when == "dynamic":
            return recipe, None
        scale = self._scales.get(name)
        amax = getattr(self._moments.get(name), "amax", None)
        if scale is None and amax is not None:
            scale = float(amax.max()) / largest_code(recipe)
        if scale is None or not scale > 0:
            raise ValueError(f"{name}: a static scale of inputs must be in the scheme, or follow from moments")
        return recipe, scale
