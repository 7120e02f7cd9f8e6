# SPDX-License-Identifier: Apache-2.0
"""`quantize_layer` and `quantize_`, which import no torch before they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from breccia.peers import require
from breccia.recipes import ScalingRecipe

if TYPE_CHECKING:
    import torch

    from breccia.nn import QuantizedLinear
    from breccia.schemes import ModelScheme

__all__ = ["quantize_", "quantize_layer"]


def quantize_(
    model: torch.nn.Module,
    recipe: ScalingRecipe | str | ModelScheme,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,  # noqa: A002
    *,
    activations: ScalingRecipe | str | None = None,
    exact_rows: int = 0,
    gradients: ScalingRecipe | str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    moments: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Put a `breccia.nn.QuantizedLinear` in the place of every ``torch.nn.Linear``.

    Args:
        model: changed in place. Subclasses of ``torch.nn.Linear`` are left alone: whoever wrote one expects
            its weight to be a tensor.
        recipe: what to quantize weights ``(out_features, in_features)`` to, or its name; or a `breccia.ModelScheme`,
            whose rules say it by the names of the layers, and what their inputs are quantized to.
        filter: ``filter(module, name)`` says whether a linear layer is quantized; default: all are.
        activations, exact_rows: what inputs are quantized to (a recipe or its name) before each product, and up to how
            many rows they are not: see `breccia.nn.QuantizedLinear`.
        gradients: what the outputs' gradients become before their products with the weights.
        include: patterns of names, as of a shell and of ``breccia convert``: only layers that one matches are
            quantized. They match a layer's name, or its weight's: "*.q_proj", "*.q_proj.weight".
        exclude: patterns of names of layers that are left alone.
        moments: name of a layer → its `breccia.moments.Moments`, whose amax gives the static scales of inputs that a
            scheme asks for and has not.

    Returns:
        ``model``; with a warning where there was nothing to quantize. Its ``state_dict`` has ``….weight_data`` and
        ``….weight_scale`` (and ``weight_zero_point``, ``weight_global_scale``) instead of ``….weight``, and loads into
        any model quantized alike.

    Raises:
        ImportError: torch is not installed.
        TypeError: ``model`` is not a module, or is itself a linear layer, which `quantize_layer` takes; ``filter`` is
            no function.
        ValueError: a weight's shape does not suit the recipe, there is no recipe of that name, or a pattern matches no
            linear layer; nothing has been changed then.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        >>> model = breccia.quantize_(model, "mxfp8", exclude=["2"])
        >>> type(model[0]).__name__, type(model[2]).__name__
        ('QuantizedLinear', 'Linear')
        >>> model(torch.ones(4, 256)).shape
        torch.Size([4, 32])
    """
    require("torch", "torch")
    from breccia.nn.quantizing import replace_layers

    selection = (filter, include, exclude)
    return replace_layers(model, recipe, selection, activations, exact_rows, gradients, moments)


def quantize_layer(
    layer: torch.nn.Linear,
    recipe: ScalingRecipe | str,
    *,
    activations: ScalingRecipe | str | None = None,
    exact_rows: int = 0,
    gradients: ScalingRecipe | str | None = None,
) -> QuantizedLinear:
    """The quantized layer that takes the place of a linear one, which stays as it is.

    Args:
        layer: a ``torch.nn.Linear``.
        recipe: what to quantize its weight ``(out_features, in_features)`` to, or its name.
        activations: as of `quantize_`.
        exact_rows: as of `quantize_`.
        gradients: as of `quantize_`.

    Returns:
        A `breccia.nn.QuantizedLinear` with the layer's bias.

    Raises:
        ImportError: torch is not installed.
        TypeError: it is no ``torch.nn.Linear``.
        ValueError: the weight's shape does not suit the recipe, or there is no recipe of that name.

    Examples:
        >>> import torch
        >>> layer = breccia.quantize_layer(torch.nn.Linear(256, 64), "fp8-block", activations="fp8-block")
        >>> layer.weight.shape, layer(torch.ones(4, 256)).shape
        ((64, 256), torch.Size([4, 64]))
    """
    require("torch", "torch")
    from breccia.nn.quantizing import quantized

    return quantized(layer, recipe, activations, exact_rows, gradients)
