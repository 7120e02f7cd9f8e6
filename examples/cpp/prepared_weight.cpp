// SPDX-License-Identifier: Apache-2.0
//
// Quantize a weight stored (N, K), multiply activations by it, look at what it costs.
#include <cstdio>
#include <vector>

#include <breccia/breccia.hpp>

int main() {
    std::vector<float> weights(64 * 256, 0.5F), activations(16 * 256, 1.0F);
    const auto w = breccia::Array::borrow(weights.data(), breccia::DType::float32, {64, 256});
    const auto x = breccia::Array::borrow(activations.data(), breccia::DType::float32, {16, 256});

    const breccia::ScaledTensor q = breccia::cast(w, breccia::make_recipe("NVFP4BlockScaling"));
    const breccia::Array y = breccia::matmul(x, q.transposed());

    std::printf("%lld bytes instead of %zu; y is %s, y[0, 0] = %g; %s kernels\n", static_cast<long long>(q.nbytes()),
                4 * weights.size(), breccia::to_string(y.shape).c_str(), static_cast<double>(y.as<float>()[0]),
                breccia::cpu_info().backend.c_str());
}
