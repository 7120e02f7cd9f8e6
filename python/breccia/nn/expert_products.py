# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts whose products, forward and backward, are of FP8 codes with scales that are powers of two
(after FP8-Flow-MoE, arXiv:2511.02302): each tensor is cast once, and the codes of transposes follow from codes.

    h = p · SwiGLU(Q(x) · Q(W)ᵀ), y = Q(h) · Q(V)ᵀ    W: an expert's gate and up, V: its down, p: its token's weight
    dh = Q(dy) · Q(V), du = the gradient of SwiGLU, dx = Q(du) · Q(W)
    dV = T(Q(dy)) · T(Q(h))ᵀ, dW = T(Q(du)) · T(Q(x))ᵀ    T: `breccia.transpose`

Rows are in the order of their experts, each expert's padded with zeros to a multiple of 128. Explicit casts are two, of
x and of dy; those of h and du are a part of SwiGLU and of its gradient.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import is_fake

from breccia import verbs
from breccia.frameworks.torch import launches
from breccia.frameworks.torch.direct import is_plain
from breccia.frameworks.torch.gradients import once_of_saved
from breccia.frameworks.torch.tensors import NATIVE, cast_here, parts_to_tensor
from breccia.kernels import triton
from breccia.recipes import Float8BlockScaling
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs.grouped import grouped_matmul
from breccia.verbs.transposing import transpose

GROUP = 128
ROWS = Float8BlockScaling(scale_format="e8m0")
SQUARES = Float8BlockScaling(block_m=GROUP, scale_format="e8m0")  # of weights: their transpose has the same codes


class Routes(NamedTuple):
    """Which row is whose. R rows: those of expert e are ``offsets[e]`` to ``offsets[e + 1]``, multiples of 128."""

    offsets: Any  # (E + 1,) int32
    source: Any  # (R,) int32, the token of a row; -1 for none
    place: Any  # (T, k) int32, the row of a token's choice; -1 where it chose no expert


def routes(index: Any, experts: int) -> Routes:
    """Routes of choices (T, k), without looking at them on the host; numbers that are no expert's choose none."""
    tokens, choices = index.shape
    flat = index.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    mine, order = torch.sort(flat, stable=True)
    begins = torch.searchsorted(mine, torch.arange(experts + 1, device=index.device))  # of each expert among choices
    ends = ((begins.diff() + GROUP - 1) // GROUP * GROUP).cumsum(0)
    rows = -(-(flat.numel() + experts * (GROUP - 1)) // GROUP) * GROUP  # at most
    first = torch.nn.functional.pad(ends, (1, 0))  # of each expert; those of none begin behind all
    chosen = mine < experts
    row = torch.where(chosen, (first - begins)[mine] + torch.arange(flat.numel(), device=index.device), rows)
    source = torch.full((rows + 1,), -1, dtype=torch.int32, device=index.device)
    source[row] = (order // choices).int()
    place = torch.empty(flat.numel(), dtype=torch.int32, device=index.device)
    place[order] = torch.where(chosen, row, -1).int()
    return Routes(first.int(), source[:rows], place.reshape(tokens, choices))


def _kernels(x: Any) -> Any:
    """The module of kernels for tensors like x, or None."""
    if not (x.is_cuda and triton.TRITON_AVAILABLE):
        return None
    from breccia.kernels.triton import experts

    return experts


def _repeated(what: str, operands: list[Any], call: Any) -> list[Any]:
    """`call()`, which launches kernels on operands of a GPU: by a plan where one can be."""
    return launches.repeated((what,), operands, call) if launches.quiet(operands[0]) else call()


def _bytes(scaled: ScaledTensor) -> tuple[Any, Any]:
    return scaled.data.view(torch.uint8), scaled.scale.view(torch.uint8)


def _tensor_of(parts: list[Any], dtype: str, recipe: Float8BlockScaling = ROWS) -> ScaledTensor:
    """Of codes and scales as bytes."""
    data, scale = parts
    made = [data.view(NATIVE[recipe.element]), scale.view(NATIVE["float8_e8m0fnu"])]
    return parts_to_tensor(made, data.shape, recipe, dtype)


def permute(q: ScaledTensor, source: Any) -> ScaledTensor:
    """Rows of codes in the order of `source`; zeros under the smallest scale where it is negative."""
    kernels = _kernels(q.data)
    if kernels is not None:
        given = [*_bytes(q), source]
        return _tensor_of(_repeated("permute", given, lambda: kernels.permute(*given)), q.original_dtype)
    with_zeros = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in _bytes(q))  # which -1 finds
    return _tensor_of([part[source.long()] for part in with_zeros], q.original_dtype)


def swiglu(x: Any, weights: Any) -> ScaledTensor:
    """Codes of weights · silu(gate) · up in float32, for x (R, 2 I), gate and up beside each other."""
    kernels = _kernels(x)
    if kernels is not None:
        return _tensor_of(_repeated("swiglu", [x, weights], lambda: kernels.swiglu(x, weights, ROWS)), "float32")
    gate, up = x.float().chunk(2, -1)
    return _cast(weights[:, None] * (torch.nn.functional.silu(gate) * up))


def swiglu_gradient(x: Any, weights: Any, grad: Any) -> tuple[ScaledTensor, ScaledTensor, Any]:
    """Codes of the gradient of x, those that `swiglu` made, and the gradient of the weights."""
    kernels = _kernels(x)
    if kernels is not None:
        given = [x, weights, grad]
        made = _repeated("swiglu gradient", given, lambda: kernels.swiglu_gradient(*given, ROWS))
        return _tensor_of(made[:2], "float32"), _tensor_of(made[2:4], "float32"), made[4].sum(0)
    gate, up = x.float().chunk(2, -1)
    silu, s, grad = torch.nn.functional.silu(gate), torch.sigmoid(gate), grad.float()
    of_weights = (grad * (silu * up)).sum(-1)
    again = _cast(weights[:, None] * (silu * up))
    grad = weights[:, None] * grad
    return _cast(torch.cat([grad * up * (s * (1 + gate * (1 - s))), grad * silu], -1)), again, of_weights


def _cast(values: Any) -> ScaledTensor:
    """The cast that is a part of SwiGLU and of its gradient."""
    if is_plain(values):
        return cast_here(values, ROWS)
    return verbs.cast(values, ROWS)


def combine(y: Any, place: Any) -> Any:
    """The sum of each token's rows."""
    kernels = _kernels(y)
    if kernels is not None:
        return _repeated("combine", [y, place], lambda: [kernels.combine(y, place)])[0]
    return torch.nn.functional.pad(y, (0, 0, 0, 1))[place.long()].float().sum(1).to(y.dtype)


def turned_weights(w: ScaledTensor) -> ScaledTensor:
    """(E, K, N) of weights (E, N, K) with a scale for each square: the same codes."""
    codes, scale = _bytes(w)
    kernels = _kernels(codes)
    if kernels is None:
        turned = codes.transpose(1, 2).contiguous()
    else:
        codes = codes.contiguous()
        turned = _repeated("turn stack", [codes], lambda: [kernels.turn_stack(codes)])[0]
    return _tensor_of([turned, scale.transpose(1, 2).contiguous()], w.original_dtype, SQUARES)


def _turned(q: ScaledTensor, source: Any) -> list[Any]:
    """Codes and scales, bytes both, of the transpose of rows by a kernel, with a scale for each square."""
    from breccia.kernels.triton.conversions import transpose as turning

    codes, scale = _bytes(q)

    def call() -> list[Any]:
        made = turning.transpose(codes, scale, "e4m3", GROUP, source, squares=True, count=False)
        return [made.codes, made.scale]

    return _repeated("turn rows", [codes, scale] if source is None else [codes, scale, source], call)


def weight_gradient(left: ScaledTensor, right: ScaledTensor, routed: Routes, of: tuple[bool, bool], dtype: Any) -> Any:
    """(E, N, K): for each expert the transpose of its rows of left (·, N) times its rows of right (·, K). `of`: whether
    rows of left and of right are those of tokens."""
    sources = [routed.source if tokens else None for tokens in of]
    if _kernels(left.data) is not None:
        from breccia.kernels.triton.products.experts_gradient import experts_gradient

        a, b = (_turned(q, source) for q, source in zip((left, right), sources, strict=True))
        return experts_gradient(a[0], b[0], a[1], b[1], routed.offsets, dtype)
    if left.data.is_meta or is_fake(left.data):
        return left.data.new_empty((len(routed.offsets) - 1, left.shape[1], right.shape[1]), dtype=dtype)
    q, r = (
        transpose(q if source is None else permute(q, source)).value
        for q, source in zip((left, right), sources, strict=True)
    )
    parts = [
        verbs.matmul(q[:, start:end], r[:, start:end].mT, dtype)
        for start, end in itertools.pairwise(routed.offsets.tolist())
    ]
    return torch.stack(parts)


class _Experts(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, gate_up: Any, down: Any, index: Any, weights: Any) -> Any:
        routed = routes(index, gate_up.shape[0])
        q = verbs.cast(x.detach(), ROWS)
        w, v = verbs.cast(gate_up.detach(), SQUARES), verbs.cast(down.detach(), SQUARES)
        inner = grouped_matmul(permute(q, routed.source), w, routed.offsets, x.dtype)
        given = _given(weights, routed)
        y = grouped_matmul(swiglu(inner, given), v, routed.offsets, x.dtype)
        scaled = (q, w, v)
        ctx.forms = [one._form for one in scaled]
        parts = [part for one in scaled for part in (one.data, one.scale)]
        ctx.save_for_backward(*parts, inner, given, *routed)
        ctx.dtypes = (gate_up.dtype, down.dtype, weights.dtype)
        return combine(y, routed.place)

    @staticmethod
    @once_of_saved(1)
    def backward(ctx: Any, grad: Any) -> Any:
        *parts, inner, given, offsets, source, place = ctx.saved_tensors
        routed = Routes(offsets, source, place)
        pairs = zip(ctx.forms, parts[::2], parts[1::2], strict=True)
        q, w, v = (ScaledTensor._of(form, data, scale) for form, data, scale in pairs)
        of_x, of_w, of_v, _, of_weights = ctx.needs_input_grad
        dy = verbs.cast(grad.contiguous(), ROWS)
        dh = grouped_matmul(permute(dy, source), turned_weights(v), offsets, inner.dtype)
        du, h, d_given = swiglu_gradient(inner, given, dh)
        made: list[Any] = [None] * 5
        if of_x:
            made[0] = combine(grouped_matmul(du, turned_weights(w), offsets, inner.dtype), place)
        if of_w:
            made[1] = weight_gradient(du, q, routed, (False, True), ctx.dtypes[0])
        if of_v:
            made[2] = weight_gradient(dy, h, routed, (True, False), ctx.dtypes[1])
        if of_weights:
            made[4] = torch.nn.functional.pad(d_given, (0, 1))[place.long()].to(ctx.dtypes[2])  # -1 finds zero
        return tuple(made)


def _given(weights: Any, routed: Routes) -> Any:
    """(R,) float32: what tokens give their rows; rows of none get nothing."""
    rows = len(routed.source)
    given = torch.zeros(rows + 1, dtype=torch.float32, device=weights.device)
    given[torch.where(routed.place < 0, rows, routed.place).long().reshape(-1)] = weights.detach().float().reshape(-1)
    return given[:rows]


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="torch.compile leaves ScaledExperts out: Inductor has no E8M0 in code for CPUs. Compile without fullgraph"
)
def apply(x: Any, gate_up: Any, down: Any, index: Any, weights: Any) -> Any:
    """The layer of x (T, H): weights (E, 2 I, H) and (E, H, I), choices and what they give (T, k)."""
    return _Experts.apply(x, gate_up, down, index, weights)
