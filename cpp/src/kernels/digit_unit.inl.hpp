// SPDX-License-Identifier: Apache-2.0
//
// How an activation becomes integers: the power of two that they are multiples of.

/// The unit, as a biased exponent, that makes integers below 2^23 - 2^16 of numbers whose largest has these bits.
BRECCIA_INLINE int unit_exponent_of(std::int32_t most) {
    return (most >> 23) - ((most & 0x7F'FFFF) < 0x7E'0000 ? 22 : 21);
}
