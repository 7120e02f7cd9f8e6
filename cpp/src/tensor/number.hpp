// SPDX-License-Identifier: Apache-2.0
//
// One number of any type, at any address.
#pragma once

#include <cstddef>
#include <cstring>

#include "breccia/dtype.hpp"

namespace breccia::inline v0_4 {

/// As float or double, of which double holds the numbers of every type.
template <class Wide>
Wide load_number(const std::byte* from, DType dtype) {
    const auto as = [&]<class T>(T x) {
        std::memcpy(&x, from, sizeof x);
        return x;
    };
    switch (dtype) {
        case DType::float32: return as(float{});
        case DType::float64: return static_cast<Wide>(as(double{}));
        case DType::float16: return to_float(as(Float16{}));
        case DType::bfloat16: return to_float(as(BFloat16{}));
    }
    return 0;
}

/// Rounded to the type; to one of 16 bits by way of float32.
template <class Wide>
void store_number(std::byte* to, DType dtype, Wide x) {
    const auto put = [&](auto rounded) { std::memcpy(to, &rounded, sizeof rounded); };
    const auto single = static_cast<float>(x);
    switch (dtype) {
        case DType::float32: return put(single);
        case DType::float64: return put(static_cast<double>(x));
        case DType::float16: return put(to_float16(single));
        case DType::bfloat16: return put(to_bfloat16(single));
    }
}

}  // namespace breccia::inline v0_4
