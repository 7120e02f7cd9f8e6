# SPDX-License-Identifier: Apache-2.0
"""From recipe to recipe, by scales under which a block keeps every value, and NVFP4's two levels under which a tensor
does: ``cpp/src/quantize/requantize.cpp``, ``exact_scale.cpp`` and ``exact_two_level.cpp`` over whole arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from breccia.kernels.whole_array import quantize
from breccia.kernels.whole_array import values as values_of
from breccia.kernels.whole_array.namespace import ABS_MASK, Namespace
from breccia.kernels.whole_array.rules import MAGIC, Global, Scale, Stats, decode_table, encode, stats_of, stored_scale
from breccia.kernels.whole_array.spec import Element, Spec
from breccia.recipes import ScalingRecipe, global_divides
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs.cast_options import CastOptions

_TOLERANCE = 1.0 / 512  # of fractions whose denominators are at most 255
_SIGNIFICANDS = {  # in the order of their odd parts
    1: (2, 3),
    2: (4, 6, 5, 7),
    3: (8, 12, 10, 14, 9, 11, 13, 15),
    4: (16, 24, 20, 28, 18, 22, 26, 30, 17, 19, 21, 23, 25, 27, 29, 31),
}
_MAGNITUDES = (6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5)


def requantize(xp: Namespace, scaled: ScaledTensor, recipe: ScalingRecipe, raw: Any) -> quantize.Parts:
    """Each block keeps a scale that loses nothing when there is one; else it is cast afresh."""
    x = values_of.dequantize(xp, scaled, raw)
    x = x if tuple(x.shape) == tuple(scaled.shape) else x.reshape(tuple(scaled.shape))
    grid, spec = quantize.Grid(tuple(x.shape), recipe), Spec.of(recipe)
    if grid.empty:
        return quantize.cast(xp, x, recipe, CastOptions())
    blocks = grid.split(xp, x)
    stats = stats_of(xp, blocks, quantize.AXES, spec.rule == "asymmetric")
    inside = _inside_one_block(grid, scaled)
    own = None if inside is None else _own_scale(xp, x, grid, scaled, raw, inside)
    if spec.two_level:
        level = stats.amax * 0 if own is None else own
        found, made = two_level(xp, blocks, grid, spec, stats, level, scaled)
        pairs = zip(made, quantize.cast(xp, x, recipe, CastOptions()), strict=True)
        return quantize.Parts(*(None if part is None else xp.where(found, part, fresh) for part, fresh in pairs))
    trials = [] if own is None else [own if spec.element.is_integer else xp.floats(xp.bits(own) & ABS_MASK)]
    if not spec.element.is_integer:
        trials.append(_power_of_two(xp, stats.amax, spec))
    if spec.scale != "e8m0":
        trials += common_scales(xp, blocks, stats, spec)
    chosen = quantize.best_scale(xp, blocks, grid, spec, stats, None)
    exact = chosen
    taken = stats.has_nan & False
    for scale in trials:
        stored, good = kept(xp, blocks, stats, scale, spec)
        good = good & ~taken
        exact = quantize.choose(xp, good, stored, exact)
        taken = taken | good
    if spec.expanded:
        return quantize.expanded(xp, blocks, grid, spec, stats, exact, taken)
    # A block with an exact scale is divided by it, whatever the recipe's rule does.
    codes = xp.where(
        taken,
        quantize.encode_blocks(xp, blocks, dataclasses.replace(spec, multiply=False), stats, exact),
        quantize.encode_blocks(xp, blocks, spec, stats, chosen),
    )
    return quantize.assemble(xp, codes, grid, spec, stats, exact, None)


def _own_scale(xp: Namespace, x: Any, grid: quantize.Grid, scaled: ScaledTensor, raw: Any, inside: Any) -> Any:
    """The source's scale of each target block, 0 where it has several."""
    own = values_of.spread(xp, values_of.scales(xp, scaled, raw), scaled)
    own = grid.split(xp, own + x * 0 if tuple(own.shape) != tuple(x.shape) else own)[:, :, :1, :, :1]
    return xp.where(xp.constant(np.asarray(inside), "bool", x), own, own * 0)


def _inside_one_block(grid: quantize.Grid, scaled: ScaledTensor) -> Any:
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


def stored_exactly(xp: Namespace, scale: Any, spec: Spec) -> tuple[Scale, Any]:
    """The scale as the recipe stores it, and whether that is the scale itself."""
    if spec.scale == "e8m0":
        bits = xp.bits(scale)
        code = (bits >> 23) & 0xFF
        fits = ((bits & ~0x7F80_0000) == 0) & (code > 0) & (code < 255)
        tiny = bits == 0x0040_0000
        code = xp.where(tiny, code * 0, code)
        return Scale(code, scale, scale), fits | tiny
    if spec.scale == "e4m3":
        code = encode(xp, scale, Element.of("float8_e4m3fn"))
        decoded = xp.take(decode_table(xp, "float8_e4m3fn", scale), code & 0xFF)
        return Scale(code, scale, scale), (decoded == scale) & (scale > 0)
    stored = stored_scale(xp, scale, spec)
    return Scale(stored.stored, scale, scale), (stored.decoded == scale) & (scale != 0)


def kept(xp: Namespace, blocks: Any, stats: Stats, scale: Any, spec: Spec) -> tuple[Scale, Any]:
    """A scale, with the zero point that goes with it, and whether each block keeps its values under it."""
    made, fits = stored_exactly(xp, scale, spec)
    if spec.rule == "asymmetric":
        made.zero_point, reaches = _zero_point(xp, stats, scale, spec.element)
        fits = fits & reaches
    finite = ~(stats.has_nan | stats.has_infinity)
    return made, fits & finite & loses_nothing(xp, blocks, made, spec.element)


def loses_nothing(xp: Namespace, blocks: Any, scale: Scale, element: Element) -> Any:
    codes = encode(xp, xp.divide(blocks, scale.factor), element, scale.zero_point)
    values = xp.take(decode_table(xp, element.name, blocks), codes & 0xFF)
    if scale.zero_point is not None:
        values = values - scale.zero_point
    values = values * scale.decoded
    different = blocks != values if element.has_one_zero else xp.bits(blocks) != xp.bits(values)
    return ~xp.any(different, quantize.AXES)


def common_scales(xp: Namespace, blocks: Any, stats: Stats, spec: Spec) -> list[Any]:
    """The scale amax / p of each block for the p that its other values leave, 0 where they leave none; for float32
    scales, whose products are rounded, also the neighbours."""
    ratio = xp.divide(xp.floats(xp.bits(blocks) & ABS_MASK), stats.amax)
    find = _integer_scale if spec.element.is_integer else _float_scale
    scale = find(xp, blocks, ratio, stats, spec)
    scale = xp.where(stats.amax == 0, stats.amax, scale)
    if spec.scale != "float32":
        return [scale]
    neighbours = (xp.where(scale == 0, scale, xp.floats(xp.bits(scale) + step)) for step in (-1, 1))
    return [scale, *neighbours]


def _zero_point(xp: Namespace, stats: Stats, scale: Any, element: Element) -> tuple[Any, Any]:
    magic = xp.number(MAGIC, scale)
    ends = xp.divide(stats.low, scale), xp.divide(stats.high, scale)
    low = (xp.minimum(*ends) + magic) - magic
    high = (xp.maximum(*ends) + magic) - magic
    lowest = xp.number(element.lowest, scale)
    return lowest - low, high - low <= xp.number(element.max - element.lowest, scale)


def _float_scale(xp: Namespace, blocks: Any, ratio: Any, stats: Stats, spec: Spec) -> Any:
    element = spec.element
    rest = 0x007F_FFFF >> element.mantissa_bits
    result = stats.amax * 0
    found = stats.has_nan & False
    for significand in _SIGNIFICANDS[element.mantissa_bits]:
        bits = xp.bits(ratio * xp.number(float(significand), ratio)) + 16
        possible = ~xp.any(((bits & rest) >= 32) & (ratio != 0), quantize.AXES)
        for p in _magnitudes(significand, spec):
            scale = xp.divide(stats.amax, xp.number(p, ratio))
            good = possible & ~found & _is_product(xp, scale, p, stats, spec)
            result = xp.where(good, scale, result)
            found = found | good
    return result


def _magnitudes(significand: int, spec: Spec) -> list[float]:
    """The largest number of a format with that significand; where scales are E4M3, which end early, the smaller ones
    as well."""
    element = spec.element
    p = significand * 2.0 ** (element.max_exponent - element.mantissa_bits)
    p = p / 2 if p > element.max else p
    smallest = 2.0**-1
    if spec.scale != "e4m3":
        return [p]
    found = []
    while p >= smallest and (p / smallest).is_integer():
        found.append(p)
        p /= 2
    return found


def _is_product(xp: Namespace, scale: Any, p: Any, stats: Stats, spec: Spec) -> Any:
    if spec.scale == "float32":
        return scale == scale  # noqa: PLR0124 (whatever it is)
    _, fits = stored_exactly(xp, scale, spec)
    factor = p if not isinstance(p, float) else xp.number(p, scale)
    return fits & (scale * factor == stats.amax)


def _integer_scale(xp: Namespace, blocks: Any, ratio: Any, stats: Stats, spec: Spec) -> Any:
    element = spec.element
    asymmetric = spec.rule == "asymmetric"
    largest = -element.lowest if element.lowest < 0 else element.max
    limit = int(element.max - element.lowest if asymmetric else largest)
    magic, most = xp.number(MAGIC, ratio), xp.number(float(limit), ratio)
    denominator = stats.amax * 0 + xp.number(1.0, ratio)
    for _ in range(limit.bit_length()):
        multiple = ratio * denominator
        distance = multiple - ((multiple + magic) - magic)
        fraction = xp.max(xp.floats(xp.bits(distance) & ABS_MASK), quantize.AXES)
        more = (fraction >= xp.number(_TOLERANCE, ratio)) & (denominator <= most)
        denominator = xp.where(more, denominator * _denominator(xp, fraction), denominator)
    n = denominator
    if spec.scale != "float32":  # the first multiple whose scale has few enough bits
        n = denominator * xp.constant(np.arange(1, limit + 1, dtype=np.float32), "float32", ratio)
        good = (n <= most) & _is_product(xp, xp.divide(stats.amax, n), n, stats, spec)
        n = -xp.max(xp.where(good, -n, n * 0 - xp.number(1e6, ratio)), (4,))
    scale = xp.divide(stats.amax, n)
    if not asymmetric:
        turned = xp.any(blocks == -stats.amax, quantize.AXES)
        if element.lowest < 0:
            turned = (n > xp.number(element.max, ratio)) & xp.any(blocks == stats.amax, quantize.AXES)
        scale = xp.where(turned, -scale, scale)
    return xp.where(n <= most, scale, scale * 0)


def _denominator(xp: Namespace, fraction: Any) -> Any:
    """Of a fraction between 0 and 1/2, by Euclid's algorithm with nearest quotients."""
    one, magic, tolerance = (xp.number(x, fraction) for x in (1.0, MAGIC, _TOLERANCE))
    a, b = fraction * 0 + one, fraction
    for _ in range(8):
        quotient = (xp.divide(a, b) + magic) - magic
        rest = xp.floats(xp.bits(a - quotient * b) & ABS_MASK)
        goes_on = b >= tolerance
        a, b = xp.where(goes_on, b, a), xp.where(goes_on, rest, b)
    return (xp.divide(one, a) + magic) - magic


@dataclasses.dataclass
class _Options:
    """What each block's scale may be, along the last axis: its own, then amax over each magnitude."""

    scale: Any
    keeps: Any
    is_free: Any  # whatever the global scale


def two_level(
    xp: Namespace, blocks: Any, grid: quantize.Grid, spec: Spec, stats: Stats, own: Any, source: ScaledTensor
) -> Any:
    """NVFP4's: (whether there are such levels, the parts); ``own`` is the source's scale of each block, 0 where it has
    more."""
    trials = []
    own = xp.floats(xp.bits(own) & ABS_MASK)
    for scale in (own, *(xp.divide(stats.amax, xp.number(m, blocks)) for m in _MAGNITUDES)):
        usable = (scale > 0) & (scale < xp.number(math.inf, blocks))
        trials.append((scale, usable & loses_nothing(xp, blocks, Scale(scale, scale, scale), spec.element)))
    options = _Options(
        xp.concatenate([scale for scale, _ in trials], 4),
        xp.concatenate([keeps for _, keeps in trials], 4),
        stats.has_nan | (stats.amax == 0),
    )
    possible = ~_any(xp, stats.has_infinity) & _any(xp, ~options.is_free)
    level = xp.number(1.0, blocks)
    found = possible & False
    for candidate in _levels(xp, options, stats, spec, source):
        good = possible & ~found & _fits(xp, options, candidate, spec)
        level = xp.where(good, candidate, level)
        found = found | good
    scale = _scales(xp, options, level, stats, spec)
    codes = quantize.encode_blocks(xp, blocks, dataclasses.replace(spec, multiply=False), stats, scale)
    return found, quantize.assemble(xp, codes, grid, spec, stats, scale, Global(level, level))


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
    two, top = xp.number(2.0, like), xp.number(256.0, like)
    scaled = xp.where(significand > xp.number(1.75, like), significand * top / two, significand * top)
    yield _level(xp, own, xp.where(((bits & 0x000F_FFFF) != 0) | (bits < 0x0080_0000), top, scaled), spec)
    amax = _largest(xp, xp.where(options.is_free, zero, stats.amax))
    for magnitude in (6.0, 4.0):
        scale = xp.divide(amax, xp.number(magnitude, like))
        for significand in _SIGNIFICANDS[3]:
            for unit in (16.0, 8.0) if significand > 14 else (32.0, 16.0):
                yield _level(xp, scale, xp.number(significand * unit, like), spec)


def _level(xp: Namespace, scale: Any, stored: Any, spec: Spec) -> Any:
    return xp.divide(stored, scale) if spec.global_divides else xp.divide(scale, stored)


def _codes(xp: Namespace, options: _Options, level: Any, spec: Spec) -> tuple[Any, Any]:
    """E4M3 codes of every option, and which of them make its scale."""
    element = Element.of("float8_e4m3fn")
    wanted = options.scale * level if spec.global_divides else xp.divide(options.scale, level)
    code = encode(xp, wanted, element) & 0xFF
    stored = xp.take(decode_table(xp, element.name, options.scale), code)
    made = xp.divide(stored, level) if spec.global_divides else stored * level
    largest = xp.number(element.max, options.scale)
    return code, options.keeps & (wanted <= largest) & (code > 0) & (made == options.scale)


def _fits(xp: Namespace, options: _Options, level: Any, spec: Spec) -> Any:
    _, good = _codes(xp, options, level, spec)
    usable = (level > 0) & (level < xp.number(math.inf, options.scale))
    return usable & ~_any(xp, ~(options.is_free | xp.any(good, (4,))))


def _scales(xp: Namespace, options: _Options, level: Any, stats: Stats, spec: Spec) -> Scale:
    code, good = _codes(xp, options, level, spec)
    count = len(_MAGNITUDES) + 1
    rank = xp.constant(np.arange(count, 0, -1, dtype=np.int32), "int32", code)
    first = xp.max(xp.where(good, code * 0 + rank, code * 0), (4,)) == rank
    stored = xp.max(xp.where(first, code, code * 0), (4,))
    scale = xp.max(xp.where(first, options.scale, options.scale * 0), (4,))
    one = stats.amax * 0 + xp.number(1.0, code)
    stored = xp.where(options.is_free, stored * 0 + (8 if spec.rule == "torchao" else 0), stored)
    stored = xp.where(stats.has_nan, stored * 0 + 0x7F, stored)
    scale = xp.where(options.is_free, one, scale)
    return Scale(stored, scale, scale)


def _any(xp: Namespace, x: Any) -> Any:
    return xp.any(x.reshape(-1), (0,)).reshape(())


def _largest(xp: Namespace, x: Any) -> Any:
    return xp.max(x.reshape(-1), (0,)).reshape(())
