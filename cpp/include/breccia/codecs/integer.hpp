// SPDX-License-Identifier: Apache-2.0
//
// Two's complement and unsigned integers as element codes. A code is the integer's low `bits` bits.
#pragma once

#include "breccia/codecs/codec.hpp"

namespace breccia::inline v0_4 {

/// All integers of so many bits.
template <int Bits, bool Signed>
struct Integer {
    static constexpr CodecFamily family = CodecFamily::integer;  ///< see the concept Codec
    static constexpr bool is_target = true;                      ///< a recipe may quantize to it
    static constexpr int bits = Bits;                            ///< of a code
    static constexpr bool has_nan = false;                       ///< NaN has no code
    static constexpr int max_integer = Signed ? (1 << (Bits - 1)) - 1 : (1 << Bits) - 1;     ///< the largest
    static constexpr int min_integer = Signed ? -(1 << (Bits - 1)) : 0;                      ///< the lowest
    static constexpr float max = static_cast<float>(max_integer);                            ///< the same as a float
    static constexpr float lowest = static_cast<float>(min_integer);                         ///< the same as a float
    static constexpr float smallest = 1.0F;                                                  ///< smallest positive one
    static constexpr std::uint8_t code_mask = static_cast<std::uint8_t>((1U << Bits) - 1U);  ///< the bits of a code

    /// The value of a code; bits above the format's are not looked at.
    static constexpr float decode(std::uint8_t code) {
        const int value = code & code_mask;
        return static_cast<float>(Signed && value > max_integer ? value - (1 << Bits) : value);
    }

    /// Round half to even, clamp; NaN becomes 0.
    static constexpr std::uint8_t encode(float x) {
        if (is_nan(x)) return 0;
        const float clamped = x > max ? max : (x < lowest ? lowest : x);
        constexpr float magic = 12582912.0F;  // 1.5 * 2^23: one unit in the last place is 1, both signs fit
        const std::uint32_t value = bits_of(clamped + magic) - bits_of(magic);
        return static_cast<std::uint8_t>(value) & code_mask;
    }
};

/// -128 to 127.
struct Int8 : Integer<8, true> {
    static constexpr std::string_view name = "int8";  ///< as in ml_dtypes
};
/// -8 to 7.
struct Int4 : Integer<4, true> {
    static constexpr std::string_view name = "int4";  ///< as in ml_dtypes
};
/// 0 to 15.
struct UInt4 : Integer<4, false> {
    static constexpr std::string_view name = "uint4";  ///< as in ml_dtypes
};
static_assert(Int4::decode(0b1000) == -8.0F && UInt4::decode(0b1111) == 15.0F);

}  // namespace breccia::inline v0_4
