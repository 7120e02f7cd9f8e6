# SPDX-License-Identifier: Apache-2.0
"""vLLM's routed experts (mixture of experts) with weights in breccia's own format, one product for each chosen one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from breccia.recipes import ScalingRecipe
from breccia.served.slices import Slice, bytewise, layers_of, product

__all__ = ["BrecciaExpertsMethod"]

_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
_layers: WeakValueDictionary[str, torch.nn.Module] = WeakValueDictionary()


class BrecciaExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Makes, fills and multiplies by the weights of one layer's experts.

    Args:
        recipe: what they are quantized to.
        activations: what inputs are quantized to, or None for products with inputs as they are.
        names: of parameters, by role, after "w13_" or "w2_".
        moe: vLLM's description of the layer.

    Raises:
        ValueError: the layer computes something else than gated experts without bias.
    """

    def __init__(
        self, recipe: ScalingRecipe, activations: ScalingRecipe | None, names: Mapping[str, str], moe: Any
    ) -> None:
        super().__init__(moe)
        self.names = names
        self.recipe = recipe
        self.activations = activations
        if moe.activation.value not in _ACTIVATIONS or moe.has_bias or moe.swiglu_limit is not None:
            raise ValueError(
                f"experts must be gated by {', '.join(_ACTIVATIONS)} without bias or limit, they have "
                f"{moe.activation.value}{', a bias' * moe.has_bias}: convert with --exclude '*.experts.*'"
            )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Parameters for the stored tensors of all experts.

        Raises:
            ValueError: slices would cut blocks.
        """
        rows, whole = intermediate_size_per_partition, self.moe.intermediate_size
        held = {
            "w13": Slice(2 * rows, hidden_size, hidden_size, self.recipe),
            "w2": Slice(hidden_size, rows, whole, self.recipe),
        }
        held["w13"].check_rows([rows, rows])
        load = bytewise(extra.pop("weight_loader"))
        load.supports_moe_loading = True  # type: ignore[attr-defined]
        for name, one in held.items():
            for role, piece in one.pieces().items():
                numbers = (2,) if name == "w13" else ()
                shape = numbers if piece.kind == "tensor" else piece.shape
                made = torch.nn.Parameter(torch.empty(num_experts, *shape, dtype=piece.dtype), requires_grad=False)
                set_weight_attrs(made, {**extra, "weight_loader": load, "quant_method": piece.kind})
                layer.register_parameter(f"{name}_{self.names[role]}", made)
        layer.__dict__["breccia_held"] = held
        _layers[layer.layer_name] = layer

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM's runs."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Views of the filled parameters, as layers of breccia's: gate and up, then down, of each expert."""
        made = {}
        for name, one in layer.__dict__["breccia_held"].items():
            parts = {role: getattr(layer, f"{name}_{self.names[role]}").data for role in one.pieces()}
            widths = [one.rows // 2] * 2 if name == "w13" else [one.rows]
            count = len(parts["data"])
            made[name] = [
                layers_of(one, {k: v[i] for k, v in parts.items()}, widths, self.activations) for i in range(count)
            ]
        layer.__dict__["breccia_layers"] = made

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum of what the chosen experts make of each row, by their weights."""
        # One operator for torch.compile, which cannot trace a choice of rows.
        made: torch.Tensor = torch.ops.breccia_vllm.experts(x, topk_weights, topk_ids, layer.layer_name)
        return made


@torch.library.custom_op("breccia_vllm::experts", mutates_args=())  # type: ignore[untyped-decorator]
def _experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, name: str) -> torch.Tensor:
    layer = _layers[name]
    made, act = layer.__dict__["breccia_layers"], _ACTIVATIONS[layer.activation.value]
    if layer.expert_map is not None:  # numbers of the experts that this rank has, -1 for others
        ids = layer.expert_map[ids.long()]
    result = torch.zeros_like(x)
    before = bool(layer.apply_router_weight_on_input)
    for number in torch.unique(ids).tolist():
        if number < 0:
            continue
        rows, places = torch.where(ids == number)
        chosen, share = x[rows], weights[rows, places, None]
        chosen = (chosen * share).to(x.dtype) if before else chosen
        gate, up = product(made["w13"][number], chosen).chunk(2, -1)
        y = product(made["w2"][number], act(gate) * up)
        result.index_add_(0, rows, y if before else (y * share).to(x.dtype))
    return result


@_experts.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)
