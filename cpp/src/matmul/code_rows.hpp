// SPDX-License-Identifier: Apache-2.0
//
// Rows of a weight's codes as kernels take them, and what kernels ask of their zero points and scales.
#pragma once

#include <algorithm>

#include "matmul/product.hpp"
#include "runtime/threads.hpp"

namespace breccia::inline v0_4 {

/// Whether there are no zero points, or 4-bit codes have them as bytes. Reads none.
bool zero_points_are_bytes(const ScaledMatrix& m);

/// Where zero_points_are_bytes(): whether all are -8 ... 15, which kernels look up in tables.
bool zero_points_are_small(const ScaledMatrix& m);

/// A row's zero points where they are bytes, `stride` apart in `out`. Inline: the stride is a constant of the caller's.
inline void read_zero_points(const ScaledMatrix& m, std::int64_t row, std::uint8_t* out, std::int64_t stride) {
    const std::byte* from = m.zero_point + row / m.grid.block_rows * m.zero_row_stride;
    const std::int64_t blocks = m.grid.grid_cols(), step = m.zero_col_stride;  // once: bytes of `out` may alias them
    for (std::int64_t b = 0; b < blocks; ++b) out[b * stride] = static_cast<std::uint8_t>(from[b * step]);
}

/// Where zero_points_are_bytes(): whether all, signed or not as their type says, are low ... high.
bool zero_points_within(const ScaledMatrix& m, int low, int high);

/// Whether E8M0 scales are all within 2^-60 ... 2^60, where their products with codes are normal bfloat16 numbers.
bool powers_of_two_keep_normal(const ScaledMatrix& m);

/// Whether every E4M3 scale is a positive number or zero.
bool e4m3_scales_are_positive(const ScaledMatrix& m);

/// Whether codes and scales lie along K, blocks are whole steps or a step holds whole blocks, and zero points are bytes
/// that come one to so many steps. Reads none of them; the kernels take zero points that zero_points_are_small() of.
bool readable_in_place(const ScaledMatrix& w);

/// Whether these kernels' results are right, where zero_points_are_small().
inline bool supports(const CodeKernelsF32& kernels, const ScaledMatrix& w) {
    const std::int64_t block = w.grid.block_cols, k = w.grid.cols;
    const bool blocks_fit = block >= k || block == 16 || block == 32 || block % 64 == 0;
    return kernels.product[static_cast<std::size_t>(w.element)] != nullptr && k > 0 && w.col_stride == 1 &&
           w.packed == is_packed(w.element) && blocks_fit && zero_points_are_bytes(w);
}

/// Rows [begin, begin + n). `first_level_cache`, `scratch`: see CodeRows::scale_scratch.
CodeRows code_rows(std::int64_t first_level_cache, const ScaledMatrix& w, std::int64_t begin, std::int64_t n,
                   float* scratch);

/// Codes of a span, see CodeRows.
std::int64_t span_of(const ScaledMatrix& w);

/// Codes worth a thread.
inline constexpr std::int64_t bytes_per_task = std::int64_t{1} << 17;
/// Calls body(begin, end) for `n` rows in all, from threads. Ranges begin at multiples of four, which kernels take
/// together: which rows these are must not depend on the number of threads.
void for_rows(const ScaledMatrix& w, std::int64_t n, RangeBody body);

/// Scales, with the global one or without it, and zero points of a few rows as floats: see InPlaceF32.
class RowNumbers {
public:
    RowNumbers(const ScaledMatrix& w, std::int64_t rows, GlobalScale global)
        : w_(w), global_(global), stride_(w.grid.grid_cols() + 3), scales_(rows * stride_) {
        std::fill_n(scales_.data(), rows * stride_, 0.0F);
        if (w.zero_point == nullptr) return;
        zero_points_ = WorkBuffer<float>(rows * stride_);
        std::fill_n(zero_points_.data(), rows * stride_, 0.0F);
    }
    void read(const KernelTable& table, std::int64_t first, std::int64_t rows) {
        const std::int64_t blocks = w_.grid.grid_cols();
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t from = (first + r) / w_.grid.block_rows;
            float* scales = scales_.data() + r * stride_;
            read_scales(table, w_, from, 0, blocks, scales, global_);
            if (w_.zero_point == nullptr) continue;
            float* zero_points = zero_points_.data() + r * stride_;
            for (std::int64_t b = 0; b < blocks; ++b) zero_points[b] = w_.zero_point_at(from, b);
        }
    }
    [[nodiscard]] const float* scales(std::int64_t block = 0) const { return scales_.data() + block; }
    [[nodiscard]] const float* zero_points(std::int64_t block = 0) const {
        return w_.zero_point == nullptr ? nullptr : zero_points_.data() + block;
    }
    [[nodiscard]] std::int64_t stride() const { return stride_; }

private:
    const ScaledMatrix& w_;
    GlobalScale global_;
    std::int64_t stride_;
    WorkBuffer<float> scales_, zero_points_;
};

}  // namespace breccia::inline v0_4
