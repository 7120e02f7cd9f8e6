// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include "breccia/breccia.hpp"

namespace breccia {

/// The array with one NaN for all NaNs: which of two a product takes, and the sign of a new one, is the processor's.
inline Array with_one_nan(const Array& array) {
    const Array result = Array::allocate(array.type, array.shape);
    for (std::int64_t i = 0; i < array.size(); ++i) {
        const auto put = [&](auto x, bool nan, auto one) { result.as<decltype(x)>()[i] = nan ? one : x; };
        switch (array.type.dtype()) {
            case DType::float32: {
                const float x = array.as<float>()[i];
                put(x, std::isnan(x), std::numeric_limits<float>::quiet_NaN());
                break;
            }
            case DType::float64: {
                const double x = array.as<double>()[i];
                put(x, std::isnan(x), std::numeric_limits<double>::quiet_NaN());
                break;
            }
            case DType::float16: {
                const Float16 x = array.as<Float16>()[i];
                put(x, std::isnan(to_float(x)), Float16{0x7E00});
                break;
            }
            case DType::bfloat16: {
                const BFloat16 x = array.as<BFloat16>()[i];
                put(x, std::isnan(to_float(x)), BFloat16{0x7FC0});
                break;
            }
        }
    }
    return result;
}

}  // namespace breccia
