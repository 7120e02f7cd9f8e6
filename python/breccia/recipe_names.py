# SPDX-License-Identifier: Apache-2.0
"""Recipes by name: the one table behind every argument ``recipe`` and behind the command line's ``--to``.

A name is a recipe's short name (``nvfp4``) or one of the field's names for FP8, with options after colons:
``nvfp4:mse``, ``int4:asym:32``. Capitals do not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from breccia import recipes
from breccia.recipes import Float8BlockScaling, Float8CurrentScaling, INT4Scaling, ScalingRecipe, all_recipes
from breccia.spelling import suggestion

# Each name and its recipe: the short name of a class is the class with its defaults, "block" blocks of one row, as
# activations have them; a weight's are tiles of 128 × 128.
_NAMED: dict[str, ScalingRecipe] = {
    **{kind.name: kind() for kind in all_recipes()},
    "fp8": Float8CurrentScaling(),
    "fp8-row": Float8CurrentScaling(granularity="row"),
    "fp8-block": Float8BlockScaling(block_m=128),
    "fp8-row-block": Float8BlockScaling(),
}
# Each option and the fields it sets. A number sets the group or block size.
_OPTIONS: dict[str, dict[str, Any]] = {
    "mse": {"scale_search": "mse"},
    "asym": {"symmetric": False},
    "e5m2": {"fp8_format": "E5M2"},
}
_SIZES = ("group_size", "block_k")


def names() -> list[str]:
    """Every name, without options."""
    return list(_NAMED)


@functools.cache
def recipe_of(name: str, argument: str = "recipe") -> ScalingRecipe:
    """The recipe of one of `names`, perhaps with options, or of the name of a class; an error has the names close to
    it."""
    base, *options = words_of(name)
    for kind in all_recipes():
        if base == kind.__name__.lower():
            return with_options(kind(), options, base)
    if base not in _NAMED:
        raise ValueError(f"{argument} must be the name of a recipe, got {name!r}: {suggestion(base, _NAMED)}")
    return with_options(_NAMED[base], options, base)


def words_of(name: str) -> list[str]:
    """A name and its options, of which a number may stand behind a hyphen, too: "int4-32" is "int4:32"."""
    return re.sub(r"-(\d+)(?=:|$)", r":\1", name.strip().lower()).split(":")


def with_options(recipe: ScalingRecipe, options: Iterable[str], name: str) -> ScalingRecipe:
    """A recipe changed by the options that followed its name."""
    fields = {field.name for field in dataclasses.fields(recipe)}
    for option in options:
        if option.isdecimal():
            changed: dict[str, Any] = {size: int(option) for size in _SIZES if size in fields}
        else:
            changed = {k: v for k, v in _OPTIONS.get(option, {}).items() if k in fields}
        if "symmetric" in changed and isinstance(recipe, INT4Scaling):
            changed["signed"] = False
        if not changed:
            raise ValueError(f"the option after '{name}:' must be {_options_of(fields)}, got {option!r}")
        recipe = dataclasses.replace(recipe, **changed)
    return recipe


def _options_of(fields: set[str]) -> str:
    found = [name for name, changed in _OPTIONS.items() if set(changed) <= fields]
    found += ["a block size"] if fields & set(_SIZES) else []
    return " or ".join(found) or "left out"


def resolve(recipe: Any, argument: str = "recipe") -> ScalingRecipe:
    """The recipe that a public function was given: the very object, or the one of a name."""
    if isinstance(recipe, ScalingRecipe):
        return recipe
    if isinstance(recipe, str):
        named = _NAMED.get(recipe)  # as it is spelled almost always
        return recipes.known(recipe_of(recipe, argument) if named is None else named)
    if isinstance(recipe, type) and issubclass(recipe, ScalingRecipe):
        raise TypeError(f"{argument} must be a recipe, got the class {recipe.__name__}: add (), {recipe.__name__}()")
    raise TypeError(
        f"breccia has no kernels for recipe {type(recipe).__name__}: {argument} must be a ScalingRecipe such as "
        f"breccia.NVFP4BlockScaling(), or the name of one such as 'nvfp4'"
    )
