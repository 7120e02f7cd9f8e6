// SPDX-License-Identifier: Apache-2.0
#include "matmul/operand_rows.hpp"

#include <algorithm>

namespace breccia::inline v0_4 {
namespace {

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

Rows::Rows(const Operand& operand, int axis, const Shape& batch, std::int64_t index) {
    if (const ScaledTensor* scaled = operand.scaled()) {
        matrix_ = scaled_matrix(*scaled, batch, index);
        along_k_ = scaled->layout().axis == axis;
        return;
    }
    NumberMatrix m = number_matrix(*operand.array(), axis, batch, index);
    const auto item = static_cast<std::int64_t>(size_of(m.dtype));
    along_k_ = m.col_stride == item || m.row_stride != item;
    if (!along_k_) {
        std::swap(m.rows, m.cols);
        std::swap(m.row_stride, m.col_stride);
    }
    matrix_ = m;
}

void Rows::read(const KernelTable& kernels, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t n,
                Scratch& scratch, float* out, std::int64_t stride) const {
    if (along_k_) {
        for (std::int64_t i = 0; i < rows; ++i) read_run(kernels, row + i, k, n, scratch, out + i * stride);
        return;
    }
    // K runs across the stored rows: read 16 runs of a piece of the rows wanted, then turn them.
    constexpr std::int64_t piece = 128;
    float runs[16 * piece], turned[16 * 16];
    for (std::int64_t i = 0; i < rows; i += piece) {
        const std::int64_t count = std::min(piece, rows - i);
        for (std::int64_t j = 0; j < n; j += 16) {
            const std::int64_t depth = std::min<std::int64_t>(16, n - j);
            for (std::int64_t d = 0; d < depth; ++d)
                read_run(kernels, k + j + d, row + i, count, scratch, runs + d * piece);
            for (std::int64_t at = 0; at < count; at += 16) {
                kernels.matmul.transpose(runs + at, piece, turned, 16);
                for (std::int64_t r = 0; r < std::min<std::int64_t>(16, count - at); ++r)
                    std::copy_n(turned + r * 16, depth, out + (i + at + r) * stride + j);
            }
        }
    }
}

void Rows::read_run(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n, Scratch& scratch,
                    float* out) const {
    if (const auto* scaled = std::get_if<ScaledMatrix>(&matrix_)) {
        scaled->read(kernels, row, begin, n, scratch, out);
    } else {
        const float* x = std::get<NumberMatrix>(matrix_).read(kernels, row, begin, n, scratch.values);
        std::copy(x, x + n, out);
    }
}

bool zero_points_are_bytes(const ScaledMatrix& m) {
    if (m.zero_point == nullptr) return true;
    if (m.zero_point_type.is_number() || info(m.element).bits != 4) return false;
    // INT4 codes as zero points are sign-extended or not according to who wrote them.
    return !m.zero_point_type.is_codes() || m.zero_point_type.format() != format_of<Int4>;
}

bool zero_points_are_small(const ScaledMatrix& m) {
    if (m.zero_point == nullptr) return true;
    const int low = m.zero_point_type == ElementType::int8() ? -8 : 0;
    return bytes_within(m.grid, m.zero_point, m.zero_row_stride, m.zero_col_stride, 0, low, 15);
}

bool powers_of_two_keep_normal(const ScaledMatrix& m) {
    return bytes_within(m.grid, m.scale, m.scale_row_stride, m.scale_col_stride, -127, -60, 60);
}

bool e4m3_scales_are_positive(const ScaledMatrix& m) {
    return bytes_within(m.grid, m.scale, m.scale_row_stride, m.scale_col_stride, 0, 0, 0x7E);
}

}  // namespace breccia::inline v0_4
