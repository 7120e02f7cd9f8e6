# SPDX-License-Identifier: Apache-2.0
"""What a forward pass of torch keeps for the backward pass, as codes."""

from __future__ import annotations

import weakref
from typing import Any

from breccia.peers import require
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.verbs import cast, dequantize

__all__ = ["checkpoint_activations"]


class _Packed:
    """A saved tensor as a ScaledTensor, its shape and its dtype."""

    def __init__(self, x: Any, recipe: ScalingRecipe) -> None:
        self.shape, self.dtype = tuple(x.shape), x.dtype
        rest = -self.shape[-1] % _block(recipe)
        matrix = x.reshape(-1, self.shape[-1])
        self.value = cast(require("torch.nn.functional", "torch").pad(matrix, (0, rest)) if rest else matrix, recipe)

    def unpacked(self) -> Any:
        values = dequantize(self.value, self.dtype)
        return values[:, : self.shape[-1]].reshape(self.shape)


def _block(recipe: ScalingRecipe) -> int:
    """Numbers along the last axis that share a scale, where the recipe says how many."""
    layout = recipe.layout
    return int(getattr(layout, "block_size", None) or getattr(layout, "block_n", None) or 1)


def checkpoint_activations(recipe: ScalingRecipe | str = "fp8-row-block", *, smallest: int = 4096) -> Any:
    """Keep what torch saves for the backward pass as codes, within a ``with`` block.

    The forward pass is not changed. The backward pass computes with the values that the codes stand for, so gradients
    are wrong by what the recipe rounds. A tensor that several operations save is quantized once.

    COAT (arXiv:2410.19313, section 5) scales what linear layers save per tensor and what other operations save in
    groups of 16: nest blocks, of which the inner one counts, to choose by module.

    Rows that are no multiple of the recipe's blocks are kept with zeros after them. Parameters and their views stay as
    they are, and so do tensors that are not float32, float16 or bfloat16, that have fewer than ``smallest`` numbers, or
    fewer than two axes.

    Args:
        recipe: what to quantize to, or its name.
        smallest: how many numbers a tensor must have to be quantized.

    Returns:
        A context manager: `torch.autograd.graph.saved_tensors_hooks` with a pair of functions.

    Raises:
        ImportError: torch is not installed.
        TypeError, ValueError: ``recipe`` is not a recipe or the name of one, or ``smallest`` is no integer.
    """
    if isinstance(smallest, bool) or not hasattr(smallest, "__index__"):
        raise TypeError(f"smallest must be an integer, got {smallest!r}")
    torch = require("torch", "torch")
    resolved = resolve(recipe)
    floats = (torch.float32, torch.float16, torch.bfloat16)
    known: dict[Any, tuple[Any, Any]] = {}

    def pack(x: Any) -> Any:
        base = x if x._base is None else x._base
        if isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad):
            return x
        if x.dtype not in floats or x.ndim < 2 or x.numel() < max(smallest, 1) or x.layout != torch.strided:
            return x
        # While a weak reference to it is held, no other storage has its address.
        storage = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
        sign = x.is_neg()  # a view of a conjugate is negated as it is read
        key = (storage.cdata, x.dtype, x.storage_offset(), tuple(x.shape), x.stride(), sign, x._version)
        held, packed = known.get(key, (storage, None))
        found = packed() if packed is not None and not held.expired() else None
        if found is None:
            with torch.no_grad():
                found = _Packed(x.detach().resolve_neg(), resolved)
            known[key] = (storage, weakref.ref(found, lambda _: known.pop(key, None)))
        return found

    def unpack(kept: Any) -> Any:
        return kept.unpacked() if isinstance(kept, _Packed) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
