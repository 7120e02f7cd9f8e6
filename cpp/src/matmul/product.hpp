// SPDX-License-Identifier: Apache-2.0
//
// One product of checked operands, as the paths take it.
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "breccia/ops.hpp"
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
    const KernelTable& table;  // the caller's: a worker thread has no BackendScope
    Rows w;
    PreparedRows prepared;
    OneOrMore<Rows> a;
    OneOrMore<OutputMatrix> c;
    std::int64_t m = 0, n = 0, k = 0;
    Precision precision = Precision::exact;

    [[nodiscard]] std::int64_t total_rows() const { return static_cast<std::int64_t>(a.size()) * m; }
    /// How many bfloat16 numbers add up to an activation, as it is or as Precision::fast rounds it.
    [[nodiscard]] int terms() const { return precision == Precision::fast ? 1 : a.front().bfloat16_terms(); }
    /// Elements [at, at + count) of `rows` activations, counted over all matrices, to rows of `out` `stride` apart.
    void read(std::int64_t row, std::int64_t rows, std::int64_t at, std::int64_t count, Scratch& scratch, float* out,
              std::int64_t stride) const;
    /// Where `rows` activations' products [begin, begin + count) can be written as numbers of that type, rows `stride`
    /// elements apart, or null.
    void* in_place(DType dtype, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t count,
                   std::int64_t& stride) const;
    /// Products [begin, begin + count) of an activation.
    void write(std::int64_t row, std::int64_t begin, std::int64_t count, const float* x) const {
        c[static_cast<std::size_t>(row / m)].write(table, row % m, begin, count, x);
    }
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

/// The products of a verb that has checked its arguments. `k_axis` is where K lies in b: -2 for (..., K, N), -1 for a
/// weight (N, K). `table` is the caller's: where a worker thread begins a product, no BackendScope of the caller's
/// holds.
void multiply_checked(const KernelTable& table, const Operand& a, const Operand& b, int k_axis, const Array& out,
                      Precision precision);

/// What choose() is asked of a product of two matrices, which has no output.
Product question(const KernelTable& table, const Operand& a, const Operand& b, Precision precision = Precision::exact);

/// The name of the path that multiplies such operands, once some may have refused. It is found by multiplying them.
std::string_view matmul_path(const Operand& a, const Operand& b, Precision precision = Precision::exact);

/// Multiplies by the path of that name wherever it suits the operands, be another quicker or not. Returns false, and
/// has not written all of `out`, where it does not, or refuses.
bool multiply_by(std::string_view path, const Operand& a, const Operand& b, const Array& out);

/// The names of all paths.
std::vector<std::string_view> matmul_paths();

}  // namespace breccia::inline v0_4
