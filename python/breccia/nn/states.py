# SPDX-License-Identifier: Apache-2.0
"""States of `QuantizedLinear`: what a ``state_dict`` says of its codes, and how one of bytes, of codes, or of 6-bit
codes packed or not becomes the layer's. Copied as numbers, as torch copies, codes would become others.

What the parts mean is in the state twice, as the JSON text of `Form.text`: in the metadata that torch keeps beside
tensors, and as the bytes of a buffer, for files that keep tensors alone.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from breccia.frameworks.torch import byte_parameters
from breccia.recipes import DelayedScaling, Float8CurrentScaling, MXFP6BlockScaling
from breccia.value import form, sixes

if TYPE_CHECKING:
    from breccia.nn.layers import QuantizedLinear

PARTS = tuple(f"weight_{part}" for part in form.PARTS)  # the buffers of a layer
MEANING = "weight_form"  # the buffer of text
_LEAST, _LENGTHS = 512, 1024  # of such a buffer
# Fields that say how scales are found, not what codes under them mean.
_FREE = {"scale_search", "scale_rule", "scale_rounding", "margin", "amax_history_len"}
_warned: list[Any] = [None]  # what is one and the same in all layers of the last load that warned


def as_bytes(part: Any) -> Any:
    return (part if part.dtype.itemsize == 1 else part.contiguous()).view(torch.uint8)


def text_of(layer: QuantizedLinear) -> str:
    """What the parts of a layer mean; the shape is that of the whole where they are sharded."""
    return layer._form.text((*layer.weight_data.shape[:-2], layer.out_features, layer.in_features))


def meaning(layer: QuantizedLinear, device: Any = None) -> torch.Tensor:
    """The buffer of text of a layer, on the device of its parts or another. Spaces fill it up to a length that follows
    from what the codes mean: `torch.distributed.checkpoint` writes into layers, but compares sizes before."""
    text = text_of(layer)
    length = _LEAST + zlib.crc32(_values(text).encode()) % _LENGTHS
    return torch.tensor(
        list(text.ljust(length).encode()),
        dtype=torch.uint8,
        device=layer.weight_data.device if device is None else device,
    )


def complete(layer: QuantizedLinear, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    """Makes bytes of what looks like floats in the state that torch made, and adds what the bytes stand for."""
    for name in () if keep_vars else layer._dtypes:
        destination[prefix + name] = byte_parameters.bytes_in(destination[prefix + name])
    said = getattr(destination, "_metadata", {}).get(prefix[:-1])  # where torch keeps a module's version
    if said is not None:
        said["codes"] = text_of(layer)


def check(layer: QuantizedLinear, given: Any) -> None:
    """Refuses the text of another format, put into a layer past ``load_state_dict``. Raises ValueError."""
    if wrong := _of_another_form(layer, _text(given)):
        raise ValueError(wrong)


def load(
    layer: QuantizedLinear, state: dict[str, Any], prefix: str, arguments: tuple[Any, ...], copy: Callable[..., None]
) -> None:
    """``_load_from_state_dict`` of a layer; ``copy`` is torch's own, ``arguments`` are what it takes beside a state."""
    wrong = _of_another_recipe(layer, state, prefix, (arguments[0] or {}).get("codes"), arguments[2])
    if wrong:  # as torch says it of shapes, the layer staying as it was
        arguments[-1].extend(wrong)
        return
    _take_bytes(layer, state, prefix)
    _take_sixes(layer, state, prefix)
    if prefix + "weight_data" in state:  # the text is the layer's own, in length too
        own = layer._buffers[MEANING]
        dealt = hasattr(own, "full_tensor")  # a DTensor copies from no other tensor
        state[prefix + MEANING] = own if dealt else meaning(layer, state[prefix + "weight_data"].device)
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


def _of_another_recipe(
    layer: QuantizedLinear, state: dict[str, Any], prefix: str, codes: str | None, load_key: Any
) -> list[str]:
    """What is of another format; ``codes``: what metadata says of the layer whose state it is, where it is there."""
    if prefix + "weight_data" not in state:
        return []
    texts = [text for text in (_text(state.get(prefix + MEANING)), codes) if text]
    wrong = [f"{prefix}{one}" for text in texts if (one := _of_another_form(layer, text))]
    if not any(text.startswith("{") for text in texts):
        wrong = wrong or _unmarked(layer, prefix, load_key)
    for name in () if wrong else PARTS:
        given, here = state.get(prefix + name), getattr(layer, name)
        if not isinstance(given, torch.Tensor) or here is None:
            continue
        wanted = layer._dtypes.get(name, here.dtype)
        if given.dtype not in (wanted, torch.uint8):
            wrong.append(f"{prefix}{name} must be {wanted} as {layer.recipe} has it, got {given.dtype}")
    return wrong[:1]


def _unmarked(layer: QuantizedLinear, prefix: str, load_key: list[str]) -> list[str]:
    """What is said of a state that does not say what its codes mean, by `QuantizedLinear.unmarked_states`."""
    if layer.unmarked_states == "load":
        return []
    why = f"must say what its codes mean, as states of breccia 0.5 on do: it has no {prefix}{MEANING}"
    if layer.unmarked_states == "refuse":
        return [f"state_dict {why}"]
    if _warned[0] is not load_key:
        _warned[0] = load_key
        warnings.warn(
            f"state_dict {why}; codes are taken for those of {layer.recipe}, and likewise in other layers "
            f"(QuantizedLinear.unmarked_states = 'refuse' or 'load' settles it)",
            stacklevel=2,
        )
    return []


def _text(given: Any) -> str:
    """The text of a buffer; "" where there is none, or its bytes are nowhere."""
    whole = given.full_tensor() if hasattr(given, "full_tensor") else given
    if type(whole) is not torch.Tensor or whole.device.type == "meta" or whole.dtype != torch.uint8:
        return ""
    try:
        return bytes(whole.reshape(-1).tolist()).decode("latin-1")
    except RuntimeError:  # a transform of torch's holds it
        return ""


def _of_another_form(layer: QuantizedLinear, text: str) -> str:
    """What is wrong where a text is of another format than a layer's; "" where it is of the same or there is none."""
    if not text:
        return ""
    if not text.startswith("{"):  # of 0.4: element and form of the global scale
        own = " ".join(str(getattr(layer.recipe, name, "")) for name in ("element", "global_scale_form")).strip()
        given = text
    else:
        own, given = (_values(said) for said in (text_of(layer), text))
    return "" if own == given else f"weight_data must be codes of {own} as {layer.recipe} has it, got {given}"


def _values(text: str) -> str:
    """What of a text decides values, to compare and to print."""
    try:
        said = json.loads(text)
        recipe, layout = said["recipe"], said["layout"]
        fields = {name: value for name, value in recipe["fields"].items() if name not in _FREE}
        name = recipe["name"]
        if name == DelayedScaling.name:  # codes alike under another history
            name, fields = Float8CurrentScaling.name, fields | {"granularity": "tensor"}
        every = {**dict(sorted(fields.items())), **layout["fields"]}
        return f"{name}({', '.join(f'{k}={v}' for k, v in every.items())}, {layout['name']})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"unknown form {text[:80]!r}"


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
