# SPDX-License-Identifier: Apache-2.0
"""What "dynamic", "static" and "local" mean for the inputs of a layer whose weights have a recipe: what programs run
beside such weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from breccia import recipes
from breccia.formats import finfo
from breccia.recipes import ScalingRecipe
from breccia.schemes.rules import MXFP4_DYNAMIC, MXFP8_DYNAMIC, NVFP4_DYNAMIC, NVFP4_LOCAL, Activations, recipe_label

if TYPE_CHECKING:
    from breccia.schemes.value import ModelScheme

WORDS = ("dynamic", "static", "local", "none")
# By the name of the weights' recipe: inputs in blocks of its own, and elements of inputs with one scale.
_IN_BLOCKS = {"nvfp4": NVFP4_DYNAMIC, "mxfp4": MXFP4_DYNAMIC, "mxfp6": MXFP8_DYNAMIC, "mxfp8": MXFP8_DYNAMIC}
_ELEMENTS = dict.fromkeys(("delayed", "current", "expanded"), "float8_e4m3fn") | dict.fromkeys(("int4", "int8"), "int8")


def inputs_for(weights: ScalingRecipe | str, when: str) -> Activations:
    """Inputs as programs quantize them beside such weights. Raises ValueError where no program does.

    FP8 and INT8 have one scale for each token, or one static scale; FP8 in tiles 1 × 128 dynamic ones; MXFP8 and MXFP4
    their own blocks, MXFP6 those of MXFP8; NVFP4 its own blocks, of which "static" and "local" are one thing, for its
    blocks' scales are always made of the inputs; INT4 has INT8 per token."""
    kind = weights.name if isinstance(weights, ScalingRecipe) else ""
    if kind == "nvfp4" and when in ("static", "local"):
        return NVFP4_LOCAL
    if kind in _IN_BLOCKS and when == "dynamic":
        return _IN_BLOCKS[kind]
    if isinstance(weights, recipes.Float8BlockScaling) and when == "dynamic":
        return Activations("float8_e4m3fn", "group", "dynamic", weights.block_k)
    if kind in _ELEMENTS and when in ("dynamic", "static"):
        return Activations(_ELEMENTS[kind], "token" if when == "dynamic" else "tensor", when)
    raise ValueError(f"inputs of weights in {recipe_label(weights)} must not be {when}: no program quantizes them so")


def recipe_of_inputs(said: Activations) -> ScalingRecipe:
    """What `breccia.cast` quantizes inputs to. Static ones have the same recipe: the amax of the cast is then that of
    their scale, see `largest_code`. Raises ValueError where no recipe makes such inputs."""
    powers = said.scale == "float8_e8m0fnu"
    match said.element, said.per:
        case (("float8_e4m3fn" | "float8_e5m2"), ("tensor" | "token")) if said.bound is None and not powers:
            fp8 = said.element.removeprefix("float8_").removesuffix("fn").upper()
            return recipes.Float8CurrentScaling(fp8_format=fp8, granularity="row" if said.per == "token" else "tensor")
        case "float8_e4m3fn", "group" if said.when == "dynamic" and powers and said.size == 32:
            return recipes.MXFP8BlockScaling()
        case "float8_e4m3fn", "group" if said.when == "dynamic" and said.size:
            return recipes.Float8BlockScaling(block_k=said.size, scale_format="e8m0" if powers else "fp32")
        case "float4_e2m1fn", "group" if said.scale == "float8_e4m3fn" and said.size == 16:
            return recipes.NVFP4BlockScaling(two_level=said.when == "local" or said.two_level)
        case "float4_e2m1fn", "group" if powers and said.size == 32:
            return recipes.MXFP4BlockScaling()
        case "int8", ("token" | "tensor") if said.symmetric and (said.per == "token" or said.when == "static"):
            return recipes.INT8Scaling()
        case "int8", "token":
            return recipes.INT8Scaling(symmetric=False)
    raise ValueError(f"inputs must be of a form that a recipe makes, {said} is none")


def inputs_in(recipe: ScalingRecipe, static: bool) -> Activations:
    """The inverse of `recipe_of_inputs`, of static scales or dynamic ones. Raises ValueError where there is none."""
    for weights in (recipe, *(kind() for kind in recipes.all_recipes())):
        for when in ("dynamic", "static"):
            with contextlib.suppress(ValueError):
                said = inputs_for(weights, when)
                for one in (said, replace(said, two_level=said.scale == "float8_e4m3fn" and said.when == "dynamic")):
                    if (one.when != "dynamic") == static and recipe_of_inputs(one) == recipe:
                        return one
    raise ValueError(f"inputs in {recipe_label(recipe)} must be of a form that programs have, they are not")


def largest_code(recipe: ScalingRecipe) -> float:
    """The magnitude of an input whose scale is 1, of which the amax of a static scale is so many times the scale: 448
    of FP8 E4M3, 6 · 448 of NVFP4, 127 of INT8. Raises ValueError where inputs in this recipe have no static scale."""
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        return 6.0 * 448.0
    if isinstance(recipe, recipes.INT8Scaling):
        return 127.0
    if isinstance(recipe, recipes.Float8CurrentScaling):
        return finfo(recipe.element).max
    raise ValueError(f"inputs in {recipe_label(recipe)} have no static scale")


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
