# SPDX-License-Identifier: Apache-2.0
"""Values as GGUF's types of blocks that no recipe makes: Q4_1, Q5_0, Q5_1 and IQ4_NL, blocks of 32, and the K-quants,
super-blocks of 256 with two levels of scales.

Each run of 16 or 32 values gets the scale, and where the type has one the minimum, of the least squares among several
first guesses. In K-quants these are rounded to integers of a few bits under one float16 scale (and minimum) of the
super-block, and with them every code is found anew, the integers also one step up and down. With an importance of each
column, squares count that many times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from breccia.bridges.common import Array
from breccia.bridges.gguf.blocks import TYPES
from breccia.bridges.gguf.values import IQ4

_AT_ONCE = 1 << 16  # values: their arrays stay in a core's cache
_TINY = np.float16(2**-24)  # the least float16 above zero
# How many steps more than there are codes a first guess has in the range of the values: the ends may be clipped.
_GUESSES = np.linspace(-2.0, 0.6, 14)
# With importance, more of an end that hardly matters may be.
_WEIGHTED_GUESSES = np.concatenate([_GUESSES, np.linspace(0.8, 6.0, 14)])
_LARGE = "x must have values of which the scales fit float16 in {}, the largest is {:g}"
# Puts other codes in the place of the nearest: (values (N, K), scales and offsets of runs (N, K / run), what codes
# stand for, codes (N, K)). Element k of a row is levels[code] * scale + offset.
Feed = Callable[[Array, Array, Array, Array, Array], None]


class _Type(NamedTuple):
    """A type of blocks.

    Attributes:
        levels: what codes stand for, float32 in rising order.
        fit: (blocks in float32, weights in float64 or None) → fields: the float16 scales, integers of runs, codes.
        steps: fields but the codes → scales and offsets of runs, float32.
        pack: all fields → bytes of a block, in parts.
    """

    levels: Array
    fit: Callable[[Array, Array | None], tuple[Array, ...]]
    steps: Callable[..., tuple[Array, Array]]
    pack: Callable[..., list[Array]]


def _quantize(kind: str, x: Array, weights: Array | None = None, feed: Feed | None = None) -> Array:
    """Bytes of float32 rows, given what their columns count; ``feed`` chooses codes of a matrix."""
    row, (_, size, nbytes) = _TYPES[kind], TYPES[kind]
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, size)
    if not np.isfinite(blocks).all():
        raise ValueError(f"x must be finite to be quantized to {kind}, it has infinities or NaN")
    shape = (*x.shape[:-1], x.shape[-1] // size * nbytes)
    if not len(blocks):
        return np.empty(shape, np.uint8)
    if weights is not None:
        weights = np.broadcast_to(weights.astype(np.float64), x.shape).reshape(-1, size)
    step = _AT_ONCE // size
    fitted = []
    for at in range(0, len(blocks), step):
        piece = blocks[at : at + step]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            fitted.append(row.fit(piece, None if weights is None else weights[at : at + step]))
        if not np.isfinite(fitted[-1][0]).all():
            raise ValueError(_LARGE.format(kind, np.abs(piece).max()))
    *fields, codes = (np.concatenate(field) for field in zip(*fitted, strict=True))
    if feed is not None:
        scale, offset = (np.ascontiguousarray(steps).reshape(len(x), -1) for steps in row.steps(*fields))
        feed(blocks.reshape(x.shape), scale, offset, row.levels, codes.reshape(x.shape))
    packed: Array = np.concatenate(row.pack(*fields, codes), axis=-1)
    return packed.reshape(shape)


def _sum(x: Array) -> Array:
    """Over a run. The order of additions is that of the run alone, however many there are."""
    total: Array = x.sum(axis=-1)
    return total


def _half(scale: Array) -> Array:
    """Scales of blocks as float16, never zero where there is something to scale."""
    halves: Array = np.copysign(np.maximum(np.abs(scale).astype(np.float16), _TINY), scale)
    return np.where(scale != 0, halves, np.float16(0))


def _levels(fitted: Array, scale: Array, low: int, high: int) -> Array:
    """Scales of runs as integers under the one of their super-block."""
    levels: Array = np.clip(np.nan_to_num(np.rint(fitted / scale.astype(np.float64)[:, None])), low, high)
    return levels


def _times(x: Array, weights: Array | None) -> Array:
    return x if weights is None else x * weights


def _line(x: Array, weights: Array | None, top: int) -> tuple[Array, Array]:
    """Scale and minimum of each run: ``scale * q - least`` with q from 0 to ``top``, of the least squared error."""
    count = x.shape[-1] if weights is None else _sum(weights)
    low = np.minimum(x.min(axis=-1), 0)
    span = x.max(axis=-1) - low
    wide = x.astype(np.float64)
    weighted = _times(wide, weights)
    x1, x2 = _sum(weighted), _sum(weighted * wide)
    best = np.full(low.shape, np.inf)
    scale, least = np.zeros(low.shape), -low.astype(np.float64)
    for guess in _GUESSES if weights is None else _WEIGHTED_GUESSES:
        q = np.clip(np.rint((wide - low[..., None]) * np.where(span > 0, (top + guess) / span, 0)[..., None]), 0, top)
        weighted_q = _times(q, weights)
        q1, q2, xq = _sum(weighted_q), _sum(weighted_q * q), _sum(weighted * q)
        slope = (count * xq - x1 * q1) / (count * q2 - q1 * q1)
        offset = (q2 * x1 - q1 * xq) / (count * q2 - q1 * q1)
        through = ~(offset <= 0)  # a minimum above zero has no form: a line through zero instead
        slope, offset = np.where(through, xq / q2, slope), np.where(through, 0, offset)
        error = x2 + slope * (slope * q2 + 2 * offset * q1 - 2 * xq) + offset * (count * offset - 2 * x1)
        better = (error < best) & (slope > 0)
        best = np.where(better, error, best)
        scale, least = np.where(better, slope, scale), np.where(better, -offset, least)
    return scale, least


def _affine(x: Array, weights: Array | None, *, run: int, top: int, most: int) -> tuple[Array, ...]:
    """Super-blocks of runs with minimums: both float16 scales (n, 2), the integers of runs' scales and minimums, and
    codes; ``most`` is the largest of the integers."""
    runs = x.reshape(len(x), -1, run)
    weights = None if weights is None else weights.reshape(runs.shape)
    scale, least = _line(runs, weights, top)
    d, m = (_half(v.max(axis=-1) / most) for v in (scale, least))
    best = np.full(scale.shape, np.inf)
    levels, leasts = _levels(scale, d, 0, most), _levels(least, m, 0, most)
    chosen = [levels, leasts, np.zeros(runs.shape, np.float32)]
    for up, more in ((a, b) for a in (0, -1, 1) for b in (0, -1, 1)):
        one, two = np.clip(levels + up, 0, most), np.clip(leasts + more, 0, most)
        s = d.astype(np.float32)[:, None] * one.astype(np.float32)
        o = m.astype(np.float32)[:, None] * two.astype(np.float32)
        q = np.clip(np.nan_to_num(np.rint((runs + o[..., None]) / s[..., None])), 0, top)
        error = _sum(_times(np.square((s[..., None] * q - o[..., None] - runs).astype(np.float64)), weights))
        _keep(best, error, chosen, (one, two, q))
    codes = chosen[2].astype(np.uint8).reshape(x.shape)
    return np.stack([d, m], axis=-1), chosen[0].astype(np.uint8), chosen[1].astype(np.uint8), codes


def _affine_steps(halves: Array, levels: Array, leasts: Array) -> tuple[Array, Array]:
    d, m = (halves[:, i : i + 1].astype(np.float32) for i in (0, 1))
    return d * levels, -(m * leasts)


def _nearest(t: Array, levels: Array) -> Array:
    """The number of the level nearest to each of some numbers."""
    if levels[-1] - levels[0] != len(levels) - 1:
        return np.searchsorted((levels[1:] + levels[:-1]) / 2, t)
    found: Array = np.clip(np.nan_to_num(np.rint(t)), levels[0], levels[-1]) - levels[0]
    return found.astype(np.intp)


def _through_zero(runs: Array, weights: Array | None, levels: Array) -> Array:
    """Scale of each run, which multiplies levels, of the least squared error."""
    wide = runs.astype(np.float64)
    weighted = _times(wide, weights)
    largest = np.take_along_axis(wide, np.abs(wide).argmax(axis=-1)[..., None], -1)[..., 0]
    best, fitted = np.full(largest.shape, np.inf), np.zeros(largest.shape)
    low, step = float(levels[0]), float(levels[1] - levels[0])
    for guess in _GUESSES if weights is None else _WEIGHTED_GUESSES:  # the largest value gets the code with no opposite
        times = np.where(largest != 0, (low - guess * step) / largest, 0)[..., None]
        q = levels[_nearest(wide * times, levels)].astype(np.float64)
        xq, q2 = _sum(weighted * q), _sum(_times(q, weights) * q)
        better = (error := -xq * xq / q2) < best
        best, fitted = np.where(better, error, best), np.where(better, xq / q2, fitted)
    return fitted


def _symmetric(x: Array, weights: Array | None, *, run: int, levels: Array, most: int) -> tuple[Array, Array, Array]:
    """Super-blocks of runs without minimums: the float16 scale (n, 1), the integers of runs' scales, -``most`` to
    ``most`` - 1, and codes."""
    runs = x.reshape(len(x), -1, run)
    weights = None if weights is None else weights.reshape(runs.shape)
    fitted = _through_zero(runs, weights, levels)
    d = _half(np.abs(fitted).max(axis=-1) / (most - 1))
    integers = _levels(fitted, d, -most, most - 1)
    best = np.full(fitted.shape, np.inf)
    chosen = [integers, np.zeros(runs.shape, np.uint8)]
    for up in (0, -1, 1):
        one = np.clip(integers + up, -most, most - 1)
        s = d.astype(np.float32)[:, None] * one.astype(np.float32)
        code = _nearest(runs / s[..., None], levels)
        error = _sum(_times(np.square((s[..., None] * levels[code] - runs).astype(np.float64)), weights))
        _keep(best, error, chosen, (one, code))
    return d[:, None], chosen[0].astype(np.int8), chosen[1].reshape(x.shape)


def _symmetric_steps(halves: Array, integers: Array | float = 1.0) -> tuple[Array, Array]:
    scale = halves.astype(np.float32) * np.float32(integers)
    return scale, np.zeros_like(scale)


def _one_scale(x: Array, weights: Array | None, *, levels: Array) -> tuple[Array, Array]:
    """Blocks of one float16 scale (n, 1), and codes."""
    d = _half(_through_zero(x, weights, levels))[:, None]
    return d, _nearest(x / d.astype(np.float32), levels).astype(np.uint8)


def _one_line(x: Array, weights: Array | None, *, top: int) -> tuple[Array, Array]:
    """Blocks of a float16 scale and a minimum (n, 2), and codes."""
    scale, least = _line(x, weights, top)
    d, m = _half(scale)[:, None], _half(-least)[:, None]
    q = np.clip(np.nan_to_num(np.rint((x - m.astype(np.float32)) / d.astype(np.float32))), 0, top)
    return np.concatenate([d, m], axis=-1), q.astype(np.uint8)


def _line_steps(halves: Array) -> tuple[Array, Array]:
    return halves[:, :1].astype(np.float32), halves[:, 1:].astype(np.float32)


def _keep(best: Array, error: Array, chosen: list[Array], given: tuple[Array, ...]) -> None:
    """Take over what is given for the runs whose error it lowers."""
    better = error < best
    best[better] = error[better]
    for into, new in zip(chosen, given, strict=True):
        into[better] = new[better]


def _bytes(scales: Array) -> Array:
    return np.ascontiguousarray(scales.astype("<f2")).view(np.uint8)


def _planes(fields: Array, bits: int) -> Array:
    """Fields of ``bits`` bits in runs of 32 bytes: field j of the bytes has elements 32 j … 32 j + 31."""
    many = 8 // bits
    runs = fields.reshape(len(fields), -1, many, 32)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: Array = np.bitwise_or.reduce(runs << shifts, axis=2)
    return packed.reshape(len(fields), -1)


def _six_bit(scale: Array, least: Array) -> Array:
    """Eight scales and eight minimums of 6 bits: the last four of each are split over three groups of bytes."""
    low = (scale[:, :4] | (scale[:, 4:] >> 4 << 6), least[:, :4] | (least[:, 4:] >> 4 << 6))
    return np.concatenate([*low, (scale[:, 4:] & 15) | (least[:, 4:] << 4)], axis=-1)


def _q2_k(scales: Array, levels: Array, leasts: Array, q: Array) -> list[Array]:
    return [levels | (leasts << 4), _planes(q, 2), _bytes(scales)]


def _q3_k(scales: Array, levels: Array, q: Array) -> list[Array]:
    s = (levels + 32).astype(np.uint8)
    low = (s[:, :8] & 15) | (s[:, 8:] << 4)
    high = np.bitwise_or.reduce((s >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=1)
    return [_planes(q >> 2, 1), _planes(q & 3, 2), low, high, _bytes(scales)]


def _q4_k(scales: Array, levels: Array, leasts: Array, q: Array) -> list[Array]:
    return [_bytes(scales), _six_bit(levels, leasts), _planes(q, 4)]


def _q5_k(scales: Array, levels: Array, leasts: Array, q: Array) -> list[Array]:
    return [_bytes(scales), _six_bit(levels, leasts), _planes(q >> 4, 1), _planes(q & 15, 4)]


def _q6_k(scales: Array, levels: Array, q: Array) -> list[Array]:
    halves = (q & 15).reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(q), -1)
    return [low, _planes(q >> 4, 2), levels.view(np.uint8), _bytes(scales)]


def _nibbles(scales: Array, q: Array) -> list[Array]:
    return [_bytes(scales), (q[:, :16] & 15) | (q[:, 16:] << 4)]


def _fifth_bits(scales: Array, q: Array) -> list[Array]:
    head, low = _nibbles(scales, q)
    return [head, np.packbits(q >> 4, axis=-1, bitorder="little"), low]


def _integers(low: int, count: int) -> Array:
    return np.arange(low, low + count, dtype=np.float32)


def _with_minimums(run: int, bits: int, most: int, pack: Callable[..., list[Array]]) -> _Type:
    top = 2**bits - 1
    return _Type(_integers(0, top + 1), partial(_affine, run=run, top=top, most=most), _affine_steps, pack)


def _without(bits: int, most: int, pack: Callable[..., list[Array]]) -> _Type:
    levels = _integers(-(2 ** (bits - 1)), 2**bits)
    return _Type(levels, partial(_symmetric, run=16, levels=levels, most=most), _symmetric_steps, pack)


def _of_one_scale(levels: Array, pack: Callable[..., list[Array]]) -> _Type:
    return _Type(levels, partial(_one_scale, levels=levels), _symmetric_steps, pack)


def _of_one_line(bits: int, pack: Callable[..., list[Array]]) -> _Type:
    return _Type(_integers(0, 2**bits), partial(_one_line, top=2**bits - 1), _line_steps, pack)


_TYPES = {
    "Q2_K": _with_minimums(16, 2, 15, _q2_k),
    "Q3_K": _without(3, 32, _q3_k),
    "Q4_K": _with_minimums(32, 4, 63, _q4_k),
    "Q5_K": _with_minimums(32, 5, 63, _q5_k),
    "Q6_K": _without(6, 128, _q6_k),
    "Q4_1": _of_one_line(4, _nibbles),
    "Q5_0": _of_one_scale(_integers(-16, 32), _fifth_bits),
    "Q5_1": _of_one_line(5, _fifth_bits),
    "IQ4_NL": _of_one_scale(IQ4, _nibbles),
}
# Bytes of rows by type: called as `_quantize` but for the name.
QUANTIZE: dict[str, Callable[..., Array]] = {kind: partial(_quantize, kind) for kind in _TYPES}
