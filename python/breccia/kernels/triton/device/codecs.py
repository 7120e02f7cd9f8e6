# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch; there is no `in`.
# ruff: noqa: PLR1714, RET505
"""Device functions: element and scale codecs, written once and shared by every kernel.

Encoders round to nearest even and saturate, byte for byte like the C++ codecs. `HW` selects the hardware conversion
for FP8 (sm_89 and later); Triton's interpreter and the formats without an instruction take the bit arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from breccia.kernels.triton.runtime import HW

FUSED = tl.constexpr(HW)  # the interpreter's fma rounds twice


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
def encode_element(y, FMT: tl.constexpr, HW: tl.constexpr):
    """Code of a float32 that is not NaN, as uint8."""
    if FMT == "e4m3":
        if HW:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return encode_bits(y, 3, -6, 448.0, 0x80).to(tl.uint8)
    elif FMT == "e5m2":
        if HW:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return encode_bits(y, 2, -14, 57344.0, 0x80).to(tl.uint8)
    elif FMT == "e3m2":
        return encode_bits(y, 2, -2, 28.0, 0x20).to(tl.uint8)
    elif FMT == "e2m3":
        return encode_bits(y, 3, 0, 7.5, 0x20).to(tl.uint8)
    else:
        tl.static_assert(FMT == "e2m1")
        return encode_e2m1(y).to(tl.uint8)


@triton.jit
def widen(raw):
    """float32 of a 16- or 32-bit float. The conversion from float16 loses the sign of a NaN; this does not."""
    v = raw.to(tl.float32)
    if raw.dtype == tl.float16:
        sign = (raw.to(tl.int16, bitcast=True).to(tl.int32) >> 15) << 31
        v = as_float((v.to(tl.int32, bitcast=True) & 0x7FFF_FFFF) | sign)
    return v


@triton.jit
def encode_nan(code, x, FMT: tl.constexpr):
    """`code` with the NaNs of x in the format's own NaN (sign kept) where it has one."""
    if FMT == "e4m3" or FMT == "e5m2":
        u = x.to(tl.int32, bitcast=True)
        nan = (0x7F if FMT == "e4m3" else 0x7E) | ((u >> 24) & 0x80)
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
def decode_e2m1(nibble):
    """float32 of an E2M1 code: the three magnitude bits land where float32 keeps its exponent, scaled by 2^126."""
    return decode_bits(nibble & 0xF, 1, 0, 4)


@triton.jit
def decode_fp8_int(code, FMT: tl.constexpr):
    """float32 of an FP8 code held in an int32, for the interpreter, which cannot load FP8."""
    if FMT == "e4m3":
        v = decode_bits(code, 3, -6, 8)
        return tl.where((code & 0x7F) == 0x7F, float("nan"), v)
    else:
        v = decode_bits(code, 2, -14, 8)
        mag = code & 0x7F
        v = tl.where(mag > 0x7C, float("nan"), v)
        return tl.where(mag == 0x7C, tl.where(code > 0x7F, float("-inf"), float("inf")), v)


@triton.jit
def decode_element(raw, FMT: tl.constexpr, HW: tl.constexpr):
    """float32 of one unpacked code as loaded from memory."""
    if FMT == "e4m3" or FMT == "e5m2":
        if HW:
            return raw.to(tl.float32)
        else:
            return decode_fp8_int(raw.to(tl.int32), FMT)
    elif FMT == "e3m2":
        return decode_bits(raw.to(tl.int32) & 0x3F, 2, -2, 6)
    elif FMT == "e2m3":
        return decode_bits(raw.to(tl.int32) & 0x3F, 3, 0, 6)
    elif FMT == "e2m1":
        return decode_e2m1(raw.to(tl.int32))
    elif FMT == "int4":
        return (((raw.to(tl.int32) & 0xF) ^ 8) - 8).to(tl.float32)
    elif FMT == "uint4":
        return (raw.to(tl.int32) & 0xF).to(tl.float32)
    elif FMT == "int8":
        return raw.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(FMT == "uint8")
        return raw.to(tl.float32)


@triton.jit
def decode_e8m0(byte):
    """2^(byte - 127) in float32; byte 0 is the subnormal 2^-127 and 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x0040_0000, b << 23)
    return as_float(tl.where(b == 255, 0x7FC0_0000, bits))


@triton.jit
def decode_scale(raw, SFMT: tl.constexpr, HW: tl.constexpr):
    """float32 of a scale: `float` for fp32/fp16/bf16, `e8m0` bytes, `e4m3` codes."""
    if SFMT == "e8m0":
        return decode_e8m0(raw)
    elif SFMT == "e4m3":
        return decode_element(raw, "e4m3", HW)
    elif raw.dtype == tl.bfloat16:
        # By hand: LLVM takes a product of a float16 and a bfloat16 that ends up a float16 for one of float16, whose
        # range is too short.
        return as_float(raw.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return raw.to(tl.float32)


@triton.jit
def mx_exponent(
    amax, MAX: tl.constexpr, EMAX: tl.constexpr, MANT: tl.constexpr, ROUNDING: tl.constexpr, EXACT: tl.constexpr
):
    """Biased E8M0 exponent of a block with finite absolute maximum `amax`.

    rceil is the exponent of amax / MAX rounded up. Away from the subnormals it rises by one exactly where amax's
    mantissa passes that of MAX; EXACT takes the division, whose rounding counts near the bottom of the range.
    """
    bits = amax.to(tl.int32, bitcast=True)
    if ROUNDING == "rceil":
        if EXACT:
            bits = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32)).to(tl.int32, bitcast=True)
            e = bits >> 23
            up = tl.where((bits & 0x7F_FFFF) != 0, 1, 0)
            return tl.where(e == 0, tl.where(bits > 0x0040_0000, 1, 0), e + up)
        else:
            top = tl.full(amax.shape, MAX, tl.float32).to(tl.int32, bitcast=True)
            return tl.maximum((bits - (top & 0x7F_FFFF) + 0x7F_FFFF) >> 23, EMAX) - EMAX
    else:
        if ROUNDING == "even":
            bits = bits + (1 << (22 - MANT))
        e = (bits >> 23) - EMAX
        if ROUNDING == "ceil":
            e = e + tl.where((bits & 0x7F_FFFF) != 0, 1, 0)
        return tl.minimum(tl.maximum(e, 0), 254)


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
