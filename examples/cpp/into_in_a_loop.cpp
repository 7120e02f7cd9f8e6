// SPDX-License-Identifier: Apache-2.0
//
// The verbs that end in _into write to memory that is there: a loop that decodes token after token allocates no result.
#include <cmath>
#include <cstdio>
#include <vector>

#include <breccia/breccia.hpp>

int main() {
    constexpr std::int64_t n = 128, k = 256;
    std::vector<float> weights(n * k);
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = 0.01F * static_cast<float>(i % 7) - 0.03F;
    const auto w = breccia::Array::borrow(weights, {n, k});
    const breccia::ScaledTensor q = breccia::cast(w, breccia::recipes::int8{});
    const breccia::PreparedWeight ready(q);
    const breccia::PreparedWeight operand = ready.transposed();

    // Made once: an activation, its quantized form, and the result.
    std::vector<float> x(k), y(n);
    const auto activation = breccia::Array::borrow(x, {1, k});
    const auto result = breccia::Array::borrow(y, {1, n});
    const breccia::Recipe fp8 = breccia::recipes::current{};
    const breccia::CastOutput parts = breccia::allocate(breccia::plan_cast(activation.shape, fp8));

    double sum = 0;
    for (int token = 0; token < 4; ++token) {
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.1F * static_cast<float>(i) + token);
        breccia::cast_into(activation, fp8, parts);
        const breccia::ScaledTensor a(parts.data, parts.scale, fp8, fp8.layout);
        breccia::matmul_into(a, operand, result);
        sum += y[0];
        std::printf("token %d: y[0] = %+.4f\n", token, static_cast<double>(y[0]));
    }
    return std::isfinite(sum) ? 0 : 1;
}
