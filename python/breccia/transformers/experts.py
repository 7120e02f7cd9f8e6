# SPDX-License-Identifier: Apache-2.0
"""Experts of a layer as layers of their own: transformers keeps them in one tensor, checkpoints one by one."""

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["ONE_EXPERT", "SeparateExperts", "why_not"]

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
    """Experts whose three matrices are linear layers each, with the call of transformers' own.

    Args:
        fused: transformers' module; its activation goes on to be used, its parameters are dropped.
        first: how the checkpoint calls the gate: "gate_proj" or "w1".
    """

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
