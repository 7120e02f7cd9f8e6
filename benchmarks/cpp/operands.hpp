// SPDX-License-Identifier: Apache-2.0
//
// What the benchmarks of products multiply.
#pragma once

#include <random>

#include "breccia/breccia.hpp"

namespace breccia {

inline constexpr std::int64_t extent = 4096;

inline Array normal(DType dtype, Shape shape, unsigned seed) {
    Array array = Array::allocate(dtype, std::move(shape));
    std::mt19937 random(seed);
    std::normal_distribution<float> value(0.0F, 0.02F);
    for (std::int64_t i = 0; i < array.size(); ++i) {
        const float x = value(random);
        if (dtype == DType::float32)
            array.as<float>()[i] = x;
        else if (dtype == DType::float16)
            array.as<Float16>()[i] = to_float16(x);
        else
            array.as<BFloat16>()[i] = to_bfloat16(x);
    }
    return array;
}

inline const Array& weight() {
    static const Array w = normal(DType::float32, {extent, extent}, 1);
    return w;
}

}  // namespace breccia
