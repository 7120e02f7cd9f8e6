// SPDX-License-Identifier: Apache-2.0
//
// A codec owns the bits of one element or scale format: how a code decodes to a float, how a float encodes to a
// code, and the limits. It knows nothing of blocks, scales or tensors.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string_view>

namespace breccia::inline v0_4 {

/// Fields of a float32.
/// @{
inline constexpr std::uint32_t f32_sign_bit = 0x8000'0000U;
inline constexpr std::uint32_t f32_abs_mask = 0x7FFF'FFFFU;
inline constexpr std::uint32_t f32_infinity_bits = 0x7F80'0000U;
/// @}

/// Of float32 by its bits, at compile time too and in any mode of arithmetic.
/// @{
constexpr std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
constexpr float float_from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
constexpr bool is_nan(float x) { return (bits_of(x) & f32_abs_mask) > f32_infinity_bits; }
constexpr bool is_finite(float x) { return (bits_of(x) & f32_abs_mask) < f32_infinity_bits; }
constexpr float abs(float x) { return float_from_bits(bits_of(x) & f32_abs_mask); }
/// @}

/// 2^e exactly, for every e a float can hold, subnormals included (-149 ... 127).
constexpr float exp2i(int e) {
    return e >= -126 ? float_from_bits(static_cast<std::uint32_t>(e + 127) << 23) : float_from_bits(1U << (e + 149));
}

/// What the kernels need to know to encode with vectors what a codec encodes one value at a time.
enum class CodecFamily { minifloat, exponent, integer };

/// One code fits in a byte; `bits` says how much of the byte it uses.
template <class C>
concept Codec = requires(float x, std::uint8_t code) {
    { C::name } -> std::convertible_to<std::string_view>;
    { C::bits } -> std::convertible_to<int>;
    { C::max } -> std::convertible_to<float>;       // largest finite magnitude on the positive side
    { C::lowest } -> std::convertible_to<float>;    // most negative finite value
    { C::smallest } -> std::convertible_to<float>;  // smallest positive value
    { C::has_nan } -> std::convertible_to<bool>;
    // Whether recipes quantize to it. Any format can be encoded, decoded, dequantized and multiplied; for the others
    // there are no kernels that choose scales.
    { C::is_target } -> std::convertible_to<bool>;
    { C::family } -> std::convertible_to<CodecFamily>;
    { C::decode(code) } -> std::same_as<float>;
    { C::encode(x) } -> std::same_as<std::uint8_t>;  // round to nearest even, saturating
};

}  // namespace breccia::inline v0_4
