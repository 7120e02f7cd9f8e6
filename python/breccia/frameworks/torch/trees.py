# SPDX-License-Identifier: Apache-2.0
"""ScaledTensor as a node of torch's trees, as a value its compiler may pass, and as something
``torch.load(weights_only=True)`` may build."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree

from breccia import layouts, recipes, scaled_tensor
from breccia.frameworks.torch.meta import layout_of
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS, Form
from breccia.verbs import packed, prepared
from breccia.verbs.packed import PackedWeight
from breccia.verbs.prepared import PreparedWeight

_LAYOUTS = (layouts.PerTensor, layouts.PerBlockK, layouts.PerChannel, layouts.PerBlockMN)


def _flatten(scaled: ScaledTensor) -> tuple[list[Any], Any]:
    return list(scaled._held), scaled._meaning


def _unflatten(kind: type[ScaledTensor], parts: Any, form: Form) -> ScaledTensor:
    return kind._of(form, *parts)


def _flatten_with_keys(scaled: ScaledTensor) -> Any:
    parts, context = _flatten(scaled)
    return [(_pytree.GetAttrKey(name), part) for name, part in zip(PARTS, parts, strict=True)], context


def _dump(form: Form) -> Any:
    return [form.recipe.to_dict(), form.layout._key, form.packing, form.original_dtype]


def _load(dumped: Any) -> Any:
    recipe, layout, packing, original_dtype = dumped[:4]
    return Form(recipes.from_dict(recipe), layout_of(layout), packing, original_dtype)


def register() -> None:
    for constant in (*recipes.all_recipes(), *_LAYOUTS):
        _pytree.register_constant(constant)
    for kind in (ScaledTensor, PreparedWeight, PackedWeight):
        _pytree.register_pytree_node(
            kind,
            _flatten,
            functools.partial(_unflatten, kind),
            serialized_type_name=f"breccia.{kind.__name__}",
            to_dumpable_context=_dump,
            from_dumpable_context=_load,
            flatten_with_keys_fn=_flatten_with_keys,
        )
    rebuilders = [scaled_tensor._unpickle, prepared._prepare_rebuilt, packed._unpickle]
    torch.serialization.add_safe_globals([ScaledTensor, *rebuilders, *recipes.all_recipes(), *_LAYOUTS])
