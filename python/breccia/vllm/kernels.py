# SPDX-License-Identifier: Apache-2.0
"""Kernels for vLLM's linear layers on CPUs, after its own: one of vLLM's that runs goes first.

NVFP4, MXFP8, MXFP6 and MXFP4 it has none for; FP8 in blocks, and FP8 with inputs as they are, only where the processor
has AMX, or none; 4-bit integers in multiples of 32 alone, and 8-bit ones of weights alone not at all. Inputs multiply
as they are, also where a checkpoint has scales for them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["parts"]

_KERNELS = "vllm.model_executor.kernels.linear"
_BATCHED = "breccia has no batched products of MXFP8 for vLLM"
_registered: set[str] = set()


@dataclass(frozen=True)
class _Kind:
    """One list of kernels that vLLM has.

    Attributes:
        base: module and name of vLLM's base class.
        name: of our class, which vLLM's log and VLLM_DISABLED_KERNELS have.
        weight: makes a ScaledTensor of a layer's parameters; the kernel is told, whose configuration says more.
        why_not: says of a layer's configuration why it cannot be, "" where it can.
        copied: parameters of the layer that are let go, where the weight is a copy of them and no view.
        kernels: name of vLLM's list, for versions whose `register_linear_kernel` does not know the kind.
    """

    base: tuple[str, str]
    name: str
    weight: Callable[[Any, Any], Any]
    why_not: Callable[[Any], str] = lambda config: ""
    copied: bool = False
    kernels: str = ""


def parts() -> dict[str, Callable[[], None]]:
    """What adds the kernel of each kind to vLLM's list, once; on other platforms than a CPU each does nothing."""
    return {f"kernels for {kind}": partial(_register, kind, said) for kind, said in _KINDS.items()}


def _register(kind: str, said: _Kind) -> None:
    """Raises whatever says that this version of vLLM has no place for the kernel."""
    platforms = importlib.import_module("vllm.platforms")
    if kind in _registered or not platforms.current_platform.is_cpu():
        return
    module, base = said.base
    made = _kernel(kind, said, getattr(importlib.import_module(f"{_KERNELS}.{module}"), base))
    if missing := getattr(made, "__abstractmethods__", None):
        raise TypeError(f"kernels must have {', '.join(sorted(missing))}")
    lists, cpu = importlib.import_module(_KERNELS), platforms.PlatformEnum.CPU
    try:
        lists.register_linear_kernel(made, cpu, kind)
    except ValueError:
        if not hasattr(lists, said.kernels):
            raise
        getattr(lists, said.kernels).setdefault(cpu, []).append(made)
    _registered.add(kind)


def _kernel(kind: str, said: _Kind, base: type) -> type:
    """A class of vLLM's kernels."""

    def is_supported(cls: type, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def can_implement(cls: type, config: Any) -> tuple[bool, str | None]:
        try:
            why = said.why_not(config)
        except (AttributeError, TypeError) as error:
            why = f"this version of vLLM describes the layer in words that breccia does not know: {error}"
        return not why, why or None

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        from breccia.nn import QuantizedLinear

        # Not a parameter or module of the layer: a view of those that it has.
        layer.__dict__["breccia_linear"] = QuantizedLinear(said.weight(self, layer).to("torch"))
        if said.copied:
            _let_go(self, layer)

    def apply_weights(self: Any, layer: Any, x: Any, bias: Any = None, **_: Any) -> Any:
        from breccia.verbs import linear

        out = getattr(self.config, "out_dtype", None) or x.dtype
        return linear(x, layer.__dict__["breccia_linear"].weight, bias, out)

    def never(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{said.name} multiplies in apply_weights")

    methods = {
        "__doc__": f"{kind.upper()} weights by inputs as they are, in breccia's products on the CPU.",
        "__module__": __name__,
        "is_supported": classmethod(is_supported),
        "can_implement": classmethod(can_implement),
        "get_min_capability": classmethod(lambda cls: -1),
        "process_weights_after_loading": process_weights_after_loading,
        "apply_weights": apply_weights,
        "apply_scaled_mm": never,
        "apply_block_scaled_mm": never,
        "apply_input_quant": False,
    }
    return type(said.name, (base,), methods)


def _let_go(kernel: Any, layer: Any) -> None:
    """Make a layer's own codes empty: the kernel has them in another order."""
    name = getattr(kernel, "w_q_name", "weight")
    parameter = getattr(layer, name)
    parameter.data = parameter.data.new_empty(0)


def _nvfp4(kernel: Any, layer: Any) -> Any:
    from breccia.bridges import from_modelopt

    # vLLM has made a multiplier of the global scale, whichever form the checkpoint has.
    parts = {"weight": layer.weight.data, "weight_scale": layer.weight_scale.data}
    return from_modelopt(parts | {"weight_scale_2": layer.weight_global_scale.data}, "nvfp4")


def _mxfp8(kernel: Any, layer: Any) -> Any:
    from breccia.bridges import from_modelopt

    return from_modelopt({"weight": layer.weight.data, "weight_scale": layer.weight_scale.data}, "mxfp8")


def _mxfp4(kernel: Any, layer: Any) -> Any:
    from breccia.bridges import from_compressed_tensors

    return from_compressed_tensors({"weight_packed": layer.weight.data, "weight_scale": layer.weight_scale.data})


def _mxfp6(kernel: Any, layer: Any) -> Any:
    from breccia.bridges.common import codes
    from breccia.bridges.scales import of_blocks
    from breccia.recipes import MXFP6BlockScaling
    from breccia.value import sixes

    # Quark packs four codes in three bytes as compressed-tensors does.
    data = sixes.unpack(codes(layer.weight.data, "weight"))
    recipe = MXFP6BlockScaling(fp6_format=_fp6_format(kernel.config))
    return of_blocks(data, layer.weight_scale.data, recipe)


def _fp6_format(config: Any) -> str:
    """ "E2M3" or "E3M2", of vLLM's description of a weight; "" of another one."""
    dtype = config.weight_quant_key.dtype
    exponent, mantissa = getattr(dtype, "exponent", 0), getattr(dtype, "mantissa", 0)
    return f"E{exponent}M{mantissa}" if (exponent, mantissa) in ((2, 3), (3, 2)) else ""


def _fp8(kernel: Any, layer: Any) -> Any:
    from breccia.bridges import from_compressed_tensors

    rows, columns = kernel.config.weight_quant_key.scale.group_shape
    if rows > 0 and columns > 0:
        return _fp8_blocks(kernel, layer)
    # vLLM has turned the weight, (K, N) now, over the memory of (N, K).
    weight, scale = layer.weight.data.t(), layer.weight_scale.data.float()
    return from_compressed_tensors(
        {"weight": weight, "weight_scale": scale.reshape(1 if scale.numel() == 1 else (-1, 1))}
    )


def _fp8_blocks(kernel: Any, layer: Any) -> Any:
    from breccia.bridges.common import as_numpy, codes
    from breccia.bridges.scales import made
    from breccia.layouts import PerBlockMN
    from breccia.recipes import Float8BlockScaling

    rows, columns = kernel.config.weight_quant_key.scale.group_shape
    scale = getattr(layer, "weight_scale_inv", None)  # which multiplies, too
    scale = (layer.weight_scale if scale is None else scale).data
    formats = {"float32": "fp32", "bfloat16": "bf16"}
    scale_format = formats.get(str(scale.dtype).removeprefix("torch."), "e8m0")
    recipe = Float8BlockScaling(block_m=rows, block_k=columns, scale_format=scale_format)
    return made(codes(layer.weight.data, "weight"), as_numpy(scale, "scale"), recipe, PerBlockMN(rows, columns))


def _not_fp8(config: Any) -> str:
    dtype = str(config.weight_quant_key.dtype)
    return "" if dtype == "torch.float8_e4m3fn" else f"weights must be torch.float8_e4m3fn, they are {dtype}"


def _not_fp6(config: Any) -> str:
    return "" if _fp6_format(config) else f"weights must be MXFP6, they are {config.weight_quant_key}"


def _not_integers(config: Any) -> str:
    kind = config.weight_type
    if kind.size_bits not in (4, 8) or not kind.is_integer() or kind.is_signed():
        return f"weights must be unsigned integers of 4 or 8 bits, they are {kind}"
    if kind.has_bias() and kind.bias != 1 << (kind.size_bits - 1):
        return f"codes must be offset by half their range, the offset is {kind.bias}"
    if not kind.has_bias() and not config.zero_points:
        return "codes without an offset must have zero points, there are none"
    columns = config.partition_weight_shape[0]
    if columns * kind.size_bits % 32:
        return f"rows must fill 32-bit words, {columns} codes of {kind.size_bits} bits do not"
    return ""


def _integers(kernel: Any, layer: Any) -> Any:
    from breccia.bridges import from_compressed_tensors

    weight, scale, zero = kernel._get_weight_params(layer)
    data, scales = weight.data, scale.data
    if weight.input_dim == 0:  # GPTQ's words, which run down the columns
        data = data.t()
    if scale.output_dim == 1:
        scales = scales.t()
    columns, rows = kernel.config.partition_weight_shape
    bits = kernel.config.weight_type.size_bits
    parts = {"weight_packed": data.contiguous(), "weight_scale": scales.contiguous()}
    if kernel.config.zero_points:
        zeros = zero.data if zero.output_dim == 0 else zero.data.t()
        parts["weight_zero_point"] = zeros.contiguous()
    parts["weight_shape"] = scales.new_tensor([rows, columns]).long()
    return from_compressed_tensors(parts, "int4" if bits == 4 else "int8-packed")


def _no_batches(config: Any) -> str:
    return "" if getattr(config, "bmm_batch_size", None) is None else _BATCHED


_FP8 = ("scaled_mm.ScaledMMLinearKernel", "FP8ScaledMMLinearKernel")
_BLOCKS = ("scaled_mm.BlockScaledMMLinearKernel", "Fp8BlockScaledMMLinearKernel")
_INTEGERS = ("mixed_precision.MPLinearKernel", "MPLinearKernel")
_FP8_BLOCKS = "_POSSIBLE_FP8_BLOCK_KERNELS"
_A16 = "_POSSIBLE_WFP8A16_KERNELS"
_KINDS: dict[str, _Kind] = {
    "nvfp4": _Kind(("nvfp4.base", "NvFp4LinearKernel"), "BrecciaNvFp4LinearKernel", _nvfp4),
    "mxfp8": _Kind(("mxfp8.Mxfp8LinearKernel", "Mxfp8LinearKernel"), "BrecciaMxfp8LinearKernel", _mxfp8, _no_batches),
    "mxfp4": _Kind(("mxfp4.base", "MxFp4LinearKernel"), "BrecciaMxFp4LinearKernel", _mxfp4),
    "mxfp6": _Kind(("mxfp6.base", "MxFp6LinearKernel"), "BrecciaMxFp6LinearKernel", _mxfp6, _not_fp6, copied=True),
    "fp8": _Kind(_FP8, "BrecciaFp8LinearKernel", _fp8, _not_fp8),
    "fp8_block": _Kind(_BLOCKS, "BrecciaFp8BlockLinearKernel", _fp8_blocks, _not_fp8, kernels=_FP8_BLOCKS),
    "fp8_a16": _Kind(_FP8, "BrecciaFp8A16LinearKernel", _fp8, _not_fp8, kernels=_A16),
    "mp": _Kind(_INTEGERS, "BrecciaIntegersLinearKernel", _integers, _not_integers, copied=True),
}
