# SPDX-License-Identifier: Apache-2.0
"""Experts of a layer, which transformers keeps in one tensor: as layers of their own where checkpoints have them one
by one, as stacks of codes where checkpoints have them in one tensor too."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import torch

from breccia.frameworks.torch.direct import as_autocast
from breccia.nn import QuantizedLinear
from breccia.verbs import dequantize
from breccia.verbs.grouped import grouped_matmul

__all__ = [
    "ONE_EXPERT",
    "PROJECTIONS",
    "STACK",
    "GroupedExperts",
    "SeparateExperts",
    "StackedLinear",
    "why_not",
    "why_not_grouped",
]

PROJECTIONS = ("gate_up_proj", "down_proj")
STACK = re.compile(r"(?P<experts>.*\bexperts)\.(gate_up_proj|down_proj)")

ONE_EXPERT = re.compile(
    r"(?P<experts>.*\bexperts)\.(?P<number>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_NAMES = {"w1": ("w1", "w3", "w2"), "gate_proj": ("gate_proj", "up_proj", "down_proj")}


def why_not(experts: Any) -> str:
    """Why a model's experts cannot be taken apart; "" where they can."""
    parameters = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    for name, usual in (("is_transposed", False), ("has_bias", False), ("has_gate", True), ("is_concatenated", True)):
        if getattr(experts, name, usual) is not usual:
            return f"{name} is {getattr(experts, name)}"
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm follows each expert"
    if set(parameters) != {"gate_up_proj", "down_proj"} or not hasattr(experts, "_apply_gate"):
        return f"its parameters are {', '.join(parameters) or 'none'}"
    return ""


class SeparateExperts(torch.nn.ModuleDict):  # type: ignore[misc]
    """Experts whose three matrices are linear layers each, with the call of transformers' own: the activation of
    ``fused`` goes on to be used, its parameters are dropped. ``first``: how the checkpoint calls the gate."""

    def __init__(self, fused: Any, first: str) -> None:
        super().__init__()
        self.names = _NAMES[first]
        many, double, hidden = fused.gate_up_proj.shape
        dtype, device = fused.gate_up_proj.dtype, fused.gate_up_proj.device
        sizes = ((hidden, double // 2), (hidden, double // 2), (double // 2, hidden))
        for number in range(many):
            layers = {
                name: torch.nn.Linear(k, n, bias=False, dtype=dtype, device=device)
                for name, (k, n) in zip(self.names, sizes, strict=True)
            }
            self[str(number)] = torch.nn.ModuleDict(layers)
        fused._parameters.clear()
        self.__dict__["fused"] = fused  # not a part of this one: it has no weights any more

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """The sum of what the chosen experts make of each row, by their weights."""
        gate, up, down = self.names
        result = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            if number >= len(self):  # of rows that this process does not compute
                continue
            expert = self[str(number)]
            rows, places = torch.where(top_k_index == number)
            x = hidden_states[rows]
            y = expert[down](self.fused._apply_gate(torch.cat([expert[gate](x), expert[up](x)], dim=-1)))
            result.index_add_(0, rows, (y * top_k_weights[rows, places, None]).to(result.dtype))
        return result


def why_not_grouped(experts: Any) -> str:
    """Why a model's experts cannot be multiplied as stacks; "" where they can."""
    parameters = {name for name, _ in experts.named_parameters()}
    biases = {f"{name}_bias" for name in PROJECTIONS}
    if not parameters >= set(PROJECTIONS) or parameters - set(PROJECTIONS) not in (set(), biases):
        return f"its parameters are {', '.join(sorted(parameters)) or 'none'}"
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm follows each expert"
    if not hasattr(experts, "_apply_gate") and type(experts).__name__ != "Llama4TextExperts":
        return "how gate and up projections are put together is not known"
    return ""


class StackedLinear(QuantizedLinear):
    """The quantized matrices of one projection of all experts, a ScaledTensor ``(E, N, K)``."""

    _ndim = 3

    def forward(self, x: Any, offsets: Any) -> Any:  # type: ignore[override]  # rows are of many experts
        """Rows ``offsets[e]`` to ``offsets[e + 1]`` by the matrix of expert e; gradients flow to ``x``."""
        x = as_autocast(x, "x")
        y = self._differentiable(x, offsets)
        if y is not None:
            return y
        activations = self._activations_of(x)
        values = x if activations is None else self._cast(x, activations)
        return grouped_matmul(values, self.weight, offsets, x.dtype)


class GroupedExperts(torch.nn.Module):  # type: ignore[misc]
    """Experts whose projections are stacks of matrices, with the call of transformers' own: the activation of ``fused``
    goes on to be used, its parameters move here and wait to become `StackedLinear`."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.num_experts, _, last = fused.gate_up_proj.shape
        self.turned = last == 2 * fused.down_proj.shape[1]  # parameters are (E, IN, OUT)
        for name, parameter in list(fused.named_parameters()):
            self.register_parameter(name, parameter)
        fused._parameters.clear()
        self.__dict__["fused"] = fused  # not a part of this one: it has no weights any more

    def shape_of(self, name: str) -> tuple[int, ...]:
        """What a stored stack of a projection's matrices must have."""
        many, rows, columns = getattr(self, name).shape
        return (many, columns, rows) if self.turned else (many, rows, columns)

    def put(self, name: str, layer: StackedLinear) -> None:
        """Codes in the place of a parameter."""
        del self._parameters[name]
        self._modules[name] = layer

    def dequantized(self, dtype: Any) -> Any:
        """transformers' own module, of ordinary parameters."""
        for name, layer in self._modules.items():
            values = dequantize(layer.weight, dtype)
            values = values.mT.contiguous() if self.turned else values
            self.fused.register_parameter(name, torch.nn.Parameter(values))
        for name, parameter in self._parameters.items():
            self.fused.register_parameter(name, parameter)
        return self.fused.train(self.training)

    def forward(self, hidden_states: Any, top_k_index: Any = None, top_k_weights: Any = None) -> Any:
        """The sum of what the chosen experts make of each row, by their weights; without a choice, what each expert
        makes of its equal share of the rows."""
        if top_k_index is None:
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            share = rows.shape[0] // self.num_experts
            experts = torch.arange(self.num_experts, device=rows.device).repeat_interleave(share)
            return self._computed(rows, experts)
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        experts, rows = chosen[order], order // top_k_index.shape[-1]
        y = self._computed(hidden_states[rows], experts)
        # Rows of an expert past the last one are not computed by this process.
        y = torch.where((experts < self.num_experts)[:, None], y * top_k_weights.reshape(-1)[order, None], 0)
        return torch.zeros_like(hidden_states).index_add_(0, rows, y.to(hidden_states.dtype))

    def _computed(self, x: Any, experts: Any) -> Any:
        """Rows, sorted by their expert, through both projections."""
        offsets = torch.searchsorted(experts, torch.arange(self.num_experts + 1, device=x.device, dtype=experts.dtype))
        gate_up = self._product("gate_up_proj", x, experts, offsets)
        if hasattr(self.fused, "_apply_gate"):
            gated = self.fused._apply_gate(gate_up)
        else:  # Llama 4's
            gate, up = gate_up.chunk(2, dim=-1)
            gated = up * self.fused.act_fn(gate)
        return self._product("down_proj", gated, experts, offsets)

    def _product(self, name: str, x: Any, experts: Any, offsets: Any) -> Any:
        projection, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        if isinstance(projection, StackedLinear):
            y = projection(x, offsets)
        else:  # left in high precision
            weights = projection if self.turned else projection.mT
            ends = offsets.tolist()
            parts = [x[a:b] @ weights[e] for e, (a, b) in enumerate(pairwise(ends))]
            y = torch.nn.functional.pad(torch.cat(parts), (0, 0, 0, x.shape[0] - ends[-1]))
        return y if bias is None else y + bias[experts.clamp(max=self.num_experts - 1)]
