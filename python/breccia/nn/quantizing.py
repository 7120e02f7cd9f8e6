# SPDX-License-Identifier: Apache-2.0
"""What `breccia.quantize_layer` and `breccia.quantize_` do: quantized layers in the place of linear ones; and `pack_`:
their 6-bit codes packed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from breccia import verbs
from breccia.nn.layers import QuantizedLinear
from breccia.peers import beside
from breccia.recipe_names import resolve
from breccia.recipes import MXFP6BlockScaling
from breccia.schemes.inputs import Layer, Layers
from breccia.schemes.value import ModelScheme
from breccia.verbs.packed import PackedWeight, pack


class Selection:
    """Chooses layers by name: by the arguments of `breccia.quantize_`."""

    def __init__(
        self,
        filter: Callable[[Any, str], bool] | None,  # noqa: A002
        include: Iterable[str] | None,
        exclude: Iterable[str],
    ) -> None:
        if filter is not None and not callable(filter):
            raise TypeError(f"filter must be a function of a module and its name, or None, got {filter!r}")
        self._filter = filter
        self._include = None if include is None else _patterns(include, "include")
        self._exclude = _patterns(exclude, "exclude")
        self._matched: set[tuple[str, str]] = set()

    def takes(self, module: Any, name: str) -> bool:
        """Whether a layer is taken; patterns match its name in the model, or that of its weight."""
        included = self._include is None or self._matches("include", self._include, name)
        excluded = self._matches("exclude", self._exclude, name)
        return included and not excluded and (self._filter is None or bool(self._filter(module, name)))

    def _matches(self, argument: str, patterns: tuple[str, ...], name: str) -> bool:
        found = [p for p in patterns if fnmatchcase(name, p) or fnmatchcase(f"{name}.weight", p)]
        self._matched.update((argument, pattern) for pattern in found)
        return bool(found)

    def check_all_matched(self, names: list[str]) -> None:
        """Refuses a pattern that matched none of the names of all linear layers."""
        for argument, patterns in (("include", self._include or ()), ("exclude", self._exclude)):
            for pattern in patterns:
                if (argument, pattern) not in self._matched:
                    example = f", such as {names[0]!r}" if names else ""
                    raise ValueError(
                        f"{argument} {pattern!r} must match the name of a linear layer, it matches none of "
                        f"{len(names)}{example}"
                    )

    @property
    def takes_all(self) -> bool:
        """Whether nothing is left out."""
        return self._filter is None and self._include is None and not self._exclude


def _patterns(value: Iterable[str], argument: str) -> tuple[str, ...]:
    listed = () if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(p, str) for p in listed):
        raise TypeError(f"{argument} must be a list of patterns, as ['*.q_proj'], got {value!r}")
    return listed


def quantized(layer: Any, recipe: Any, activations: Any, exact_rows: int, gradients: Any) -> QuantizedLinear:
    """See `breccia.quantize_layer`."""
    if type(layer) is not torch.nn.Linear:
        more = ": quantize_(model, recipe) changes the layers of a model" if isinstance(layer, torch.nn.Module) else ""
        raise TypeError(f"layer must be a torch.nn.Linear, got {type(layer).__name__}{more}")
    inputs = None if activations is None else resolve(activations, "activations")
    made = Layer(resolve(recipe), inputs)
    try:
        return _quantized(layer, made, exact_rows, gradients)
    except ValueError as error:
        raise ValueError(f"layer.weight cannot be quantized: {_of_layer(error)}") from None


def _of_layer(error: ValueError) -> str:
    """Why a cast refused a layer's weight, of which it does not help to cast the transpose."""
    return str(error).partition(": where the product runs")[0]


def _quantized(linear: Any, layer: Layer, exact_rows: int, gradients: Any) -> QuantizedLinear:
    assert layer.weight is not None
    weight = verbs.cast(linear.weight.detach(), layer.weight)
    scale = None if layer.scale is None else torch.tensor(layer.scale, device=linear.weight.device)
    made = QuantizedLinear(
        weight, linear.bias, layer.inputs, exact_rows=exact_rows, gradients=gradients, input_scale=scale
    )
    made.train(linear.training)
    return made


def _layers(recipe: Any, activations: Any, moments: Any) -> Callable[[str], Layer]:
    """What a layer of a name becomes."""
    if isinstance(recipe, ModelScheme):
        if activations is not None:
            raise ValueError(f"activations must be left out with a scheme, which says them, got {activations!r}")
        return Layers(recipe, moments).of
    if moments is not None:
        raise ValueError("moments must be left out without a scheme: they are for its static scales of inputs")
    every = Layer(resolve(recipe), None if activations is None else resolve(activations, "activations"))
    return lambda name: every


def replace_layers(
    model: Any, recipe: Any, selection: Any, activations: Any, exact_rows: int, gradients: Any, moments: Any
) -> torch.nn.Module:
    """See `breccia.quantize_`; ``selection`` are the arguments of `Selection`."""
    if not isinstance(model, torch.nn.Module):
        more = ": swapped arguments? quantize_(model, recipe)" if isinstance(recipe, torch.nn.Module) else ""
        kind = type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module that contains linear layers, got {kind}{more}")
    layer_of, chosen, names = _layers(recipe, activations, moments), Selection(*selection), []
    if type(model) is torch.nn.Linear:
        raise TypeError(
            "model must be a module that contains linear layers, got one itself, which cannot be replaced in place: "
            "layer = breccia.quantize_layer(layer, recipe) gives the one that takes its place"
        )
    made: list[tuple[Any, str, Any]] = []
    replaced: dict[int, Any] = {}  # a layer used in two places stays one
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # named_children would skip a layer used twice
            full = f"{path}.{name}" if path else name
            if type(child) is not torch.nn.Linear:
                continue
            names.append(full)
            if not chosen.takes(child, full) or (layer := layer_of(full)).weight is None:
                continue
            if id(child) not in replaced:
                try:
                    replaced[id(child)] = _quantized(child, layer, exact_rows, gradients)
                except ValueError as error:
                    more = f": filter= or exclude=[{full!r}] leaves it as it is"
                    raise ValueError(f"{full}.weight cannot be quantized: {_of_layer(error)}{more}") from None
            made.append((parent, name, replaced[id(child)]))
    chosen.check_all_matched(names)
    for parent, name, new in made:
        setattr(parent, name, new)
    if made:
        beside("peft")  # whose adapters then take the layers
    for library in ("transformers", "diffusers") if made else ():
        for module in reversed(list(model.modules())):  # what is around another comes last, and is what counts
            if hasattr(module, "save_pretrained") and any(
                kind.__module__.startswith(f"{library}.") for kind in type(module).__mro__
            ):
                _mark(library, module)
    if not made:
        which = "no torch.nn.Linear" if chosen.takes_all else "no torch.nn.Linear that filter takes"
        which += " that a rule quantizes" if isinstance(recipe, ModelScheme) else ""
        warnings.warn(f"quantize_ changed nothing: {type(model).__name__} has {which}", stacklevel=3)
    return model


def _mark(library: str, model: Any) -> None:
    """Let a model of a library that saves and opens models say that its layers are quantized."""
    if not any(isinstance(layer, QuantizedLinear) for layer in model.modules()):
        return
    try:
        package = importlib.import_module(f"breccia.{library}")
    except ImportError as error:
        warnings.warn(f"what save_pretrained writes of the model, from_pretrained will not open: {error}", stacklevel=5)
        return
    package.mark(model)


def pack_(model: torch.nn.Module) -> torch.nn.Module:
    """Hold the MXFP6 weights of a model's quantized layers in 0.75 bytes a code, as `breccia.pack` does.

    Products are the same. A layer makes codes of a byte each of its own weight for as long as its product takes; with
    gradients, until the backward pass. ``state_dict`` has the packed bytes, and loads either form.

    Args:
        model: with `QuantizedLinear` layers of `breccia.MXFP6BlockScaling`, such as ``quantize_(model, "mxfp6")``
            makes. Layers of other recipes stay as they are.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
        ValueError: a layer's weight is sharded; no layer has been changed then.

    Warns:
        UserWarning: no layer has such a weight.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module that contains quantized layers, got {type(model).__name__}")
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    layers = [layer for layer in layers if isinstance(layer.recipe, MXFP6BlockScaling)]
    loose = [layer for layer in layers if not isinstance(layer.weight, PackedWeight)]
    for layer in loose:
        layer.check_puttable()
    for layer in loose:
        layer.put_weight_(pack(layer.weight))
    if not layers:
        kind = type(model).__name__
        warnings.warn(f"pack_ changed nothing: {kind} has no QuantizedLinear of MXFP6BlockScaling", stacklevel=2)
    return model
