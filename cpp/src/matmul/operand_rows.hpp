// SPDX-License-Identifier: Apache-2.0
//
// One operand of a product as rows of length K in float32, whatever its type, strides and scaling.
#pragma once

#include <variant>

#include "breccia/ops.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

class Rows {
public:
    /// `axis` is where K lies in the operand: -1 for a, -2 for b. `index` counts the matrices of the batch.
    Rows(const Operand& operand, int axis, const Shape& batch, std::int64_t index);

    /// Elements [k, k + n) of `rows` rows, to rows of `out` that are `stride` apart.
    void read(const KernelTable& kernels, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t n,
              Scratch& scratch, float* out, std::int64_t stride) const;

    /// The matrix of a ScaledTensor whose codes and scales run along K, else null.
    [[nodiscard]] const ScaledMatrix* scaled_along_k() const {
        return along_k_ ? std::get_if<ScaledMatrix>(&matrix_) : nullptr;
    }
    /// Where a row of contiguous bfloat16 numbers begins, else null.
    [[nodiscard]] const std::byte* bfloat16_row(std::int64_t row) const {
        const auto* numbers = std::get_if<NumberMatrix>(&matrix_);
        const bool in_place = numbers != nullptr && numbers->dtype == DType::bfloat16 && along_k_ &&
                              (numbers->col_stride == 2 || numbers->cols <= 1);
        return in_place ? numbers->data + row * numbers->row_stride : nullptr;
    }
    /// How many bfloat16 numbers add up to an element, exactly.
    [[nodiscard]] int bfloat16_terms() const {
        const auto* numbers = std::get_if<NumberMatrix>(&matrix_);
        if (numbers != nullptr && numbers->dtype == DType::bfloat16) return 1;
        return numbers != nullptr && numbers->dtype == DType::float16 ? 2 : 3;
    }

private:
    void read_run(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, Scratch& scratch,
                  float* out) const;

    std::variant<NumberMatrix, ScaledMatrix> matrix_;
    bool along_k_ = true;
};

/// Whether there are no zero points, or 4-bit codes have them as bytes. Reads none.
bool zero_points_are_bytes(const ScaledMatrix& m);

/// Of such: whether all of them are -8 ... 15, which kernels look up.
bool zero_points_are_small(const ScaledMatrix& m);

/// A row's zero points where they are bytes, `stride` apart in `out`. Inline: the stride is a constant of the caller's.
inline void read_zero_points(const ScaledMatrix& m, std::int64_t row, std::uint8_t* out, std::int64_t stride) {
    const std::byte* from = m.zero_point + row / m.grid.block_rows * m.zero_row_stride;
    const std::int64_t blocks = m.grid.grid_cols(), step = m.zero_col_stride;  // once: bytes of `out` may alias them
    for (std::int64_t b = 0; b < blocks; ++b) out[b * stride] = static_cast<std::uint8_t>(from[b * step]);
}

/// Whether E8M0 scales are all within 2^-60 ... 2^60, where their products with codes are normal bfloat16 numbers.
bool powers_of_two_keep_normal(const ScaledMatrix& m);

/// Whether every E4M3 scale is a positive number or zero.
bool e4m3_scales_are_positive(const ScaledMatrix& m);

}  // namespace breccia::inline v0_4
