// SPDX-License-Identifier: Apache-2.0
#include "matmul/code_rows.hpp"

#include <algorithm>

namespace breccia::inline v0_4 {
namespace {

bool supported_block(std::int64_t block, std::int64_t k, bool packed) {
    const std::int64_t step = row_step(packed);
    return block >= k || block % step == 0 || (step % block == 0 && block >= 16);
}

bool supported_zero_points(const ScaledMatrix& w) {
    if (w.zero_point == nullptr) return true;
    const bool one = w.grid.block_cols >= w.grid.cols;
    return zero_points_are_bytes(w) && (one || (w.grid.block_cols % row_step(true) == 0 && w.zero_col_stride == 1));
}

// Whether every byte of a grid, plus `shift`, lies in [low, high].
bool bytes_within(const BlockGrid& grid, const std::byte* data, std::int64_t row_stride, std::int64_t col_stride,
                  int shift, int low, int high) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(data);
    const std::int64_t rows = row_stride == 0 ? 1 : grid.grid_rows(), cols = grid.grid_cols();
    const auto first = static_cast<std::uint8_t>(low - shift), span = static_cast<std::uint8_t>(high - low);
    bool within = true;
    for (std::int64_t i = 0; i < rows; ++i) {
        const std::uint8_t* row = bytes + i * row_stride;
        std::uint8_t largest = 0;
        if (col_stride == 1)
            for (std::int64_t j = 0; j < cols; ++j)
                largest = std::max(largest, static_cast<std::uint8_t>(row[j] - first));
        else
            for (std::int64_t j = 0; j < cols; ++j)
                largest = std::max(largest, static_cast<std::uint8_t>(row[j * col_stride] - first));
        within &= largest <= span;
    }
    return within;
}

}  // namespace

bool zero_points_are_bytes(const ScaledMatrix& m) {
    if (m.zero_point == nullptr) return true;
    if (m.zero_point_type.is_number() || info(m.element).bits != 4) return false;
    // INT4 codes as zero points are sign-extended or not according to who wrote them.
    return !m.zero_point_type.is_codes() || m.zero_point_type.format() != format_of<Int4>;
}

bool zero_points_within(const ScaledMatrix& m, int low, int high) {
    if (m.zero_point == nullptr) return true;
    if (m.zero_point_type != ElementType::int8()) low = std::max(low, 0);
    return bytes_within(m.grid, m.zero_point, m.zero_row_stride, m.zero_col_stride, 0, low, high);
}

bool zero_points_are_small(const ScaledMatrix& m) {
    return zero_points_within(m, m.zero_point_type == ElementType::int8() ? -8 : 0, 15);
}

bool powers_of_two_keep_normal(const ScaledMatrix& m) {
    return bytes_within(m.grid, m.scale, m.scale_row_stride, m.scale_col_stride, -127, -60, 60);
}

bool e4m3_scales_are_positive(const ScaledMatrix& m) {
    return bytes_within(m.grid, m.scale, m.scale_row_stride, m.scale_col_stride, 0, 0, 0x7E);
}

bool readable_in_place(const ScaledMatrix& w) {
    const std::int64_t scale_size =
        is_coded(w.scale_type) ? 1 : static_cast<std::int64_t>(size_of(static_cast<DType>(w.scale_type)));
    return w.grid.cols > 0 && w.col_stride == 1 && w.packed == is_packed(w.element) &&
           supported_block(w.grid.block_cols, w.grid.cols, w.packed) &&
           (w.grid.grid_cols() == 1 || w.scale_col_stride == scale_size) && supported_zero_points(w);
}

CodeRows code_rows(std::int64_t first_level_cache, const ScaledMatrix& w, std::int64_t begin, std::int64_t n,
                   float* scratch) {
    return {.codes = w.data + begin * w.row_stride,
            .row_stride = w.row_stride,
            .rows = n,
            .k = w.grid.cols,
            .block = std::min(w.grid.block_cols, w.grid.cols),
            .first_row = begin,
            .block_rows = w.grid.block_rows,
            .scales = w.scale,
            .scale_type = w.scale_type,
            .scale_row_stride = w.scale_row_stride,
            .zero_points = reinterpret_cast<const std::uint8_t*>(w.zero_point),
            .zero_row_stride = w.zero_row_stride,
            .scale_scratch = scratch,
            .first_level_cache = first_level_cache};
}

std::int64_t span_of(const ScaledMatrix& w) { return row_span(w.grid.block_cols, w.grid.cols, w.packed); }

void for_rows(const ScaledMatrix& w, std::int64_t n, RangeBody body) {
    constexpr std::int64_t together = special_rows;
    const std::int64_t group_bytes = together * w.row_bytes();
    parallel_for((n + together - 1) / together, std::max<std::int64_t>(2, bytes_per_task / group_bytes),
                 [&](std::int64_t begin, std::int64_t end) { body(begin * together, std::min(end * together, n)); });
}

}  // namespace breccia::inline v0_4
