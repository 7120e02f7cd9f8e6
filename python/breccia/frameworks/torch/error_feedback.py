# SPDX-License-Identifier: Apache-2.0
"""GPTQ on the device of a torch tensor: what ``cpp/src/quantize/gptq.cpp`` computes, with the factor of the moments in
float64 and the sums of remainders in torch's float32 products."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from breccia import _core
from breccia.frameworks.torch.tensors import NAMESPACE, data_dtype, raw
from breccia.kernels import triton
from breccia.kernels.triton.runtime import INTERPRETED
from breccia.kernels.whole_array import rules, values
from breccia.kernels.whole_array.quantize import Grid, pack, scaled_values
from breccia.kernels.whole_array.spec import Spec
from breccia.scaled_tensor import ScaledTensor

_RUN = 128  # columns whose remainders feed each other before a product feeds the rest
_CODED = ("e8m0", "e4m3")
_LOWEST = {"e8m0": 1, "torchao": 8}  # codes of scales that a search gives; of other E4M3 ones from 1


class Rounded(NamedTuple):
    """What became of a weight: see `breccia.calibration.error_feedback.GptqReport`."""

    scaled: ScaledTensor
    damp: float
    dead: int
    nearest: int


class Feed(NamedTuple):
    """Of one matrix of moments."""

    order: Any  # (K,) integers, the column that comes as number i
    shares: Any  # (K, K) float32; [i, c] is what a remainder of the i-th column adds to the c-th, 0 where i >= c


class _Blocks(NamedTuple):
    """One matrix's scales, of rows and columns of blocks: float32, and whether codes are made by multiplication."""

    decoded: Any
    factor: Any
    zero_point: Any
    block: tuple[int, int]


def check_moments(moments: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Moments in float32, (K, K) or (…, K, K) like w of a shape, or (…, K / g, g, g) of runs; and their diagonals."""
    one = (shape[-1], shape[-1])
    each = (*shape[:-2], *one)
    runs = _are_runs(tuple(moments.shape), shape)
    if not runs and tuple(moments.shape) not in (one, each):
        wanted = f"{one} or {each}" if len(each) > 2 else f"{one}"
        raise ValueError(f"moments must be {wanted} for w of shape {shape}, got shape {tuple(moments.shape)}")
    moments = moments.detach().to(torch.float32)
    wild = ~torch.isfinite(moments)
    if wild.any():
        raise ValueError(f"moments must be finite, got {float(moments[wild][0]):g}")
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    lowest = diagonal.min() if moments.numel() else torch.zeros(())
    if lowest < 0:
        raise ValueError(f"moments must not be negative on the diagonal, got {float(lowest):g}")
    return moments, diagonal.flatten(-2) if runs else diagonal


def _are_runs(moments: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether moments are of runs of g columns, (K / g, g, g) or so for each matrix of w, and not (…, K, K)."""
    if len(moments) < 3 or moments == (*shape[:-2], shape[-1], shape[-1]):
        return False
    *batch, count, group, also = moments
    return tuple(batch) in ((), shape[:-2]) and group == also and count * group == shape[-1]


def _of_runs(each: Any) -> Any:
    """(K / g, g, g) as (K, K), zero between runs."""
    count, group, _ = each.shape
    out = each.new_zeros((count, group, count, group))
    at = torch.arange(count, device=each.device)
    out[at, :, at, :] = each
    return out.reshape(count * group, -1)


def rounded(w: Any, moments: Any, nearest: ScaledTensor, act_order: bool, damp: float) -> Rounded:
    """Codes of floats (…, N, K) by GPTQ for the scales of ``nearest``, their cast by importance, the diagonal of the
    moments. Columns by falling diagonal (``act_order``), else as they stand; ``damp`` is added to the diagonal, in its
    mean."""
    grid, spec = Grid(tuple(w.shape), nearest.recipe), Spec.of(nearest.recipe)
    # Where scales are stored as numbers, codes are made by division, whatever the rule that chose them.
    spec = dataclasses.replace(spec, multiply=spec.scale in _CODED)
    if grid.empty:
        return Rounded(nearest, damp, 0, 0)
    shape, w = tuple(w.shape), w.detach().reshape(-1, *w.shape[-2:])
    matrices, rows, cols = w.shape
    runs = _are_runs(tuple(moments.shape), shape)
    moments = moments.reshape(-1, *moments.shape[-3:]) if runs else moments.reshape(-1, cols, cols)
    codes = values.codes(NAMESPACE, nearest, raw).to(torch.uint8).reshape(matrices, rows, cols)
    scale = _scales(nearest, spec, w)
    feed: Feed | None = None
    round_run = _round_by_kernel if _has_kernel(nearest) else _round_run
    most, dead, left = damp, 0, 0
    for index in range(matrices):
        if index == 0 or len(moments) > 1:
            one = _of_runs(moments[index]) if runs else moments[index]
            feed, took, unreached = _feed(one, act_order, damp)
            most, dead = max(most, took), dead + unreached
        if feed is None:
            left += 1
            continue
        codes[index] = _matrix(w[index], codes[index], feed, _blocks(scale, grid, index), spec, round_run)
    data = codes.reshape(nearest.shape)
    data = (pack(NAMESPACE, data) if spec.element.bits == 4 else data).view(data_dtype(spec.element.name))
    return Rounded(nearest._with(data=data), most, dead, left)


def _scales(scaled: ScaledTensor, spec: Spec, w: Any) -> rules.Scale:
    """As a cast has them: NaN where they are not of those that a search gives, whose codes stay."""
    zero = None if scaled.zero_point is None else scaled.zero_point.to(torch.float32)
    if spec.scale not in _CODED:
        decoded = values.scales(NAMESPACE, scaled, raw)
        return rules.Scale(decoded, decoded, decoded, zero)
    code = raw(scaled.scale).to(torch.int32)
    if spec.scale == "e8m0":
        made, last = rules.exponent_scale(NAMESPACE, code, spec.rule == "rceil"), 254
    else:
        amax = rules.stats_of(NAMESPACE, w.to(torch.float32).reshape(-1), (0,), False).amax.reshape(())
        level = rules.global_scale(NAMESPACE, amax) if spec.two_level else None
        made, last = rules.e4m3_scale(NAMESPACE, code, spec, level), 0x7E
    lowest = _LOWEST.get(spec.scale, _LOWEST.get(spec.rule, 1))
    made.decoded = torch.where((code < lowest) | (code > last), float("nan"), made.decoded)
    return made


def _blocks(scale: rules.Scale, grid: Grid, index: int) -> _Blocks:
    m, n = grid.block
    shape = (grid.matrices, -(-grid.rows // m), -(-grid.cols // n))
    at = 0 if grid.whole else index
    zero = None if scale.zero_point is None else scale.zero_point.reshape(shape)[at]
    return _Blocks(scale.decoded.reshape(shape)[at], scale.factor.reshape(shape)[at], zero, grid.block)


def _feed(moments: Any, act_order: bool, damp: float) -> tuple[Feed | None, float, int]:
    """What the moments say, the damping that they took and how many columns are dead; None where no damping makes
    them positive definite."""
    diagonal = moments.diagonal().contiguous()
    n = len(diagonal)
    order = torch.arange(n, device=moments.device)
    if act_order:
        order = torch.argsort(diagonal, descending=True, stable=True)
    backwards = order.flip(0)
    dead = int((diagonal == 0).sum())
    mean = float(diagonal.sum(dtype=torch.float64)) / (n - dead) if dead < n else 1.0
    lower = torch.tril(moments, -1)
    matrix = (lower + lower.T)[backwards][:, backwards].to(torch.float64)
    del lower
    own = diagonal[backwards].to(torch.float64)
    own = torch.where(own == 0, mean, own)
    while True:
        matrix.diagonal().copy_((own + damp * mean).to(torch.float32))
        factor, info = torch.linalg.cholesky_ex(matrix)
        if int(info) == 0:
            break
        if damp >= 1:
            return None, damp, dead
        damp = _core.more_damping(damp)
    del matrix
    upper = factor.flip(0, 1)
    shares = torch.triu(upper.div_(upper.diagonal().clone()), 1).to(torch.float32)
    return Feed(order, shares), damp, dead


def _has_kernel(scaled: ScaledTensor) -> bool:
    if not triton.TRITON_AVAILABLE or not (scaled.data.is_cuda or INTERPRETED):
        return False
    from breccia.kernels.triton.recipes import decodes

    return decodes(scaled)


def _matrix(w: Any, codes: Any, feed: Feed, blocks: _Blocks, spec: Spec, round_run: Any) -> Any:
    """uint8 codes of one matrix; ``codes`` are those that stay where a number or a scale is not finite."""
    x = w[:, feed.order].to(torch.float32)
    codes = codes[:, feed.order]
    for begin in range(0, x.shape[1], _RUN):
        end = min(begin + _RUN, x.shape[1])
        fed = x[:, :begin] @ feed.shares[:begin, begin:end] if begin else None
        round_run(x, codes, fed, feed, begin, end, blocks, spec)
    out = torch.empty_like(codes)
    out[:, feed.order] = codes
    return out


def _round_by_kernel(
    x: Any, codes: Any, fed: Any, feed: Feed, begin: int, end: int, blocks: _Blocks, spec: Spec
) -> None:
    from breccia.kernels.triton.casts.cast_feedback import round_run

    parts = (blocks.decoded, blocks.factor, blocks.zero_point, blocks.block)
    round_run(x, codes, fed, feed.shares, feed.order, begin, end, *parts, spec.element.name, spec.multiply)


def _round_run(x: Any, codes: Any, fed: Any, feed: Feed, begin: int, end: int, blocks: _Blocks, spec: Spec) -> None:
    """Columns [begin, end), a column after the other: weights, in whose place remainders come, and their codes."""
    m, n = blocks.block
    row_of = torch.arange(len(x), device=x.device) // m
    decode = rules.decode_table(NAMESPACE, spec.element.name, x)
    added = torch.zeros_like(x[:, begin:end]) if fed is None else fed
    columns = (feed.order[begin:end] // n).tolist()
    for at, block in enumerate(columns):
        value, column = x[:, begin + at], slice(at + 1, None)
        scale, factor = blocks.decoded[row_of, block], blocks.factor[row_of, block]
        zero = None if blocks.zero_point is None else blocks.zero_point[row_of, block]
        known = torch.isfinite(value) & torch.isfinite(scale)
        scaled = scaled_values(NAMESPACE, value + added[:, at], spec, rules.Scale(None, scale, factor))
        code = rules.encode(NAMESPACE, scaled, spec.element, zero)
        meant = decode[code.long() & 0xFF]
        rest = torch.where(known, value - (meant if zero is None else meant - zero) * scale, 0.0)
        codes[:, begin + at] = torch.where(known, code.to(torch.uint8), codes[:, begin + at])
        x[:, begin + at] = rest
        added[:, column] += rest[:, None] * feed.shares[begin + at, begin + at + 1 : end]
