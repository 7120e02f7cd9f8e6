// SPDX-License-Identifier: Apache-2.0
//
// One product of checked operands, as the paths take it: its activations, which may be codes, and its weight's rows of
// codes.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "breccia/ops.hpp"
#include "runtime/threads.hpp"
#include "tensor/matrix_view.hpp"

namespace breccia::inline v0_4 {

/// One operand of a product as rows of length K in float32, whatever its type, strides and scaling.
class Rows {
public:
    /// `axis` is where K lies in the operand: -1 for a, -2 for b. `index` counts the matrices of the batch.
    Rows(const Operand& operand, int axis, const Shape& batch, std::int64_t index);

    /// Elements [k, k + n) of `rows` rows, to rows of `out` that are `stride` apart.
    void read(const KernelTable& kernels, std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t n,
              Scratch& scratch, float* out, std::int64_t stride) const;

    /// The matrix of a ScaledTensor whose codes and scales run along K, else null. Codes of groups with exponents are
    /// read as the values that they stand for.
    [[nodiscard]] const ScaledMatrix* scaled_along_k() const {
        const auto* scaled = along_k_ ? std::get_if<ScaledMatrix>(&matrix_) : nullptr;
        return scaled != nullptr && !scaled->expanded ? scaled : nullptr;
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

/// One matrix of an InterleavedWeight; null where the weight is not prepared.
struct PreparedRows {
    PreparedRows() = default;
    /// `index` counts the matrices of the batch.
    PreparedRows(const Operand& weight, const Shape& batch, std::int64_t index);

    const std::uint8_t* codes = nullptr;
    const std::byte *scales = nullptr, *zero_points = nullptr;
    ScaleType scale_type = ScaleType::float32;
    const std::uint8_t* special = nullptr;
    std::int64_t special_row_stride = 0;
};

/// A list of what there mostly is one of, which then takes no memory of its own.
template <class T>
class OneOrMore {
public:
    OneOrMore() = default;
    OneOrMore(T one) : one_(std::move(one)) {}
    void push_back(T x) {
        if (!one_) {
            one_ = std::move(x);
            return;
        }
        if (many_.empty()) many_.push_back(std::move(*one_));
        many_.push_back(std::move(x));
    }

    [[nodiscard]] std::size_t size() const { return many_.empty() ? std::size_t{one_.has_value()} : many_.size(); }
    [[nodiscard]] const T* begin() const { return many_.empty() && one_ ? &*one_ : many_.data(); }
    [[nodiscard]] const T* end() const { return begin() + size(); }
    [[nodiscard]] const T& front() const { return *begin(); }
    [[nodiscard]] const T& operator[](std::size_t i) const { return begin()[i]; }

private:
    std::optional<T> one_;
    std::vector<T> many_;
};

/// Matrices of activations that meet one weight: c[i] = a[i] @ w^T for every i, `m` rows each.
struct Product {
    const Call& call;
    Rows w;
    PreparedRows prepared;
    OneOrMore<Rows> a;
    OneOrMore<OutputMatrix> c;
    std::int64_t m = 0, n = 0, k = 0;
    Precision precision = Precision::exact;
    const double* bias = nullptr;  ///< what is added to each row of products, or null
    const KernelTable& table = call.kernels;

    [[nodiscard]] std::int64_t total_rows() const { return static_cast<std::int64_t>(a.size()) * m; }
    /// How many bfloat16 numbers add up to an activation, as it is or as Precision::fast rounds it.
    [[nodiscard]] int terms() const { return precision == Precision::fast ? 1 : a.front().bfloat16_terms(); }
    /// Elements [at, at + count) of `rows` activations, counted over all matrices, to rows of `out` `stride` apart.
    void read(std::int64_t row, std::int64_t rows, std::int64_t at, std::int64_t count, Scratch& scratch, float* out,
              std::int64_t stride) const;
    /// Where `rows` activations' products [begin, begin + count) can be written as numbers of that type, rows `stride`
    /// elements apart, or null: where they do not lie so, or a bias is to be added.
    void* in_place(DType dtype, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t count,
                   std::int64_t& stride) const;
    /// Products [begin, begin + count) of an activation, to which the bias is added before they are rounded.
    void write(std::int64_t row, std::int64_t begin, std::int64_t count, const float* x) const {
        if (bias != nullptr) return write_sums(row, begin, count, x);
        c[static_cast<std::size_t>(row / m)].write(table, row % m, begin, count, x);
    }

private:
    void write_sums(std::int64_t row, std::int64_t begin, std::int64_t count, const float* x) const;
};

/// 1 where a number is neither zero nor in [2^lowest, 2^highest], else 0. In integers and without branches, so that
/// compilers turn loops of it into vectors.
constexpr std::uint32_t out_of_range(float x, int lowest, int highest) {
    const std::uint32_t least = bits_of(exp2i(lowest)), span = bits_of(exp2i(highest)) - least;
    const std::uint32_t magnitude = bits_of(x) & f32_abs_mask;
    return static_cast<std::uint32_t>(magnitude != 0) & static_cast<std::uint32_t>(magnitude - least > span);
}

/// Whether all numbers are zero or in that range.
inline bool all_within(std::span<const float> x, int lowest, int highest) {
    std::uint32_t outside = 0;
    for (const float value : x) outside |= out_of_range(value, lowest, highest);
    return outside == 0;
}

/// Calls body(i, row) with each activation as floats, and zeros after it up to `padded_k`, until it returns false.
/// Returns whether it never did. What body writes into the zeros stays there.
template <class Body>
bool all_activations(const Product& product, std::int64_t padded_k, Body body) {
    const auto buffer = WorkBuffer<float>::zeros(padded_k);
    const std::span row(buffer.data(), static_cast<std::size_t>(padded_k));
    Scratch scratch;
    for (std::int64_t i = 0; i < product.total_rows(); ++i) {
        product.read(i, 1, 0, product.k, scratch, row.data(), product.k);
        if (!body(i, row)) return false;
    }
    return true;
}

/// The kernel for a format among those that a backend has, or null.
template <class Kernels, class Base, class Table>
auto kernel_of(const Kernels* kernels, const Table Base::* table, Format format) {
    return kernels != nullptr ? (kernels->*table)[static_cast<std::size_t>(format)] : nullptr;
}

// ---- Activations that are codes: multiplied without their scales, which multiply the sums of their blocks ----

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

// ---- Rows of a weight's codes as kernels take them, and what kernels ask of their zero points and scales ----

/// Whether there are no zero points, or 4-bit codes have them as bytes. Reads none.
bool zero_points_are_bytes(const ScaledMatrix& m);

/// Where zero_points_are_bytes(): whether all are -8 ... 15, which kernels look up in tables.
bool zero_points_are_small(const ScaledMatrix& m);

/// A row's zero points where they are bytes, `stride` apart in `out`. Inline: the stride is a constant of the caller's.
inline void read_zero_points(const ScaledMatrix& m, std::int64_t row, std::uint8_t* out, std::int64_t stride) {
    const std::byte* from = m.zero_point.at(row / m.grid.block_rows, 0);
    const std::int64_t blocks = m.grid.grid_cols(),
                       step = m.zero_point.col_stride;  // once: bytes of `out` may alias them
    for (std::int64_t b = 0; b < blocks; ++b) out[b * stride] = static_cast<std::uint8_t>(from[b * step]);
}

/// Where zero_points_are_bytes(): whether all, signed or not as their type says, are low ... high.
bool zero_points_within(const ScaledMatrix& m, int low, int high);

/// Whether E8M0 scales are all within 2^-60 ... 2^60, where their products with codes are normal bfloat16 numbers.
bool powers_of_two_keep_normal(const ScaledMatrix& m);

/// Whether every E4M3 scale is a positive number or zero.
bool e4m3_scales_are_positive(const ScaledMatrix& m);

/// Whether codes and scales lie along K, blocks are whole steps or a step holds whole blocks, and zero points are bytes
/// that come one to so many steps. Reads none of them; the kernels take zero points of which zero_points_are_small()
/// holds.
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

/// Codes worth a thread.
inline constexpr std::int64_t bytes_per_task = std::int64_t{1} << 17;
/// Calls body(begin, end) for all of the weight's rows, from threads. Ranges begin at multiples of four, which kernels
/// take together: which rows these are must not depend on the number of threads.
void for_rows(const Product& product, const ScaledMatrix& w, RangeBody body);

/// Scales, with the global one or without it, and zero points of a few rows as floats: see InPlaceF32.
class RowNumbers {
public:
    RowNumbers(const ScaledMatrix& w, std::int64_t rows, GlobalScale global)
        : w_(w), global_(global), stride_(w.grid.grid_cols() + 3), scales_(WorkBuffer<float>::zeros(rows * stride_)) {
        if (w.zero_point.data != nullptr) zero_points_ = WorkBuffer<float>::zeros(rows * stride_);
    }
    void read(const KernelTable& table, std::int64_t first, std::int64_t rows) {
        const std::int64_t blocks = w_.grid.grid_cols();
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::int64_t from = (first + r) / w_.grid.block_rows;
            float* scales = scales_.data() + r * stride_;
            read_scales(table, w_, from, 0, blocks, scales, global_);
            if (w_.zero_point.data == nullptr) continue;
            float* zero_points = zero_points_.data() + r * stride_;
            for (std::int64_t b = 0; b < blocks; ++b) zero_points[b] = w_.zero_point_at(from, b);
        }
    }
    [[nodiscard]] const float* scales(std::int64_t block = 0) const { return scales_.data() + block; }
    [[nodiscard]] const float* zero_points(std::int64_t block = 0) const {
        return w_.zero_point.data == nullptr ? nullptr : zero_points_.data() + block;
    }
    [[nodiscard]] std::int64_t stride() const { return stride_; }

private:
    const ScaledMatrix& w_;
    GlobalScale global_;
    std::int64_t stride_;
    WorkBuffer<float> scales_, zero_points_;
};

// ---- Verbs, and what asks which path they take ----

/// The products of a verb that has checked its arguments. `k_axis` is where K lies in b: -2 for (..., K, N), -1 for a
/// weight (N, K). `bias` is null or of a number for each column.
void multiply_checked(const Call& call, const Operand& a, const Operand& b, int k_axis, const Array& out,
                      Precision precision, const Array* bias = nullptr);

/// What choose() is asked of a product of two matrices, which has no output.
Product question(const Call& call, const Operand& a, const Operand& b, Precision precision = Precision::exact);

/// Multiplies by the path of that name wherever it suits the operands, be another quicker or not. Returns false, and
/// has not written all of `out`, where it does not, or refuses. `bias` is null or of a number for each column.
bool multiply_by(std::string_view path, const Operand& a, const Operand& b, const Array& out,
                 const Array* bias = nullptr);

}  // namespace breccia::inline v0_4
