# SPDX-License-Identifier: Apache-2.0
# Device code: `else` after a return is a compile-time branch.
# ruff: noqa: RET505
"""Device functions: logarithms and powers of two. A GPU has instructions for them, an eighth of the work; the
interpreter has the bits of cpp/src/kernels/powers.inl.hpp, by additions and products that are each rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from breccia.kernels.triton.device.codecs import HW, as_float

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
