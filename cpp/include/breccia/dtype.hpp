// SPDX-License-Identifier: Apache-2.0
//
// The high-precision side: the types a tensor is cast from and dequantized to, and the types a scale is stored in.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "breccia/codecs/codec.hpp"

namespace breccia::inline v0_4 {

/// A type of numbers.
enum class DType : std::uint8_t { float32, float64, float16, bfloat16 };
/// How many of them there are.
inline constexpr int dtype_count = 4;

/// "float32", "float64", "float16" or "bfloat16".
constexpr std::string_view name_of(DType dtype) {
    constexpr std::string_view names[] = {"float32", "float64", "float16", "bfloat16"};
    return names[static_cast<int>(dtype)];
}

/// Bytes of a number.
constexpr std::size_t size_of(DType dtype) {
    constexpr std::size_t sizes[] = {4, 8, 2, 2};
    return sizes[static_cast<int>(dtype)];
}

/// IEEE binary16 as a bit pattern: it is storage here, arithmetic is in float32.
struct Float16 {
    std::uint16_t bits;  ///< sign, 5 bits of exponent, 10 of mantissa
};
/// bfloat16, likewise: the upper half of a float.
struct BFloat16 {
    std::uint16_t bits;  ///< sign, 8 bits of exponent, 7 of mantissa
};

/// Exactly; a NaN keeps its payload and becomes quiet.
/// @{
constexpr float to_float(BFloat16 x) { return float_from_bits(static_cast<std::uint32_t>(x.bits) << 16); }

constexpr float to_float(Float16 x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16;
    const std::uint32_t magnitude = x.bits & 0x7FFFU;
    if (magnitude >= 0x7C00U)  // infinity, NaN (payload kept, made quiet)
        return float_from_bits(sign | f32_infinity_bits | (magnitude & 0x3FFU) << 13 |
                               (magnitude > 0x7C00U ? 0x0040'0000U : 0U));
    // Rebias by an exact multiplication, which also normalises the subnormals.
    const float scaled = float_from_bits(magnitude << 13) * exp2i(112);
    return float_from_bits(bits_of(scaled) | sign);
}

/// @}

/// Rounded to nearest even; what is too large becomes infinite, a NaN stays one.
/// @{
constexpr BFloat16 to_bfloat16(float x) {
    const std::uint32_t b = bits_of(x);
    if (is_nan(x)) return {static_cast<std::uint16_t>(b >> 16 | 0x40U)};
    return {static_cast<std::uint16_t>((b + 0x7FFFU + (b >> 16 & 1U)) >> 16)};
}

constexpr Float16 to_float16(float x) {
    const std::uint32_t sign = (bits_of(x) & f32_sign_bit) >> 16;
    const std::uint32_t b = bits_of(x) & f32_abs_mask;
    if (b > f32_infinity_bits) return {static_cast<std::uint16_t>(sign | 0x7E00U | (b >> 13 & 0x1FFU))};
    if (b >= 0x477F'F000U) return {static_cast<std::uint16_t>(sign | 0x7C00U)};  // 65520 and more round to infinity
    if (b < 0x3880'0000U) {                                                      // below 2^-14: float16 subnormals
        const float magic = 0.5F;  // one unit in the last place of [0.5, 1) is 2^-24
        return {static_cast<std::uint16_t>(sign | (bits_of(float_from_bits(b) + magic) - bits_of(magic)))};
    }
    return {static_cast<std::uint16_t>(sign | (b - 0x3800'0000U + 0xFFFU + (b >> 13 & 1U)) >> 13)};
}
/// @}

}  // namespace breccia::inline v0_4
