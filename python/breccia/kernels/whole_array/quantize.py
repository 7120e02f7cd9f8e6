# SPDX-License-Identifier: Apache-2.0
"""Quantization: ``cpp/src/quantize/quantizer.cpp`` over whole arrays."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from breccia import _core
from breccia.kernels.whole_array.namespace import Namespace
from breccia.kernels.whole_array.random import hadamard, uniform_of
from breccia.kernels.whole_array.rules import (
    Global,
    Scale,
    Stats,
    candidates,
    encode,
    global_scale,
    scale_of,
    squared_errors,
    stats_of,
)
from breccia.kernels.whole_array.spec import Spec
from breccia.kernels.whole_array.values import expand
from breccia.recipes import ScalingRecipe, _spec
from breccia.verbs.cast_options import CastOptions

AXES = (2, 4)  # of a block, in a Grid's five axes
_PIECE = 4096  # the core sums squared errors in runs of this many elements
_LANES = 16


class Parts(NamedTuple):
    """What a cast makes: uint8 codes, two per byte where they are 4-bit ones, and scales as they are stored."""

    data: Any
    scale: Any
    zero_point: Any
    global_scale: Any


class Grid:
    """A tensor (…, R, C) as blocks: (matrices, block rows, rows of a block, block columns, columns of a block),
    with zeros beyond its edges."""

    def __init__(self, shape: tuple[int, ...], recipe: ScalingRecipe, square: bool = False) -> None:
        layout = _spec(recipe).layout
        self.shape = shape
        self.plan: Any = _core.plan_cast(list(shape), _spec(recipe))
        self.rows = shape[-2] if len(shape) > 1 else 1
        self.cols = shape[-1]
        self.matrices = math.prod(shape[:-2])
        self.whole = layout.kind == "PerTensor"
        if self.whole:
            self.rows, self.matrices = self.rows * self.matrices, 1
            self.block = (self.rows, self.cols)
        elif layout.kind == "PerChannel":
            self.block = (1, self.cols)
        else:
            self.block = (layout.block_m, layout.block_n)
        self.stored_rows = self.block[0]  # that one stored scale is for
        if square:
            if Spec.of(recipe).expanded:
                raise ValueError(f"square_blocks needs a recipe without exponents, got {type(recipe).__name__}")
            if self.whole or layout.kind == "PerChannel" or self.block[0] != 1:
                raise ValueError(
                    f"square_blocks needs a recipe whose blocks lie along rows, got {type(recipe).__name__}"
                )
            self.block = (self.block[1], self.block[1])
        self.empty = 0 in shape

    def split(self, xp: Namespace, x: Any) -> Any:
        m, n = self.block
        x = x.reshape(self.matrices, self.rows, self.cols)
        below, right = -self.rows % m, -self.cols % n
        if below or right:
            x = xp.pad(x, below, right)
        return x.reshape(self.matrices, -(-self.rows // m), m, -(-self.cols // n), n)

    def join(self, blocks: Any) -> Any:
        m, n = self.block
        x = blocks.reshape(self.matrices, -(-self.rows // m) * m, -(-self.cols // n) * n)
        return x[:, : self.rows, : self.cols].reshape(self.shape)

    def per_block(self, xp: Namespace, values: Any, key: str) -> Any:
        if self.stored_rows != self.block[0]:  # each row of a square stores its scale
            values = xp.index(values, 1, np.arange(self.rows) // self.block[0])
        return values.reshape(tuple(self.plan[key][0]))


def cast(xp: Namespace, x: Any, recipe: ScalingRecipe, options: CastOptions) -> Parts:
    """Quantize a float32 array of any shape the recipe takes."""
    grid, spec = Grid(tuple(x.shape), recipe, options.square_blocks), Spec.of(recipe)
    if options.hadamard is not None:
        x = hadamard(xp, x, options.hadamard.block, options.hadamard.seed)
    if options.amax is not None:
        _check_amax(recipe, spec, grid, options.amax)
    if grid.empty:
        return _empty(xp, x, grid, spec, options.amax)
    blocks = grid.split(xp, x)
    stats = stats_of(xp, blocks, AXES, spec.rule == "asymmetric")
    if options.amax is not None and not spec.two_level:
        stats = _given(xp, options.amax, stats, grid)
    level = global_scale(xp, _amax(xp, x, options)) if spec.two_level else None
    scale = best_scale(xp, blocks, grid, spec, stats, level)
    draws = None
    if options.rounding == "stochastic":
        draws = grid.split(xp, uniform_of(xp, options.seed, grid.shape, options.offset, x))
    if spec.expanded:
        return expanded(xp, blocks, grid, spec, stats, scale, draws=draws)
    codes = encode_blocks(xp, blocks, spec, stats, scale, draws)
    return assemble(xp, codes, grid, spec, stats, scale, level)


def expanded(
    xp: Namespace,
    blocks: Any,
    grid: Grid,
    spec: Spec,
    stats: Stats,
    scale: Scale,
    plain: Any = False,
    draws: Any = None,
) -> Parts:
    """A cast to groups with exponents, which are 1 where ``plain``."""
    exponent, powers = expand(xp, blocks, stats, spec.element)
    exponent = xp.where(plain | (exponent == 1), exponent * 0 + 1, exponent)
    scaled = xp.where(exponent == 1, scaled_values(xp, blocks, spec, scale), powers)
    made = assemble(xp, encode_scaled(xp, blocks, scaled, spec, stats, scale, draws), grid, spec, stats, scale, None)
    return made._replace(zero_point=grid.per_block(xp, exponent, "zero_point"))


def _amax(xp: Namespace, x: Any, options: CastOptions) -> Any:
    """Of the whole tensor: measured, or given from outside."""
    if options.amax is None:
        return stats_of(xp, x.reshape(-1), (0,), False).amax.reshape(())
    return _array(xp, options.amax, x).reshape(())


def _given(xp: Namespace, amax: Any, stats: Stats, grid: Grid) -> Stats:
    """Statistics of blocks that reach beyond this part of the tensor."""
    amax = _array(xp, amax, stats.amax)
    amax = amax.reshape(()) if grid.whole else amax.reshape(grid.matrices, grid.rows, 1, 1, 1)
    nan = amax != amax  # noqa: PLR0124
    amax = xp.where(nan, amax * 0, amax) + stats.amax * 0
    return Stats(amax, stats.has_nan if grid.whole else nan, stats.has_infinity)


def _array(xp: Namespace, x: Any, like: Any) -> Any:
    here = isinstance(x, (int, float, list, tuple, np.ndarray, np.generic))
    return xp.constant(np.asarray(x, np.float32), "float32", like) if here else xp.astype(x, "float32")


def _check_amax(recipe: ScalingRecipe, spec: Spec, grid: Grid, amax: Any) -> None:
    rows = _spec(recipe).layout.kind == "PerChannel"
    if not (spec.two_level or ((grid.whole or rows) and not spec.search and spec.rule != "asymmetric")):
        raise ValueError(
            "recipe must have two levels, or one symmetric scale per tensor or row without a search, for amax to be "
            f"given, got {type(recipe).__name__}"
        )
    count = grid.matrices * grid.rows if rows else 1
    size = math.prod(amax.shape) if hasattr(amax, "shape") else np.size(amax)
    if size != count:
        raise ValueError(f"amax must have {count} number{'s' if count > 1 else ''}, got {size}")


def cast_scaled(xp: Namespace, x: Any, recipe: ScalingRecipe, factor: Any, options: CastOptions) -> Any:
    """Codes of ``x * factor`` by the recipe's element format, for scales that come from elsewhere."""
    if options.hadamard is not None:
        x = hadamard(xp, x, options.hadamard.block, options.hadamard.seed)
    draws = None
    if options.rounding == "stochastic":
        draws = uniform_of(xp, options.seed, tuple(x.shape), options.offset, x)
    return xp.astype(encode(xp, x * factor, Spec.of(recipe).element, uniform=draws), "uint8")


def scaled_values(xp: Namespace, x: Any, spec: Spec, scale: Scale) -> Any:
    return x * scale.factor if spec.multiply else xp.divide(x, scale.factor)


def encode_blocks(xp: Namespace, blocks: Any, spec: Spec, stats: Stats, scale: Scale, draws: Any = None) -> Any:
    """int32 codes made with the chosen scales."""
    return encode_scaled(xp, blocks, scaled_values(xp, blocks, spec, scale), spec, stats, scale, draws)


def encode_scaled(
    xp: Namespace, blocks: Any, scaled: Any, spec: Spec, stats: Stats, scale: Scale, draws: Any = None
) -> Any:
    """The same of values that are multiples of the scales."""
    if spec.element.has_nan:  # the sign of a NaN is the input's, whatever the arithmetic makes of it
        scaled = xp.where(blocks != blocks, blocks, scaled)  # noqa: PLR0124
    codes = encode(xp, scaled, spec.element, scale.zero_point, draws)
    return codes if spec.element.has_nan else xp.where(stats.has_nan, codes * 0, codes)


def assemble(
    xp: Namespace, codes: Any, grid: Grid, spec: Spec, stats: Stats, scale: Scale, level: Global | None
) -> Parts:
    """Codes and scales in the shapes and types of the plan."""
    data = xp.astype(grid.join(codes), "uint8")
    if spec.element.bits == 4:
        data = pack(xp, data)
    zero_point = None
    if scale.zero_point is not None:
        zeros = xp.astype(scale.zero_point, "int32")
        zeros = xp.where(stats.has_nan, zeros * 0, zeros)
        zero_point = grid.per_block(xp, xp.astype(zeros, grid.plan["zero_point"][1]), "zero_point")
    stored = xp.astype(scale.stored, "uint8" if spec.scale in ("e8m0", "e4m3") else spec.scale)
    return Parts(data, grid.per_block(xp, stored, "scale"), zero_point, _stored_level(level, spec))


def pack(xp: Namespace, codes: Any) -> Any:
    shape = tuple(codes.shape)
    if shape[-1] % 2:
        codes = xp.pad(codes.reshape(-1, shape[-1]), 0, 1)
    pairs = codes.reshape(*shape[:-1], -1, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def best_scale(xp: Namespace, blocks: Any, grid: Grid, spec: Spec, stats: Stats, level: Global | None) -> Scale:
    """The rule's scale, or with a search the first of least squared error."""
    best = scale_of(xp, stats, spec, level)
    if not spec.search:
        return best
    searches = ~(stats.has_nan | stats.has_infinity) & (stats.amax != 0)

    # Errors are measured in a power of two near amax, to stay in range.
    exponent = xp.bits(stats.amax) >> 23
    unit = xp.floats(xp.minimum(xp.maximum(254 - exponent, exponent * 0 + 1), exponent * 0 + 253) << 23)

    def error_of(scale: Scale) -> Any:
        scaled = scaled_values(xp, blocks, spec, scale)
        errors = squared_errors(xp, blocks * unit, scaled, spec.element, scale.decoded * unit, scale.zero_point)
        return _total(xp, errors, grid)

    least = error_of(best)
    for candidate in range(1, candidates(spec)):
        other = scale_of(xp, stats, spec, level, candidate)
        error = error_of(other)
        better = searches & (error < least)
        least = xp.where(better, error, least)
        best = choose(xp, better, other, best)
    return best


def choose(xp: Namespace, condition: Any, a: Scale, b: Scale) -> Scale:
    return Scale(
        xp.where(condition, a.stored, b.stored),
        xp.where(condition, a.decoded, b.decoded),
        xp.where(condition, a.factor, b.factor),
        None if a.zero_point is None else xp.where(condition, a.zero_point, b.zero_point),
    )


def _total(xp: Namespace, errors: Any, grid: Grid) -> Any:
    """Sums per block in the core's order of addition: see squared_error and Quantizer in the core."""
    m, n = grid.block
    whole_bytes = grid.plan["data"][0][-1] == grid.shape[-1] or n % 2 == 0
    one_run = m == 1 and n <= 2 * _PIECE and whole_bytes and not grid.whole
    piece = n if one_run else _PIECE
    totals = []
    for row in range(1 if grid.whole else m):
        rows = errors if grid.whole else errors[:, :, row : row + 1]
        total: Any = None
        for begin in range(0, n, piece):
            part = _run(xp, rows[..., begin : begin + piece])
            total = part if total is None else total + part
        totals.append(total)
    if grid.whole:
        return xp.sum(totals[0])
    result = totals[0]
    for total in totals[1:]:
        result = result + total
    return result


def _run(xp: Namespace, errors: Any) -> Any:
    shape = tuple(errors.shape)
    flat = errors.reshape(-1, shape[-1])
    if shape[-1] % _LANES:
        flat = xp.pad(flat, 0, -shape[-1] % _LANES)
    lanes = flat.reshape(flat.shape[0], -1, _LANES)
    total = lanes[:, 0]
    for i in range(1, lanes.shape[1]):
        total = total + lanes[:, i]
    half = _LANES // 2
    while half:
        total = total[:, :half] + total[:, half:]
        half //= 2
    return total.reshape(*shape[:-1], 1)


def _stored_level(level: Global | None, spec: Spec) -> Any:
    if level is None:
        return None
    return level.encode if spec.global_divides else level.scale


def _empty(xp: Namespace, x: Any, grid: Grid, spec: Spec, amax: Any) -> Parts:
    zeros = xp.number(0.0, x).reshape(1, 1, 1, 1, 1)
    stats = stats_of(xp, zeros, AXES, spec.rule == "asymmetric")
    given = zeros.reshape(()) if amax is None else _array(xp, amax, zeros)
    if amax is not None and not spec.two_level:
        stats = _given(xp, amax, stats, grid)
    level = global_scale(xp, given.reshape(())) if spec.two_level else None
    scale = scale_of(xp, stats, spec, level)
    stored = xp.astype(scale.stored, "uint8" if spec.scale in ("e8m0", "e4m3") else spec.scale)

    def spread(value: Any, key: str) -> Any:
        shape, value = tuple(grid.plan[key][0]), value.reshape(-1)
        count = math.prod(shape)
        return (value if value.shape[0] == count else xp.take(value, xp.arange(count, x) * 0)).reshape(shape)

    second = stats.amax * 0 + 1 if spec.expanded else scale.zero_point
    return Parts(
        xp.astype(x, "uint8").reshape(tuple(grid.plan["data"][0])),
        spread(stored, "scale"),
        None if second is None else spread(xp.astype(second, grid.plan["zero_point"][1]), "zero_point"),
        _stored_level(level, spec),
    )
