# SPDX-License-Identifier: Apache-2.0
"""transformers' quantizers "breccia" and "modelopt"."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.utils import logging

from breccia._serving.models import check_patterns, dense, fits, is_alone
from breccia.bridges.parts import Found
from breccia.checkpoint.planning.asked import Asked
from breccia.checkpoint.planning.left_alone import left_alone
from breccia.checkpoint.reading.source import Checkpoint
from breccia.nn import QuantizedLinear
from breccia.recipes import ScalingRecipe
from breccia.schemes.inputs import Layer, Layers, recipe_of_inputs
from breccia.schemes.value import Activations, ModelScheme, Rule
from breccia.transformers.configs import BrecciaConfig
from breccia.transformers.experts import (
    ONE_EXPERT,
    PROJECTIONS,
    STACK,
    GroupedExperts,
    SeparateExperts,
    StackedLinear,
    why_not,
    why_not_grouped,
)
from breccia.transformers.loading import Quantize, ReadCodes, module_of, stored_tensors

__all__ = ["BrecciaQuantizer", "ModelOptQuantizer"]

_logger = logging.get_logger(__name__)


class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Layers of a model whose weights stay codes: `breccia.nn.QuantizedLinear`.

    Attributes:
        format: the bridge that reads and writes the checkpoint.
        stored: what the tensors of a weight are called, after the name of its module.
        stacked: what the tensors of all experts in one are called, after their name; empty where the format has none.
        tensors: the model's name of a weight → its tensors in the checkpoint, where it is quantized there.
        chosen: names of weights to quantize on load.
        inputs: the model's name of a weight → the recipe of its layer's inputs, where the checkpoint says so.
        marked: whether layers are others than were loaded: see `mark`.
    """

    requires_calibration = False
    format = ""
    pre_quantized: bool
    stored: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.tensors: dict[str, Found] = {}
        self.chosen: set[str] = set()
        self.inputs: dict[str, ScalingRecipe] = {}
        self.marked = False
        self._readers: list[Any] = []
        self._layers: Layers | None = None
        self.activations = getattr(quantization_config, "activations", None)

    def update_dtype(self, dtype: Any) -> Any:
        """The model's dtype; a file of codes has FP8 in its place."""
        return torch.bfloat16 if str(dtype).startswith("torch.float8") else dtype

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return param_name in self.chosen

    def get_quantize_ops(self) -> Any:
        return Quantize(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """Codes and scales keep theirs; `ReadCodes` is told what a plain weight gets."""
        own = [op for op in getattr(converter, "operations", ()) if isinstance(op, ReadCodes)]
        if own:
            own[0].dtype = dtype
            return None
        return super().get_new_dtype(converter, param, dtype)

    def layer(self, name: str) -> Layer:
        """What a weight that is quantized on load becomes, and its layer's inputs."""
        if self._layers is not None:
            return self._layers.of(name.removesuffix(".weight"))
        return Layer(self.quantization_config.recipe, self.activations)

    def turned(self, name: str) -> bool:
        """Whether a parameter has inputs before outputs."""
        return name in self._turned

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        self._turned: set[str] = set()
        files = [str(name) for name in checkpoint_files or []]
        if not self.pre_quantized and any(name.endswith(".safetensors") for name in files):
            # A folder whose config says nothing, but whose tensors are those of quantized layers.
            self.pre_quantized = any(found.format == self.format for found in _found(files)[0])
        if self.pre_quantized:
            self._prepare_for(model, *_found(files))
        else:
            self._choose(model)

    def _prepare_for(self, model: Any, every: list[Found], scheme: ModelScheme) -> None:
        """Which module each quantized tensor belongs to, and what its inputs are."""
        conversions = get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        names = {found.name: found for found in every if found.format == self.format}
        scaled = [found.name for found in every if found.name.endswith(".pre_quant_scale")]
        if scaled:
            raise ValueError(
                f"tensor {scaled[0]!r} must be absent: it scales the input of its layer, which no layer here does; "
                f"'breccia convert' to another format multiplies it into the weight"
            )

        def renamed(name: str) -> str:
            return str(rename_source_key(name, renamings, [])[0])

        self._separate_experts(model, [renamed(name) for name in names])
        if self.stacked:
            self._group_experts(model, {m["experts"] for name in names if (m := STACK.fullmatch(renamed(name)))})
        parameters = dict(model.named_parameters())
        for name, found in names.items():
            own = str(rename_source_key(name, renamings, [], model.base_model_prefix, parameters)[0])
            if own in parameters:
                self._check(model, own, found)
                self.tensors[own] = found
                self._run_inputs(own, scheme.rule(found.name.removesuffix(".weight")))
            elif keeper := _keeper(model, own):
                raise ValueError(
                    f"tensor {name!r} must belong to a linear layer, {type(model).__name__} keeps it in a parameter of "
                    f"{keeper}: convert the checkpoint to bf16 first, or leave it out when quantizing"
                )

    def _run_inputs(self, name: str, rule: Rule | None) -> None:
        """Note the recipe of a layer's inputs."""
        if self.activations is not None:
            self.inputs[name] = self.activations
        elif rule is not None and isinstance(rule.inputs, Activations):
            try:
                self.inputs[name] = recipe_of_inputs(rule.inputs)
            except ValueError as error:
                _logger.warning(f"inputs of {name} stay in high precision: {error}")

    def _check(self, model: Any, name: str, found: Found) -> None:
        parent, last = module_of(model, name)
        module = parent._modules.get(last)
        if isinstance(parent, GroupedExperts) and last in PROJECTIONS:
            if found.shape != parent.shape_of(last):
                wanted = parent.shape_of(last)
                raise ValueError(f"tensor {found.name!r} must have shape {wanted} as the model's, it has {found.shape}")
            return
        if not name.endswith(".weight") or not isinstance(module, (torch.nn.Linear, Conv1D)):
            kind = type(module or parent).__name__
            raise ValueError(
                f"tensor {found.name!r} must belong to a linear layer, it belongs to {kind}: leave it out in quantizing"
            )
        shape = tuple(reversed(module.weight.shape)) if isinstance(module, Conv1D) else tuple(module.weight.shape)
        if found.shape != shape:
            raise ValueError(f"tensor {found.name!r} must have shape {shape} as the model's, it has {found.shape}")

    def _separate_experts(self, model: Any, names: Iterable[str]) -> None:
        """Take all experts apart where some are quantized."""
        firsts = {match["kind"] for name in names if (match := ONE_EXPERT.fullmatch(name))}
        if not firsts:
            return
        first = "w1" if firsts & {"w1", "w2", "w3"} else "gate_proj"
        for path, module in list(model.named_modules()):
            if not path.endswith("experts") or not isinstance(
                getattr(module, "gate_up_proj", None), torch.nn.Parameter
            ):
                continue
            if why := why_not(module):
                raise ValueError(
                    f"experts of {type(module).__name__} ({path}) must be gate and up projections, then down, without "
                    f"bias, to be quantized: {why}; leave them out with --exclude '*.experts.*'"
                )
            parent, last = module_of(model, path)
            parent._modules[last] = SeparateExperts(module, first)

    def _group_experts(self, model: Any, paths: Iterable[str]) -> None:
        """Experts whose matrices become stacks of codes, by their names in the checkpoint or the model."""
        wanted = tuple(f".{path}" for path in paths)
        for path, module in list(model.named_modules()):
            fused = isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter)
            if not fused or not any(f".{path}".endswith(one) or one.endswith(f".{path}") for one in wanted):
                continue
            if why := why_not_grouped(module):
                raise ValueError(
                    f"experts of {type(module).__name__} ({path}) must be gate and up projections, then down, to be "
                    f"quantized: {why}; leave them out with --exclude '*.experts.*'"
                )
            parent, last = module_of(model, path)
            parent._modules[last] = GroupedExperts(module)

    def _choose_stacks(self, model: Any, alone: Iterable[str]) -> None:
        """Experts in one tensor to quantize on load."""
        paths = [
            path
            for path, module in model.named_modules()
            if isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter) and not is_alone(path, alone)
        ]
        self._group_experts(model, paths)
        for path in paths:
            experts = model.get_submodule(path)
            for last in PROJECTIONS:
                name = f"{path}.{last}"
                recipe = self.layer(name).weight
                if recipe is None or not fits(name, experts.shape_of(last), recipe, _logger):
                    continue
                self.chosen.add(name)
                self._turned |= {name} if experts.turned else set()

    def _choose(self, model: Any) -> None:
        """Linear layers to quantize on load: all but embeddings, output layers, norms, routers and what was named."""
        config = self.quantization_config
        asked = None if config.scheme is None else Asked(config.scheme)
        self._layers = None if asked is None else Layers(asked.scheme, config.moments)
        alone = [*(config.modules_to_not_convert or ()), *get_keys_to_not_convert(model)]
        check_patterns(model, config.modules_to_not_convert or ())
        conversions = get_model_conversion_mapping(model)
        apart = [c for c in conversions if isinstance(c, WeightConverter) and _of_experts(c)]
        sources = [source for one in apart for source in one.source_patterns]
        if sources:
            self._separate_experts(model, ["experts.0.w1.weight" if any(".w1." in s for s in sources) else _GATE])
        self._choose_stacks(model, alone)
        ignored, known = [], left_alone(model.config.to_dict())
        for path, module in model.named_modules():
            if type(module) not in (torch.nn.Linear, Conv1D):
                continue
            name, turned = f"{path}.weight", isinstance(module, Conv1D)
            shape = tuple(reversed(module.weight.shape)) if turned else tuple(module.weight.shape)
            named = asked is not None and asked.names(path)
            left = is_alone(path, alone) or known.weight(name)
            recipe = None if (left and not named) or min(shape) < 16 else self.layer(name).weight
            if recipe is None or not fits(name, shape, recipe, _logger):
                ignored.append(path)
                continue
            self.chosen.add(name)
            self._turned |= {name} if turned else set()
        if not self.chosen:
            raise ValueError(f"{type(model).__name__} must have linear layers to quantize, none is left")
        config.ignore = ignored
        if asked is not None:
            config.say({name.removesuffix(".weight"): (self.layer(name), asked.rule(name)) for name in self.chosen})

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """transformers' own, without those that would put experts together that are apart here; and ours."""
        separate = any(isinstance(module, SeparateExperts) for module in model.modules())
        kept = [c for c in weight_conversions if not (separate and isinstance(c, WeightConverter) and _of_experts(c))]
        if not self.pre_quantized:
            return kept
        # Before transformers' own, which take every name that has theirs in it; a weight of any name comes last.
        stacks = [
            WeightConverter([f"experts.{last}.{part}" for part in self.stacked], f"experts.{last}", [ReadCodes(self)])
            for last in PROJECTIONS
            if self.stacked
        ]
        weights = WeightConverter(list(self.stored), "weight", [ReadCodes(self)])
        self._readers = [*stacks, weights]
        return [*stacks, *kept, weights]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        # What reads codes, or turns stacks of numbers, is not to be undone in saving, which has its own way.
        grouped = any(isinstance(module, GroupedExperts) for module in model.modules())
        model._weight_conversions = [
            one
            for one in getattr(model, "_weight_conversions", None) or []
            if not any(one is reader for reader in self._readers) and not (grouped and _of_stacks(one))
        ]
        left = [n for n in (*self.tensors, *self.chosen) if not isinstance(_layer(model, n), QuantizedLinear)]
        if left:
            raise ValueError(f"tensor {left[0]!r} must be in the checkpoint, complete: it was not read")
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The tensors to save, in the format they came in; the model's config, saved after, says what they are now."""
        if self.marked:
            model.config.quantization_config = self.quantization_config.take(model)
        return stored_tensors(model, self.format)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Gradients flow through the layers, to adapters beside them."""
        return True

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for path, layer in list(model.named_modules()):
            if isinstance(layer, GroupedExperts):
                parent, last = module_of(model, path)
                parent._modules[last] = layer.dequantized(dtype)
            elif isinstance(layer, QuantizedLinear) and not isinstance(layer, StackedLinear):
                parent, last = module_of(model, path)
                parent._modules[last] = dense(layer, dtype)
        return model


_GATE = "experts.0.gate_proj.weight"


def _found(files: list[str]) -> tuple[list[Found], ModelScheme]:
    """The logical tensors of a checkpoint's files, and what it is beside them."""
    weights = [Path(name) for name in files if name.endswith(".safetensors")]
    if not weights:
        raise ValueError("the checkpoint must have safetensors files, it has none")
    folder = len(weights) > 1 or (weights[0].parent / "config.json").is_file()
    with Checkpoint(weights[0].parent if folder else weights[0]) as checkpoint:
        return [checkpoint.refined(one) for one in checkpoint.found], checkpoint.scheme_or_none or ModelScheme(())


def _keeper(model: Any, name: str) -> str:
    """The nearest module of a model that a name goes into, if it has parameters of its own beside no linear layer."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        own = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        return f"{type(module).__name__} ({path})" if own else ""
    return ""


def _layer(model: Any, name: str) -> Any:
    parent, last = module_of(model, name)
    return parent._modules.get(last)


def _of_experts(converter: Any) -> bool:
    return any(re.search(r"experts\.\*\.", source) for source in converter._original_source_patterns)


def _of_stacks(conversion: Any) -> bool:
    targets = conversion.target_patterns if isinstance(conversion, WeightConverter) else ()
    return any(target.endswith(tuple(f"experts.{last}" for last in PROJECTIONS)) for target in targets)


class BrecciaQuantizer(_Quantizer):
    """Reads what ``breccia convert`` writes in its own format, and quantizes on load."""

    format = "breccia"
    stored = (
        *(f"weight{joint}{part}" for joint in "._" for part in ("data", "scale", "zero_point", "global_scale")),
        "weight_form",
        "input_scale",
    )
    stacked = ("data", "scale", "zero_point", "global_scale")


class ModelOptQuantizer(_Quantizer):
    """Reads checkpoints of NVIDIA's ModelOpt on any device; inputs are quantized as ``quant_algo`` says."""

    format = "modelopt"
    stored = ("weight", "weight_scale", "weight_scale_2", "input_scale")

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        if not self.pre_quantized:
            raise ValueError("quantization_config must be a BrecciaConfig to quantize on load, got a ModelOptConfig")


def mark(model: Any) -> None:
    """Let a model of transformers whose layers are quantized say so, in its config and in saving: `breccia.quantize_`
    calls this.

    Args:
        model: a ``PreTrainedModel`` with `breccia.nn.QuantizedLinear` layers.
    """
    there = getattr(model, "hf_quantizer", None)
    if there is not None and not isinstance(there, _Quantizer):
        warnings.warn(
            f"quantize_ changed layers of a model that {type(there).__name__} has quantized: no program opens what "
            f"save_pretrained writes of it",
            stacklevel=6,
        )
        return
    if there is None:
        model.hf_quantizer = BrecciaQuantizer(BrecciaConfig(), pre_quantized=True)
        model.register_state_dict_post_hook(_pairs_as_bytes)
    if isinstance(model.hf_quantizer, BrecciaQuantizer):
        model.hf_quantizer.marked = True
        model.config.quantization_config = model.hf_quantizer.quantization_config.take(model)


def _pairs_as_bytes(model: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Makes bytes of two codes to a byte in a state: a model around this one may write it, and transformers opens no
    file with such a dtype."""
    for name, part in state.items():
        if name.startswith(prefix) and getattr(part, "dtype", None) == torch.float4_e2m1fn_x2:
            state[name] = part.view(torch.uint8)


_KINDS: Mapping[str, type[_Quantizer]] = {"breccia": BrecciaQuantizer, "modelopt": ModelOptQuantizer}
for _name, _kind in _KINDS.items():
    if _name not in AUTO_QUANTIZER_MAPPING:  # a reload of this module
        register_quantizer(_name)(_kind)
