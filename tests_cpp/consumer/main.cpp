// SPDX-License-Identifier: Apache-2.0
//
// The smallest program that needs the library itself, not its headers alone: a round trip through the dispatch.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <breccia/breccia.hpp>

int main() {
    std::vector<float> weights(64, 1.5F);
    const auto x = breccia::Array::borrow(weights.data(), breccia::DType::float32, {1, 64});
    const breccia::Array back = breccia::dequantize(breccia::cast(x, breccia::make_recipe("MXFP8BlockScaling")));
    for (std::int64_t i = 0; i < back.size(); ++i)
        if (back.as<float>()[i] != 1.5F) return EXIT_FAILURE;
    try {  // thrown in the library, caught by its type here
        (void)breccia::make_recipe("MXFP9BlockScaling");
        return EXIT_FAILURE;
    } catch (const breccia::Error& error) {
        if (error.kind() != breccia::Error::Kind::value) return EXIT_FAILURE;
    }
    std::printf("breccia runs its %s kernels\n", breccia::cpu_info().backend.c_str());
    return EXIT_SUCCESS;
}
