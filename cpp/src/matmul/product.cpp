// SPDX-License-Identifier: Apache-2.0
#include "matmul/product.hpp"

#include <algorithm>

#include "matmul/interleaved.hpp"

namespace breccia::inline v0_4 {

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
        std::get<NumberMatrix>(matrix_).read(kernels, row, begin, n, out);
    }
}

PreparedRows::PreparedRows(const Operand& weight, const Shape& batch, std::int64_t index) {
    const InterleavedWeight* from = weight.scaled() == nullptr ? nullptr : interleaved_of(*weight.scaled());
    if (from == nullptr) return;
    const auto first_of = [&](const Array& array) {
        return array.as<const std::byte>() + batch_offset(array, batch, index);
    };
    codes = reinterpret_cast<const std::uint8_t*>(first_of(from->codes));
    scales = first_of(from->scales);
    scale_type = from->scale_type;
    if (from->zero_points) zero_points = first_of(*from->zero_points);
    if (!from->special) return;
    special = reinterpret_cast<const std::uint8_t*>(first_of(*from->special));
    special_row_stride = from->special->shape.back();
}

void Product::read(std::int64_t row, std::int64_t rows, std::int64_t at, std::int64_t count, Scratch& scratch,
                   float* out, std::int64_t stride) const {
    while (rows > 0) {
        const std::int64_t here = std::min(rows, m - row % m);
        a[static_cast<std::size_t>(row / m)].read(table, row % m, here, at, count, scratch, out, stride);
        out += here * stride;
        row += here;
        rows -= here;
    }
}

void* Product::in_place(DType dtype, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t count,
                        std::int64_t& stride) const {
    const OutputMatrix& to = c[static_cast<std::size_t>(row / m)];
    const auto item = static_cast<std::int64_t>(size_of(dtype));
    stride = to.row_stride / item;
    const bool fits = to.dtype == dtype && row % m + rows <= m && to.row_stride % item == 0;
    return fits ? to.in_place(row % m, begin, count) : nullptr;
}

}  // namespace breccia::inline v0_4
