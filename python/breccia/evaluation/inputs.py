# SPDX-License-Identifier: Apache-2.0
"""Inputs of a model's linear layers, quantized on the way as a program would quantize them that runs the checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from breccia import recipes, verbs
from breccia.calibration.inputs import linear_layers
from breccia.checkpoint.planning.left_alone import left_alone
from breccia.checkpoint.reading.source import Checkpoint
from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import Layers, largest_code
from breccia.schemes.value import Activations

OF_FILE = "file"
# By name, with scales made of the inputs.
INPUTS: dict[str, ScalingRecipe] = {
    "nvfp4": recipes.NVFP4BlockScaling(),
    "fp8": recipes.Float8CurrentScaling(granularity="row"),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "int8": recipes.INT8Scaling(),
}
Inputs = tuple[ScalingRecipe, float | None]  # and the multiplier of their codes, None where it is made of them


@contextlib.contextmanager
def quantized_inputs(model: Any, path: str | os.PathLike[str], inputs: str | None) -> Iterator[list[str]]:
    """While inside, the inputs of layers are quantized and dequantized again; gives the layers' names.

    ``inputs`` is a name of `INPUTS`, for layers that are quantized in the checkpoint, or all that `convert` would
    quantize where none is; or `OF_FILE`, for layers of which the checkpoint says how; or None, for none. Raises
    ValueError where there is no such layer in the checkpoint, or one is not a linear layer of the model.
    """
    if inputs is None:
        yield []
        return
    layers = _layers(path, inputs)
    widths = linear_layers(model)
    if layers is None:
        alone = left_alone(model.config.to_dict())
        layers = {name: (INPUTS[inputs], None) for name in widths if not alone.weight(f"{name}.weight")}
    if not layers:
        raise ValueError(f"activations must be a format: {path} does not say that inputs are quantized")
    if strange := sorted(layers.keys() - widths):
        raise ValueError(f"activations must be left out: {strange[0]} is no linear layer of {type(model).__name__}")
    hooks = [model.get_submodule(name).register_forward_pre_hook(_hook(*said)) for name, said in layers.items()]
    try:
        yield list(layers)
    finally:
        for hook in hooks:
            hook.remove()


def _layers(path: str | os.PathLike[str], inputs: str) -> dict[str, Inputs] | None:
    """The layers of a checkpoint whose inputs are to be quantized; None where no weight in it is."""
    with Checkpoint(path, mapped=False) as checkpoint:
        names = [one.name.removesuffix(".weight") for one in checkpoint.found if one.format != "plain"]
        if inputs != OF_FILE:
            return dict.fromkeys(names, (INPUTS[inputs], None)) if names else None
        layers, scheme = Layers(checkpoint.scheme), checkpoint.scheme
    rules = {name: scheme.rule(name) for name in names}
    said = {name: rule.inputs for name, rule in rules.items() if rule and isinstance(rule.inputs, Activations)}
    found = {name: layers.inputs(name, one) for name, one in said.items()}
    return {name: (recipe, scale) for name, (recipe, scale) in found.items() if recipe is not None}


def _hook(recipe: ScalingRecipe, scale: float | None) -> Any:
    def quantized(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0]
        rows = x.reshape(-1, x.shape[-1])
        amax: Any = None
        if scale is not None:
            amax = torch.tensor(scale * largest_code(recipe), device=x.device)
            amax = amax.expand(len(rows), 1) if recipe.layout.block == (1, 0) else amax
        return (verbs.dequantize(verbs.cast(rows, recipe, amax=amax), x.dtype).reshape(x.shape), *args[1:])

    return quantized
