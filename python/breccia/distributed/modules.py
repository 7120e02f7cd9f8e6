# SPDX-License-Identifier: Apache-2.0
"""Quantized models under FSDP2."""

from __future__ import annotations

import torch

from breccia.nn import QuantizedLinear

__all__ = ["make_shardable_"]


def make_shardable_(model: torch.nn.Module) -> torch.nn.Module:
    """Make every `breccia.nn.QuantizedLinear` of a model one that ``torch.distributed.fsdp.fully_shard`` shards.

    The ranks then hold their rows of the codes and scales, and the gather before each layer's products moves those
    bytes, in one collective for all layers of an FSDP unit. Checkpoints of ``torch.distributed.checkpoint`` hold the
    same bytes and load on any number of ranks.

    Args:
        model: changed in place; call it before ``fully_shard``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
        ValueError: it has no `breccia.nn.QuantizedLinear`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    if not layers:
        raise ValueError("model must have a breccia.nn.QuantizedLinear: quantize it with breccia.quantize_ first")
    for layer in layers:
        layer.make_shardable_()
    return model
