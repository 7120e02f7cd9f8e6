// SPDX-License-Identifier: Apache-2.0
//
// Tensors whose parts are any bytes that the constructor takes. Made from integers: the same on every machine.
#pragma once

#include "one_nan.hpp"
#include "support.hpp"

namespace breccia {

/// Scales a cast never stores: zeros of both signs, negative ones, then also subnormal ones, infinities and NaNs.
enum class Scales { zeros, ordinary, extreme };

struct State {
    std::string name;
    Scales scales;
    ScaledTensor tensor;
};

inline void fill_numbers(const Array& array, Scales kind, std::mt19937& random) {
    const auto bits = [&]() -> std::uint32_t {
        const auto sign = static_cast<std::uint32_t>(random()) & f32_sign_bit;
        const auto significand = static_cast<std::uint32_t>(random()) & 0x007F'0000U;
        if (kind == Scales::zeros) return sign;
        const auto exponent = static_cast<std::uint32_t>(random());
        if (kind == Scales::ordinary) return sign | (124 + exponent % 6) << 23 | significand;
        constexpr std::uint32_t odd[] = {0, 1, 0x0040'0000, 0x0080'0000, 0x7F7F'0000, 0x7F80'0000, 0x7FC0'0000};
        return sign | (exponent % 2 != 0 ? odd[exponent / 2 % 7] : (96 + exponent / 2 % 64) << 23 | significand);
    };
    for (std::int64_t i = 0; i < array.size(); ++i) {
        const float x = float_from_bits(bits());
        switch (array.type.dtype()) {
            case DType::float32: array.as<float>()[i] = x; break;
            case DType::float64: array.as<double>()[i] = static_cast<double>(x); break;
            case DType::float16: array.as<Float16>()[i] = to_float16(x); break;
            case DType::bfloat16: array.as<BFloat16>()[i] = to_bfloat16(x); break;
        }
    }
}

inline void fill_bytes(const Array& array, std::mt19937& random) {
    for (std::int64_t i = 0; i < array.size(); ++i)
        array.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random() >> 8);
}

inline void fill_scales(const Array& scale, const Recipe& recipe, Scales kind, std::mt19937& random) {
    if (!is_coded(recipe.scale)) return fill_numbers(scale, kind, random);
    fill_bytes(scale, random);
    auto* codes = scale.as<std::uint8_t>();
    for (std::int64_t i = 0; i < scale.size(); ++i) {
        if (kind == Scales::zeros) codes[i] &= 0x80;  // of E4M3 both zeros
        if (kind == Scales::ordinary) codes[i] = static_cast<std::uint8_t>(120 + codes[i] % 6);
    }
}

/// Every recipe by every kind of scale.
inline std::vector<State> all_states(std::int64_t rows, std::int64_t cols) {
    std::vector<State> states;
    std::mt19937 random(17);
    for (const Recipe& recipe : all_recipes())
        for (const Scales kind : {Scales::zeros, Scales::ordinary, Scales::extreme}) {
            CastOutput parts = allocate(plan_cast({rows, cols}, recipe));
            fill_bytes(parts.data, random);
            fill_scales(parts.scale, recipe, kind, random);
            if (parts.zero_point && recipe.is_expanded()) fill_numbers(*parts.zero_point, kind, random);
            if (recipe.has_zero_point()) fill_bytes(*parts.zero_point, random);
            if (parts.global_scale) fill_numbers(*parts.global_scale, kind, random);
            states.push_back({.name = describe(recipe) + "/scales" + std::to_string(static_cast<int>(kind)),
                              .scales = kind,
                              .tensor = {parts.data,
                                         parts.scale,
                                         recipe,
                                         recipe.layout,
                                         {.zero_point = parts.zero_point,
                                          .global_scale = parts.global_scale,
                                          .shape = Shape{rows, cols}}}});
        }
    return states;
}

}  // namespace breccia
