# SPDX-License-Identifier: Apache-2.0
"""Products of floats by quantized weights without torch's dispatcher, which takes longer than a small product does:
what nothing of torch must see, on CPUs by the core and on GPUs by launch plans."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from breccia import _core
from breccia.frameworks.torch import launches, operators
from breccia.frameworks.torch.meta import flatten
from breccia.frameworks.torch.tensors import FLOATS, core_array
from breccia.scaled_tensor import ScaledTensor, data_of

EXACT_TYPES = (torch.Tensor, torch.nn.Parameter)
_DIRECT = (torch.float32, torch.float16, torch.bfloat16)  # of which every number is one of float32


def is_plain(*tensors: Any, writes: bool = True) -> bool:
    """Whether the core may read the tensors' memory and write to what torch makes now: no mode and no transform of
    torch must see the call. Without ``writes``, whether it may read alone."""
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if writes and (launches.is_any_transform_active() or launches.is_jit_tracing()):
        return False
    for x in tensors:  # noqa: SIM110 (a generator enters a function for each)
        if type(x) not in EXACT_TYPES or not x.is_cpu or launches.is_wrapped(x):
            return False
    return True


def check_tangents(**operands: Any) -> None:
    """Refuses operands with a derivative in forward mode, which our operators would take for zero. Called inside of
    ``forward_ad.dual_level()`` alone, for a call takes time."""
    for argument, operand in operands.items():
        data = data_of(operand)
        if isinstance(data, torch.Tensor) and forward_ad.unpack_dual(data).tangent is not None:
            raise NotImplementedError(
                f"{argument} must have no derivative in forward mode (torch.func.jvp, torch.autograd.forward_ad): "
                f"there are those of backward passes alone"
            )


def check_transforms(**operands: Any) -> None:
    """Refuses operands that a transform of torch.func follows: torch's own messages are about how operators are
    made."""
    if torch.compiler.is_dynamo_compiling() or not launches.is_any_transform_active():
        return
    for argument, operand in operands.items():
        data = data_of(operand)
        batched = launches.is_wrapped(data) and torch._C._functorch.is_batchedtensor(data)
        if batched or (launches.is_wrapped(data) and data.requires_grad):
            what = "torch.vmap" if batched else "torch.func.grad, vjp or jacrev"
            instead = "give the batch as an axis of it" if batched else "torch.autograd.grad gives its derivative"
            raise NotImplementedError(f"{argument} must not be what {what} goes over: {instead}")


def as_autocast(x: Any, argument: str = "input") -> Any:
    """An input as ``torch.autocast`` has those of linear layers: in its dtype, but for float64."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{argument} must be a torch tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{argument} must be of a float dtype, of 16 bits or more, got {x.dtype}")
    if forward_ad._current_level >= 0:
        check_tangents(**{argument: x})
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def needs_grad(operand: Any) -> bool:
    return not isinstance(operand, ScaledTensor) and operand.requires_grad and torch.is_grad_enabled()


def may_differentiate(x: Any, w: ScaledTensor) -> bool:
    """Whether `linear` takes x and w, and a gradient of x may be recorded by torch's eager means alone."""
    if type(w) is not ScaledTensor or type(x) not in EXACT_TYPES or x.dtype not in _DIRECT or not w._form.has_kernels:
        return False
    data = w.data
    if not (is_plain(x, data) if data.is_cpu else launches.quiet(x) and launches.quiet(data)):
        return False
    if x.ndim < 2 or data.ndim != 2 or x.layout is not torch.strided or x.is_nested or x.device != data.device:
        return False
    if forward_ad._current_level >= 0:
        return False
    return bool(x.shape[-1] == w.shape[1])


def linear(x: Any, w: ScaledTensor, kind: torch.dtype, precision: str, bias: Any = None) -> Any:
    """``x @ w.T + bias`` without a gradient, on GPUs without a bias; None where torch must see the call, or `matmul`
    has more to say of the operands."""
    if not w.data.is_cpu:
        launched = bias is None and precision == "exact" and type(w) is ScaledTensor
        return launches.linear(x, w, kind) if launched else None
    if not (is_plain(w.data, x) if bias is None else is_plain(w.data, x, bias)) or x.dtype not in _DIRECT:
        return None
    if x.ndim < 2 or w.data.ndim != 2 or x.layout is not torch.strided or x.is_nested:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return None
    if bias is not None and bias.dtype not in FLOATS:
        return None
    core = _core_of(w)
    count, depth = core.shape
    if x.shape[-1] != depth:
        return None
    out = torch.empty((*x.shape[:-1], count), dtype=kind)
    added = None if bias is None else core_array(bias, "bias")
    _core.linear_into(core_array(x, "x"), core, added, core_array(out, "out"), precision)
    return out


def by_weight(a: Any, w: ScaledTensor, kind: torch.dtype) -> Any:
    """``a @ w`` of rows (M, N), floats or a ScaledTensor, by a weight (N, K) as it lies: what a backward pass asks of
    `linear`'s operands; None where torch must see the call."""
    data = data_of(a)
    if w.data.is_cpu:
        if not is_plain(data, w.data):
            return None
        return operators.matmul_cpu(*flatten(a), *flatten(w), kind, "exact")
    if not (launches.quiet(data) and launches.quiet(w.data)):
        return None
    return launches.by_weight(a, w, kind)


def _core_of(w: ScaledTensor) -> Any:
    """The core's w, remembered as long as torch leaves the arrays where they are."""
    places = [w.data.data_ptr(), w.scale.data_ptr()]
    places += [part.data_ptr() for part in (w.zero_point, w.global_scale) if part is not None]
    known = w.__dict__.get("_placed_core")
    if known is None or known[0] != places:
        known = w.__dict__["_placed_core"] = (places, w.mT._core.T)
    return known[1]
