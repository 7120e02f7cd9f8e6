# SPDX-License-Identifier: Apache-2.0
"""From recipe to recipe: ``cpp/src/quantize/requantize.cpp`` over whole arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from breccia.kernels.vectorized import values as values_of
from breccia.kernels.vectorized.encode import encode
from breccia.kernels.vectorized.namespace import Namespace
from breccia.kernels.vectorized.quantize import AXES, Grid, Parts, assemble, best_scale, choose, encode_blocks
from breccia.kernels.vectorized.quantize import cast as fresh_cast
from breccia.kernels.vectorized.rules import (
    Scale,
    decode_table,
    exponent_scale,
    round_up_to_e8m0,
    stats_of,
    stored_scale,
)
from breccia.kernels.vectorized.spec import Element, Spec
from breccia.options import CastOptions
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor


def requantize(xp: Namespace, scaled: ScaledTensor, recipe: ScalingRecipe, raw: Any) -> Parts:
    """Each block keeps a scale that loses nothing when there is one; else it is cast afresh."""
    x = values_of.dequantize(xp, scaled, raw)
    grid, spec = Grid(tuple(x.shape), recipe), Spec.of(recipe)
    if grid.empty or grid.whole or not _may_be_exact(spec, Spec.of(scaled.recipe).element):
        return fresh_cast(xp, x, recipe, CastOptions())
    blocks = grid.split(xp, x)
    stats = stats_of(xp, blocks, AXES, False)
    chosen = best_scale(xp, blocks, grid, spec, stats, None, in_tiles=True)
    trials = []
    inside = _inside_one_block(grid, scaled)
    if inside is not None:
        own = values_of.spread(xp, values_of.scales(xp, scaled, raw), scaled)
        own = grid.split(xp, own + x * 0) if own.shape != x.shape else grid.split(xp, own)
        own = own[:, :, :1, :, :1]
        trials.append((own, inside))
    if not spec.element.is_integer:
        ceiling = exponent_scale(
            xp, round_up_to_e8m0(xp, xp.divide(stats.amax, xp.constant(spec.element.max, "float32", x))), True
        )
        trials.append((_power_of_two(xp, stats.amax, spec, ceiling), True))
    taken = stats.has_nan | stats.has_infinity
    exact = chosen
    for scale, allowed in trials:
        stored, fits = _exactly(xp, scale, spec)
        good = fits & ~taken & xp.constant(np.asarray(allowed), "bool", x) & _loses_nothing(xp, blocks, stored, spec)
        exact = choose(xp, good, stored, exact)
        taken = taken | good
    taken = taken & ~(stats.has_nan | stats.has_infinity)
    # A block with an exact scale is divided by it, whatever the recipe's rule does.
    codes = xp.where(
        taken,
        encode_blocks(xp, blocks, dataclasses.replace(spec, multiply=False), stats, exact),
        encode_blocks(xp, blocks, spec, stats, chosen),
    )
    return assemble(xp, codes, grid, spec, stats, exact, None)


def _may_be_exact(spec: Spec, source: Element) -> bool:
    target = spec.element
    if spec.rule == "asymmetric" or spec.scale == "e4m3" or target.is_integer != source.is_integer:
        return False
    return target.bits >= source.bits if target.is_integer else target.mantissa_bits >= source.mantissa_bits


def _inside_one_block(grid: Grid, scaled: ScaledTensor) -> Any:
    """Of each target block, whether it lies in one block of the source: a NumPy array, or None where none does."""
    sizes = dict(values_of.block_sizes(scaled.layout))
    if scaled.layout.name == "per_channel":
        other = -3 - scaled.layout.axis  # type: ignore[attr-defined]
        sizes = {other: 1}
    elif scaled.layout.name == "per_block_k":
        sizes[-3 - scaled.layout.axis] = 1  # type: ignore[attr-defined]
    ok = []
    for at, (extent, block) in ((-2, (grid.rows, grid.block[0])), (-1, (grid.cols, grid.block[1]))):
        begin = np.arange(0, extent, block)
        last = np.minimum(begin + block, extent) - 1
        size = sizes.get(at, extent)
        ok.append(begin // size == last // size)
    inside = ok[0][:, None] & ok[1][None, :]
    return inside[None, :, None, :, None] if inside.any() else None


def _power_of_two(xp: Namespace, amax: Any, spec: Spec, ceiling: Scale) -> Any:
    """amax / max rounded up to a power of two; 0 where there is none."""
    quotient = xp.bits(xp.divide(amax, xp.constant(spec.element.max, "float32", amax)))
    up = (quotient + 0x007F_FFFF) & 0x7F80_0000
    return xp.floats(xp.where((up < 0x7F80_0000) & (amax != 0), up, up * 0))


def _exactly(xp: Namespace, scale: Any, spec: Spec) -> tuple[Scale, Any]:
    """The scale as the recipe stores it, and whether that is the scale itself."""
    if spec.scale == "e8m0":
        bits = xp.bits(scale)
        code = (bits >> 23) & 0xFF
        fits = ((bits & ~0x7F80_0000) == 0) & (code > 0) & (code < 255)
        tiny = bits == 0x0040_0000
        code = xp.where(tiny, code * 0, code)
        return Scale(code, scale, scale), fits | tiny
    stored = stored_scale(xp, scale, spec)
    return Scale(stored.stored, scale, scale), (stored.decoded == scale) & (scale != 0)


def _loses_nothing(xp: Namespace, blocks: Any, scale: Scale, spec: Spec) -> Any:
    values = (
        xp.take(decode_table(xp, spec.element.name, blocks), encode(xp, xp.divide(blocks, scale.factor), spec.element))
        * scale.decoded
    )
    different = blocks != values if spec.element.is_integer else xp.bits(blocks) != xp.bits(values)
    return ~xp.any(different, AXES)
