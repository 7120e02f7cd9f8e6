# SPDX-License-Identifier: Apache-2.0
"""From recipe to recipe: ``cpp/src/quantize/requantize.cpp`` over whole arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from breccia.kernels.whole_array import values as values_of
from breccia.kernels.whole_array.exact import common_scales, kept, two_level
from breccia.kernels.whole_array.namespace import ABS_MASK, Namespace
from breccia.kernels.whole_array.quantize import (
    AXES,
    Grid,
    Parts,
    assemble,
    best_scale,
    choose,
    encode_blocks,
    expanded,
)
from breccia.kernels.whole_array.quantize import cast as fresh_cast
from breccia.kernels.whole_array.rules import stats_of
from breccia.kernels.whole_array.spec import Spec
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs.cast_options import CastOptions


def requantize(xp: Namespace, scaled: ScaledTensor, recipe: ScalingRecipe, raw: Any) -> Parts:
    """Each block keeps a scale that loses nothing when there is one; else it is cast afresh."""
    x = values_of.dequantize(xp, scaled, raw)
    x = x if tuple(x.shape) == tuple(scaled.shape) else x.reshape(tuple(scaled.shape))
    grid, spec = Grid(tuple(x.shape), recipe), Spec.of(recipe)
    if grid.empty:
        return fresh_cast(xp, x, recipe, CastOptions())
    blocks = grid.split(xp, x)
    stats = stats_of(xp, blocks, AXES, spec.rule == "asymmetric")
    inside = _inside_one_block(grid, scaled)
    own = None if inside is None else _own_scale(xp, x, grid, scaled, raw, inside)
    if spec.two_level:
        level = stats.amax * 0 if own is None else own
        found, made = two_level(xp, blocks, grid, spec, stats, level, scaled)
        pairs = zip(made, fresh_cast(xp, x, recipe, CastOptions()), strict=True)
        return Parts(*(None if part is None else xp.where(found, part, fresh) for part, fresh in pairs))
    trials = [] if own is None else [own if spec.element.is_integer else xp.floats(xp.bits(own) & ABS_MASK)]
    if not spec.element.is_integer:
        trials.append(_power_of_two(xp, stats.amax, spec))
    if spec.scale != "e8m0":
        trials += common_scales(xp, blocks, stats, spec)
    chosen = best_scale(xp, blocks, grid, spec, stats, None)
    exact = chosen
    taken = stats.has_nan & False
    for scale in trials:
        stored, good = kept(xp, blocks, stats, scale, spec)
        good = good & ~taken
        exact = choose(xp, good, stored, exact)
        taken = taken | good
    if spec.expanded:
        return expanded(xp, blocks, grid, spec, stats, exact, taken)
    # A block with an exact scale is divided by it, whatever the recipe's rule does.
    codes = xp.where(
        taken,
        encode_blocks(xp, blocks, dataclasses.replace(spec, multiply=False), stats, exact),
        encode_blocks(xp, blocks, spec, stats, chosen),
    )
    return assemble(xp, codes, grid, spec, stats, exact, None)


def _own_scale(xp: Namespace, x: Any, grid: Grid, scaled: ScaledTensor, raw: Any, inside: Any) -> Any:
    """The source's scale of each target block, 0 where it has several."""
    own = values_of.spread(xp, values_of.scales(xp, scaled, raw), scaled)
    own = grid.split(xp, own + x * 0 if tuple(own.shape) != tuple(x.shape) else own)[:, :, :1, :, :1]
    return xp.where(xp.constant(np.asarray(inside), "bool", x), own, own * 0)


def _inside_one_block(grid: Grid, scaled: ScaledTensor) -> Any:
    """Of each target block, whether it lies in one block of the source: a NumPy array, or None where none does."""
    if grid.whole and math.prod(scaled.shape[:-2]) > 1:
        level = scaled.global_scale
        one = math.prod(scaled.scale.shape) == 1 and (level is None or math.prod(level.shape) == 1)
        return np.ones((1, 1, 1, 1, 1), bool) if one else None
    sizes = dict(values_of.block_sizes(scaled.layout))
    if scaled.layout.name == "per_channel":
        other = -3 - scaled.layout.axis
        sizes = {other: 1}
    elif scaled.layout.name == "per_block_k":
        sizes[-3 - scaled.layout.axis] = 1
    ok = []
    for at, (extent, block) in ((-2, (grid.rows, grid.block[0])), (-1, (grid.cols, grid.block[1]))):
        begin = np.arange(0, extent, block)
        last = np.minimum(begin + block, extent) - 1
        size = sizes.get(at, extent)
        ok.append(begin // size == last // size)
    inside = ok[0][:, None] & ok[1][None, :]
    return inside[None, :, None, :, None] if inside.any() else None


def _power_of_two(xp: Namespace, amax: Any, spec: Spec) -> Any:
    """amax / max rounded up to a power of two; 0 where there is none."""
    quotient = xp.bits(xp.divide(amax, xp.number(spec.element.max, amax)))
    up = (quotient + 0x007F_FFFF) & 0x7F80_0000
    return xp.floats(xp.where((up < 0x7F80_0000) & (amax != 0), up, up * 0))
