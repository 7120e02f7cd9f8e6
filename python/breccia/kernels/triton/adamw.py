# SPDX-License-Identifier: Apache-2.0
# Device code: x != x is NaN.
# ruff: noqa: PLR0124
"""A step of AdamW whose two moments are codes, in one pass over the weights: cpp/include/breccia/adamw.hpp says what
it computes. The bytes are those of the core, but for codes with exponents, which follow from a GPU's own logarithms."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_block import block_scale
from breccia.kernels.triton.device import codecs
from breccia.kernels.triton.device.elements import BY_FORMAT, Form
from breccia.kernels.triton.runtime import launch
from breccia.kernels.whole_array.random import key_words
from breccia.recipes import ScalingRecipe, choices

NUMBERS, WARPS = 512, 2  # of a program


@triton.jit
def with_sign(size, of):
    """Magnitudes with the signs of other numbers."""
    sign = of.to(tl.int32, bitcast=True) & (-0x7FFF_FFFF - 1)
    return codecs.as_float(size.to(tl.int32, bitcast=True) | sign)


@triton.jit
def update(w, g, m, v, beta1, beta2, rest1, rest2, keep, rate, correction, eps, limit):
    """(weights, first moments, second moments, roots of these) after a step."""
    size = tl.abs(g)
    g = tl.where(size < 18446744073709551616.0, g, 0.0)
    m = beta1 * m + rest1 * g
    v = beta2 * v + (rest2 * g) * g
    root = tl.sqrt_rn(v)
    quotient = tl.div_rn(m, root * correction + eps)
    change = tl.where(tl.abs(quotient) > limit, with_sign(tl.full(m.shape, 1.0, tl.float32) * limit, m), quotient)
    new = w * keep - rate * change
    return tl.where(size < float("inf"), new, float("nan")), m, v, root


@triton.jit
def read_expanded(code_ptr, scale_ptr, exponent_ptr, at, group, live, inside, FORM: tl.constexpr):
    """Values [G, N] of groups with an exponent."""
    ELEMENT: tl.constexpr = FORM.element
    code = codecs.decode_element(tl.load(code_ptr + at, mask=inside, other=0), ELEMENT)
    scale = tl.load(scale_ptr + group, mask=live, other=1.0)
    k = tl.load(exponent_ptr + group, mask=live, other=1.0).to(tl.float32)
    known = (k > 0) & (k < float("inf"))  # else a group has no values
    scale, k = tl.where(known, scale, float("nan")), tl.where(known, k, 1.0)
    size = tl.abs(code)
    whole, part = codecs.logarithm(size)
    whole_of_max, part_of_max = codecs.logarithm(tl.full(k.shape, ELEMENT.max, tl.float32))
    half = tl.div_rn(tl.full(k.shape, 0.5, tl.float32), k)
    log = ((whole - whole_of_max[:, None]) + (part - part_of_max[:, None])) * half[:, None]
    root = codecs.power_of_two(tl.minimum(tl.maximum(log, -126.0), 127.0))  # of INT8's -128 perhaps more
    # The scale of the largest float32 may have been rounded up, and the product be beyond float32.
    largest = scale * ELEMENT.max
    finite = tl.minimum(tl.maximum(largest, -codecs.F32_MAX), codecs.F32_MAX)
    largest = tl.where(tl.abs(scale) <= codecs.F32_MAX / ELEMENT.max, finite, largest)
    value = tl.where(size > 0, (root * largest[:, None]) * with_sign(root, code), code)
    return tl.where((k == 1.0)[:, None], code * scale[:, None], value)


@triton.jit
def expanded_codes(x, size, most, k, FORM: tl.constexpr):
    """Codes of finite groups."""
    ELEMENT: tl.constexpr = FORM.element
    whole, part = codecs.logarithm(size)
    whole_of_top, part_of_top = codecs.logarithm(most)
    log = ((whole - whole_of_top[:, None]) + (part - part_of_top[:, None])) * k[:, None]
    power = codecs.power_of_two(tl.maximum(log, -126.0)) * ELEMENT.max
    return codecs.encode_element(with_sign(tl.where(size > 0, power, 0.0), x), ELEMENT)


@triton.jit
def write_expanded(x, code_ptr, scale_ptr, exponent_ptr, at, group, live, inside, FORM: tl.constexpr):
    """Quantizes groups [G, N] with an exponent each."""
    ELEMENT: tl.constexpr = FORM.element
    bits = codecs.abs_bits(x)
    most = tl.max(bits, axis=1)
    least = tl.min(tl.where(bits > 0, bits, 0x7F80_0000), axis=1)
    # Without a range, or not finite.
    finite = (most > 0) & (most < 0x7F80_0000)
    high = codecs.as_float(tl.where(finite, most, 0x3F80_0000))
    low = codecs.as_float(tl.where(finite, least, 0x3F80_0000))
    whole, part = codecs.logarithm(high)
    whole_of_low, part_of_low = codecs.logarithm(low)
    whole_of_max, part_of_max = codecs.logarithm(tl.full(high.shape, ELEMENT.max, tl.float32))
    whole_of_least, part_of_least = codecs.logarithm(tl.full(high.shape, ELEMENT.smallest, tl.float32))
    span = (whole_of_max - whole_of_least) + (part_of_max - part_of_least)
    extent = (whole - whole_of_low) + (part - part_of_low)
    k = tl.div_rn(span, tl.maximum(extent, span * 0.00390625)).to(tl.float16)
    k = tl.where(finite, k, 1.0).to(tl.float16)
    plain = k == 1.0
    scale, _ = block_scale(high, FORM, tl.float32, True)
    size = codecs.as_float(bits)
    code = expanded_codes(x, size, high, k.to(tl.float32), FORM)
    if tl.max(tl.where(plain, 1, 0), axis=0) != 0:
        poisoned = most > 0x7F80_0000
        amax = tl.max(tl.where(bits < 0x7F80_0000, bits, 0), axis=1)
        own, factor = block_scale(codecs.as_float(amax), FORM, tl.float32, True)
        y = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
        if not ELEMENT.has_nan:
            own = tl.where(poisoned, float("nan"), own)
            y = tl.where(poisoned[:, None], 0.0, y)
        unsigned = codecs.as_float(tl.where(x != x, 0x7FC0_0000, x.to(tl.int32, bitcast=True)))  # where it is a NaN
        given = codecs.encode_nan(codecs.encode_element(y, ELEMENT), unsigned, ELEMENT)
        code = tl.where(plain[:, None], given, code)
        scale = tl.where(plain, own, scale)
    tl.store(code_ptr + at, code, mask=inside)
    tl.store(scale_ptr + group, scale, mask=live)
    tl.store(exponent_ptr + group, k, mask=live)


@triton.jit
def expanded_kernel(
    w_ptr, g_ptr, code1_ptr, scale1_ptr, exponent1_ptr, code2_ptr, scale2_ptr, exponent2_ptr, count, groups,
    beta1, beta2, rest1, rest2, keep, rate, correction, eps, limit,
    FORM: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """G groups."""
    N: tl.constexpr = FORM.cols
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    live = group < groups
    at = group[:, None] * N + tl.arange(0, N)[None, :]
    inside = live[:, None] & (at < groups * N)
    there = at < count
    m = read_expanded(code1_ptr, scale1_ptr, exponent1_ptr, at, group, live, inside, FORM)
    v = read_expanded(code2_ptr, scale2_ptr, exponent2_ptr, at, group, live, inside, FORM)
    w = tl.load(w_ptr + at, mask=there, other=0)
    g = codecs.widen(tl.load(g_ptr + at, mask=there, other=0))
    new, m, v, _ = update(codecs.widen(w), g, m, v, beta1, beta2, rest1, rest2, keep, rate, correction, eps, limit)
    tl.store(w_ptr + at, new.to(w.dtype), mask=there)
    write_expanded(m, code1_ptr, scale1_ptr, exponent1_ptr, at, group, live, inside, FORM)
    write_expanded(v, code2_ptr, scale2_ptr, exponent2_ptr, at, group, live, inside, FORM)


@triton.jit
def mixed(x):
    """See mix_bits in cpp/src/contract/random.hpp; of uint32."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB_352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846C_A68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def write_by_chance(x, code_ptr, scale_ptr, at, group, live, inside, key, offset, FORM: tl.constexpr):
    """Quantizes groups [G, N] stochastically: see stochastic_code in cpp/src/kernels/stochastic.inl.hpp."""
    ELEMENT: tl.constexpr = FORM.element
    bits = codecs.abs_bits(x)
    amax = tl.max(tl.where(bits < 0x7F80_0000, bits, 0), axis=1)
    scale, factor = block_scale(codecs.as_float(amax), FORM, tl.uint8, True)
    scaled = codecs.abs_bits(x * factor[:, None])
    place = at.to(tl.uint32)
    draw = mixed(mixed(place ^ key.to(tl.uint32, bitcast=True)) + offset.to(tl.uint32, bitcast=True)) >> 8
    uniform = draw.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    top = tl.full(scaled.shape, ELEMENT.max, tl.float32).to(tl.int32, bitcast=True)
    clamped = tl.minimum(scaled, top)
    least: tl.constexpr = (ELEMENT.emin + 127) << 23
    exponent = tl.maximum(clamped & 0x7F80_0000, least)
    units = codecs.as_float(clamped) * codecs.as_float((254 << 23) - exponent + (ELEMENT.mantissa << 23))
    below = units.to(tl.int32)
    code = below + tl.where(uniform < units - below.to(tl.float32), 1, 0)
    code = code + ((exponent - least) >> (23 - ELEMENT.mantissa))
    code = code | ((x.to(tl.int32, bitcast=True) >> 24) & ELEMENT.sign)
    code = tl.where(bits > 0x7F80_0000, ELEMENT.nan, code)
    tl.store(code_ptr + at, code.to(tl.uint8), mask=inside)
    tl.store(scale_ptr + group, scale, mask=live)


@triton.jit(do_not_specialize=["key1", "offset1", "key2", "offset2"])
def stochastic_kernel(
    w_ptr, g_ptr, code1_ptr, scale1_ptr, code2_ptr, scale2_ptr, count, groups,
    beta1, beta2, rest1, rest2, keep, rate, correction, eps, limit, key1, offset1, key2, offset2,
    FORM: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """G groups of first moments and of the roots of second ones."""
    ELEMENT: tl.constexpr = FORM.element
    N: tl.constexpr = FORM.cols
    group = tl.program_id(0).to(tl.int64) * G + tl.arange(0, G)
    live = group < groups
    at = group[:, None] * N + tl.arange(0, N)[None, :]
    inside = live[:, None] & (at < groups * N)
    there = at < count
    scale1 = codecs.decode_e8m0(tl.load(scale1_ptr + group, mask=live, other=127))
    scale2 = codecs.decode_e8m0(tl.load(scale2_ptr + group, mask=live, other=127))
    m = codecs.decode_element(tl.load(code1_ptr + at, mask=inside, other=0), ELEMENT) * scale1[:, None]
    root = codecs.decode_element(tl.load(code2_ptr + at, mask=inside, other=0), ELEMENT) * scale2[:, None]
    w = tl.load(w_ptr + at, mask=there, other=0)
    g = codecs.widen(tl.load(g_ptr + at, mask=there, other=0))
    new, m, _, root = update(
        codecs.widen(w), g, m, root * root, beta1, beta2, rest1, rest2, keep, rate, correction, eps, limit
    )
    tl.store(w_ptr + at, new.to(w.dtype), mask=there)
    bits = codecs.abs_bits(root)
    most = tl.max(bits, axis=1)
    least = codecs.as_float(tl.where(most < 0x7F80_0000, most, 0)) * 1.52587890625e-05
    root = tl.where(root > 0, tl.maximum(root, least[:, None]), root)
    write_by_chance(m, code1_ptr, scale1_ptr, at, group, live, inside, key1, offset1, FORM)
    write_by_chance(root, code2_ptr, scale2_ptr, at, group, live, inside, key2, offset2, FORM)


def adamw_step(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    recipe: ScalingRecipe,
    factors: tuple[float, ...],
    seed: int,
) -> None:
    """One step in place. All tensors are contiguous; moments are codes, scales and, where there are any, exponents;
    `factors` are those of AdamWFactors in cpp/src/contract/kernel_table.hpp, `seed` is of the first moment's draws."""
    form = _form(recipe)
    moments = [
        part if part.is_floating_point() and part.element_size() > 1 else part.view(torch.uint8)
        for part in (*first, *second)
    ]
    keys = () if len(first) == 3 else (*key_words(seed), *key_words(seed + 1))
    some = NUMBERS // form.cols
    groups = first[1].numel()
    launch(
        expanded_kernel if len(first) == 3 else stochastic_kernel,
        (triton.cdiv(groups, some),),
        weights,
        gradients,
        *moments,
        weights.numel(),
        groups,
        *factors,
        *keys,
        FORM=form,
        G=some,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


@functools.cache
def _form(recipe: ScalingRecipe) -> Form:
    chosen = choices(recipe)
    scale, rule = ("float", "divide") if chosen.expanded else ("e8m0", chosen.rule)
    return Form(BY_FORMAT[recipe.element], scale, rule, 1, recipe.layout.block[1])
