// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <breccia/breccia.hpp>

extern "C" [[gnu::visibility("default")]] float quantize(float value) {
    std::vector<float> block(32, value);
    const auto x = breccia::Array::borrow(block.data(), breccia::DType::float32, {1, 32});
    return breccia::dequantize(breccia::cast(x, breccia::make_recipe("MXFP8BlockScaling"))).as<float>()[0];
}
