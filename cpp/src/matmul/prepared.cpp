// SPDX-License-Identifier: Apache-2.0
#include "matmul/prepared.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "breccia/formats.hpp"
#include "matmul/paths/panels.hpp"
#include "tensor/checks.hpp"

namespace breccia::inline v0_4 {
namespace {

constexpr std::int64_t lanes = 16;

// Rows of bytes as they lie, `each` of the product's to one of them.
struct ByteRows {
    const std::byte* data;
    std::int64_t stride, first = 0, each = 1;
    [[nodiscard]] const std::byte* operator[](std::int64_t r) const { return data + (first + r) / each * stride; }
};

// Doublewords of up to 16 rows in turn; what is missing of the last one, and rows that are, become zeros.
void interleave_rows(const KernelTable& table, const ByteRows& from, std::int64_t rows, std::int64_t bytes,
                     std::byte* out) {
    constexpr std::int64_t line = 64;
    alignas(line) float lines[lanes][lanes] = {}, turned[lanes][lanes];
    std::int64_t at = 0;
    for (; at + line <= bytes; at += line, out += lanes * line) {
        for (std::int64_t r = 0; r < rows; ++r) std::memcpy(lines[r], from[r] + at, line);
        table.matmul.transpose(lines[0], lanes, turned[0], lanes);
        std::memcpy(out, turned, sizeof turned);
    }
    if (at == bytes) return;
    const std::int64_t n = bytes - at;
    std::memset(lines, 0, sizeof lines);
    for (std::int64_t r = 0; r < rows; ++r) std::memcpy(lines[r], from[r] + at, static_cast<std::size_t>(n));
    table.matmul.transpose(lines[0], lanes, turned[0], lanes);
    std::memcpy(out, turned, static_cast<std::size_t>((n + 3) / 4 * line));
}

bool readable(ScaleType type, const std::byte* codes, std::int64_t n) {
    const std::uint8_t low = type == ScaleType::e8m0 ? 1 : 0, span = type == ScaleType::e8m0 ? 253 : 126;
    std::uint8_t outside = 0;
    for (std::int64_t i = 0; i < n; ++i)
        outside |= static_cast<std::uint8_t>(static_cast<std::uint8_t>(codes[i]) - low) > span ? 1 : 0;
    return outside == 0;
}

bool readable_zero_points(const ScaledMatrix& w) {
    return w.zero_point.data == nullptr || (w.element == format_of<UInt4> && zero_points_are_bytes(w));
}

bool is_special(const std::uint8_t* codes, std::int64_t n) {
    std::uint8_t found = 0;
    for (std::int64_t i = 0; i < n; ++i)
        found |= static_cast<std::uint8_t>((codes[i] & 0x78) == 0 || (codes[i] & 0x7F) == 0x7F);
    return found != 0;
}

// Of E4M3, where the kernel of rows in place is quicker when it is told.
std::optional<Array> find_special(const BF16Kernels& bf16, const ScaledTensor& w, const Shape& batch) {
    const ScaledMatrix first = scaled_matrix(w, batch, 0);
    const std::int64_t span = row_span(first.grid.block_cols, first.grid.cols, first.packed);
    if (bf16.gemv_e4m3 == nullptr || first.element != format_of<Float8E4M3FN> || span > longest_span_of_finite ||
        !readable_in_place(first))
        return {};
    const std::int64_t spans = (first.grid.cols + span - 1) / span;
    Shape shape = batch;
    shape.insert(shape.end(), {(first.grid.rows + special_rows - 1) / special_rows, spans});
    Array special = Array::allocate(ElementType::uint8(), shape);
    auto* out = special.as<std::uint8_t>();
    std::memset(out, 0, static_cast<std::size_t>(special.size()));
    for (std::int64_t i = 0; i < element_count(batch); ++i) {
        const ScaledMatrix m = scaled_matrix(w, batch, i);
        for (std::int64_t row = 0; row < m.grid.rows; row += special_rows)
            for (std::int64_t k = 0; k < m.grid.cols; k += span, ++out)
                for (std::int64_t r = 0; r < std::min(special_rows, m.grid.rows - row); ++r)
                    if (is_special(m.data + (row + r) * m.row_stride + k, std::min(span, m.grid.cols - k)))
                        *out |= static_cast<std::uint8_t>(1 << r);
    }
    return special;
}

// Null where a matrix does not suit, or the table has no kernel to read it.
std::shared_ptr<const InterleavedWeight> interleave(const KernelTable& table, const ScaledTensor& w) {
    const BF16Kernels* bf16 = table.matmul.bf16;
    if (bf16 == nullptr || bf16->lanes[static_cast<std::size_t>(w.recipe().element)] == nullptr ||
        w.shape().size() < 2 || w.recipe().is_expanded())
        return nullptr;
    const Shape batch = batch_shape(w.shape());
    const std::int64_t members = element_count(batch);
    if (members == 0) return nullptr;
    const auto matrix = [&](std::int64_t index) { return scaled_matrix(w, batch, index); };
    const ScaledMatrix first = matrix(0);
    const std::optional<LaneBlocks> blocks = lane_blocks(first);
    if (!blocks) return nullptr;
    for (std::int64_t i = 0; i < members; ++i)
        if (!zero_points_are_small(matrix(i))) return nullptr;
    const std::int64_t groups = (first.grid.rows + lanes - 1) / lanes;
    const std::int64_t group_bytes = quads_of(first.grid.cols, first.packed) * 256;
    auto result = std::make_shared<InterleavedWeight>();
    result->special = find_special(*bf16, w, batch);
    const auto allocate = [&](std::int64_t bytes) {
        Shape shape = batch;
        shape.insert(shape.end(), {1, groups * bytes});
        return Array::allocate(ElementType::uint8(), shape);
    };
    result->codes = allocate(group_bytes);
    std::memset(result->codes.data, 0, static_cast<std::size_t>(result->codes.size()));
    for (std::int64_t i = 0; i < members * groups; ++i) {
        const ScaledMatrix m = matrix(i / groups);
        const std::int64_t row = i % groups * lanes;
        const ByteRows codes{.data = reinterpret_cast<const std::byte*>(m.data), .stride = m.row_stride, .first = row};
        interleave_rows(table, codes, std::min(lanes, m.grid.rows - row), m.row_bytes(),
                        result->codes.as<std::byte>() + i * group_bytes);
    }
    Scratch scratch;
    const auto interleave_all = [&](ScaleType type) {
        const std::int64_t bytes = blocks->group_bytes(type);
        result->scale_type = type;
        result->scales = allocate(bytes);
        for (std::int64_t i = 0; i < members * groups; ++i)
            if (!interleave_scales(table, matrix(i / groups), *blocks, i % groups * lanes, type, scratch,
                                   result->scales.as<std::byte>() + i * bytes))
                return false;
        return true;
    };
    if (!is_coded(first.scale_type) || !interleave_all(first.scale_type)) interleave_all(ScaleType::float32);
    if (first.zero_point.data == nullptr) return result;
    const std::int64_t zero_bytes = blocks->stored * lanes;
    const Array zeros = allocate(zero_bytes);
    result->zero_points = zeros;
    for (std::int64_t i = 0; i < members * groups; ++i)
        interleave_zero_points(table, matrix(i / groups), *blocks, i % groups * lanes, scratch,
                               zeros.as<std::byte>() + i * zero_bytes);
    return result;
}

bool is_aligned(const ScaledTensor& w) {
    return reinterpret_cast<std::uintptr_t>(w.data().data) % cache_line == 0 &&
           reinterpret_cast<std::uintptr_t>(w.scale().data) % cache_line == 0;
}

bool is_in_order(const ScaledTensor& w) {
    const auto in_order = [&](const Array& array) {
        return (w.layout().axis == -1 ? array : array.transposed()).is_contiguous();
    };
    const bool wide = is_coded(w.scale_type()) || w.scale_type() == ScaleType::float32;
    return wide && w.is_packed() == is_packed(w.recipe().element) && in_order(w.data()) &&
           (w.layout().kind == LayoutKind::per_tensor || in_order(w.scale())) &&
           (!w.zero_point() || w.layout().kind == LayoutKind::per_tensor || in_order(*w.zero_point()));
}

// A contiguous copy of an array's items, last axis `axis`.
Array copy_in_order(const Array& from, int axis) {
    const Array view = axis == -2 && from.rank() >= 2 ? from.transposed() : from;
    Array to = Array::allocate(from.type, view.shape);
    copy_elements(view, to.as<std::byte>());
    return axis == -2 && from.rank() >= 2 ? to.transposed() : to;
}

// Two codes to a byte, where the operand has one.
Array pack_codes(const Array& from) {
    Shape shape = from.shape;
    const std::int64_t cols = shape.back();
    shape.back() = (cols + 1) / 2;
    Array to = Array::allocate(ElementType::uint8(), shape);
    const std::span in(from.as<const std::uint8_t>(), static_cast<std::size_t>(from.size()));
    const std::span out(to.as<std::uint8_t>(), static_cast<std::size_t>(to.size()));
    const auto codes = static_cast<std::size_t>(cols), bytes = static_cast<std::size_t>(shape.back());
    for (std::size_t row = 0; row * codes < in.size(); ++row)
        breccia::pack(in.subspan(row * codes, codes), out.subspan(row * bytes, bytes));
    return to;
}

Array widened(const KernelTable& table, const Array& scale) {
    const DType dtype = scale.type.dtype();
    if (dtype == DType::float32) return scale;
    Array to = Array::allocate(DType::float32, scale.shape);
    table.dequantize.load[static_cast<std::size_t>(dtype)](scale.data, scale.size(), to.as<float>());
    return to;
}

ScaledTensor ready(const KernelTable& table, const ScaledTensor& w) {
    if (w.data().rank() < 2 || (is_in_order(w) && is_aligned(w))) return w;
    const int axis = w.layout().axis;
    const auto turned = [&](const Array& array) { return axis == -2 ? array.transposed() : array; };
    Array data = turned(copy_in_order(w.data(), axis));
    if (!w.is_packed() && is_packed(w.recipe().element)) data = pack_codes(data);
    // A scale without its constant axis has nothing to turn.
    const bool full = w.scale().rank() == w.data().rank();
    const auto copy_blocks = [&](const Array& array) { return copy_in_order(array, full ? axis : -1); };
    Array scale = copy_blocks(w.scale());
    if (scale.type.is_half_word()) scale.type = DType::bfloat16;
    if (scale.type.is_number() && !is_coded(w.recipe().scale)) {
        if (full) scale = turned(scale);
        scale = widened(table, scale);
        if (full) scale = turned(scale);
    }
    Extras extras{.zero_point = std::nullopt,
                  .global_scale = w.global_scale(),
                  .shape = w.shape(),
                  .original_dtype = w.original_dtype()};
    if (w.zero_point()) extras.zero_point = copy_blocks(*w.zero_point());
    return {turned(data), std::move(scale), w.recipe(), w.layout(), std::move(extras)};
}

}  // namespace

std::optional<LaneBlocks> lane_blocks(const ScaledMatrix& w) {
    constexpr std::int64_t longest = 256;
    const std::int64_t k = w.grid.cols, own = w.grid.block_cols, quad = w.packed ? 32 : 16;
    if (!readable_zero_points(w) || w.col_stride != 1 || w.packed != is_packed(w.element) || k == 0) return {};
    const std::int64_t cols = w.grid.grid_cols();
    if (cols == 1) return LaneBlocks{.block_quads = longest / quad, .scale_step = 0};
    if (own == 16 || own == 32 || own == 64)
        return LaneBlocks{.stored = round_up(cols, 4),
                          .block_shift = std::countr_zero(static_cast<std::uint64_t>(own)) - 4};
    if (own == longest / 2 || own % longest == 0) {
        const std::int64_t repeats = std::max<std::int64_t>(own / longest, 1);
        return LaneBlocks{
            .block_quads = own / repeats / quad, .stored = round_up(cols * repeats, 4), .repeats = repeats};
    }
    return {};
}

bool interleave_scales(const KernelTable& table, const ScaledMatrix& w, const LaneBlocks& blocks, std::int64_t row,
                       ScaleType type, Scratch& scratch, std::byte* out) {
    const std::int64_t rows = std::min(lanes, w.grid.rows - row), cols = w.grid.grid_cols();
    const std::int64_t item = is_coded(type) ? 1 : sizeof(float), bytes = cols * blocks.repeats * item;
    const std::int64_t whole = blocks.group_bytes(type) / lanes;  // of one row
    if (bytes < whole) std::memset(out, 0, static_cast<std::size_t>(blocks.group_bytes(type)));
    ByteRows from{.data = w.scale.data, .stride = w.scale.row_stride, .first = row, .each = w.grid.block_rows};
    const bool as_they_lie = type == w.scale_type && blocks.repeats == 1 && (cols == 1 || w.scale.col_stride == item);
    if (is_coded(type)) {
        if (!as_they_lie) return false;
        for (std::int64_t r = 0; r < rows; ++r)
            if (!readable(type, from[r], cols)) return false;
    } else if (!as_they_lie) {
        const std::int64_t count = cols * blocks.repeats;
        scratch.scales.resize(static_cast<std::size_t>(rows * count));
        for (std::int64_t r = 0; r < rows; ++r) {
            float* line = scratch.scales.data() + r * count;
            read_scales(table, w, (row + r) / w.grid.block_rows, 0, cols, line);
            if (blocks.repeats == 1) continue;
            for (std::int64_t i = count; i-- > 0;) line[i] = line[i / blocks.repeats];
        }
        from = {.data = reinterpret_cast<const std::byte*>(scratch.scales.data()), .stride = bytes};
    }
    interleave_rows(table, from, rows, bytes, out);
    return true;
}

void interleave_zero_points(const KernelTable& table, const ScaledMatrix& w, const LaneBlocks& blocks, std::int64_t row,
                            Scratch& scratch, std::byte* out) {
    const std::int64_t rows = std::min(lanes, w.grid.rows - row), bytes = w.grid.grid_cols() * blocks.repeats;
    if (bytes < blocks.stored) std::memset(out, 0, static_cast<std::size_t>(blocks.stored * lanes));
    ByteRows from{
        .data = w.zero_point.data, .stride = w.zero_point.row_stride, .first = row, .each = w.grid.block_rows};
    if (blocks.repeats != 1 || (bytes > 1 && w.zero_point.col_stride != 1)) {
        scratch.codes.resize(static_cast<std::size_t>(rows * bytes));
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t i = 0; i < bytes; ++i)
                scratch.codes[static_cast<std::size_t>(r * bytes + i)] =
                    static_cast<std::uint8_t>(from[r][i / blocks.repeats * w.zero_point.col_stride]);
        from = {.data = reinterpret_cast<const std::byte*>(scratch.codes.data()), .stride = bytes};
    }
    interleave_rows(table, from, rows, bytes, out);
}

PreparedWeight::PreparedWeight(const ScaledTensor& weight) : tensor_(weight) {
    const Call call;
    check_memory(weight, "weight");
    if (weight.interleaved_ != nullptr || element_count(weight.shape()) == 0) return;
    const KernelTable& table = call.kernels;
    if (weight.data().rank() < 2 || !is_in_order(weight)) tensor_ = ready(table, weight);
    tensor_.interleaved_ = interleave(table, tensor_);
    if (tensor_.interleaved_ == nullptr) tensor_ = ready(table, weight);
}

std::int64_t ScaledTensor::packed_nbytes() const {
    if (interleaved_ == nullptr) return 0;
    const auto size = [](const std::optional<Array>& array) { return array ? array->size() : 0; };
    return interleaved_->codes.size() + interleaved_->scales.size() + size(interleaved_->zero_points) +
           size(interleaved_->special);
}

PreparedWeight PreparedWeight::transposed() const { return {Ready{}, tensor_.transposed()}; }

}  // namespace breccia::inline v0_4
