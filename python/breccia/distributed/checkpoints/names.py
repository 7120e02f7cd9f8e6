# SPDX-License-Identifier: Apache-2.0
"""What of a model's state dict a checkpoint has, and under which names."""

from __future__ import annotations

import torch

from breccia.nn import QuantizedLinear, ScaledLinear
from breccia.nn.states import MEANING

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # of torch.compile and the like


def stored_name(name: str) -> str:
    """A tensor's or module's name without those of modules that only wrap another."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def stored_state(model: torch.nn.Module) -> dict[str, tuple[str, torch.Tensor]]:
    """Tensors by their names in a checkpoint, with those in the model; without histories of scales, which are a
    training run's own, and without texts about codes."""
    own = {
        f"{path}.{name}".lstrip(".")
        for path, layer in model.named_modules()
        if isinstance(layer, (ScaledLinear, QuantizedLinear))
        for name in (layer._buffers if isinstance(layer, ScaledLinear) else (MEANING,))
    }
    return {
        stored_name(name): (name, tensor)
        for name, tensor in model.state_dict().items()
        if name not in own and isinstance(tensor, torch.Tensor)
    }
