// SPDX-License-Identifier: Apache-2.0
//
// Quantize a weight stored (N, K), lay it out once for the products to come, and multiply activations by it.
#include <cstdio>
#include <vector>

#include <breccia/breccia.hpp>

int main() {
    std::vector<float> weights(64 * 256, 0.5F), activations(16 * 256, 1.0F);
    const auto w = breccia::Array::borrow(weights, {64, 256});
    const auto x = breccia::Array::borrow(activations, {16, 256});

    const breccia::ScaledTensor q = breccia::cast(w, breccia::recipes::nvfp4{});
    const breccia::PreparedWeight ready(q);
    const breccia::Array y = breccia::linear(x, ready);

    std::printf("%lld bytes instead of %zu, and %lld more for the kernels of few activations\n",
                static_cast<long long>(q.nbytes()), 4 * weights.size(), static_cast<long long>(ready.packed_nbytes()));
    std::printf("y is %s, y[0, 0] = %g; %s kernels\n", breccia::to_string(y.shape).c_str(),
                static_cast<double>(y.as<float>()[0]), breccia::cpu_info().backend.c_str());
}
