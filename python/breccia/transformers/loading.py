# SPDX-License-Identifier: Apache-2.0
"""How stored tensors become the layers of a model that transformers loads, one at a time."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightRenaming, apply_renamings

from breccia import bridges, verbs
from breccia.bridges.common import as_numpy
from breccia.bridges.contract import Place
from breccia.bridges.parts import Found
from breccia.checkpoint.reading.source import assemble
from breccia.nn import QuantizedLinear
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.transformers.experts import GroupedExperts, StackedLinear
from breccia.value.form import PARTS

__all__ = ["Quantize", "ReadCodes", "module_of", "put"]


def module_of(model: Any, name: str) -> tuple[Any, str]:
    """The parent of a parameter's module, and the module's name in it."""
    path, _, last = name.removesuffix(".weight").rpartition(".")
    return model.get_submodule(path), last


def put(
    model: Any, name: str, weight: ScaledTensor, activations: ScalingRecipe | None, inputs: Any, config: Any
) -> QuantizedLinear:
    """A quantized layer in the place of the one that has this parameter; ``inputs`` is a stored scale of its inputs."""
    more = {option: getattr(config, option) for option in ("exact_rows", "gradients") if hasattr(config, option)}
    parent, last = module_of(model, name)
    stacked = isinstance(parent, GroupedExperts)
    layer = (StackedLinear if stacked else QuantizedLinear)(weight, None, activations, input_scale=inputs, **more)
    if not stacked:
        layer.bias = parent._modules[last].bias  # maybe still to come
    for part in (layer, *layer._buffers.values()):
        if part is not None:
            part._is_hf_initialized = True
    # Models that initialize the weight of a part by its name, as GPT-2 does, look at the value.
    layer.weight.__dict__["_is_hf_initialized"] = True
    layer.train(parent.training)
    if stacked:
        parent.put(last, layer)
    else:
        parent._modules[last] = layer
    return layer


class ReadCodes(ConversionOps):  # type: ignore[misc]
    """The stored tensors of one weight, as a layer of the model; a plain weight passes."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer
        self.dtype: Any = None  # of the parameter, where it is a plain one

    def __deepcopy__(self, memo: Any) -> ReadCodes:
        return ReadCodes(self.hf_quantizer)

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str = "",
        model: Any = None,
        missing_keys: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        tensors = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        found: Found | None = self.hf_quantizer.tensors.get(full_layer_name)
        if found is None:
            (plain,) = tensors.values()
            return {full_layer_name: plain.to(self.dtype) if plain.is_floating_point() else plain}
        device = next(iter(tensors.values())).device
        parts = {}
        for role, name in found.parts.items():
            pattern = _pattern(name, found.name, target_patterns[0])
            # The dot of another pattern may take what a pattern spells with an underscore.
            pattern = pattern if pattern in tensors else pattern.replace("weight_", "weight.")
            parts[role] = as_numpy(tensors[pattern], name)
        weight = assemble(found, parts)
        if not isinstance(weight, ScaledTensor):
            raise ValueError(f"tensor {found.name!r} must have a ScaledTensor form, it has none")
        weight = weight.to("torch")
        weight = weight if device.type == "cpu" else weight.to(device)
        scale = tensors.get("input_scale")
        inputs = self.hf_quantizer.inputs.get(full_layer_name)
        put(model, full_layer_name, weight, inputs, scale, self.hf_quantizer.quantization_config)
        missing_keys.discard(full_layer_name)
        return {}


def _pattern(part: str, weight: str, target: str) -> str:
    """The pattern that took a stored tensor: its name, with the model's name of the weight in place of the file's."""
    if part.startswith(weight):
        return target + part.removeprefix(weight)
    return part.removeprefix(weight.rpartition(".")[0] + ".")


class Quantize(ConversionOps):  # type: ignore[misc]
    """A weight of high precision, as a quantized layer of the model."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str = "",
        model: Any = None,
        missing_keys: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        if self.hf_quantizer.turned(full_layer_name):
            weight = weight.mT.contiguous()
        layer = self.hf_quantizer.layer(full_layer_name)
        scale = None if layer.scale is None else torch.tensor(layer.scale)
        codes = verbs.cast(weight.detach(), layer.weight)
        put(model, full_layer_name, codes, layer.inputs, scale, self.hf_quantizer.quantization_config)
        missing_keys.discard(full_layer_name)
        return {}


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
