// SPDX-License-Identifier: Apache-2.0
#include "quantize/exact_scale.hpp"

namespace breccia {
namespace {

std::optional<std::uint32_t> stored_bits(float scale, ScaleType type) {
    switch (type) {
        case ScaleType::float32: return bits_of(scale);
        case ScaleType::float16: {
            const Float16 half = to_float16(scale);
            return to_float(half) == scale ? std::optional<std::uint32_t>(half.bits) : std::nullopt;
        }
        case ScaleType::bfloat16: {
            const BFloat16 half = to_bfloat16(scale);
            return to_float(half) == scale ? std::optional<std::uint32_t>(half.bits) : std::nullopt;
        }
        case ScaleType::e8m0: {
            const std::uint8_t code = Float8E8M0FNU::encode(scale);
            return Float8E8M0FNU::decode(code) == scale ? std::optional<std::uint32_t>(code) : std::nullopt;
        }
        default: return std::nullopt;
    }
}

// A power of two, neither it nor its reciprocal a subnormal number.
bool has_exact_reciprocal(float scale) {
    const std::uint32_t bits = bits_of(scale) & f32_abs_mask;
    return (bits & 0x007F'FFFFU) == 0 && bits >= 0x0080'0000U && bits <= 0x7E80'0000U;
}

}  // namespace

std::optional<BlockScale> stored_exactly(float scale, ScaleType type, std::uint32_t amax_bits) {
    if (scale == 0 || !is_finite(scale)) return std::nullopt;
    const std::optional<std::uint32_t> stored = stored_bits(scale, type);
    if (!stored) return std::nullopt;
    BlockScale s;
    s.stored = *stored;
    s.factor = s.decoded = scale;
    s.all_finite = true;
    s.multiply = has_exact_reciprocal(scale);
    if (s.multiply)
        s.factor = 1 / scale;
    else
        allow_fast_division(s, amax_bits);
    return s;
}

std::optional<float> power_of_two_for(float amax, Format format) {
    if (amax == 0) return std::nullopt;
    const std::uint32_t rounded_up = (bits_of(amax / info(format).max) + 0x007F'FFFFU) & 0x7F80'0000U;
    if (rounded_up == 0 || rounded_up >= f32_infinity_bits) return std::nullopt;
    return float_from_bits(rounded_up);
}

bool has_few_bits(float x, Format format) {
    const std::uint32_t magnitude = bits_of(x) & f32_abs_mask;
    if (magnitude < 0x0080'0000U) return true;  // a subnormal number's leading zeros are not counted
    return (magnitude & (0x007F'FFFFU >> info(format).mantissa_bits)) == 0;
}

}  // namespace breccia
