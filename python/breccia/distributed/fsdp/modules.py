# SPDX-License-Identifier: Apache-2.0
"""Quantized models under FSDP2."""

from __future__ import annotations

from typing import Any

import torch

from breccia.distributed.fsdp import filling
from breccia.distributed.fsdp.parameters import ScaledParameter
from breccia.distributed.fsdp.resting import RestingWeight
from breccia.frameworks.torch.weights import LinearWeight
from breccia.nn import QuantizedLinear, ScaledLinear


def make_shardable_(model: torch.nn.Module, *, at_rest: str = "bf16") -> torch.nn.Module:
    """Make the layers of a model ones that ``torch.distributed.fsdp.fully_shard`` shards, and gathers as codes.

    The ranks then hold their rows, and the gather before each layer's products moves codes and scales, in one
    collective for all layers of an FSDP unit.

    - `breccia.nn.QuantizedLinear`: the ranks hold bytes, and checkpoints of ``torch.distributed.checkpoint`` hold the
      same; they load on any number of ranks.
    - `breccia.nn.ScaledLinear`, which trains: the weight becomes a `ScaledParameter`; the ranks hold floats, and so do
      checkpoints. A weight that a module of another kind uses too, an embedding say, stays as it is.
    - With ``at_rest="codes"`` its checkpoints hold codes; its ``load_state_dict`` takes these as they are, and
      quantizes floats as the whole weight would be.

    Args:
        model: changed in place; call it before ``fully_shard``, after ``parallelize_module``.
        at_rest: of `ScaledParameter`: "bf16", or "codes" for layers that do not learn.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``, or a layer takes its weight's scale from a history.
        ValueError: it has no such layer, or a weight does not suit its recipe.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, (QuantizedLinear, ScaledLinear))
    }
    if not layers:
        raise ValueError(
            "model must have a breccia.nn.QuantizedLinear or ScaledLinear: quantize it with breccia.quantize_ first"
        )
    made: dict[int, Any] = {}
    for name, layer in layers.items():
        if isinstance(layer, QuantizedLinear):
            layer.make_shardable_()
        elif id(layer.weight) not in made:
            made[id(layer.weight)] = _parameter(name, layer, at_rest)
    for module in model.modules():
        if not isinstance(module, ScaledLinear):
            made |= {id(own): own for own in module.parameters(recurse=False)}
    for layer in layers.values():
        if isinstance(layer, ScaledLinear):
            layer.weight = made[id(layer.weight)]
            if isinstance(layer.weight, RestingWeight):
                layer.register_load_state_dict_pre_hook(filling.before_load)
    return model


def _parameter(name: str, layer: ScaledLinear, at_rest: str) -> Any:
    if isinstance(getattr(layer.weight, "_local_tensor", layer.weight), LinearWeight):
        return layer.weight
    recipes = layer.recipes
    try:
        return ScaledParameter(layer.weight, recipes.w, at_rest, square_blocks=recipes.square_weights)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}.weight cannot be sharded as codes: {error}") from None
