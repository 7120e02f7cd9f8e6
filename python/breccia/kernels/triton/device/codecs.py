# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; there is no `in`.
# ruff: noqa: RET505
"""Device functions: element and scale codecs, written once and shared by every kernel.

ELEMENT is a row of `elements`. Encoders round to nearest even and saturate, byte for byte like the C++ codecs. `FP8`
selects the hardware conversion for FP8 (sm_89 and later); earlier GPUs, Triton's interpreter and the formats without an
instruction take the bit arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from breccia.kernels.triton import runtime
from breccia.kernels.triton.device.elements import ELEMENTS

HW, FP8 = tl.constexpr(runtime.HW), tl.constexpr(runtime.FP8)
F32_MAX = tl.constexpr(3.4028234663852886e38)
FUSED = HW  # the interpreter's fma rounds twice
# NVFP4's scales and elements. The interpreter looks for attributes on a constexpr itself.
E4M3, E2M1 = (ELEMENTS[name] if runtime.INTERPRETED else tl.constexpr(ELEMENTS[name]) for name in ("e4m3", "e2m1"))


@triton.jit
def abs_bits(x):
    """Absolute value of float32 as an ordered int32: NaN > Inf > finite."""
    return x.to(tl.int32, bitcast=True) & 0x7FFF_FFFF


@triton.jit
def as_float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def encode_bits(y, MANT: tl.constexpr, EMIN: tl.constexpr, MAX: tl.constexpr, SIGN: tl.constexpr):
    """Any minifloat with MANT mantissa bits, smallest normal exponent EMIN and largest value MAX. NaN input: see
    callers."""
    u = y.to(tl.int32, bitcast=True)
    a = tl.minimum(as_float(u & 0x7FFF_FFFF), MAX)
    e = tl.maximum((a.to(tl.int32, bitcast=True) >> 23) - 127, EMIN)
    magic = (e + (23 - MANT + 127)) << 23  # adding it rounds to a multiple of 2^(e - MANT)
    t = a + as_float(magic)
    code = (t.to(tl.int32, bitcast=True) - magic) + ((e - EMIN) << MANT)
    return code | tl.where(u < 0, SIGN, 0)


@triton.jit
def encode_e2m1(y):
    """E2M1 code of float32 in an int32. The format is three straight lines; the code is the lowest of their rounded
    values."""
    u = y.to(tl.int32, bitcast=True)
    a = as_float(u & 0x7FFF_FFFF)
    low = a * 2.0 + 8388608.0
    mid = a + 8388610.0
    top = a * 0.5 + 8388612.0
    t = tl.minimum(tl.minimum(low, mid), tl.minimum(top, 8388615.0))
    return (t.to(tl.int32, bitcast=True) & 7) | ((u >> 28) & 8)


@triton.jit
def encode_element(y, ELEMENT: tl.constexpr):
    """Code of a float32 that is not NaN, as uint8."""
    if ELEMENT.is_integer:
        return round_int(y, ELEMENT.lo, ELEMENT.hi).to(tl.uint8)
    elif FP8 and ELEMENT.hardware == "fp8e4nv":
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif FP8 and ELEMENT.hardware == "fp8e5":
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif ELEMENT.name == "e2m1":
        return encode_e2m1(y).to(tl.uint8)
    else:
        return encode_bits(y, ELEMENT.mantissa, ELEMENT.emin, ELEMENT.max, ELEMENT.sign).to(tl.uint8)


@triton.jit
def widen(raw):
    """float32 of a 16- or 32-bit float. The conversion from float16 loses the sign of a NaN; this does not."""
    v = raw.to(tl.float32)
    if raw.dtype == tl.float16:
        sign = (raw.to(tl.int16, bitcast=True).to(tl.int32) >> 15) << 31
        v = as_float((v.to(tl.int32, bitcast=True) & 0x7FFF_FFFF) | sign)
    return v


@triton.jit
def encode_nan(code, x, ELEMENT: tl.constexpr):
    """`code` with the NaNs of x in the format's own NaN (sign kept) where it has one."""
    if ELEMENT.has_nan:
        u = x.to(tl.int32, bitcast=True)
        nan = ELEMENT.nan | ((u >> (32 - ELEMENT.bits)) & ELEMENT.sign)
        return tl.where((u & 0x7FFF_FFFF) > 0x7F80_0000, nan, code.to(tl.int32)).to(tl.uint8)
    else:
        return code


@triton.jit
def round_int(v, LO: tl.constexpr, HI: tl.constexpr):
    """clamp(rint(v), LO, HI) as int32, halves to even."""
    v = tl.minimum(tl.maximum(v, LO * 1.0), HI * 1.0)
    return ((v + 12582912.0).to(tl.int32, bitcast=True)) - 0x4B40_0000


@triton.jit
def pack_nibbles(code, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] codes to [ROWS, COLS / 2] bytes, the even column in the low nibble."""
    lo, hi = tl.split(tl.reshape(code.to(tl.uint8), [ROWS, COLS // 2, 2]))
    return (lo & 0xF) | (hi << 4)


@triton.jit
def decode_bits(code, MANT: tl.constexpr, EMIN: tl.constexpr, BITS: tl.constexpr):
    """float32 of a minifloat code (int32) without NaN or Inf: exponent and mantissa moved in place, then one exact
    product."""
    mag = (code & ((1 << (BITS - 1)) - 1)) << (23 - MANT)
    v = as_float(mag) * as_float(tl.full([], (253 + EMIN) << 23, tl.int32))
    return as_float(v.to(tl.int32, bitcast=True) | ((code >> (BITS - 1)) << 31))


@triton.jit
def decode_float(code, ELEMENT: tl.constexpr):
    """float32 of a float's code held in an int32, without conversion instructions."""
    v = decode_bits(code, ELEMENT.mantissa, ELEMENT.emin, ELEMENT.bits)
    if ELEMENT.infinity > 0:
        mag = code & (ELEMENT.sign - 1)
        v = tl.where(mag > ELEMENT.infinity, float("nan"), v)
        signed = tl.where(code > ELEMENT.sign - 1, float("-inf"), float("inf"))
        return tl.where(mag == ELEMENT.infinity, signed, v)
    elif ELEMENT.has_nan:
        return tl.where((code & (ELEMENT.sign - 1)) == ELEMENT.sign - 1, float("nan"), v)
    else:
        return v


@triton.jit
def as_hardware(raw, ELEMENT: tl.constexpr):
    """Bytes as the type with conversion instructions, where there is one."""
    if FP8 and ELEMENT.hardware == "fp8e4nv":
        return raw.to(tl.float8e4nv, bitcast=True)
    elif FP8 and ELEMENT.hardware == "fp8e5":
        return raw.to(tl.float8e5, bitcast=True)
    else:
        return raw


@triton.jit
def decode_element(raw, ELEMENT: tl.constexpr):
    """float32 of one unpacked code as loaded from memory."""
    if ELEMENT.is_integer:
        if ELEMENT.bits == 8:
            return (raw.to(tl.int8, bitcast=True) if ELEMENT.lo < 0 else raw).to(tl.float32)
        elif ELEMENT.lo < 0:
            code = raw.to(tl.int32) & (2 * ELEMENT.sign - 1)
            return ((code ^ ELEMENT.sign) - ELEMENT.sign).to(tl.float32)
        else:
            return (raw.to(tl.int32) & (2 * ELEMENT.sign - 1)).to(tl.float32)
    elif FP8 and ELEMENT.hardware != "":
        return as_hardware(raw, ELEMENT).to(tl.float32)
    elif ELEMENT.bits == 8:
        return decode_float(raw.to(tl.int32), ELEMENT)
    else:
        return decode_float(raw.to(tl.int32) & (2 * ELEMENT.sign - 1), ELEMENT)


@triton.jit
def decode_e8m0(byte):
    """2^(byte - 127) in float32; byte 0 is the subnormal 2^-127 and 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x0040_0000, b << 23)
    return as_float(tl.where(b == 255, 0x7FC0_0000, bits))


@triton.jit
def decode_scale(raw, SCALE: tl.constexpr):
    """float32 of a scale: `float` for fp32/fp16/bf16, `e8m0` bytes, `e4m3` codes."""
    if SCALE == "e8m0":
        return decode_e8m0(raw)
    elif SCALE == "e4m3":
        return decode_element(raw, E4M3)
    elif raw.dtype == tl.bfloat16:
        # By hand: LLVM takes a product of a float16 and a bfloat16 that ends up a float16 for one of float16, whose
        # range is too short.
        return as_float(raw.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return raw.to(tl.float32)


@triton.jit
def mx_exponent(amax, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, EXACT: tl.constexpr):
    """Biased E8M0 exponent of a block with finite absolute maximum `amax`.

    rceil is the exponent of amax / max rounded up. Away from the subnormals it rises by one exactly where amax's
    mantissa passes that of the element's max; EXACT takes the division, whose rounding counts near the bottom of the
    range.
    """
    bits = amax.to(tl.int32, bitcast=True)
    if ROUNDING == "rceil":
        if EXACT:
            bits = tl.div_rn(amax, tl.full(amax.shape, ELEMENT.max, tl.float32)).to(tl.int32, bitcast=True)
            e = bits >> 23
            up = tl.where((bits & 0x7F_FFFF) != 0, 1, 0)
            return tl.where(e == 0, tl.where(bits > 0x0040_0000, 1, 0), e + up)
        else:
            top = tl.full(amax.shape, ELEMENT.max, tl.float32).to(tl.int32, bitcast=True)
            return tl.maximum((bits - (top & 0x7F_FFFF) + 0x7F_FFFF) >> 23, ELEMENT.emax) - ELEMENT.emax
    else:
        if ROUNDING == "even":
            bits = bits + (1 << (22 - ELEMENT.mantissa))
        e = (bits >> 23) - ELEMENT.emax
        if ROUNDING == "ceil":
            e = e + tl.where((bits & 0x7F_FFFF) != 0, 1, 0)
        return tl.minimum(tl.maximum(e, 0), 254)


@triton.jit
def nvfp4_wanted(amax, stat_ptr, RULE: tl.constexpr):
    """The scale of an NVFP4 block before E4M3 rounds it. stat_ptr: see `cast_tensor.finish_kernel`."""
    one = tl.full(amax.shape, 1.0, tl.float32)
    if RULE == "transformer_engine":
        return amax * tl.load(stat_ptr)
    elif RULE == "torchao":
        b = tl.div_rn(tl.div_rn(amax, one * 6.0), one * tl.load(stat_ptr + 2))
        return tl.maximum(b, 0.015625)
    else:
        return tl.div_rn(amax, one * 6.0)


@triton.jit
def nvfp4_factor(b, stat_ptr, RULE: tl.constexpr):
    """What the values of a block are multiplied by, from its scale as E4M3 holds it."""
    one = tl.full(b.shape, 1.0, tl.float32)
    if RULE == "transformer_engine":
        r = tl.div_rn(one, b * tl.load(stat_ptr + 1))
    elif RULE == "torchao":
        r = tl.div_rn(one * tl.load(stat_ptr + 3), b)
    else:
        r = tl.div_rn(one, b)
    return tl.minimum(r, F32_MAX)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(x, AXIS: tl.constexpr):
    """Largest absolute value along an axis, NaN if there is one: a single instruction per element."""
    return tl.reduce(tl.abs(x), AXIS, _largest)


@triton.jit
def divide(x, s, r, FINE: tl.constexpr):
    """x / s from r, about 1 / s, for s well inside float32's range; its residuals are exact.

    FINE: two corrections, the correctly rounded quotient. One correction leaves a relative error of 2^-44 before the
    last rounding; for x of a 16-bit type this cannot move a code (tests_py/gpu/test_division.py), and float32 takes
    two.
    """
    if FUSED:
        # Triton's unary minus is 0 - x, so that -(+0) is +0; with r and not the residual negated, -0 stays -0.
        q = x * r
        q = tl.fma(tl.fma(q, s, -x), -r, q)
        if FINE:
            q = tl.fma(tl.fma(q, s, -x), -r, q)
        return q
    else:
        return tl.div_rn(x, tl.broadcast_to(s, x.shape))


@triton.jit
def positive(s, DT: tl.constexpr):
    """s rounded to a storage type, kept finite and above zero."""
    stored = s.to(DT)
    v = stored.to(tl.float32)
    if tl.float16 == DT:
        v = tl.minimum(tl.maximum(v, 5.960464477539063e-08), 65504.0)
    elif tl.bfloat16 == DT:
        v = tl.minimum(tl.maximum(v, 9.183549615799121e-41), 3.3895313892515355e38)
    else:
        v = tl.minimum(tl.maximum(v, 1.401298464324817e-45), 3.4028234663852886e38)
    return v.to(DT)


@triton.jit
def unit_power(s):
    """The power of two that brings s into [1, 2) (a subnormal s: close to it), as float32."""
    e = tl.minimum(tl.maximum(s.to(tl.int32, bitcast=True) >> 23, 1), 253)
    return as_float((254 - e) << 23)


MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to the nearest integer
MAGIC_BITS = tl.constexpr(0x4B40_0000)
ROOT_HALF = tl.constexpr(0x3F35_04F3)
LOG0, LOG1, LOG2, LOG3, LOG4, LOG5, LOG6 = (
    tl.constexpr(float.fromhex(term))
    for term in (
        "0x1.7154c4p+0", "-0x1.71582ep-1", "0x1.ebff06p-2", "-0x1.6f93b2p-2",
        "0x1.30659cp-2", "-0x1.173e24p-2", "0x1.5d75a4p-3",
    )
)  # fmt: skip
EXP0, EXP1, EXP2, EXP3, EXP4 = (
    tl.constexpr(float.fromhex(term))
    for term in ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10")
)


@triton.jit
def logarithm(x):
    """log2 of numbers above zero as a whole number and a part from -1/2 to 1/2, or another sum; some numbers for
    others."""
    if HW:
        asm: tl.constexpr = "lg2.approx.f32 $0, $1;"  # tl.log2 is a polynomial
        log = tl.inline_asm_elementwise(asm, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log, tl.zeros_like(log)
    else:
        small = x < 1.1754943508222875e-38
        offset = tl.where(small, MAGIC + 151.0, MAGIC + 127.0)
        bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True) + (0x3F80_0000 - ROOT_HALF)
        exponent = ((bits >> 23) & 0x1FF) + MAGIC_BITS
        f = as_float((bits & 0x007F_FFFF) + ROOT_HALF) - 1.0
        part = (((((LOG6 * f + LOG5) * f + LOG4) * f + LOG3) * f + LOG2) * f + LOG1) * f + LOG0
        return as_float(exponent) - offset, part * f


@triton.jit
def power_of_two(x):
    """2^x for x from -126 to 127."""
    if HW:
        return tl.exp2(x)
    else:
        total = x + MAGIC
        r = x - (total - MAGIC)
        significand = ((((EXP4 * r + EXP3) * r + EXP2) * r + EXP1) * r + EXP0) * r + 1.0
        return as_float(significand.to(tl.int32, bitcast=True) + (total.to(tl.int32, bitcast=True) << 23))
