# SPDX-License-Identifier: Apache-2.0
"""Quantize the linear layers of a torch model in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.verbs import cast

if TYPE_CHECKING:
    import torch

__all__ = ["quantize_"]


def quantize_(
    model: torch.nn.Module,
    recipe: ScalingRecipe | str,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,  # noqa: A002
    *,
    activations: ScalingRecipe | str | None = None,
    exact_rows: int = 0,
) -> torch.nn.Module:
    """Put a `breccia.nn.QuantizedLinear` in the place of every ``torch.nn.Linear``.

    Args:
        model: changed in place. Subclasses of ``torch.nn.Linear`` are left alone: whoever wrote one expects
            its weight to be a tensor.
        recipe: what to quantize weights ``(out_features, in_features)`` to, or its name.
        filter: ``filter(module, name)`` says whether a linear layer is quantized; default: all are.
        activations, exact_rows: what inputs are quantized to (a recipe or its name) before each product, and up to how
            many rows they are not: see `breccia.nn.QuantizedLinear`.

    Returns:
        ``model``. Its ``state_dict`` has ``….weight_data`` and ``….weight_scale`` (and ``weight_zero_point``,
        ``weight_global_scale``) instead of ``….weight``, and loads into any model quantized alike.

    Raises:
        ImportError: torch is not installed.
        TypeError: ``model`` is not a module, or is itself a linear layer.
        ValueError: a weight's shape does not suit the recipe, or there is no recipe of that name; nothing has
            been changed then.
    """
    from breccia.bridges._common import require

    torch = require("torch", "torch")
    from breccia.nn import QuantizedLinear

    recipe = resolve(recipe)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module that contains linear layers, got {type(model).__name__}")
    if type(model) is torch.nn.Linear:
        raise TypeError(
            "model must be a module that contains linear layers, got one itself, which cannot be replaced in place: "
            "pass torch.nn.Sequential(layer), or make breccia.nn.QuantizedLinear(breccia.cast(layer.weight.detach(), "
            "recipe), layer.bias)"
        )
    made: list[tuple[Any, str, Any]] = []
    replaced: dict[int, Any] = {}  # a layer used in two places stays one
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # named_children would skip a layer used twice
            full = f"{path}.{name}" if path else name
            if type(child) is not torch.nn.Linear or (filter is not None and not filter(child, full)):
                continue
            if id(child) not in replaced:
                try:
                    weight = cast(child.weight.detach(), recipe)
                except ValueError as error:
                    raise ValueError(f"{full}.weight cannot be quantized: {error}") from None
                replaced[id(child)] = QuantizedLinear(weight, child.bias, activations, exact_rows=exact_rows).train(
                    child.training
                )
            made.append((parent, name, replaced[id(child)]))
    for parent, name, layer in made:
        setattr(parent, name, layer)
    return model
