# SPDX-License-Identifier: Apache-2.0
"""ScaledTensors as custom operators pass them: a list of tensors, and a string for the rest.

What runs while torch.compile traces does without the core and without caches: attributes, strings and lists.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from breccia import layouts, recipes
from breccia.layouts import Layout
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import Form


def recipe_key(recipe: ScalingRecipe) -> str:
    key: str = recipe._key  # type: ignore[attr-defined]
    return key


@functools.cache
def recipe_of(key: str) -> ScalingRecipe:
    return recipes.from_dict(json.loads(key))


@functools.cache
def layout_of(key: str) -> Layout:
    fields = json.loads(key)
    name = fields.pop("name")
    named = {kind.name: kind for kind in layouts.all_layouts()}
    if name not in named:
        raise ValueError(f"layout must be a known one, got {name!r}")
    return named[name](**fields)


def flatten(operand: Any) -> tuple[list[Any], str]:
    """(tensors, key) of a ScaledTensor, or of a plain tensor, whose key is empty."""
    if not isinstance(operand, ScaledTensor):
        return [operand], ""
    form = operand._form
    parts = ",".join(form.parts)
    key = f"{recipe_key(form.recipe)}|{form.layout._key}|{form.packing}|{form.original_dtype}|{parts}"
    return [getattr(operand, part) for part in form.parts], key


def unflatten(tensors: list[Any], key: str) -> Any:
    """The inverse of `flatten`."""
    if not key:
        return tensors[0]
    form = form_of(key)
    return ScaledTensor._of(form, *form.place(tensors))


@functools.cache
def form_of(key: str) -> Form:
    """The form of the tensor that `flatten` gave the key."""
    recipe, layout, packing, dtype, parts = key.split("|")
    return Form(recipe_of(recipe), layout_of(layout), packing, dtype, tuple(parts.split(",")))
