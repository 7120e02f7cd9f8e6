# SPDX-License-Identifier: Apache-2.0
"""Products of layers whose weights are codes, with a gradient for the input whatever it is quantized to:

    y  = Q(x) · Wᵀ          Q: the recipe of the activations, or none
    dx = G(dy) · W          G: the recipe of the gradients, or none; zero where Q saturates, as of `cast_ste_clipped`

Backward passes keep the codes of W and a mask of x; values of W are made in products alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from breccia.autograd import block_width
from breccia.frameworks.torch import direct, launches
from breccia.frameworks.torch.meta import flatten, form_of, recipe_key, recipe_of, unflatten
from breccia.frameworks.torch.tensors import NAMESPACE, cast_here, dtype_name, parts_to_tensor, raw
from breccia.kernels import whole_array
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor

BF16 = "bf16"  # gradients rounded to bfloat16

_library = torch.library.Library("breccia", "FRAGMENT")
_library.define(
    "quantized_linear(Tensor x, str activations, str gradients, Tensor[] w, str w_key, Tensor? offsets, "
    "ScalarType dtype) -> (Tensor, Tensor)"
)
_library.define(
    "grouped_gradient(Tensor[] grad, str grad_key, Tensor[] w, str w_key, Tensor offsets, ScalarType dtype) -> Tensor"
)


def linear(
    x: Any, w: ScaledTensor, activations: ScalingRecipe | None, gradients: str, offsets: Any, dtype: torch.dtype
) -> Any:
    """A product (..., M, N) of floats (..., M, K), quantized to ``activations`` or as they are, by ``w`` (N, K), or by
    a stack (E, N, K) with the offsets of `breccia.grouped_matmul`. Its input gets a gradient, made of what
    `gradient_key` says."""
    y = None if offsets is not None else eager(x, w, activations, gradients, dtype)
    if y is not None:
        return y
    direct.check_transforms(x=x)
    quantized = "" if activations is None else recipe_key(activations)
    y, _ = torch.ops.breccia.quantized_linear(x, quantized, gradients, *flatten(w), offsets, dtype)
    return y


def eager(
    x: Any, w: ScaledTensor, activations: ScalingRecipe | None, gradients: str, dtype: torch.dtype
) -> torch.Tensor | None:
    """`linear` where torch's eager means record the gradient, in a few calls; None where an operator must."""
    if not direct.may_differentiate(x, w):
        return None
    made: torch.Tensor = _Linear.apply(x, w, activations, gradients, dtype)
    return made


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """The operator ``breccia::quantized_linear`` without offsets, and its gradient, past torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, w: ScaledTensor, activations: ScalingRecipe | None, gradients: str, dtype: torch.dtype
    ) -> Any:
        parts = _there(w)
        given, inside = (x, None) if activations is None else _quantized(x, activations)
        y = direct.linear(given, w, dtype, "exact")
        y = _product(given, w, None, dtype) if y is None else y
        y = y.detach() if y._is_view() else y  # of a view that a Function made, torch lets nobody write into
        ctx.form, ctx.parts, ctx.dtype, ctx.gradients = w._form, len(parts), x.dtype, gradients
        ctx.clips, ctx.grouped, ctx.weight = inside is not None, False, weakref.ref(w)
        ctx.save_for_backward(*parts, *(() if inside is None else (inside,)))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        saved, grad = ctx.saved_tensors, grad.to(ctx.dtype)  # which it was, before a bias was added to wider sums
        made = None if torch.is_grad_enabled() else _at_once(ctx, grad, saved)
        if made is None:
            return _gradient(ctx, grad, list(saved)), None, None, None, None
        if ctx.clips:
            made = torch.where(saved[ctx.parts], made, 0)
        return made, None, None, None, None


def _quantized(x: Any, activations: ScalingRecipe) -> tuple[ScaledTensor, Any]:
    """Q(x), and where x does not saturate."""
    scaled = _cast(x, activations)
    low, high = whole_array.saturation(NAMESPACE, scaled, raw)
    inside = ((x >= low) & (x <= high)).expand(x.shape).contiguous()
    return scaled, inside


def _at_once(ctx: Any, grad: Any, saved: Any) -> Any:
    """G(dy) · W, of which no gradient is asked for; None where torch must see how it is made."""
    if type(grad) is not torch.Tensor:
        return None
    w = ctx.weight()
    if w is None or any(one is not part for one, part in zip(saved, _there(w), strict=False)):
        w = ScaledTensor._of(ctx.form, *ctx.form.place(saved[: ctx.parts]))
    rows = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])
    made = direct.by_weight(_quantized_gradient(rows, ctx.gradients), w, ctx.dtype)
    if made is None or grad.ndim == 2:
        return made
    return made.reshape(*grad.shape[:-1], made.shape[-1])


def _there(w: ScaledTensor) -> list[Any]:
    return [part for part in w._held if part is not None]


def gradient_key(gradients: ScalingRecipe | str | None) -> str:
    """What operators are told of the gradients: a recipe, "bf16" or None for as they come."""
    return (gradients or "") if not isinstance(gradients, ScalingRecipe) else recipe_key(gradients)


def once_of_saved(operands: int) -> Callable[[Any], Any]:
    """Marks a backward pass `once_differentiable` whose results follow from what it saved, too: the gradient of a sum
    depends on nothing, and what is made of it on x and W all the same, where as many inputs as `operands` need
    gradients."""

    def mark(backward: Any) -> Any:
        once = once_differentiable(backward)

        @functools.wraps(backward)
        def marked(ctx: Any, grad: Any) -> Any:
            if torch.is_grad_enabled() and not grad.requires_grad and sum(ctx.needs_input_grad) >= operands:
                grad = grad.detach().requires_grad_()
            return once(ctx, grad)

        return marked

    return mark


def _product(x: Any, w: ScaledTensor, offsets: Any, dtype: torch.dtype) -> Any:
    if offsets is not None:
        return torch.ops.breccia.grouped_matmul(*flatten(x), *flatten(w), offsets, dtype)
    # On a CPU the operator remembers what the core knows of a weight, by where it lies; w is new each time.
    made = launches.linear(x, w, dtype) if w.data.is_cuda else None
    if made is not None:
        return made
    return torch.ops.breccia.matmul(*flatten(x), *flatten(w.mT), dtype, "exact")


def _quantized_linear(
    x: Any, activations: str, gradients: str, w: list[Any], w_key: str, offsets: Any, dtype: torch.dtype
) -> tuple[Any, Any]:
    if activations:
        given, inside = _quantized(x, recipe_of(activations))
    else:
        given, inside = x, torch.empty(0, dtype=torch.bool, device=x.device)
    return _product(given, unflatten(w, w_key), offsets, dtype), inside


def _quantized_linear_fake(
    x: Any, activations: str, gradients: str, w: list[Any], w_key: str, offsets: Any, dtype: torch.dtype
) -> tuple[Any, Any]:
    y = torch.empty((*x.shape[:-1], unflatten(w, w_key).shape[-2]), dtype=dtype, device=x.device)
    return y, torch.empty(x.shape if activations else (0,), dtype=torch.bool, device=x.device)


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    x, activations, ctx.gradients, w, w_key, offsets, _ = inputs
    ctx.form = form_of(w_key)
    ctx.dtype, ctx.parts, ctx.clips, ctx.grouped = x.dtype, len(w), bool(activations), offsets is not None
    saved = [*w, *([output[1]] if activations else []), *([offsets] if ctx.grouped else [])]
    ctx.save_for_backward(*saved)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
    return _gradient(ctx, grad, list(ctx.saved_tensors)), None, None, [None] * ctx.parts, None, None, None


def _gradient(ctx: Any, grad: Any, saved: list[Any]) -> Any:
    """That of x, which may be differentiated again where no codes are made of it."""
    rounded = ctx.gradients not in ("", BF16)
    made = (_of_input_once if rounded or ctx.grouped else _of_input)(ctx, grad, saved)
    return torch.where(saved[ctx.parts], made, 0) if ctx.clips else made


def _of_input(ctx: Any, grad: Any, saved: list[Any]) -> Any:
    """G(dy) · W."""
    weight = ScaledTensor._of(ctx.form, *ctx.form.place(saved[: ctx.parts]))
    operand = _quantized_gradient(grad.reshape(-1, grad.shape[-1]), ctx.gradients)
    if ctx.grouped:
        made = torch.ops.breccia.grouped_gradient(*flatten(operand), *flatten(weight), saved[-1], ctx.dtype)
    else:
        made = torch.ops.breccia.matmul(*flatten(operand), *flatten(weight), ctx.dtype, "exact")
    return made.reshape(*grad.shape[:-1], made.shape[-1])


# Of codes and of rows by many matrices the gradient of a gradient is an error, not zero.
_of_input_once: Any = once_differentiable(_of_input)


def _quantized_gradient(grad: Any, gradients: str) -> Any:
    """G(dy) as an operand: rows are padded with zeros to whole blocks, and then values stand for the codes."""
    if not gradients:
        return grad
    if gradients == BF16:
        return grad.to(torch.bfloat16)
    short = -grad.shape[-1] % block_width(recipe_of(gradients))
    if not short:
        return _cast(grad, recipe_of(gradients))
    padded = _cast(torch.nn.functional.pad(grad, (0, short)), recipe_of(gradients))
    values = torch.ops.breccia.dequantize(*flatten(padded), torch.float32)
    return values[:, : grad.shape[-1]].contiguous()


def _cast(x: Any, recipe: ScalingRecipe) -> ScaledTensor:
    x = x.detach()
    if direct.is_plain(x):
        return cast_here(x, recipe)
    if launches.quiet(x):
        return launches.cast(x, recipe)
    return parts_to_tensor(torch.ops.breccia.cast(x, recipe_key(recipe)), x.shape, recipe, dtype_name(x))


def _grouped_gradient(
    grad: list[Any], grad_key: str, w: list[Any], w_key: str, offsets: Any, dtype: torch.dtype
) -> Any:
    from breccia.verbs.grouped import by_expert

    return by_expert(unflatten(grad, grad_key), unflatten(w, w_key).mT, offsets.cpu(), dtype)


def _grouped_gradient_fake(
    grad: list[Any], grad_key: str, w: list[Any], w_key: str, offsets: Any, dtype: torch.dtype
) -> Any:
    rows, columns = unflatten(grad, grad_key).shape[0], unflatten(w, w_key).shape[-1]
    return torch.empty((rows, columns), dtype=dtype, device=w[0].device)


def _grouped_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.x_key, w, ctx.w_key, offsets, _ = inputs
    ctx.counts, ctx.dtype = (len(x), len(w)), x[0].dtype
    ctx.save_for_backward(*w, offsets)


def _grouped_backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
    of_x: list[Any] = [None] * ctx.counts[0]
    if not ctx.x_key and ctx.needs_input_grad[0][0]:
        of_x = [_of_rows_once(ctx, grad)]
    return of_x, None, [None] * ctx.counts[1], None, None, None


@once_differentiable  # type: ignore[untyped-decorator]
def _of_rows_once(ctx: Any, grad: Any) -> Any:
    *w, offsets = ctx.saved_tensors
    return torch.ops.breccia.grouped_gradient([grad], "", w, ctx.w_key, offsets, ctx.dtype)


for _name, _implementation, _fake in (
    ("quantized_linear", _quantized_linear, _quantized_linear_fake),
    ("grouped_gradient", _grouped_gradient, _grouped_gradient_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"breccia::{_name}", _fake, lib=_library)
torch.library.register_autograd("breccia::quantized_linear", _backward, setup_context=_context, lib=_library)
torch.library.register_autograd(
    "breccia::grouped_matmul", _grouped_backward, setup_context=_grouped_context, lib=_library
)
