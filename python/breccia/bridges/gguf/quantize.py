# SPDX-License-Identifier: Apache-2.0
"""Values as GGUF's K-quants: super-blocks of 256 with two levels of scales, which no recipe makes.

Each run of 16 or 32 values gets the scale, and in Q2_K, Q4_K and Q5_K the minimum, of the least squares among several
first guesses. These are rounded to integers of a few bits under one float16 scale (and minimum) of the super-block, and
with them every code is found anew, the integers also one step up and down. With an importance of each column, squares
count that many times.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from breccia.bridges.common import Array

__all__ = ["QUANTIZE"]

_SUPER = 256  # values of a super-block
_AT_ONCE = 256  # super-blocks: their arrays stay in a core's cache
_TINY = np.float16(2**-24)  # the least float16 above zero
# How many steps more than there are codes a first guess has in the range of the values: the ends may be clipped.
_GUESSES = np.linspace(-2.0, 0.6, 14)
# With importance, more of an end that hardly matters may be.
_WEIGHTED_GUESSES = np.concatenate([_GUESSES, np.linspace(0.8, 6.0, 14)])
_LARGE = "x must have values of which the scales fit float16 in {}, the largest is {:g}"


Encode = Callable[[Array, "Array | None"], tuple[Array, list[Array]]]


def _in_parts(kind: str, nbytes: int, encode: Encode) -> Callable[..., Array]:
    """A function of rows, and of what their columns count, of one of super-blocks: (n, 256) float32 and weights in
    float64 → the float16 scales, and the fields as bytes."""

    def quantize(x: Array, weights: Array | None = None) -> Array:
        blocks = np.ascontiguousarray(x, np.float32).reshape(-1, _SUPER)
        if not np.isfinite(blocks).all():
            raise ValueError(f"x must be finite to be quantized to {kind}, it has infinities or NaN")
        if weights is not None:
            weights = np.broadcast_to(weights.astype(np.float64), x.shape).reshape(-1, _SUPER)
        out = np.empty((len(blocks), nbytes), np.uint8)
        for at in range(0, len(blocks), _AT_ONCE):
            piece = blocks[at : at + _AT_ONCE]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                scales, fields = encode(piece, None if weights is None else weights[at : at + _AT_ONCE])
            if not np.isfinite(scales).all():
                raise ValueError(_LARGE.format(kind, np.abs(piece).max()))
            np.concatenate(fields, axis=-1, out=out[at : at + _AT_ONCE])
        return out.reshape(*x.shape[:-1], x.shape[-1] // _SUPER * nbytes)

    return quantize


def _sum(x: Array) -> Array:
    """Over a run. The order of additions is that of the run alone, however many there are."""
    total: Array = x.sum(axis=-1)
    return total


def _half(scale: Array, live: Array) -> Array:
    """A super-block's scale as float16, never zero where there is something to scale."""
    halves: Array = np.where(live, np.maximum(scale.astype(np.float16), _TINY), np.float16(0))
    return halves


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


def _affine(x: Array, weights: Array | None, run: int, top: int, most: int) -> tuple[Array, Array, Array, Array]:
    """Super-blocks of runs with minimums: both float16 scales (n, 2), the integers of runs' scales and minimums, and
    codes; ``most`` is the largest of the integers."""
    runs = x.reshape(len(x), -1, run)
    weights = None if weights is None else weights.reshape(runs.shape)
    scale, least = _line(runs, weights, top)
    d, m = (_half(v.max(axis=-1) / most, v.max(axis=-1) > 0) for v in (scale, least))
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
    codes = chosen[2].astype(np.uint8).reshape(len(x), _SUPER)
    return np.stack([d, m], axis=-1), chosen[0].astype(np.uint8), chosen[1].astype(np.uint8), codes


def _symmetric(x: Array, weights: Array | None, run: int, half: int, most: int) -> tuple[Array, Array, Array]:
    """Super-blocks of runs without minimums: the float16 scale (n, 1), the integers of runs' scales, -``most`` to
    ``most`` - 1, and codes, -``half`` to ``half`` - 1."""
    runs = x.reshape(len(x), -1, run)
    weights = None if weights is None else weights.reshape(runs.shape)
    wide = runs.astype(np.float64)
    weighted = _times(wide, weights)
    largest = np.take_along_axis(wide, np.abs(wide).argmax(axis=-1)[..., None], -1)[..., 0]
    best, fitted = np.full(largest.shape, np.inf), np.zeros(largest.shape)
    for guess in _GUESSES if weights is None else _WEIGHTED_GUESSES:  # the largest value gets the code with no opposite
        q = np.clip(np.rint(wide * np.where(largest != 0, (-half - guess) / largest, 0)[..., None]), -half, half - 1)
        xq, q2 = _sum(weighted * q), _sum(_times(q, weights) * q)
        better = (error := -xq * xq / q2) < best
        best, fitted = np.where(better, error, best), np.where(better, xq / q2, fitted)
    amax = np.abs(fitted).max(axis=-1)
    d = _half(amax / (most - 1), amax > 0)
    levels = _levels(fitted, d, -most, most - 1)
    best = np.full(fitted.shape, np.inf)
    chosen = [levels, np.zeros(runs.shape, np.float32)]
    for up in (0, -1, 1):
        one = np.clip(levels + up, -most, most - 1)
        s = d.astype(np.float32)[:, None] * one.astype(np.float32)
        q = np.clip(np.nan_to_num(np.rint(runs / s[..., None])), -half, half - 1)
        error = _sum(_times(np.square((s[..., None] * q - runs).astype(np.float64)), weights))
        _keep(best, error, chosen, (one, q))
    return d[:, None], chosen[0].astype(np.int8), chosen[1].astype(np.int8).reshape(len(x), _SUPER)


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


def _q2_k(x: Array, weights: Array | None) -> tuple[Array, list[Array]]:
    scales, levels, leasts, q = _affine(x, weights, 16, 3, 15)
    return scales, [levels | (leasts << 4), _planes(q, 2), _bytes(scales)]


def _q3_k(x: Array, weights: Array | None) -> tuple[Array, list[Array]]:
    scales, levels, signed = _symmetric(x, weights, 16, 4, 32)
    q, s = (signed + 4).astype(np.uint8), (levels + 32).astype(np.uint8)
    low = (s[:, :8] & 15) | (s[:, 8:] << 4)
    high = np.bitwise_or.reduce((s >> 4).reshape(-1, 4, 4) << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=1)
    return scales, [_planes(q >> 2, 1), _planes(q & 3, 2), low, high, _bytes(scales)]


def _q4_k(x: Array, weights: Array | None) -> tuple[Array, list[Array]]:
    scales, levels, leasts, q = _affine(x, weights, 32, 15, 63)
    return scales, [_bytes(scales), _six_bit(levels, leasts), _planes(q, 4)]


def _q5_k(x: Array, weights: Array | None) -> tuple[Array, list[Array]]:
    scales, levels, leasts, q = _affine(x, weights, 32, 31, 63)
    return scales, [_bytes(scales), _six_bit(levels, leasts), _planes(q >> 4, 1), _planes(q & 15, 4)]


def _q6_k(x: Array, weights: Array | None) -> tuple[Array, list[Array]]:
    scales, levels, signed = _symmetric(x, weights, 16, 32, 128)
    q = (signed + 32).astype(np.uint8)
    halves = (q & 15).reshape(-1, 2, 2, 64)
    low = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(x), -1)
    return scales, [low, _planes(q >> 4, 2), levels.view(np.uint8), _bytes(scales)]


QUANTIZE: dict[str, Callable[..., Array]] = {
    "Q2_K": _in_parts("Q2_K", 84, _q2_k),
    "Q3_K": _in_parts("Q3_K", 110, _q3_k),
    "Q4_K": _in_parts("Q4_K", 144, _q4_k),
    "Q5_K": _in_parts("Q5_K", 176, _q5_k),
    "Q6_K": _in_parts("Q6_K", 210, _q6_k),
}
