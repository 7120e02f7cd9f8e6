// SPDX-License-Identifier: Apache-2.0
//
// Bytes of a checkpoint as they lie in memory, a mapped file for instance, become a tensor without a copy.
#include <cstdio>
#include <vector>

#include <breccia/breccia.hpp>

int main() {
    using breccia::Array;

    // What DeepSeek-V3 stores: FP8 codes (N, K) and one float32 scale to a tile of 128 x 128. Here, made up.
    const std::int64_t n = 256, k = 512;
    const std::vector<std::uint8_t> codes(static_cast<std::size_t>(n * k), 0x38);  // E4M3 for 1
    const std::vector<float> scales{0.5F, 0.25F, 0.5F, 0.25F, 2.0F, 1.0F, 2.0F, 1.0F};

    const breccia::Recipe recipe = breccia::recipes::block{.block_k = 128, .block_m = 128};
    const breccia::ScaledTensor w(Array::borrow(codes, {n, k}), Array::borrow(scales, {2, 4}), recipe, recipe.layout);

    const Array values = breccia::dequantize(w);
    std::printf("%s, %lld bytes, not copied: %s\n", breccia::to_string(w.shape()).c_str(),
                static_cast<long long>(w.nbytes()), w.data().data == codes.data() ? "yes" : "no");
    std::printf("w[0, 0] = %g, w[0, 128] = %g, w[128, 0] = %g\n", static_cast<double>(values.as<float>()[0]),
                static_cast<double>(values.as<float>()[128]), static_cast<double>(values.as<float>()[128 * k]));

    // A scale of the wrong shape is an error that says which shape it must have.
    try {
        const breccia::ScaledTensor wrong(Array::borrow(codes, {n, k}), Array::borrow(scales, {4, 2}), recipe,
                                          recipe.layout);
    } catch (const breccia::Error& error) {
        std::printf("refused: %s\n", error.what());
    }
}
