// SPDX-License-Identifier: Apache-2.0
#include "matmul/product.hpp"

#include <algorithm>
#include <cstring>

#include "matmul/prepared.hpp"

namespace breccia::inline v0_4 {
namespace {

bool supported_block(std::int64_t block, std::int64_t k, bool packed) {
    const std::int64_t step = row_step(packed);
    return block >= k || block % step == 0 || (step % block == 0 && block >= 16);
}

bool supported_zero_points(const ScaledMatrix& w) {
    if (w.zero_point.data == nullptr) return true;
    const bool one = w.grid.block_cols >= w.grid.cols;
    return zero_points_are_bytes(w) &&
           (one || (w.grid.block_cols % row_step(true) == 0 && w.zero_point.col_stride == 1));
}

// Whether every byte of a grid, plus `shift`, lies in [low, high].
bool bytes_within(const BlockGrid& grid, const GridView& view, int shift, int low, int high) {
    const std::int64_t rows = view.row_stride == 0 ? 1 : grid.grid_rows(), cols = grid.grid_cols();
    const auto first = static_cast<std::uint8_t>(low - shift), span = static_cast<std::uint8_t>(high - low);
    bool within = true;
    for (std::int64_t i = 0; i < rows; ++i) {
        const auto* row = reinterpret_cast<const std::uint8_t*>(view.at(i, 0));
        std::uint8_t largest = 0;
        if (view.col_stride == 1)
            for (std::int64_t j = 0; j < cols; ++j)
                largest = std::max(largest, static_cast<std::uint8_t>(row[j] - first));
        else
            for (std::int64_t j = 0; j < cols; ++j)
                largest = std::max(largest, static_cast<std::uint8_t>(row[j * view.col_stride] - first));
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
    const bool fits = bias == nullptr && to.dtype == dtype && row % m + rows <= m && to.row_stride % item == 0;
    return fits ? to.in_place(row % m, begin, count) : nullptr;
}

// In float64, which rounds once: the sum of two float32 numbers comes out as float32 would add them.
void Product::write_sums(std::int64_t row, std::int64_t begin, std::int64_t count, const float* x) const {
    constexpr std::int64_t piece = 256;
    const OutputMatrix& to = c[static_cast<std::size_t>(row / m)];
    for (std::int64_t i = 0; i < count; i += piece) {
        const std::int64_t n = std::min(piece, count - i), at = begin + i;
        const auto sum = [&](std::int64_t j) { return static_cast<double>(x[i + j]) + bias[at + j]; };
        float sums[piece];
        if (to.dtype == DType::float64) {
            for (std::int64_t j = 0; j < n; ++j) store_number(to.at(row % m, at + j), to.dtype, sum(j));
        } else {
            for (std::int64_t j = 0; j < n; ++j) sums[j] = static_cast<float>(sum(j));
            to.write(table, row % m, at, n, sums);
        }
    }
}

const ScaledMatrix* coded_activations(const Product& product) {
    const ScaledMatrix* a = product.a.front().scaled_along_k();
    const bool suits = a != nullptr && product.a.size() == 1 && a->zero_point.data == nullptr &&
                       info(a->element).family != CodecFamily::exponent;
    return suits ? a : nullptr;
}

void read_activations(const Product& product, const ScaledMatrix* coded, std::int64_t first, std::int64_t rows,
                      std::int64_t k, std::int64_t count, Scratch& scratch, float* out, std::int64_t stride) {
    if (coded == nullptr) return product.read(first, rows, k, count, scratch, out, stride);
    static constexpr float one = 1;
    ScaledMatrix codes = *coded;
    codes.global_scale = 1;
    codes.scale = {.data = reinterpret_cast<const std::byte*>(&one)};
    codes.scale_type = ScaleType::float32;
    for (std::int64_t i = 0; i < rows; ++i) codes.read(product.table, first + i, k, count, scratch, out + i * stride);
}

std::optional<Int8Activations> Int8Activations::of(const Product& product, const ScaledMatrix& w) {
    constexpr std::int64_t least = 16;  // elements to a block that kernels add up before they scale
    if (product.k == 0) return {};
    const ScaledMatrix* front = product.a.front().scaled_along_k();
    for (const Rows& rows : product.a) {
        const ScaledMatrix* a = rows.scaled_along_k();
        if (a == nullptr || a->element != format_of<Int8> || a->zero_point.data != nullptr ||
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

bool zero_points_are_bytes(const ScaledMatrix& m) {
    if (m.zero_point.data == nullptr) return true;
    if (m.zero_point_type.is_number() || info(m.element).bits != 4) return false;
    // INT4 codes as zero points are sign-extended or not according to who wrote them.
    return !m.zero_point_type.is_codes() || m.zero_point_type.format() != format_of<Int4>;
}

bool zero_points_within(const ScaledMatrix& m, int low, int high) {
    if (m.zero_point.data == nullptr) return true;
    if (m.zero_point_type != ElementType::int8()) low = std::max(low, 0);
    return bytes_within(m.grid, m.zero_point, 0, low, high);
}

bool zero_points_are_small(const ScaledMatrix& m) {
    return zero_points_within(m, m.zero_point_type == ElementType::int8() ? -8 : 0, 15);
}

bool powers_of_two_keep_normal(const ScaledMatrix& m) { return bytes_within(m.grid, m.scale, -127, -60, 60); }

bool e4m3_scales_are_positive(const ScaledMatrix& m) { return bytes_within(m.grid, m.scale, 0, 0, 0x7E); }

bool readable_in_place(const ScaledMatrix& w) {
    const std::int64_t scale_size =
        is_coded(w.scale_type) ? 1 : static_cast<std::int64_t>(size_of(static_cast<DType>(w.scale_type)));
    return w.grid.cols > 0 && w.col_stride == 1 && w.packed == is_packed(w.element) &&
           supported_block(w.grid.block_cols, w.grid.cols, w.packed) &&
           (w.grid.grid_cols() == 1 || w.scale.col_stride == scale_size) && supported_zero_points(w);
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
            .scales = w.scale.data,
            .scale_type = w.scale_type,
            .scale_row_stride = w.scale.row_stride,
            .zero_points = reinterpret_cast<const std::uint8_t*>(w.zero_point.data),
            .zero_row_stride = w.zero_point.row_stride,
            .scale_scratch = scratch,
            .first_level_cache = first_level_cache};
}

void for_rows(const Product& product, const ScaledMatrix& w, RangeBody body) {
    constexpr std::int64_t together = special_rows;
    const std::int64_t group_bytes = together * w.row_bytes();
    const std::int64_t n = product.n;
    parallel_for(product.call, (n + together - 1) / together, std::max<std::int64_t>(2, bytes_per_task / group_bytes),
                 [&](std::int64_t begin, std::int64_t end) { body(begin * together, std::min(end * together, n)); });
}

}  // namespace breccia::inline v0_4
