# SPDX-License-Identifier: Apache-2.0
"""Routed experts (mixture of experts) with weights in breccia's own format, as serving programs make and fill them; one
product for each chosen one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from breccia._serving.slices import Slice, bytewise, layers_of, product
from breccia.nn import QuantizedLinear
from breccia.recipes import ScalingRecipe

__all__ = ["ACTIVATIONS", "ExpertsMethod"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
_layers: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()
_numbers = count()


class ExpertsMethod(ABC):
    """Makes, fills and multiplies by the weights of one layer's experts; a base of programs' own classes for that.
    Without ``activations`` inputs stay as they are."""

    def __init__(self, recipe: ScalingRecipe, activations: ScalingRecipe | None) -> None:
        self.recipe = recipe
        self.activations = activations

    @abstractmethod
    def place(self, layer: torch.nn.Module, matrix: str, role: str) -> tuple[torch.nn.Module, str]:
        """The module that has a parameter, and its name there; ``matrix`` is "w13" (gate and up) or "w2" (down)."""

    def make(
        self, layer: torch.nn.Module, experts: int, hidden: int, rows: int, whole: int, load: Any, **extra: Any
    ) -> None:
        """Parameters for the stored tensors of the experts that this process has: ``hidden`` inputs of gate and up,
        ``rows`` outputs of each of the ``whole``. ``load`` is the layer's weight loader, ``extra`` has attributes
        beside it. Raises ValueError where slices would cut blocks."""
        held = {"w13": Slice(2 * rows, hidden, hidden, self.recipe), "w2": Slice(hidden, rows, whole, self.recipe)}
        held["w13"].check_rows([rows, rows])
        loader = bytewise(load)
        loader.supports_moe_loading = True  # type: ignore[attr-defined]
        for matrix, one in held.items():
            for role, piece in one.pieces().items():
                numbers = (2,) if matrix == "w13" else ()
                shape = numbers if piece.kind == "tensor" else piece.shape
                made = torch.nn.Parameter(torch.empty(experts, *shape, dtype=piece.dtype), requires_grad=False)
                for key, value in {**extra, "weight_loader": loader, "quant_method": piece.kind}.items():
                    setattr(made, key, value)
                home, name = self.place(layer, matrix, role)
                home.register_parameter(name, made)
        layer.__dict__["breccia_held"] = held
        layer.__dict__["breccia_key"] = key = str(next(_numbers))
        _layers[key] = layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Views of the filled parameters, as layers of breccia's: gate and up, then down, of each expert."""
        made: dict[str, list[list[QuantizedLinear]]] = {}
        for matrix, one in layer.__dict__["breccia_held"].items():
            places = {role: self.place(layer, matrix, role) for role in one.pieces()}
            parts = {role: getattr(home, name).data for role, (home, name) in places.items()}
            widths = [one.rows // 2] * 2 if matrix == "w13" else [one.rows]
            made[matrix] = [
                layers_of(one, {role: values[i] for role, values in parts.items()}, widths, self.activations)
                for i in range(len(parts["data"]))
            ]
        layer.__dict__["breccia_layers"] = made

    def chosen(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        shares: torch.Tensor,
        ids: torch.Tensor,
        activation: str,
        before: bool,
    ) -> torch.Tensor:
        """The sum of what the chosen experts make of each row. An expert's number of ``ids`` is that in this process, a
        negative one is another's, and adds nothing; ``shares`` are of each in its row's sum, and multiply inputs where
        ``before``, else outputs."""
        # One operator for torch.compile, which cannot trace a choice of rows.
        key = layer.__dict__["breccia_key"]
        made: torch.Tensor = torch.ops.breccia_served.experts(x, shares, ids, activation, before, key)
        return made


@torch.library.custom_op("breccia_served::experts", mutates_args=())  # type: ignore[untyped-decorator]
def _experts(
    x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, activation: str, before: bool, key: str
) -> torch.Tensor:
    made, act = _layers[key].__dict__["breccia_layers"], ACTIVATIONS[activation]
    result = torch.zeros_like(x)
    for number in torch.unique(ids).tolist():
        if number < 0:
            continue
        rows, places = torch.where(ids == number)
        chosen, share = x[rows], shares[rows, places, None]
        chosen = (chosen * share).to(x.dtype) if before else chosen
        gate, up = product(made["w13"][number], chosen).chunk(2, -1)
        y = product(made["w2"][number], act(gate) * up)
        result.index_add_(0, rows, y if before else (y * share).to(x.dtype))
    return result


@_experts.register_fake  # type: ignore[untyped-decorator]
def _(
    x: torch.Tensor, shares: torch.Tensor, ids: torch.Tensor, activation: str, before: bool, key: str
) -> torch.Tensor:
    return torch.empty_like(x)
