# SPDX-License-Identifier: Apache-2.0
"""States of `QuantizedLinear`: what a ``state_dict`` says of its codes, and how one of bytes, of codes, or of 6-bit
codes packed or not becomes the layer's. Copied as numbers, as torch copies, codes would become others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from breccia.frameworks.torch import byte_parameters
from breccia.recipes import MXFP6BlockScaling
from breccia.value import form, sixes

if TYPE_CHECKING:
    from breccia.nn.layers import QuantizedLinear

PARTS = tuple(f"weight_{part}" for part in form.PARTS)  # the buffers of a layer


def as_bytes(part: Any) -> Any:
    return (part if part.dtype.itemsize == 1 else part.contiguous()).view(torch.uint8)


def complete(layer: QuantizedLinear, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Makes bytes of what looks like floats in the state that torch made, and adds what the bytes stand for."""
    for name in () if keep_vars else layer._dtypes:
        destination[prefix + name] = byte_parameters.bytes_in(destination[prefix + name])
    said = getattr(destination, "_metadata", {}).get(prefix[:-1])  # where torch keeps a module's version
    if said is not None:
        said["codes"] = _codes(layer)


def _codes(layer: QuantizedLinear) -> str:
    """What bytes of the parts stand for."""
    return " ".join(str(getattr(layer.recipe, name, "")) for name in ("element", "global_scale_form")).strip()


def load(
    layer: QuantizedLinear, state: dict[str, Any], prefix: str, arguments: tuple[Any, ...], copy: Callable[..., None]
) -> None:
    """``_load_from_state_dict`` of a layer; ``copy`` is torch's own, ``arguments`` are what it takes beside a state."""
    wrong = _of_another_recipe(layer, state, prefix, (arguments[0] or {}).get("codes"))
    if wrong:  # as torch says it of shapes, the layer staying as it was
        arguments[-1].extend(wrong)
        return
    _take_bytes(layer, state, prefix)
    _take_sixes(layer, state, prefix)
    # As bytes: before 2.9, torch copies no tensor of two codes to a byte.
    coded = {}
    for name in PARTS:
        here = layer._buffers.get(name)
        if here is not None and here.dtype == torch.float4_e2m1fn_x2:
            layer._buffers[name] = as_bytes(here)
            coded[name] = here, layer._buffers[name]
            given = state.get(prefix + name)
            if given is not None and given.dtype == here.dtype:
                state[prefix + name] = as_bytes(given)
    copy(state, prefix, *arguments)
    for name, (here, filled) in coded.items():
        loaded: Any = layer._buffers[name]  # with assign=True the given one
        layer._buffers[name] = here if loaded is filled else loaded.view(here.dtype)


def _of_another_recipe(layer: QuantizedLinear, state: dict[str, Any], prefix: str, codes: str | None) -> list[str]:
    """What is of another format; ``codes``: `_codes` of the layer whose state it is, where that is known."""
    own = _codes(layer)
    if codes is not None and codes != own and prefix + "weight_data" in state:
        return [f"{prefix}weight_data must be codes of {own} as {layer.recipe} has it, got {codes}"]
    wrong = []
    for name in PARTS:
        given, here = state.get(prefix + name), getattr(layer, name)
        if not isinstance(given, torch.Tensor) or here is None:
            continue
        wanted = layer._dtypes.get(name, here.dtype)
        if given.dtype not in (wanted, torch.uint8) and given.dtype.itemsize == 1:
            wrong.append(f"{prefix}{name} must be {wanted} as {layer.recipe} has it, got {given.dtype}")
    return wrong


def _take_bytes(layer: QuantizedLinear, state: dict[str, Any], prefix: str) -> None:
    """Bytes for codes, or codes for bytes."""
    for name in PARTS:
        given, here = state.get(prefix + name), getattr(layer, name)
        if given is not None and here is not None and given.dtype != here.dtype:
            if name in layer._dtypes and given.dtype == layer._dtypes[name]:
                state[prefix + name] = as_bytes(given)
            elif name not in layer._dtypes and given.dtype == torch.uint8:
                state[prefix + name] = given.view(here.dtype)


def _take_sixes(layer: QuantizedLinear, state: dict[str, Any], prefix: str) -> None:
    """6-bit codes of a byte each for packed ones, or packed ones for those."""
    given, here = state.get(prefix + "weight_data"), layer.weight_data
    if given is None or layer.recipe.name != MXFP6BlockScaling.name or given.shape == here.shape:
        return
    if layer._packed and given.shape == layer.weight.shape:
        state[prefix + "weight_data"] = sixes.pack(given)
    elif not layer._packed and given.ndim == here.ndim and 4 * given.shape[-1] == 3 * here.shape[-1]:
        state[prefix + "weight_data"] = sixes.unpack(given)
