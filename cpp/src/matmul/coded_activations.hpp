// SPDX-License-Identifier: Apache-2.0
//
// Activations that are codes: multiplied without their scales, which multiply the sums of their blocks.
#pragma once

#include "matmul/product.hpp"

namespace breccia::inline v0_4 {

/// The activations where they are codes along K that bfloat16 holds, one matrix of them; else null.
const ScaledMatrix* coded_activations(const Product& product);

/// Elements [k, k + count) of `rows` activations from `first` on, to rows of `out` `stride` apart: codes of `coded`,
/// unless that is null.
void read_activations(const Product& product, const ScaledMatrix* coded, std::int64_t first, std::int64_t rows,
                      std::int64_t k, std::int64_t count, Scratch& scratch, float* out, std::int64_t stride);

/// A product whose activations are all INT8 codes along K, without zero points.
class Int8Activations {
public:
    /// None where they are not, or where not all of a block of the weight's has one scale of theirs, or the reverse.
    static std::optional<Int8Activations> of(const Product& product, const ScaledMatrix& w);

    /// A row's codes, all K of them, to `out`.
    void read_codes(std::int64_t row, std::int8_t* out) const;
    /// A row's scales, the global scale included: of its blocks, or one.
    void read_scales(std::int64_t row, float* out) const;
    /// Scales to a row.
    [[nodiscard]] std::int64_t blocks() const { return first().grid.grid_cols(); }
    /// Elements to a scale, at most K.
    [[nodiscard]] std::int64_t block() const { return std::min(first().grid.block_cols, first().grid.cols); }
    /// Elements that share their scale and the weight's, at most K.
    [[nodiscard]] std::int64_t common_block() const { return common_block_; }

private:
    Int8Activations(const Product& product, std::int64_t common_block)
        : product_(&product), common_block_(common_block) {}
    [[nodiscard]] const ScaledMatrix& first() const { return *product_->a.front().scaled_along_k(); }
    [[nodiscard]] const ScaledMatrix& of_row(std::int64_t row) const {
        return *product_->a[static_cast<std::size_t>(row / product_->m)].scaled_along_k();
    }

    const Product* product_;
    std::int64_t common_block_;
};

}  // namespace breccia::inline v0_4
