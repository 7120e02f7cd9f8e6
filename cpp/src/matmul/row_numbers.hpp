// SPDX-License-Identifier: Apache-2.0
//
// What the float32 kernels of rows of codes want besides codes.
#pragma once

#include "matmul/operand_rows.hpp"

namespace breccia::inline v0_4 {

/// Whether the kernels' results are right, where zero_points_are_small().
inline bool supports(const CodeKernelsF32& kernels, const ScaledMatrix& w) {
    const std::int64_t block = w.grid.block_cols, k = w.grid.cols;
    const bool blocks_fit = block >= k || block == 16 || block == 32 || block % 64 == 0;
    return kernels.product[static_cast<std::size_t>(w.element)] != nullptr && k > 0 && w.col_stride == 1 &&
           w.packed == is_packed(w.element) && blocks_fit && zero_points_are_bytes(w);
}

/// Scales and zero points of a few rows as floats, see InPlaceF32.
class RowNumbers {
public:
    RowNumbers(const ScaledMatrix& w, std::int64_t rows, bool with_global)
        : w_(w),
          with_global_(with_global && w.global_scale != 1),
          stride_(w.grid.grid_cols() + 3),
          scales_(static_cast<std::size_t>(rows * stride_)) {
        if (w.zero_point != nullptr) zero_points_.resize(scales_.size());
    }
    void read(const KernelTable& table, std::int64_t first, std::int64_t rows) {
        const std::int64_t blocks = w_.grid.grid_cols();
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t from = (first + r) / w_.grid.block_rows;
            float* scales = scales_.data() + r * stride_;
            read_scales(table, w_, from, 0, blocks, scales);
            if (with_global_)
                for (std::int64_t b = 0; b < blocks; ++b) scales[b] = w_.with_global(scales[b]);
            if (zero_points_.empty()) continue;
            float* zero_points = zero_points_.data() + r * stride_;
            for (std::int64_t b = 0; b < blocks; ++b) zero_points[b] = w_.zero_point_at(from, b);
        }
    }
    [[nodiscard]] const float* scales(std::int64_t block = 0) const { return scales_.data() + block; }
    [[nodiscard]] const float* zero_points(std::int64_t block = 0) const {
        return zero_points_.empty() ? nullptr : zero_points_.data() + block;
    }
    [[nodiscard]] std::int64_t stride() const { return stride_; }

private:
    const ScaledMatrix& w_;
    bool with_global_;
    std::int64_t stride_;
    std::vector<float> scales_, zero_points_;
};

}  // namespace breccia::inline v0_4
