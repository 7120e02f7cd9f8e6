# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; Triton's tuples have no stars.
# ruff: noqa: RET505, RUF005
"""Casts that search the scale of least squared error, and casts with zero points.

The order in which the core adds squared errors is part of the definition: 16 lanes, then halves. Launched without
fused multiply-adds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from breccia.kernels.triton.casts.cast_tensor import statistics
from breccia.kernels.triton.device import codecs
from breccia.kernels.triton.device.elements import ELEMENTS, Form
from breccia.kernels.triton.recipes import Plan
from breccia.kernels.triton.runtime import empty_parts, launch
from breccia.kernels.triton.turn import contiguous_rows

TILE, WARPS = 256, 1  # elements and warps of a program. One warp: with four, Triton 3.6 got a sum of float32 wrong
NVFP4_RULES = ("transformer_engine", "torchao")


@triton.jit
def stored_scale(s, SDT: tl.constexpr):
    """(stored, decoded): `codecs.positive` of the magnitude, with the sign."""
    bits = s.to(tl.int32, bitcast=True)
    size = codecs.positive(codecs.as_float(bits & 0x7FFF_FFFF), SDT).to(tl.float32)
    decoded = tl.where(bits < 0, -size, size)
    return decoded.to(SDT), decoded


@triton.jit
def nvfp4_candidate(amax, candidate, stat_ptr, RULE: tl.constexpr):
    """(E4M3 code, value, factor)."""
    lowest: tl.constexpr = 8 if RULE == "torchao" else 1
    code = codecs.encode_element(codecs.nvfp4_wanted(amax, stat_ptr, RULE), codecs.E4M3).to(tl.int32)
    # 0, 1, -1, 2, -2, 3, 4, 5, 6
    offset = tl.where(candidate > 4, candidate - 2, ((candidate + 1) // 2) * tl.where(candidate % 2 == 1, 1, -1))
    moved = code + offset
    code = tl.where((moved < lowest) | (moved > 0x7E), code, moved)
    v = codecs.decode_float(code, codecs.E4M3)
    value = v if RULE == "single" else v * tl.load(stat_ptr + 2)
    return code, value, codecs.nvfp4_factor(v, stat_ptr, RULE)


@triton.jit
def mx_candidate(amax, candidate, FORM: tl.constexpr):
    """(E8M0 code, value, factor)."""
    ELEMENT: tl.constexpr = FORM.element
    RULE: tl.constexpr = FORM.rule
    code = codecs.mx_exponent(amax, ELEMENT, RULE, True)
    moved = code + tl.where(candidate == 2, -1, candidate)
    code = tl.where((moved < 1) | (moved > 254), code, moved)
    value = codecs.as_float(tl.where(code == 0, 0x0040_0000, code << 23))
    at_zero: tl.constexpr = 0x3F80_0000 if RULE == "rceil" else 0x7E80_0000
    factor = tl.where(code == 0, at_zero, tl.where(code == 254, 0x0040_0000, (254 - code) << 23))
    return code, value, codecs.as_float(factor)


@triton.jit
def float_candidate(amax, low, high, candidate, FORM: tl.constexpr, SDT: tl.constexpr):
    """(stored scale, its value, zero point)."""
    LO: tl.constexpr = FORM.element.lo
    HI: tl.constexpr = FORM.element.hi
    if FORM.rule == "asymmetric":
        shrink = 1.0 - 0.02 * candidate.to(tl.float32)
        low = low * shrink
        high = high * shrink
        s = tl.div_rn(high * 0.5 - low * 0.5, tl.full(amax.shape, HI - LO, tl.float32)) * 2.0
        stored, value = stored_scale(tl.where(amax == 0, 1.0, s), SDT)
        zero = tl.minimum(tl.maximum(LO - tl.div_rn(low, value), LO * 1.0), HI * 1.0)
        return stored, value, (zero + 12582912.0) - 12582912.0
    else:
        s = tl.div_rn(amax, tl.full(amax.shape, FORM.element.max, tl.float32))
        if FORM.element.is_integer:
            s = s * (1.0 - 0.02 * (candidate & 15).to(tl.float32))
            s = tl.where(candidate > 15, -s, s)
        else:
            s = s * (1.0 + 0.0625 * candidate.to(tl.float32))
        stored, value = stored_scale(tl.where(amax == 0, 1.0, s), SDT)
        return stored, value, value * 0.0


@triton.jit
def choose(
    amax, low, high, candidate, stat_ptr, FORM: tl.constexpr, NVFP4: tl.constexpr, DIVIDE: tl.constexpr,
    SDT: tl.constexpr,
):  # fmt: skip
    """(stored scale, its value, factor or divisor, zero point) of a candidate; 0 is the rule's own."""
    RULE: tl.constexpr = FORM.rule
    if NVFP4:
        stored, value, factor = nvfp4_candidate(amax, candidate, stat_ptr, RULE)
        return stored.to(SDT), value, factor, value * 0.0
    elif DIVIDE:
        stored, value, zero = float_candidate(amax, low, high, candidate, FORM, SDT)
        return stored, value, value, zero
    else:
        stored, value, factor = mx_candidate(amax, candidate, FORM)
        return stored.to(SDT), value, factor, value * 0.0


@triton.jit
def over(x, factor, DIVIDE: tl.constexpr):
    """x [R, n] over or times a factor [R], which may be negative; beyond every format where the quotient is."""
    if DIVIDE:
        power = codecs.unit_power(tl.abs(factor))
        d = tl.expand_dims(factor * power, 1)
        x = tl.minimum(tl.maximum(x * tl.expand_dims(power, 1), -3.0e30), 3.0e30)
        return codecs.divide(x, d, 1.0 / d, True)
    else:
        return x * tl.expand_dims(factor, 1)


@triton.jit
def squared_error(x, unit, factor, value, zero, DIVIDE: tl.constexpr, ELEMENT: tl.constexpr):
    """Of x and what it quantizes to, in a unit near amax."""
    y = over(x, factor, DIVIDE)
    value = tl.expand_dims(value, 1)
    unit = tl.expand_dims(unit, 1)
    if ELEMENT.is_integer:
        z = tl.expand_dims(zero, 1)
        rounded = (tl.minimum(tl.maximum(y, ELEMENT.lo - z), ELEMENT.hi - z) + 12582912.0) - 12582912.0
        error = rounded * value - x * unit
    else:
        a = tl.minimum(tl.abs(y), ELEMENT.max)
        e = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, ELEMENT.emin)
        magic = codecs.as_float((e + (23 - ELEMENT.mantissa + 127)) << 23)
        error = ((a + magic) - magic) * value - tl.abs(x * unit)
    return error * error


@triton.jit
def block_error(xs, unit, factor, value, zero, FORM: tl.constexpr, R: tl.constexpr, DIVIDE: tl.constexpr):
    """Sums [R] over blocks whose elements stand in tensors [R, 16]."""
    ELEMENT: tl.constexpr = FORM.element
    total = squared_error(xs[0], unit, factor, value, zero, DIVIDE, ELEMENT)
    for i in tl.static_range(1, FORM.cols // 16):
        total += squared_error(xs[i], unit, factor, value, zero, DIVIDE, ELEMENT)
    halves = tl.permute(tl.reshape(total, [R, 2, 2, 2, 2]), (0, 4, 3, 2, 1))
    for _ in tl.static_range(4):
        low, high = tl.split(halves)
        halves = low + high
    return halves


@triton.jit
def cast_search_kernel(
    x_ptr, code_ptr, scale_ptr, zero_ptr, stat_ptr, blocks, across, x_stride,
    FORM: tl.constexpr, CANDIDATES: tl.constexpr, NVFP4: tl.constexpr, DIVIDE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R blocks of G elements; `across` of them make a row."""
    ELEMENT: tl.constexpr = FORM.element
    G: tl.constexpr = FORM.cols
    SDT: tl.constexpr = scale_ptr.dtype.element_ty
    block = tl.program_id(0) * R + tl.arange(0, R)
    live = block < blocks
    at = (block // across).to(tl.int64) * x_stride + (block % across) * G
    whole = at[:, None] + tl.arange(0, G)[None, :]
    raw = tl.load(x_ptr + whole, mask=live[:, None], other=0)
    x = raw.to(tl.float32)
    clean = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    amax = tl.max(tl.abs(clean), axis=1)
    low = tl.minimum(tl.min(clean, axis=1), 0.0)
    high = tl.maximum(tl.max(clean, axis=1), 0.0)
    top = codecs.absmax(x, 1)
    nan = top != top  # noqa: PLR0124
    own = tl.full([], 0, tl.int32)
    best, value, factor, zero = choose(amax, low, high, own, stat_ptr, FORM, NVFP4, DIVIDE, SDT)
    if CANDIDATES > 1:
        lanes = at[:, None] + tl.arange(0, 16)[None, :]
        xs = (tl.load(x_ptr + lanes, mask=live[:, None], other=0).to(tl.float32),)
        for i in tl.static_range(16, G, 16):
            xs = xs + (tl.load(x_ptr + lanes + i, mask=live[:, None], other=0).to(tl.float32),)  # type: ignore[assignment]
        exponent = amax.to(tl.int32, bitcast=True) >> 23
        unit = codecs.as_float(tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23)
        searches = (top < float("inf")) & (amax != 0)
        least = block_error(xs, unit, factor, value * unit, zero, FORM, R, DIVIDE)
        for candidate in range(1, CANDIDATES):
            other, v, f, z = choose(amax, low, high, own + candidate, stat_ptr, FORM, NVFP4, DIVIDE, SDT)
            error = block_error(xs, unit, f, v * unit, z, FORM, R, DIVIDE)
            better = searches & (error < least)
            least = tl.where(better, error, least)
            best = tl.where(better, other, best)
            factor = tl.where(better, f, factor)
            zero = tl.where(better, z, zero)
        # Once more, so that it need not be kept; the policy makes it another load for the compiler.
        raw = tl.load(x_ptr + whole, mask=live[:, None], other=0, eviction_policy="evict_first")
        x = raw.to(tl.float32)
    if not ELEMENT.has_nan:
        x = tl.where(tl.expand_dims(tl.where(nan, 1, 0), 1) != 0, 0.0, x)
        if DIVIDE:
            best = tl.where(nan, float("nan"), best.to(tl.float32)).to(SDT)
        else:
            best = tl.where(nan, 0x7F if NVFP4 else 0xFF, best.to(tl.int32)).to(SDT)
    y = over(x, factor, DIVIDE)
    if FORM.rule == "asymmetric":
        z = tl.expand_dims(tl.where(nan, 0.0, zero), 1)
        y = tl.minimum(tl.maximum(y, ELEMENT.lo - z), ELEMENT.hi - z)
        code = ((y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B40_0000 + z.to(tl.int32)).to(tl.uint8)
        code = tl.where(tl.expand_dims(tl.where(nan, 1, 0), 1) != 0, 0, code.to(tl.int32)).to(tl.uint8)
        tl.store(zero_ptr + block, tl.where(nan, 0.0, zero).to(tl.int32).to(tl.uint8), mask=live)
    else:
        code = codecs.encode_element(y, ELEMENT)
        if ELEMENT.has_nan:
            code = codecs.encode_nan(code, codecs.widen(raw), ELEMENT)
    tl.store(scale_ptr + block, best, mask=live)
    if FORM.packed:
        to = block.to(tl.int64)[:, None] * (G // 2) + tl.arange(0, G // 2)[None, :]
        tl.store(code_ptr + to, codecs.pack_nibbles(code, R, G), mask=live[:, None])
    else:
        tl.store(code_ptr + block.to(tl.int64)[:, None] * G + tl.arange(0, G)[None, :], code, mask=live[:, None])


def candidates(plan: Plan) -> int:
    if not plan.search:
        return 1
    if plan.rule in NVFP4_RULES:
        return 9
    if plan.rule not in ("divide", "asymmetric"):
        return 3
    return 32 if ELEMENTS[plan.element].lo < 0 and plan.rule == "divide" else 16


def cast_search(x: torch.Tensor, plan: Plan) -> list[torch.Tensor]:
    """Codes (uint8), scales and, where there are any, zero points (uint8) and the global scale of a 2-D tensor whose
    columns are whole blocks."""
    x = contiguous_rows(x)
    rows, cols = x.shape
    g = plan.block[1]
    nvfp4, asymmetric = plan.rule in NVFP4_RULES, plan.rule == "asymmetric"
    made = list(empty_parts(x.shape, plan, x.device))
    codes, scales = made
    if asymmetric:
        made.append(torch.empty((rows, cols // g), dtype=torch.uint8, device=x.device))
    stats = scales
    if nvfp4 and plan.two_level:
        made.append(torch.ones((), dtype=torch.float32, device=x.device))
        stats = statistics(x, "nvfp4", 6.0, 1.0, made[-1])
    blocks = rows * (cols // g)
    launch(
        cast_search_kernel,
        (triton.cdiv(blocks, TILE // g),),
        x,
        codes,
        scales,
        made[2] if asymmetric else scales,
        stats,
        blocks,
        cols // g,
        x.stride(0),
        num_warps=WARPS,
        enable_fp_fusion=False,
        **constants(plan),
    )
    return made


def constants(plan: Plan) -> dict[str, Any]:
    """What the kernel is compiled for."""
    nvfp4 = plan.rule in NVFP4_RULES
    rule = "single" if nvfp4 and not plan.two_level else plan.rule
    rows, cols = plan.block
    return {
        "FORM": Form(ELEMENTS[plan.element], rule=rule, rows=rows, cols=cols, packed=plan.packed),
        "CANDIDATES": candidates(plan),
        "NVFP4": nvfp4,
        "DIVIDE": plan.rule in ("divide", "asymmetric"),
        "R": TILE // cols,
    }
