# SPDX-License-Identifier: Apache-2.0
"""Which modules of a checkpoint are quantized, and to what, as a program asks that fuses some of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from breccia import recipes
from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import recipe_of_inputs
from breccia.schemes.rules import Activations, inputs_said

__all__ = ["Modules", "listed"]


def listed(given: Any, argument: str) -> list[str]:
    """A list of modules' names, as a caller or JSON gives it; None has none."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{argument} must be a list of names, got {given!r}")
    return list(given)


class Modules:
    """What ``quantization_config`` of breccia's own format says; a base of programs' own classes for that.

    Args:
        recipe: of most modules.
        ignore: modules that stay in high precision, see `is_ignored`.
        modules: recipes of modules that have another one.
        activations: what inputs are quantized to before each product, or None.
        inputs: how inputs of most quantized modules are quantized, where ``activations`` says nothing.
        module_inputs: that of modules with others.
    """

    packed_modules_mapping: Mapping[str, list[str]]  # fused layer → its parts, which the program says

    def __init__(
        self,
        recipe: ScalingRecipe,
        ignore: list[str],
        modules: dict[str, ScalingRecipe],
        activations: ScalingRecipe | None = None,
        inputs: Activations | None = None,
        module_inputs: Mapping[str, Activations | None] | None = None,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.module_inputs = dict(module_inputs or {})
        self.recipe = recipe
        self.ignore = ignore
        self.modules = modules
        self.activations = activations

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Of the object that config.json has. Raises TypeError where what modules it ignores is no list of names,
        ValueError where it does not say what it must."""
        if not isinstance(config.get("recipe"), dict):
            raise ValueError(f"quantization_config must have a recipe, as breccia writes it, got {config}")
        said = config.get("activations")
        modules = config.get("modules") or {}
        if not isinstance(modules, dict):
            raise ValueError(f"modules of quantization_config must be an object of recipes, got {modules!r}")
        return cls(
            recipes.from_dict(config["recipe"]),
            listed(config.get("ignore"), "ignore of quantization_config"),
            {name: recipes.from_dict(one) for name, one in modules.items()},
            None if said is None else recipes.from_dict(said),
            inputs_said(config.get("inputs")),
            {name: inputs_said(one) for name, one in (config.get("module_inputs") or {}).items()},
        )

    def get_name(self) -> str:
        """The name in config.json."""
        return "breccia"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of inputs."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU, as programs counts them."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside config.json."""
        return []

    def parts(self, prefix: str) -> list[str]:
        """The modules of the checkpoint that a layer holds."""
        path, _, last = prefix.rpartition(".")
        return [f"{path}.{part}" if path else part for part in self.packed_modules_mapping.get(last, [last])]

    def is_ignored(self, name: str) -> bool:
        """Whether a module stayed in high precision: by its name, a pattern, or an expression after ``re:``."""
        return name in self.ignore or any(
            re.match(pattern[3:], name) is not None if pattern.startswith("re:") else fnmatchcase(name, pattern)
            for pattern in self.ignore
        )

    def recipe_of(self, prefix: str, names: list[str]) -> ScalingRecipe | None:
        """The recipe of a layer of these modules, None where none is quantized. Raises ValueError where they differ."""
        found = {name: None if self.is_ignored(name) else self.modules.get(name, self.recipe) for name in names}
        kinds = list(dict.fromkeys(found.values()))
        if len(kinds) > 1:
            odd = next(name for name, one in found.items() if one != kinds[0])
            raise ValueError(
                f"modules that are fused into {prefix} must have one recipe, {names[0]} has {kinds[0]} and {odd} has "
                f"{found[odd]}: convert them alike"
            )
        return kinds[0]

    def inputs_of(self, prefix: str, names: list[str]) -> tuple[ScalingRecipe | None, bool]:
        """What the inputs of a layer of these modules are quantized to, None for products with inputs as they are; and
        whether by a static scale, which files have as ``input_scale``."""
        if self.activations is not None:
            return self.activations, False
        kinds = list(dict.fromkeys(self.module_inputs.get(name, self.inputs) for name in names))
        if len(kinds) > 1:
            raise ValueError(
                f"inputs of modules that are fused into {prefix} must be quantized alike, they are {kinds[0]} and "
                f"{kinds[1]}: convert them alike"
            )
        if kinds[0] is None:
            return None, False
        return recipe_of_inputs(kinds[0]), kinds[0].when != "dynamic"

    def inputs_of_experts(self, prefix: str) -> ScalingRecipe | None:
        """What the inputs of a layer's experts are quantized to."""
        if self.activations is not None:
            return self.activations
        own = {one for name, one in self.module_inputs.items() if name.startswith(f"{prefix}.")}
        kinds = own or {self.inputs}
        if len(kinds) > 1 or any(one is not None and one.when != "dynamic" for one in kinds):
            said = " and ".join(sorted(map(str, kinds)))
            raise ValueError(
                f"inputs of the experts of {prefix} must be quantized alike, by scales made of them, they are {said}: "
                f"convert with --set '*.experts.*=kept,inputs=none'"
            )
        (one,) = kinds
        return None if one is None else recipe_of_inputs(one)

    def recipe_of_head(self, prefix: str) -> ScalingRecipe | None:
        """The recipe of an output layer, None where it stayed in high precision."""
        recipe = self.recipe_of(prefix, [prefix])
        if recipe is not None and getattr(recipe.layout, "block_m", 1) > 1:
            raise ValueError(
                f"{prefix} must have scales of one row each to be served, it has {recipe.layout}: convert with "
                f"--exclude '{prefix}.*'"
            )
        return recipe

    def recipe_of_experts(self, prefix: str, number: int, names: tuple[tuple[str, ...], ...]) -> ScalingRecipe | None:
        """The recipe of a layer's experts, of which the checkpoint has so many; None where they stayed in high
        precision. ``names`` are what the linear layers of one expert may be called, by kinds of models; the first is
        taken where none is named. Raises ValueError where they differ."""
        every = [[f"{prefix}.{i}.{name}" for i in range(number) for name in kind] for kind in names]
        named = {*self.ignore, *self.modules}
        return self.recipe_of(prefix, next((kind for kind in every if named & set(kind)), every[0]))
