// SPDX-License-Identifier: Apache-2.0
//
// Every format with a sign, an exponent field and a mantissa field, from its five defining numbers.
// The suffixes are ml_dtypes': "fn" = finite (no infinity), "uz" = unsigned zero (the code of -0 is the NaN).
#pragma once

#include "breccia/codecs/codec.hpp"

namespace breccia::inline v0_4 {

/// Which codes are not finite numbers.
enum class Specials {
    ieee,      ///< exponent all ones: infinity and NaNs (float8_e5m2)
    nan_ones,  ///< exponent and mantissa all ones: NaN; no infinity (float8_e4m3fn)
    nan_zero,  ///< the code of -0 is the only NaN (fnuz)
    none       ///< every code is a finite number (OCP MX 4- and 6-bit formats)
};

/// Sign, exponent and mantissa; `Bias` is what the exponent field is too large by.
template <int ExponentBits, int MantissaBits, int Bias, Specials Kind>
struct Minifloat {
    static constexpr CodecFamily family = CodecFamily::minifloat;          ///< see the concept Codec
    static constexpr bool is_target = true;                                ///< a recipe may quantize to it
    static constexpr int exponent_bits = ExponentBits;                     ///< width of a field
    static constexpr int mantissa_bits = MantissaBits;                     ///< width of a field
    static constexpr int bias = Bias;                                      ///< what the exponent field is too large by
    static constexpr Specials specials = Kind;                             ///< which codes are not finite numbers
    static constexpr int bits = 1 + ExponentBits + MantissaBits;           ///< of a code
    static constexpr bool has_nan = Kind != Specials::none;                ///< whether a code is NaN
    static constexpr bool has_infinity = Kind == Specials::ieee;           ///< whether two codes are infinite
    static constexpr bool has_negative_zero = Kind != Specials::nan_zero;  ///< whether zero has two codes

    static constexpr std::uint8_t sign_mask = 1U << (bits - 1);     ///< the highest bit of a code
    static constexpr std::uint8_t magnitude_mask = sign_mask - 1U;  ///< the bits below it
    static constexpr std::uint8_t infinity_code = magnitude_mask >> MantissaBits << MantissaBits;  ///< ieee only
    /// Code of the largest number.
    static constexpr std::uint8_t max_code = Kind == Specials::ieee       ? infinity_code - 1U
                                             : Kind == Specials::nan_ones ? magnitude_mask - 1U
                                                                          : magnitude_mask;
    /// Code of +NaN as ml_dtypes writes it. A format without one gets the negative zero for it, as there.
    static constexpr std::uint8_t nan_code = Kind == Specials::ieee       ? infinity_code + (1U << (MantissaBits - 1))
                                             : Kind == Specials::nan_ones ? magnitude_mask
                                                                          : sign_mask;

    /// Exponent of the smallest normal number and of the step between subnormals.
    static constexpr int min_exponent = 1 - Bias;
    static constexpr float smallest = exp2i(min_exponent - MantissaBits);  ///< smallest positive number
    static constexpr float smallest_normal = exp2i(min_exponent);          ///< smallest with an exponent field above 0

    /// The value of a code whose sign is not set, as if there were no special ones.
    static constexpr float decode_magnitude(std::uint8_t code) {
        const int exponent = code >> MantissaBits;
        const int mantissa = code & ((1 << MantissaBits) - 1);
        const int significand = exponent == 0 ? mantissa : mantissa + (1 << MantissaBits);
        return static_cast<float>(significand) * exp2i((exponent == 0 ? 1 : exponent) - Bias - MantissaBits);
    }

    static constexpr float max = decode_magnitude(max_code);  ///< largest finite value
    static constexpr float lowest = -max;                     ///< most negative finite value
    /// Exponent of the largest number: the OCP MX specification's emax.
    static constexpr int max_exponent = (max_code >> MantissaBits) - Bias;

    /// The value of a code; bits above the format's are not looked at.
    static constexpr float decode(std::uint8_t code) {
        const auto magnitude = static_cast<std::uint8_t>(code & magnitude_mask);
        const bool negative = (code & sign_mask) != 0;
        if constexpr (Kind == Specials::nan_zero) {
            if (code == nan_code) return std::numeric_limits<float>::quiet_NaN();
        } else if constexpr (has_nan) {
            if (has_infinity && magnitude == infinity_code)
                return negative ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
            if (magnitude > max_code) return std::numeric_limits<float>::quiet_NaN();
        }
        return negative ? -decode_magnitude(magnitude) : decode_magnitude(magnitude);
    }

    /// Round to nearest even, saturating; infinities become the largest number.
    static constexpr std::uint8_t encode(float x) {
        const std::uint32_t x_bits = bits_of(x);
        const std::uint8_t sign = (x_bits & f32_sign_bit) != 0 ? sign_mask : std::uint8_t{0};
        if (is_nan(x)) {
            if constexpr (Kind == Specials::nan_zero) return nan_code;
            // Without a NaN ml_dtypes answers with the zero of the opposite sign.
            return static_cast<std::uint8_t>(has_nan ? nan_code | sign : nan_code ^ sign);
        }
        float magnitude = float_from_bits(x_bits & f32_abs_mask);
        if (magnitude >= max) magnitude = max;
        // Adding 2^(e+23-mantissa_bits) rounds to nearest even at the format's own unit in the last place, where e is
        // the exponent of the value or, among subnormals, of the smallest normal: one path for both. The difference
        // of the bit patterns is the rounded significand in those units, implicit one included.
        const int exponent = static_cast<int>(bits_of(magnitude) >> 23) - 127;
        const int e = exponent < min_exponent ? min_exponent : exponent;
        const float magic = exp2i(e + 23 - MantissaBits);
        const std::uint32_t significand = bits_of(magnitude + magic) - bits_of(magic);
        const auto code =
            static_cast<std::uint8_t>(significand + (static_cast<std::uint32_t>(e - min_exponent) << MantissaBits));
        if (!has_negative_zero && code == 0) return 0;
        return static_cast<std::uint8_t>(code | sign);
    }
};

}  // namespace breccia::inline v0_4
