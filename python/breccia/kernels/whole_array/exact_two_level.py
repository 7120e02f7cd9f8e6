# SPDX-License-Identifier: Apache-2.0
"""NVFP4's two levels under which a tensor keeps every value: ``cpp/src/quantize/exact_two_level.cpp`` over whole
arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from breccia.kernels.whole_array.encode import encode
from breccia.kernels.whole_array.exact import loses_nothing
from breccia.kernels.whole_array.namespace import ABS_MASK, Namespace
from breccia.kernels.whole_array.quantize import Grid, Parts, assemble, encode_blocks
from breccia.kernels.whole_array.rules import Global, Scale, Stats, decode_table
from breccia.kernels.whole_array.spec import Element, Spec
from breccia.recipes import global_divides
from breccia.scaled_tensor import ScaledTensor

_MAGNITUDES = (6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5)
_SIGNIFICANDS = (8, 12, 10, 14, 9, 11, 13, 15)


@dataclasses.dataclass
class _Options:
    """What each block's scale may be, along the last axis: its own, then amax over each magnitude."""

    scale: Any
    keeps: Any
    is_free: Any  # whatever the global scale


def requantize(xp: Namespace, blocks: Any, grid: Grid, spec: Spec, stats: Stats, own: Any, source: ScaledTensor) -> Any:
    """(whether there are such levels, the parts); ``own`` is the source's scale of each block, 0 where it has more."""
    trials = []
    own = xp.floats(xp.bits(own) & ABS_MASK)
    for scale in (own, *(xp.divide(stats.amax, xp.constant(m, "float32", blocks)) for m in _MAGNITUDES)):
        usable = (scale > 0) & (scale < xp.constant(math.inf, "float32", blocks))
        trials.append((scale, usable & loses_nothing(xp, blocks, Scale(scale, scale, scale), spec.element)))
    options = _Options(
        xp.concatenate([scale for scale, _ in trials], 4),
        xp.concatenate([keeps for _, keeps in trials], 4),
        stats.has_nan | (stats.amax == 0),
    )
    possible = ~_any(xp, stats.has_infinity) & _any(xp, ~options.is_free)
    level = xp.constant(1.0, "float32", blocks)
    found = possible & False
    for candidate in _levels(xp, options, stats, spec, source):
        good = possible & ~found & _fits(xp, options, candidate, spec)
        level = xp.where(good, candidate, level)
        found = found | good
    scale = _scales(xp, options, level, stats, spec)
    codes = encode_blocks(xp, blocks, dataclasses.replace(spec, multiply=False), stats, scale)
    return found, assemble(xp, codes, grid, spec, stats, scale, Global(level, level))


def choose(xp: Namespace, found: Any, exact: Parts, fresh: Parts) -> Parts:
    return Parts(
        *(None if part is None else xp.where(found, part, other) for part, other in zip(exact, fresh, strict=True))
    )


def _levels(xp: Namespace, options: _Options, stats: Stats, spec: Spec, source: ScaledTensor) -> Any:
    """Global scales to be tried, in order."""
    like = stats.amax
    level = source.global_scale
    if level is not None and math.prod(level.shape) == 1 and global_divides(source.recipe) == spec.global_divides:
        yield level.reshape(())
    zero = like * 0
    used = xp.where(options.is_free, zero, options.scale[..., :1])
    own = _largest(xp, xp.where(options.keeps[..., :1], used, zero))
    bits = xp.bits(own)
    significand = xp.floats((bits & 0x007F_FFFF) | 0x3F80_0000)
    two, top = xp.constant(2.0, "float32", like), xp.constant(256.0, "float32", like)
    scaled = xp.where(significand > xp.constant(1.75, "float32", like), significand * top / two, significand * top)
    yield _level(xp, own, xp.where(((bits & 0x000F_FFFF) != 0) | (bits < 0x0080_0000), top, scaled), spec)
    amax = _largest(xp, xp.where(options.is_free, zero, stats.amax))
    for magnitude in (6.0, 4.0):
        scale = xp.divide(amax, xp.constant(magnitude, "float32", like))
        for significand in _SIGNIFICANDS:
            for unit in (16.0, 8.0) if significand > 14 else (32.0, 16.0):
                yield _level(xp, scale, xp.constant(significand * unit, "float32", like), spec)


def _level(xp: Namespace, scale: Any, stored: Any, spec: Spec) -> Any:
    return xp.divide(stored, scale) if spec.global_divides else xp.divide(scale, stored)


def _codes(xp: Namespace, options: _Options, level: Any, spec: Spec) -> tuple[Any, Any]:
    """E4M3 codes of every option, and which of them make its scale."""
    element = Element.of("float8_e4m3fn")
    wanted = options.scale * level if spec.global_divides else xp.divide(options.scale, level)
    code = encode(xp, wanted, element) & 0xFF
    stored = xp.take(decode_table(xp, element.name, options.scale), code)
    made = xp.divide(stored, level) if spec.global_divides else stored * level
    largest = xp.constant(element.max, "float32", options.scale)
    return code, options.keeps & (wanted <= largest) & (code > 0) & (made == options.scale)


def _fits(xp: Namespace, options: _Options, level: Any, spec: Spec) -> Any:
    _, good = _codes(xp, options, level, spec)
    usable = (level > 0) & (level < xp.constant(math.inf, "float32", options.scale))
    return usable & ~_any(xp, ~(options.is_free | xp.any(good, (4,))))


def _scales(xp: Namespace, options: _Options, level: Any, stats: Stats, spec: Spec) -> Scale:
    code, good = _codes(xp, options, level, spec)
    count = len(_MAGNITUDES) + 1
    rank = xp.constant(np.arange(count, 0, -1, dtype=np.int32), "int32", code)
    first = xp.max(xp.where(good, code * 0 + rank, code * 0), (4,)) == rank
    stored = xp.max(xp.where(first, code, code * 0), (4,))
    scale = xp.max(xp.where(first, options.scale, options.scale * 0), (4,))
    one = stats.amax * 0 + xp.constant(1.0, "float32", code)
    stored = xp.where(options.is_free, stored * 0 + (8 if spec.rule == "nvfp4_torchao" else 0), stored)
    stored = xp.where(stats.has_nan, stored * 0 + 0x7F, stored)
    scale = xp.where(options.is_free, one, scale)
    return Scale(stored, scale, scale)


def _any(xp: Namespace, x: Any) -> Any:
    return xp.any(x.reshape(-1), (0,)).reshape(())


def _largest(xp: Namespace, x: Any) -> Any:
    return xp.max(x.reshape(-1), (0,)).reshape(())
