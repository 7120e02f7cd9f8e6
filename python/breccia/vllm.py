# SPDX-License-Identifier: Apache-2.0
"""Kernels for vLLM on CPUs, where it has none: linear layers of NVFP4, MXFP8 and MXFP4 weights.

vLLM finds `register` by its entry point ``vllm.general_plugins`` and calls it in every process. On a CPU it appends one
kernel for each format to vLLM's own lists: a kernel of vLLM's that runs goes first. Inputs multiply as they are, also
where a checkpoint has scales for them.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["register"]

_KERNELS = "vllm.model_executor.kernels.linear"
# kind of kernel → vLLM's base class, and the name of ours, which vLLM's log and VLLM_DISABLED_KERNELS have.
_BASES = {
    "nvfp4": (f"{_KERNELS}.nvfp4.base", "NvFp4LinearKernel", "BrecciaNvFp4LinearKernel"),
    "mxfp8": (f"{_KERNELS}.mxfp8.Mxfp8LinearKernel", "Mxfp8LinearKernel", "BrecciaMxfp8LinearKernel"),
    "mxfp4": (f"{_KERNELS}.mxfp4.base", "MxFp4LinearKernel", "BrecciaMxFp4LinearKernel"),
}
_registered: list[type] = []


def register() -> None:
    """Append the kernels to vLLM's lists, once. On other platforms than a CPU nothing happens."""
    platforms = importlib.import_module("vllm.platforms")
    if _registered or not platforms.current_platform.is_cpu():
        return
    add = importlib.import_module(_KERNELS).register_linear_kernel
    for kind, (module, base, name) in _BASES.items():
        made = _kernel(kind, getattr(importlib.import_module(module), base), name)
        add(made, platforms.PlatformEnum.CPU, kind)
        _registered.append(made)


def _kernel(kind: str, base: type, name: str) -> type:
    """A class of vLLM's kernels."""

    def is_supported(cls: type, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def can_implement(cls: type, config: Any) -> tuple[bool, str | None]:
        batch = getattr(config, "bmm_batch_size", None)
        return (True, None) if batch is None else (False, "breccia has no batched products of MXFP8 for vLLM")

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        # Not a parameter or module of the layer: a view of those that it has.
        layer.__dict__["breccia_weight"] = _weight(kind, layer)

    def apply_weights(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        from breccia.verbs import linear

        return linear(x, layer.__dict__["breccia_weight"], bias, x.dtype)

    methods = {
        "__doc__": f"{kind.upper()} weights by inputs as they are, in breccia's products on the CPU.",
        "__module__": __name__,
        "is_supported": classmethod(is_supported),
        "can_implement": classmethod(can_implement),
        "process_weights_after_loading": process_weights_after_loading,
        "apply_weights": apply_weights,
    }
    return type(name, (base,), methods)


def _weight(kind: str, layer: Any) -> Any:
    """A layer's weight as a ScaledTensor that views its parameters.

    Raises:
        ValueError: they do not fit.
    """
    from breccia.bridges import from_compressed_tensors, from_modelopt

    weight, scale = layer.weight.data, layer.weight_scale.data
    if kind == "mxfp4":
        made = from_compressed_tensors({"weight_packed": weight, "weight_scale": scale})
    elif kind == "mxfp8":
        made = from_modelopt({"weight": weight, "weight_scale": scale}, "mxfp8")
    else:
        # vLLM has made a multiplier of it, whichever form the checkpoint has.
        second = layer.weight_global_scale.data
        made = from_modelopt({"weight": weight, "weight_scale": scale, "weight_scale_2": second}, "nvfp4")
    return made.to("torch")
