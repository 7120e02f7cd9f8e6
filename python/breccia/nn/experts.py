# SPDX-License-Identifier: Apache-2.0
"""`ScaledExperts`."""

from __future__ import annotations

import math
from typing import Any

import torch

from breccia.frameworks.torch.direct import as_autocast
from breccia.nn import expert_products
from breccia.nn.expert_products import GROUP
from breccia.value.inputs import is_integer


class ScaledExperts(torch.nn.Module):  # type: ignore[misc]
    """The experts of a mixture, each down(silu(gate(x)) * up(x)), that train in FP8 between two casts.

    Forward and backward products are of E4M3 codes under power-of-two scales, of 1 x 128 for rows and of 128 x 128 for
    weights. What a product needs the other way round is made of codes (`breccia.transpose`), not of values: the input
    and the gradient of the output are cast, once each, and nothing is dequantized. After FP8-Flow-MoE
    (arXiv:2511.02302). Parameters have the names, shapes and order of the experts in transformers 5, whose ``forward``
    this is; the router is the model's.

    For the backward pass the layer keeps the codes of its input, one byte a number and token, however many experts a
    token goes to; gate(x) and up(x) in the dtype of the input; and the codes of the weights.

    Args:
        num_experts: E.
        hidden_size: H, a multiple of 128.
        intermediate_size: I, a multiple of 128.
        device: as ``torch.nn.Linear``.
        dtype: as ``torch.nn.Linear``; the weights are quantized on every call.

    Attributes:
        gate_up_proj: parameter ``(E, 2 I, H)``, the rows of gate before those of up.
        down_proj: parameter ``(E, H, I)``.

    Raises:
        ValueError: a number is not positive, or a size no multiple of 128.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        if not is_integer(num_experts) or num_experts < 1:
            raise ValueError(f"num_experts must be a positive integer, got {num_experts!r}")
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if not is_integer(size) or size < 1 or size % GROUP:
                raise ValueError(f"{name} must be a positive multiple of {GROUP}, got {size!r}")
        # Of NumPy's integers torch.compile would make tensors.
        num_experts, hidden_size, intermediate_size = map(int, (num_experts, hidden_size, intermediate_size))
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        made = {"device": device, "dtype": dtype}
        self.gate_up_proj = torch.nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, **made))
        self.down_proj = torch.nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as ``torch.nn.Linear`` draws its own."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[-1])
            torch.nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """The sum over a token's choices of ``top_k_weights`` times what the chosen expert makes of it.

        Args:
            hidden_states: ``(..., hidden_size)`` of bfloat16, float16 or float32.
            top_k_index: integers ``(..., k)``, the experts of each token. One that is negative, or ``num_experts`` or
                more, is of no expert here, as in expert-parallel training.
            top_k_weights: floats ``(..., k)``, what each choice counts. Gradients flow to them.

        Returns:
            ``(..., hidden_size)`` in the dtype of ``hidden_states``.

        Raises:
            TypeError: a dtype is not what it must be.
            ValueError: shapes or devices do not match.
        """
        x = as_autocast(hidden_states, "hidden_states")
        self._check(x, top_k_index, top_k_weights)
        choices = top_k_index.shape[-1]
        y = expert_products.apply(
            x.reshape(-1, self.hidden_size), self.gate_up_proj, self.down_proj,
            top_k_index.reshape(-1, choices), top_k_weights.reshape(-1, choices),
        )  # fmt: skip
        return y.reshape(x.shape)

    def _check(self, x: Any, index: Any, weights: Any) -> None:
        for name, tensor in (("top_k_index", index), ("top_k_weights", weights)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"hidden_states must be a bfloat16, float16 or float32 tensor, got {x.dtype}")
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden_states must be (..., {self.hidden_size}), got shape {tuple(x.shape)}")
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise TypeError(f"top_k_index must be a tensor of integers, got {index.dtype}")
        if not weights.is_floating_point():
            raise TypeError(f"top_k_weights must be a tensor of floats, got {weights.dtype}")
        if index.ndim != x.ndim or index.shape[:-1] != x.shape[:-1] or index.shape[-1] < 1:
            wanted = f"({', '.join(map(str, x.shape[:-1]))}, k)"
            raise ValueError(f"top_k_index must be {wanted} as hidden_states has it, got shape {tuple(index.shape)}")
        if weights.shape != index.shape:
            raise ValueError(f"top_k_weights must be {tuple(index.shape)} as top_k_index, got {tuple(weights.shape)}")
        for name, tensor in (("top_k_index", index), ("top_k_weights", weights), ("weights", self.down_proj)):
            if tensor.device != x.device:
                raise ValueError(f"{name} must be on the device of hidden_states, {x.device}, got {tensor.device}")

    def extra_repr(self) -> str:
        sizes = ("num_experts", "hidden_size", "intermediate_size")
        return ", ".join(f"{name}={getattr(self, name)}" for name in sizes)
