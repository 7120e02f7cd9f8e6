# SPDX-License-Identifier: Apache-2.0
"""The tensors that ``save_pretrained`` writes of a model with quantized layers."""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import WeightRenaming, apply_renamings

from breccia import bridges
from breccia.bridges.contract import Place
from breccia.nn import QuantizedLinear
from breccia.transformers.experts import StackedLinear
from breccia.value.form import PARTS

__all__ = ["stored_tensors"]


def stored_tensors(model: Any, format: str) -> tuple[dict[str, Any], dict[str, str]]:  # noqa: A002
    """The state of a model with each quantized weight as a format stores it, and entries of the files' metadata."""
    state: dict[str, Any] = dict(model.state_dict())
    metadata: dict[str, str] = {}
    used = getattr(model, "_weight_conversions", None) or []
    backwards = [one.reverse_transform() for one in reversed(used) if isinstance(one, WeightRenaming)]
    bridge = bridges.bridge(format)
    for path, layer in model.named_modules():
        if not isinstance(layer, QuantizedLinear):
            continue
        for part in (*PARTS, "form"):
            state.pop(f"{path}.weight_{part}", None)
        weight = layer.weight.to("cpu").to("numpy")
        place = Place(hasattr(layer, "input_scale"), model.config.to_dict())
        name = path if isinstance(layer, StackedLinear) else f"{path}.weight"
        parts, said = bridge.stored(name, weight, place)
        metadata |= {apply_renamings(key, backwards): text for key, text in said.items()}
        state |= {name: part.in_torch() for name, part in parts.items()}
    return state, metadata
