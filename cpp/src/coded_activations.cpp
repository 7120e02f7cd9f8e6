// SPDX-License-Identifier: Apache-2.0
#include "coded_activations.hpp"

#include <vector>

namespace breccia {
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

void read_code_scales(const KernelTable& table, const ScaledMatrix& a, std::int64_t first, std::int64_t rows,
                      std::int64_t block, float* out, std::int64_t stride) {
    const std::int64_t blocks = (a.grid.cols + block - 1) / block;
    std::vector<float> own(static_cast<std::size_t>(a.grid.grid_cols()));
    for (std::int64_t i = 0; i < rows; ++i) {
        read_scales(table, a, (first + i) / a.grid.block_rows, 0, a.grid.grid_cols(), own.data());
        for (std::int64_t b = 0; b < blocks; ++b)
            out[b * stride + i] = a.with_global(own[static_cast<std::size_t>(b * block / a.grid.block_cols)]);
    }
}

}  // namespace breccia
