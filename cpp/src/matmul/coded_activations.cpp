// SPDX-License-Identifier: Apache-2.0
#include "matmul/coded_activations.hpp"

#include <algorithm>
#include <cstring>

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
        product.read(first, rows, k, count, scratch, out, stride);
}

std::optional<Int8Activations> Int8Activations::of(const Product& product, const ScaledMatrix& w) {
    constexpr std::int64_t least = 16;  // elements to a block that kernels add up before they scale
    if (product.k == 0) return {};
    const ScaledMatrix* front = product.a.front().scaled_along_k();
    for (const Rows& rows : product.a) {
        const ScaledMatrix* a = rows.scaled_along_k();
        if (a == nullptr || a->element != format_of<Int8> || a->zero_point != nullptr ||
            a->grid.block_cols != front->grid.block_cols)
            return {};
    }
    const std::int64_t of_a = std::min(front->grid.block_cols, product.k),
                       of_w = std::min(w.grid.block_cols, product.k);
    const std::int64_t common = std::min(of_a, of_w);
    const bool whole = common == product.k;
    const bool fit = whole || (common % least == 0 && (of_a % common == 0 || of_a == product.k) &&
                               (of_w % common == 0 || of_w == product.k));
    return fit ? std::optional(Int8Activations(product, common)) : std::nullopt;
}

void Int8Activations::read_codes(std::int64_t row, std::int8_t* out) const {
    const ScaledMatrix& a = of_row(row);
    const std::uint8_t* from = a.data + row % product_->m * a.row_stride;
    if (a.col_stride == 1)
        std::memcpy(out, from, static_cast<std::size_t>(product_->k));
    else
        for (std::int64_t k = 0; k < product_->k; ++k) out[k] = static_cast<std::int8_t>(from[k * a.col_stride]);
}

void Int8Activations::read_scales(std::int64_t row, float* out) const {
    const ScaledMatrix& a = of_row(row);
    breccia::read_scales(product_->table, a, row % product_->m / a.grid.block_rows, 0, blocks(), out);
    for (std::int64_t b = 0; b < blocks(); ++b) out[b] = a.with_global(out[b]);
}

}  // namespace breccia::inline v0_4
