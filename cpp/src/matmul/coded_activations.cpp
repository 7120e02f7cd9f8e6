// SPDX-License-Identifier: Apache-2.0
#include "matmul/coded_activations.hpp"

namespace breccia::inline v0_4 {
namespace {

void read_codes(const KernelTable& table, const ScaledMatrix& a, std::int64_t first, std::int64_t rows, std::int64_t k,
                std::int64_t count, Scratch& scratch, float* out, std::int64_t stride) {
    static constexpr float one = 1;
    ScaledMatrix codes = a;
    codes.global_scale = 1;
    codes.scale = reinterpret_cast<const std::byte*>(&one);
    codes.scale_type = ScaleType::float32;
    codes.scale_row_stride = codes.scale_col_stride = 0;
    for (std::int64_t i = 0; i < rows; ++i) codes.read(table, first + i, k, count, scratch, out + i * stride);
}

}  // namespace

const ScaledMatrix* coded_activations(const Product& product) {
    const ScaledMatrix* a = product.a.front().scaled_along_k();
    const bool suits = a != nullptr && product.a.size() == 1 && a->zero_point == nullptr &&
                       info(a->element).family != CodecFamily::exponent;
    return suits ? a : nullptr;
}

void read_activations(const Product& product, const ScaledMatrix* coded, std::int64_t first, std::int64_t rows,
                      std::int64_t k, std::int64_t count, Scratch& scratch, float* out, std::int64_t stride) {
    if (coded != nullptr)
        read_codes(product.table, *coded, first, rows, k, count, scratch, out, stride);
    else
        product.read(product.table, first, rows, k, count, scratch, out, stride);
}

}  // namespace breccia::inline v0_4
