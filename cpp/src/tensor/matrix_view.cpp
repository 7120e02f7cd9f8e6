// SPDX-License-Identifier: Apache-2.0
#include "tensor/matrix_view.hpp"

#include <algorithm>

namespace breccia::inline v0_4 {
namespace {

float load_scale(const std::byte* p, ScaleType type) {
    if (!is_coded(type)) return load_number<float>(p, static_cast<DType>(type));
    const auto code = static_cast<std::uint8_t>(*p);
    return type == ScaleType::e8m0 ? Float8E8M0FNU::decode(code) : Float8E4M3FN::decode(code);
}

// Elements [at, …) of axis `axis` and those after it. Returns where the next ones go.
std::byte* copy_axes(const Array& from, std::size_t axis, const std::byte* at, std::byte* to) {
    const std::size_t size = from.type.size();
    if (axis == from.rank()) return std::copy_n(at, size, to);
    if (axis + 1 == from.rank() && from.strides[axis] == static_cast<std::int64_t>(size))
        return std::copy_n(at, static_cast<std::size_t>(from.shape[axis]) * size, to);
    for (std::int64_t i = 0; i < from.shape[axis]; ++i) to = copy_axes(from, axis + 1, at + i * from.strides[axis], to);
    return to;
}

// Of -1 and -2.
constexpr int other_axis(int axis) { return -3 - axis; }

// The stride of an axis of one element may be any number, and nothing is computed with it: where there is no second row
// the stride of rows is 0, and columns lie side by side.
std::int64_t stride_of(const Array& array, int axis, std::int64_t alone = 0) {
    const bool has_steps = std::ssize(array.shape) + axis >= 0 && array.shape.end()[axis] > 1;
    return has_steps ? array.strides.end()[axis] : alone;
}

std::int64_t col_stride_of(const Array& array, int axis) {
    return stride_of(array, axis, static_cast<std::int64_t>(array.type.size()));
}

GridView grid_view(const Array& array, const ScaledTensor& scaled, const Shape& batch, std::int64_t index) {
    const auto* data = array.as<const std::byte>();
    const Layout& layout = scaled.layout();
    if (layout.kind == LayoutKind::per_tensor) return {.data = data};
    // Only the axes of the batch count. PerChannel may be without its constant axis.
    if (array.rank() < scaled.shape().size())
        return {.data = data + batch_offset(array, batch, index, 1), .row_stride = stride_of(array, -1)};
    return {.data = data + batch_offset(array, batch, index),
            .row_stride = stride_of(array, other_axis(layout.axis)),
            .col_stride = col_stride_of(array, layout.axis)};
}

}  // namespace

void copy_elements(const Array& from, std::byte* to) {
    if (from.size() > 0) copy_axes(from, 0, static_cast<const std::byte*>(from.data), to);
}

Shape batch_shape(const Shape& shape) { return shape.size() <= 2 ? Shape{} : Shape(shape.begin(), shape.end() - 2); }

std::int64_t batch_offset(const Array& array, const Shape& extents, std::int64_t index, std::size_t trailing) {
    if (array.data == nullptr) return 0;  // there are no elements, and nothing can be added to null
    std::int64_t offset = 0;
    const std::size_t leading = array.rank() < trailing ? 0 : array.rank() - trailing;
    for (std::size_t i = extents.size(); i-- > 0;) {
        const std::int64_t at = index % extents[i];
        index /= extents[i];
        const std::size_t from_end = extents.size() - i;
        if (from_end > leading) continue;
        const std::size_t axis = leading - from_end;
        if (array.shape[axis] != 1) offset += at * array.strides[axis];
    }
    return offset;
}

NumberMatrix number_matrix(const Array& array, int axis, const Shape& batch, std::int64_t index) {
    const std::size_t n = array.rank();
    NumberMatrix m;
    m.data = array.as<const std::byte>() + batch_offset(array, batch, index);
    m.dtype = array.type.dtype();
    m.cols = n == 0 ? 1 : array.shape[n - 1];
    m.rows = n < 2 ? 1 : array.shape[n - 2];
    if (axis == -2) std::swap(m.rows, m.cols);
    m.col_stride = col_stride_of(array, axis);
    m.row_stride = stride_of(array, other_axis(axis));
    return m;
}

bool NumberMatrix::is_run(std::int64_t row, std::int64_t begin, std::int64_t n) const {
    const std::size_t size = size_of(dtype);
    const bool side_by_side = col_stride == static_cast<std::int64_t>(size) || n <= 1;
    return side_by_side && reinterpret_cast<std::uintptr_t>(element(row, begin)) % size == 0;
}

const float* NumberMatrix::read(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n,
                                std::vector<float>& scratch) const {
    if (n == 0) return scratch.data();  // memory without elements may be null, to which nothing can be added
    if (dtype == DType::float32 && is_run(row, begin, n)) return reinterpret_cast<const float*>(element(row, begin));
    if (scratch.size() < static_cast<std::size_t>(n)) scratch.resize(static_cast<std::size_t>(n));
    read(kernels, row, begin, n, scratch.data());
    return scratch.data();
}

void NumberMatrix::read(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n,
                        float* out) const {
    if (n == 0) return;
    if (is_run(row, begin, n))
        return kernels.dequantize.load[static_cast<std::size_t>(dtype)](element(row, begin), n, out);
    for (std::int64_t i = 0; i < n; ++i) out[i] = load_number<float>(element(row, begin + i), dtype);
}

void OutputMatrix::write(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n,
                         const float* x) const {
    if (is_run(row, begin, n)) return kernels.dequantize.store[static_cast<std::size_t>(dtype)](x, n, at(row, begin));
    for (std::int64_t i = 0; i < n; ++i) store_number(at(row, begin + i), dtype, x[i]);
}

ScaledMatrix scaled_matrix(const ScaledTensor& scaled, const Shape& batch, std::int64_t index) {
    const Layout& layout = scaled.layout();
    const Array& data = scaled.data();
    ScaledMatrix m;
    m.element = scaled.recipe().element;
    m.grid = scaled.grid();
    // A block may be larger than any matrix; the kernels' sums of a few sizes must fit in 63 bits.
    constexpr std::int64_t largest = std::int64_t{1} << 48;
    m.grid.block_rows = std::min(m.grid.block_rows, largest);
    m.grid.block_cols = std::min(m.grid.block_cols, largest);
    m.packed = scaled.is_packed();
    m.data = data.as<const std::uint8_t>() + batch_offset(data, batch, index);
    m.row_stride = stride_of(data, other_axis(layout.axis));
    m.col_stride = col_stride_of(data, layout.axis);

    m.scale_type = scaled.scale_type();
    m.scale = grid_view(scaled.scale(), scaled, batch, index);
    m.expanded = scaled.recipe().is_expanded();
    if (const auto& zero_point = scaled.zero_point()) {
        m.zero_point = grid_view(*zero_point, scaled, batch, index);
        m.zero_point_type = zero_point->type;
    }
    if (const auto& global = scaled.global_scale()) {
        const std::int64_t offset = global->size() == 1 ? 0 : batch_offset(*global, batch, index);
        m.global_scale = load_number<float>(global->as<const std::byte>() + offset, DType::float32);
        m.global_divides = scaled.recipe().global_divides;
    }
    return m;
}

float ScaledMatrix::scale_at(std::int64_t block_row, std::int64_t block_col) const {
    return with_global(load_scale(scale.at(block_row, block_col), scale_type));
}

float ScaledMatrix::zero_point_at(std::int64_t block_row, std::int64_t block_col) const {
    if (zero_point.data == nullptr) return 0;
    const std::byte* p = zero_point.at(block_row, block_col);
    if (zero_point_type.is_number()) return load_number<float>(p, zero_point_type.dtype());
    const auto byte = static_cast<std::uint8_t>(*p);
    if (zero_point_type.is_codes()) return info(zero_point_type.format()).decode(byte);
    return zero_point_type == ElementType::int8() ? static_cast<float>(static_cast<std::int8_t>(byte))
                                                  : static_cast<float>(byte);
}

void read_scales(const KernelTable& kernels, const ScaledMatrix& m, std::int64_t block_row, std::int64_t first,
                 std::int64_t n, float* out, GlobalScale global) {
    const std::byte* p = m.scale.at(block_row, first);
    const bool coded = is_coded(m.scale_type);
    const std::size_t size = coded ? 1 : size_of(static_cast<DType>(m.scale_type));
    const bool contiguous =
        m.scale.col_stride == static_cast<std::int64_t>(size) && reinterpret_cast<std::uintptr_t>(p) % size == 0;
    if (contiguous && coded) {
        const float one = 1;
        kernels.dequantize.row(format_of_scale(m.scale_type), {.codes = reinterpret_cast<const std::uint8_t*>(p),
                                                               .begin = 0,
                                                               .count = n,
                                                               .block = std::max<std::int64_t>(n, 1),
                                                               .scales = &one,
                                                               .zero_points = nullptr,
                                                               .packed = false,
                                                               .out = out});
    } else if (contiguous) {
        kernels.dequantize.load[static_cast<std::size_t>(m.scale_type)](p, n, out);
    } else {
        for (std::int64_t i = 0; i < n; ++i) out[i] = load_scale(p + i * m.scale.col_stride, m.scale_type);
    }
    if (global == GlobalScale::applied && m.global_scale != 1)
        for (std::int64_t i = 0; i < n; ++i) out[i] = m.with_global(out[i]);
}

void read_finer_scales(const KernelTable& kernels, const ScaledMatrix& m, std::int64_t row, std::int64_t block,
                       std::vector<float>& scratch, float* out, std::int64_t stride) {
    const std::int64_t own_blocks = m.grid.grid_cols(), blocks = (m.grid.cols + block - 1) / block;
    const std::int64_t repeats = (std::min(m.grid.block_cols, m.grid.cols) + block - 1) / block;
    scratch.resize(static_cast<std::size_t>(own_blocks));
    read_scales(kernels, m, row / m.grid.block_rows, 0, own_blocks, scratch.data(), GlobalScale::applied);
    for (std::int64_t b = 0, own = 0, left = repeats; b < blocks; ++b, --left) {
        if (left == 0) ++own, left = repeats;
        out[b * stride] = scratch[static_cast<std::size_t>(own)];
    }
}

void ScaledMatrix::read(const KernelTable& kernels, std::int64_t row, std::int64_t begin, std::int64_t n,
                        Scratch& scratch, void* out, DType dtype) const {
    if (n <= 0) return;
    const std::uint8_t* codes = data + row * row_stride;
    if (col_stride != 1) {
        // Gathered so that the row starts where the kernel expects element 0 of its part.
        const std::int64_t first = packed ? begin / 2 : begin;
        const std::int64_t last = packed ? (begin + n + 1) / 2 : begin + n;
        scratch.codes.resize(static_cast<std::size_t>(last));
        for (std::int64_t i = first; i < last; ++i) scratch.codes[static_cast<std::size_t>(i)] = codes[i * col_stride];
        codes = scratch.codes.data();
    }
    const std::int64_t first_block = begin / grid.block_cols;
    const std::int64_t blocks = (begin + n - 1) / grid.block_cols - first_block + 1;
    const std::int64_t block_row = row / grid.block_rows;
    scratch.scales.resize(static_cast<std::size_t>(blocks));
    read_scales(kernels, *this, block_row, first_block, blocks, scratch.scales.data(), GlobalScale::applied);
    if (zero_point.data != nullptr) {
        scratch.zero_points.resize(static_cast<std::size_t>(blocks));
        for (std::int64_t i = 0; i < blocks; ++i)
            scratch.zero_points[static_cast<std::size_t>(i)] = zero_point_at(block_row, first_block + i);
    }
    const DequantizeRow part{.codes = codes,
                             .begin = begin,
                             .count = n,
                             .block = grid.block_cols,
                             .scales = scratch.scales.data(),
                             .zero_points = zero_point.data != nullptr ? scratch.zero_points.data() : nullptr,
                             .packed = packed,
                             .out = out};
    if (expanded) return read_expanded(kernels, part, scratch, dtype);
    kernels.dequantize.row(element, part, dtype);
}

// Codes as numbers, then what they stand for.
void ScaledMatrix::read_expanded(const KernelTable& kernels, const DequantizeRow& row, Scratch& scratch,
                                 DType dtype) const {
    const bool direct = dtype == DType::float32;
    if (!direct) scratch.expanded.resize(static_cast<std::size_t>(row.count));
    auto* values = direct ? static_cast<float*>(row.out) : scratch.expanded.data();
    const float one = 1;
    DequantizeRow plain = row;
    plain.block = row.begin + row.count;
    plain.scales = &one;
    plain.zero_points = nullptr;
    plain.out = values;
    kernels.dequantize.row(element, plain);
    kernels.dequantize.contract({.values = values,
                                 .begin = row.begin,
                                 .count = row.count,
                                 .group = row.block,
                                 .scales = row.scales,
                                 .exponents = row.zero_points,
                                 .max = info(element).max});
    if (!direct) kernels.dequantize.store[static_cast<std::size_t>(dtype)](values, row.count, row.out);
}

}  // namespace breccia::inline v0_4
