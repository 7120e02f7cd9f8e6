// SPDX-License-Identifier: Apache-2.0
//
// OCP Microscaling Formats (MX) Specification v1.0, section 5.4.1: a power of two, 2^(code - 127), or NaN.
#pragma once

#include "breccia/codecs/codec.hpp"

namespace breccia::inline v0_4 {

/// The scales of MX: 2^-127 to 2^127, no sign, no zero.
struct Float8E8M0FNU {
    static constexpr std::string_view name = "float8_e8m0fnu";  ///< as in ml_dtypes
    /// See the concept Codec; `bias` is that of the exponent.
    /// @{
    static constexpr CodecFamily family = CodecFamily::exponent;
    static constexpr bool is_target = false;
    static constexpr int bits = 8;
    static constexpr int bias = 127;
    static constexpr bool has_nan = true;
    static constexpr std::uint8_t nan_code = 0b1111'1111;
    static constexpr float max = exp2i(127);
    static constexpr float lowest = exp2i(-127);  // no sign and no zero: the smallest value is the lowest
    static constexpr float smallest = exp2i(-127);

    static constexpr float decode(std::uint8_t code) {
        return code == nan_code ? std::numeric_limits<float>::quiet_NaN() : exp2i(code - bias);
    }
    /// @}

    /// Nearest power of two, halves up (as ml_dtypes and torch). Zero and everything below 2^-127 saturate to 2^-127
    /// (torch; ml_dtypes has NaN for zero), everything above 2^127 to 2^127; a negative number is a NaN (ml_dtypes).
    static constexpr std::uint8_t encode(float x) {
        const std::uint32_t x_bits = bits_of(x);
        if (is_nan(x)) return nan_code;
        if ((x_bits & f32_sign_bit) != 0) return (x_bits & f32_abs_mask) == 0 ? 0 : nan_code;
        // 2^-127 is a float32 subnormal; those above it go up to 2^-126 (ml_dtypes and torch agree).
        if (x_bits < 0x0080'0000U) return x_bits > 0x0040'0000U ? 1 : 0;
        const std::uint32_t code = (x_bits + 0x0040'0000U) >> 23;
        return static_cast<std::uint8_t>(code > 254 ? 254 : code);
    }
};

}  // namespace breccia::inline v0_4
