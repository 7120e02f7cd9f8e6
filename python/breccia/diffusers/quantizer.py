# SPDX-License-Identifier: Apache-2.0
"""diffusers' quantizer "breccia"."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.utils import logging

from breccia._serving.models import check_patterns, dense, fits, is_alone
from breccia.bridges import native
from breccia.bridges.common import as_numpy
from breccia.bridges.parts import Found
from breccia.checkpoint.planning.left_alone import NOTHING_KNOWN
from breccia.checkpoint.reading.source import Checkpoint
from breccia.diffusers.configs import BrecciaConfig
from breccia.nn import QuantizedLinear
from breccia.scaled_tensor import ScaledTensor
from breccia.value.form import PARTS
from breccia.verbs import cast

__all__ = ["BrecciaQuantizer"]

_logger = logging.get_logger(__name__)
_OUTPUT = "proj_out.weight"  # at the top, what makes the output


class BrecciaQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Layers of a model whose weights stay codes: `breccia.nn.QuantizedLinear`.

    Attributes:
        stored: the names of quantized weights → their tensors in the checkpoint.
        chosen: names of weights to quantize on load.
    """

    use_keep_in_fp32_modules = True
    required_packages = ("accelerate",)

    def __init__(self, quantization_config: BrecciaConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.stored: dict[str, Found] = {}
        self.chosen: set[str] = set()
        self._parts: dict[str, dict[str, torch.Tensor]] = {}  # those of weights that other shards have more of
        self._device_map: dict[str, Any] = {}

    @property
    def supports_parallel_loading(self) -> bool:
        """No: shards share what they have read of one weight."""
        return False

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Names of weights in the place of those of their stored tensors.

        Args:
            loaded_keys: names of all tensors in the files.
            checkpoint_files: paths of the checkpoint's safetensors files, whose headers are read.

        Returns:
            Each name once, in the order of ``loaded_keys``; as they are where the model is quantized on load.
        """
        if not self.pre_quantized:
            return loaded_keys
        self.stored = {found.name: found for found in _found(checkpoint_files)}
        owners = {key: name for name, found in self.stored.items() for key in found.parts.values()}
        return list(dict.fromkeys(owners.get(key, key) for key in loaded_keys))

    def _process_model_before_weight_loading(
        self, model: Any, device_map: Any = None, keep_in_fp32_modules: Iterable[str] = (), **_: Any
    ) -> None:
        self._model = weakref.ref(model)
        self._device_map = {"": device_map} if isinstance(device_map, (str, int, torch.device)) else device_map or {}
        if not self.pre_quantized:
            self._choose(model, list(keep_in_fp32_modules))
        for name, found in self.stored.items():
            layer = _layer(model, name)
            if type(layer) is not torch.nn.Linear:
                kind = type(model if layer is None else layer).__name__
                raise ValueError(f"tensor {name!r} must belong to a linear layer, it belongs to {kind}")
            if found.shape != tuple(layer.weight.shape):
                wanted = tuple(layer.weight.shape)
                raise ValueError(f"tensor {name!r} must have shape {wanted} as the model's, it has {found.shape}")
        model.config.quantization_config = self.quantization_config

    def _choose(self, model: Any, keep: list[str]) -> None:
        """Linear layers to quantize on load: all but embeddings, norms, outputs and what was named."""
        config = self.quantization_config
        named = config.modules_to_not_convert or []
        check_patterns(model, named)
        ignored = []
        for path, module in model.named_modules():
            if type(module) is not torch.nn.Linear:
                continue
            name, shape = f"{path}.weight", tuple(module.weight.shape)
            left = NOTHING_KNOWN.weight(name) or name == _OUTPUT or min(shape) < 16
            if left or is_alone(path, [*named, *keep]) or not fits(name, shape, config.recipe, _logger):
                ignored.append(path)
                continue
            self.chosen.add(name)
        if not self.chosen:
            raise ValueError(f"{type(model).__name__} must have linear layers to quantize, none is left")
        config.ignore = ignored

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a shard without those of quantized weights, which become layers here.

        Args:
            state_dict: name → tensor, of one file.

        Returns:
            The rest, for diffusers to load; a weight whose parts are in several files waits for the last.
        """
        model = self._model()
        rest = dict(state_dict)
        for name, found in self.stored.items():
            parts = self._parts.setdefault(name, {})
            parts |= {role: rest.pop(key) for role, key in found.parts.items() if key in rest}
            if len(parts) < len(found.parts):
                continue
            arrays = {role: as_numpy(part, found.parts[role]) for role, part in self._parts.pop(name).items()}
            scaled = native.load(arrays, config=found.record(native.Details).config, name=name)
            self._put(model, name, scaled.to("torch"), self._device(name))
            self._parts[name] = {}
        return rest

    def _device(self, name: str) -> Any:
        path = name
        while path and path not in self._device_map:
            path = path.rpartition(".")[0]
        return self._device_map.get(path, "cpu")

    def _put(self, model: Any, name: str, weight: ScaledTensor, device: Any) -> None:
        path, _, last = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(path)
        old = parent._modules[last]
        weight = weight if str(device) == "cpu" else weight.to(device)
        config = self.quantization_config
        layer = QuantizedLinear(
            weight, None, config.inputs_of(path), exact_rows=config.exact_rows, gradients=config.gradients
        )
        layer.bias = old.bias  # maybe still to come
        parent._modules[last] = layer.train(old.training)

    def check_if_quantized_param(self, model: Any, param_value: Any, param_name: str, *_: Any, **__: Any) -> bool:
        """Whether a weight is to be quantized on load.

        Args:
            model: the model that is loaded.
            param_value: its tensor in the checkpoint.
            param_name: its dotted name.

        Returns:
            True for the linear layers that were chosen.
        """
        return param_name in self.chosen

    def create_quantized_param(
        self, model: Any, param_value: Any, param_name: str, target_device: Any, *_: Any, **__: Any
    ) -> None:
        """A weight of high precision becomes a quantized layer.

        Args:
            model: the model, whose layer is replaced.
            param_value: floats ``(N, K)``.
            param_name: dotted name of the weight.
            target_device: where the codes are to lie.
        """
        self._put(model, param_name, cast(param_value.detach(), self.quantization_config.recipe), target_device)

    def update_missing_keys(self, model: Any, missing_keys: list[str], prefix: str) -> list[str]:
        """Those of the model's keys that the checkpoint lacks.

        Args:
            model: the model that is loaded.
            missing_keys: names that no tensor of the files has.
            prefix: of the model's names in the checkpoint.

        Returns:
            ``missing_keys`` without weights whose codes and scales are stored.
        """
        return [key for key in missing_keys if key not in self.stored]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        left = [n for n in (*self.stored, *self.chosen) if not isinstance(_layer(model, n), QuantizedLinear)]
        if left:
            raise ValueError(f"tensor {left[0]!r} must be in the checkpoint, complete: it was not read")
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors to save and the entries of each file's metadata, as ``breccia convert`` writes them.

        Args:
            state_dict: name → tensor, of the model.
            safe_serialization: whether safetensors files are written; it must be.

        Returns:
            Name → tensor, with codes and scales for each quantized weight, and key → text of the metadata.

        Raises:
            ValueError: the file is to be a pickle.
        """
        if not safe_serialization:
            raise ValueError("safe_serialization must be True: a quantized model is saved in safetensors files")
        state, metadata = dict(state_dict), {}
        model: Any = self._model()
        for path, layer in model.named_modules():
            if not isinstance(layer, QuantizedLinear):
                continue
            for part in (*PARTS, "form"):
                state.pop(f"{path}.weight_{part}", None)
            name = f"{path}.weight"
            parts, metadata[f"{name}.config"] = native.store(name, layer.weight.to("cpu").to("numpy"))
            state |= {key: part.in_torch() for key, part in parts.items()}
        return state, metadata

    @property
    def is_serializable(self) -> bool:
        """Yes: `get_state_dict_and_metadata`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Gradients flow through the layers, to adapters beside them."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Layers are compiled as `breccia.nn.QuantizedLinear` is."""
        return True

    def _dequantize(self, model: Any) -> Any:
        for path, layer in list(model.named_modules()):
            if isinstance(layer, QuantizedLinear):
                parent, _, last = path.rpartition(".")
                dtype = None if layer.bias is None else layer.bias.dtype
                model.get_submodule(parent)._modules[last] = dense(layer, dtype)
        return model


def mark(model: Any) -> None:
    """Let a model of diffusers whose layers are quantized say so, in its config and in saving: `breccia.quantize_`
    calls this.

    Args:
        model: a ``ModelMixin`` with `breccia.nn.QuantizedLinear` layers.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        model.hf_quantizer = quantizer = BrecciaQuantizer(BrecciaConfig(), pre_quantized=True)
        quantizer._model = weakref.ref(model)
    if isinstance(quantizer, BrecciaQuantizer):
        model.register_to_config(quantization_config=quantizer.quantization_config.take(model))


def _found(files: list[str]) -> list[Found]:
    """The quantized tensors of a checkpoint's files."""
    weights = [Path(name) for name in files if name.endswith(".safetensors")]
    if not weights:
        raise ValueError("the checkpoint must have safetensors files, it has none")
    with Checkpoint(weights[0].parent if len(weights) > 1 else weights[0]) as checkpoint:
        return [found for found in checkpoint.found if found.format == native.NAME]


def _layer(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name.removesuffix(".weight"))
    except AttributeError:
        return None


AUTO_QUANTIZER_MAPPING["breccia"] = BrecciaQuantizer
