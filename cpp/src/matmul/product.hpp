// SPDX-License-Identifier: Apache-2.0
//
// One product of checked operands, as the paths take it.
#pragma once

#include "breccia/ops.hpp"
#include "matmul/interleaved.hpp"
#include "matmul/operand_rows.hpp"
#include "tensor/output.hpp"

namespace breccia::inline v0_4 {

/// Matrices of activations that meet one weight: c[i] = a[i] @ w^T for every i, `m` rows each.
struct Product {
    const KernelTable& table;  // the caller's: a worker thread has no BackendScope
    std::vector<Rows> a;
    std::vector<OutputMatrix> c;
    std::int64_t m = 0, n = 0, k = 0;
    Precision precision = Precision::exact;

    [[nodiscard]] std::int64_t total_rows() const { return static_cast<std::int64_t>(a.size()) * m; }
    /// Elements [at, at + count) of `rows` activations, counted over all matrices, to rows of `out` `stride` apart.
    void read(const KernelTable& table, std::int64_t row, std::int64_t rows, std::int64_t at, std::int64_t count,
              Scratch& scratch, float* out, std::int64_t stride) const;
    /// Where `rows` activations' products [begin, begin + count) can be written as numbers of that type, rows `stride`
    /// elements apart, or null.
    void* in_place(DType dtype, std::int64_t row, std::int64_t rows, std::int64_t begin, std::int64_t count,
                   std::int64_t& stride) const;
    /// Products [begin, begin + count) of an activation.
    void write(const KernelTable& table, std::int64_t row, std::int64_t begin, std::int64_t count,
               const float* x) const;
};

/// 1 where a number is neither zero nor in [2^lowest, 2^highest], else 0. In integers and without branches, so that
/// compilers turn loops of it into vectors.
constexpr std::uint32_t out_of_range(float x, int lowest, int highest) {
    const std::uint32_t least = bits_of(exp2i(lowest)), span = bits_of(exp2i(highest)) - least;
    const std::uint32_t magnitude = bits_of(x) & f32_abs_mask;
    return static_cast<std::uint32_t>(magnitude != 0) & static_cast<std::uint32_t>(magnitude - least > span);
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
