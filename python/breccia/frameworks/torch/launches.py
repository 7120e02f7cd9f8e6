# SPDX-License-Identifier: Apache-2.0
"""The verbs on CUDA tensors: repeated calls by launch plans (`breccia.kernels.triton.plans`), without torch's
dispatcher where nothing traces and nothing needs a gradient.

A plan is found by the verb and by all that decides its steps: the form of each operand (`form_number`) and what is
asked for. Here a microsecond counts: a whole call takes about twenty.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from breccia import _core
from breccia.frameworks.torch import tensors
from breccia.kernels import triton
from breccia.scaled_tensor import ScaledTensor

if TYPE_CHECKING:
    from breccia.recipes import ScalingRecipe

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MAX_PLANS = 4096
_MAX_TRIES = 2  # the first call of a process may do what no later one does, such as filling a cache
# Plans by key; in their place how often recording failed, where it did.
_plans: dict[tuple[Any, ...], Any] = {}
# Why there is no plan, for those that look for it.
refusals: dict[tuple[Any, ...], str] = {}
# Forms of ScaledTensors by what they consist of, so that keys of plans hold small integers.
_forms: dict[tuple[Any, ...], int] = {}
# Of torch.func. While a transform runs, it wraps whatever torch makes: that has no memory to write to.
is_any_transform_active = torch._C._are_functorch_transforms_active
is_jit_tracing = torch._C._is_tracing  # which takes what kernels write to for a constant
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_numbers = itertools.count()  # never the same one for two forms, whichever threads ask at once


def is_transformed(tensor: Any) -> bool:
    """Whether a transform, or ``torch.jit.trace``, must see what is done with a tensor."""
    return bool(is_any_transform_active() or is_wrapped(tensor) or is_jit_tracing())


def quiet(tensor: Any) -> bool:
    """Whether kernels may be launched on the tensor directly: no compiler, mode or transform of torch must see the
    call."""
    kind = type(tensor)
    return (
        (kind is torch.Tensor or kind is torch.nn.Parameter)
        and tensor.is_cuda
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not is_transformed(tensor)
        and triton.TRITON_AVAILABLE
    )


def cast(x: torch.Tensor, recipe: ScalingRecipe) -> ScaledTensor:
    """`breccia.cast` of floats for which `quiet` holds."""
    key: tuple[Any, ...] = ("cast", recipe._key, x.dtype, x.shape, x.stride(), x.get_device())  # type: ignore[attr-defined]
    made = _run(key, [x], lambda: _ops().cast_parts(x, recipe))
    return tensors.parts_to_tensor(made, x.shape, recipe, tensors.dtype_name(x))


def silu_mul(gate: torch.Tensor, up: torch.Tensor, recipe: ScalingRecipe) -> ScaledTensor:
    """`breccia.nn.functional.silu_mul` of floats for which `quiet` holds."""
    strides = (gate.stride(), up.stride())
    key: tuple[Any, ...] = ("silu mul", recipe._key, gate.dtype, gate.shape, *strides, gate.get_device())  # type: ignore[attr-defined]
    if key not in _plans and not _ops().fuses(gate, recipe):
        return cast(torch.nn.functional.silu(gate) * up, recipe)
    made = _run(key, [gate, up], lambda: _ops().silu_mul_parts(gate, up, recipe))
    return tensors.parts_to_tensor(made, gate.shape, recipe, tensors.dtype_name(gate))


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, recipe: ScalingRecipe
) -> tuple[ScaledTensor, torch.Tensor]:
    """`breccia.nn.functional.rms_norm` of floats for which `quiet` holds, and what it is the norm of."""
    operands = [x, weight] if residual is None else [x, weight, residual]
    forms = tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in operands)
    key: tuple[Any, ...] = ("rms norm", recipe._key, eps, forms, x.get_device())  # type: ignore[attr-defined]
    if key not in _plans and not _ops().fuses(x, recipe):
        total = x if residual is None else x + residual
        return cast(torch.nn.functional.rms_norm(total, x.shape[-1:], weight, eps), recipe), total
    made = _run(key, operands, lambda: _ops().rms_norm_parts(x, residual, weight, eps, recipe))
    scaled = tensors.parts_to_tensor(made, x.shape, recipe, tensors.dtype_name(x))
    return scaled, x if residual is None else made[-1]


def takes_amax(x: torch.Tensor, recipe: ScalingRecipe, amax: torch.Tensor) -> bool:
    """Whether `cast_with_amax` takes them."""
    return quiet(x) and x.numel() > 0 and amax.numel() == 1 and _ops().takes_amax(recipe)


def cast_with_amax(x: torch.Tensor, recipe: ScalingRecipe, amax: torch.Tensor) -> ScaledTensor:
    """`cast` of a part of a tensor whose largest magnitude is `amax`, one float32 on x's device."""
    amax = amax if amax.data_ptr() % 16 == 0 else amax.clone()  # as plans want it
    key = ("cast, amax", recipe._key, x.dtype, x.shape, x.stride(), x.get_device(), amax.shape)  # type: ignore[attr-defined]
    made = _run(key, [x, amax], lambda: _ops().cast_parts(x, recipe, amax))
    return tensors.parts_to_tensor(made, x.shape, recipe, tensors.dtype_name(x))


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of floats for which `quiet` holds, 0-d float32."""
    from breccia.kernels.triton.casts import cast_tensor

    x = x.detach()
    key = ("finite amax", x.dtype, x.shape, x.stride(), x.get_device())
    return _run(key, [x], lambda: [cast_tensor.finite_amax(x.reshape(-1, x.shape[-1]))])[0]


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """A matrix in memory of its own order, for whatever `quiet` holds or not; a transposed view by a kernel."""
    if not quiet(x) or x.is_contiguous():
        return x.contiguous()
    from breccia.kernels.triton.turn import contiguous_rows

    return contiguous_rows(x.detach()).contiguous()


def dequantize(scaled: ScaledTensor, kind: torch.dtype) -> torch.Tensor:
    """`breccia.dequantize` of a value for whose data `quiet` holds."""
    key = ("dequantize", form_number(scaled), kind)
    made: torch.Tensor = _run(key, _parts(scaled), lambda: [_ops().dequantize(scaled, kind).contiguous()])[0]
    return made


def unpack_sixes(packed: torch.Tensor) -> torch.Tensor:
    """`breccia.value.sixes.unpack` of bytes for which `quiet` holds."""
    from breccia.kernels.triton.conversions import sixes

    key = ("unpack sixes", packed.shape, packed.stride(), packed.get_device())
    return _run(key, [packed], lambda: [sixes.unpack(packed)])[0]


def linear(x: Any, w: ScaledTensor, kind: torch.dtype, activations: ScalingRecipe | None = None) -> torch.Tensor | None:
    """x (..., K), floats or a ScaledTensor, times a quantized w (N, K) transposed; None where that is for torch's
    dispatcher. Floats are quantized to `activations` first, if given, by the same plan."""
    if not quiet(w.data) or w.data.ndim != 2:
        return None
    if type(x) is ScaledTensor:
        data = x.data
        if not quiet(data) or data.ndim < 2:
            return None
        key: tuple[Any, ...] = ("linear", form_number(w), form_number(x), kind)
        operands = _parts(x) + _parts(w)
    elif type(x) is torch.Tensor and x.dtype in tensors.FLOATS and not (x.requires_grad and torch.is_grad_enabled()):
        if x.ndim < 2 or x.layout is not torch.strided or x.is_nested:
            return None
        if not x.is_cuda or is_transformed(x):
            return None
        data = x
        key = _key_of_linear(x, w, kind, activations)
        operands = [x, *_parts(w)]
    else:
        return None
    if data.get_device() != w.data.get_device():
        return None

    def call() -> list[torch.Tensor]:
        given = x if activations is None else _ops().cast(x, activations)
        return [triton.matmul(given, w.mT, kind).contiguous()]

    made: torch.Tensor = _run(key, operands, call)[0]
    return made


def by_values(a: Any, w: ScaledTensor, kind: torch.dtype) -> torch.Tensor | None:
    """``a @ w`` where kernels decode w (N, K) for it and torch multiplies: a plan decodes. None for other products."""
    if not quiet(w.data):
        return None
    from breccia.kernels.triton.products import running

    if not running.by_values(a, w, kind):
        return None
    if a.ndim < 2 or a.shape[-1] != w.shape[0] or a.device != w.data.device:
        return None
    return torch.matmul(a, dequantize(w, kind)).to(kind).contiguous()  # autocast may have chosen another dtype


def by_weight(a: Any, w: ScaledTensor, kind: torch.dtype) -> torch.Tensor:
    """``a @ w`` of rows (M, N), floats or a ScaledTensor, by w (N, K), for whose data `quiet` holds."""
    made = by_values(a, w, kind)
    if made is not None:
        return made
    scaled = type(a) is ScaledTensor
    form: Any = form_number(a) if scaled else (a.dtype, a.shape, a.stride(), a.get_device())
    operands = [*(_parts(a) if scaled else [a]), *_parts(w)]
    key = ("by weight", form_number(w), form, kind)
    return _run(key, operands, lambda: [triton.matmul(a, w, kind).contiguous()])[0]


def grouped_matmul(x: Any, w: ScaledTensor, offsets: torch.Tensor, kind: torch.dtype) -> torch.Tensor | None:
    """Rows of x (T, K), floats or a ScaledTensor, by the weights w (E, N, K) that offsets give them to; None where
    that is for torch's dispatcher."""
    scaled = type(x) is ScaledTensor
    data = x.data if scaled else x
    if type(w) is not ScaledTensor or not quiet(w.data) or not quiet(data) or not quiet(offsets):
        return None
    if data.get_device() != w.data.get_device() or (data.requires_grad and torch.is_grad_enabled()):
        return None
    operands = [*(_parts(x) if scaled else [x]), *_parts(w), offsets]
    key = _key_of_grouped(x, w, offsets, kind)
    made: torch.Tensor = _run(key, operands, lambda: [triton.grouped_matmul(x, w, offsets, kind)])[0]
    return made


def grouped_again(x: Any, w: Any, offsets: Any, out_dtype: Any) -> torch.Tensor | None:
    """`breccia.grouped_matmul` by the plan of a call whose operands had the form of these, so that they need no checks;
    None where there is none, or where torch must see the call."""
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    scaled, weights = type(x) is ScaledTensor, w.data
    data = x.data if scaled else x
    for tensor in (data, weights, offsets):
        if type(tensor) not in _PLAIN or is_transformed(tensor):
            return None
    device = weights.get_device()
    if device < 0 or data.get_device() != device or offsets.get_device() != device:
        return None
    if data.requires_grad and torch.is_grad_enabled():
        return None
    if type(out_dtype) is not torch.dtype:
        if out_dtype is not np.float32:  # the default, which follows the operand that is a tensor
            return None
        out_dtype = torch.float32 if scaled else x.dtype
    plan = _plans.get(_key_of_grouped(x, w, offsets, out_dtype), 0)
    if isinstance(plan, int) or device != torch._C._cuda_getDevice() or _plan_module().hooked():
        return None
    made = plan.run([*(_parts(x) if scaled else [x]), *_parts(w), offsets])
    return None if made is None else made[0]


def _key_of_grouped(x: Any, w: ScaledTensor, offsets: torch.Tensor, kind: torch.dtype) -> tuple[Any, ...]:
    form: Any = form_number(x) if type(x) is ScaledTensor else (x.dtype, x.shape, x.stride())
    return ("grouped matmul", form_number(w), form, offsets.dtype, offsets.shape, offsets.stride(), kind)


def _key_of_linear(
    x: torch.Tensor, w: ScaledTensor, kind: torch.dtype, activations: ScalingRecipe | None
) -> tuple[Any, ...]:
    """Of floats by a weight."""
    recipe = None if activations is None else activations._key  # type: ignore[attr-defined]
    return ("linear", form_number(w), x.dtype, x.shape, x.stride(), kind, recipe)


def repeated_linear(
    x: torch.Tensor,
    w: ScaledTensor,
    parts: dict[str, Any],
    names: tuple[str, ...],
    activations: ScalingRecipe | None,
    kind: torch.dtype,
) -> Any:
    """`linear` of w, whose parts are those of a dict under `names`, and floats of the form of x: what repeats it in
    less time than a plan takes to find, or None where there is no plan."""
    if not quiet(x) or not quiet(w.data):
        return None
    plan = _plans.get(_key_of_linear(x, w, kind, activations), 0)
    if isinstance(plan, int):
        return None
    return _core.RepeatedCall(
        plan=plan,
        like=x,
        parts=parts,
        names=names,
        unless=(torch._C._len_torch_dispatch_stack, is_any_transform_active, is_jit_tracing, _plan_module().hooked),
        wrapped=is_wrapped,
        current_device=torch._C._cuda_getDevice,
    )


def repeated(what: tuple[Any, ...], operands: list[torch.Tensor], call: Any) -> list[torch.Tensor]:
    """`call()`, the CUDA code of an operator of ``torch.ops.breccia``, which compiled code calls: by a plan, where
    ``what`` and the form of the operands have one."""
    forms = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()) for tensor in operands]
    return _run(("operator", *what, *forms), operands, call)


def _run(key: tuple[Any, ...], operands: list[Any], call: Any) -> list[torch.Tensor]:
    """`call()`, by its plan if it has one."""
    plan = _plans.get(key, 0)
    if plan == _MAX_TRIES or operands[0].get_device() != torch._C._cuda_getDevice():
        return call()  # type: ignore[no-any-return]
    plans = _plan_module()
    if plans.hooked():
        return call()  # type: ignore[no-any-return]
    if not isinstance(plan, int):
        repeated = plan.run(operands)
        return call() if repeated is None else repeated  # type: ignore[no-any-return]
    # Kernels are compiled for addresses that are multiples of 16, or that are not: plans are for the former.
    if any(tensor.data_ptr() % 16 for tensor in operands):
        return call()  # type: ignore[no-any-return]
    made, recorded, why = plans.record(call, operands)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
        refusals.clear()
    _plans[key] = plan + 1 if recorded is None else recorded
    if recorded is None:
        refusals[key] = why
    else:
        refusals.pop(key, None)
    return made  # type: ignore[no-any-return]


def _parts(scaled: ScaledTensor) -> list[Any]:
    parts = [scaled.data, scaled.scale]
    if scaled.zero_point is not None:
        parts.append(scaled.zero_point)
    if scaled.global_scale is not None:
        parts.append(scaled.global_scale)
    return parts


def form_number(scaled: ScaledTensor) -> int:
    """A number for the form of a tensor (recipe, layout, device, dtypes, shapes and strides), remembered on the tensor,
    which is immutable."""
    made = scaled.__dict__
    form: int | None = made.get("_torch_form")
    if form is None:
        parts = (scaled.data, scaled.scale, scaled.zero_point, scaled.global_scale)
        shapes = tuple(None if part is None else (part.dtype, part.shape, part.stride()) for part in parts)
        what = (scaled.recipe._key, scaled.layout._key, made["_packing"], made["_original_dtype"])
        form = _forms.setdefault((*what, scaled.data.get_device(), *shapes), next(_numbers))
        made["_torch_form"] = form
    return form


@functools.cache
def _plan_module() -> Any:
    from breccia.kernels.triton import plans

    return plans


def _ops() -> Any:
    from breccia.kernels.triton import ops

    return ops
