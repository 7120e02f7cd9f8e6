// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "runtime/call.hpp"

namespace breccia::inline v0_4 {

/// The lower half of an (n, n) matrix, row by row in bands that are as wide as their last row is long: hardly more than
/// half of the memory. It begins uninitialised.
class LowerHalf {
public:
    static constexpr std::int64_t band = 1024;

    explicit LowerHalf(std::int64_t n)
        : n_(n), numbers_(std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(begin_of(n)))) {}

    [[nodiscard]] std::int64_t size() const { return n_; }
    /// A row, which has its elements up to the diagonal's.
    [[nodiscard]] float* row(std::int64_t i) { return numbers_.get() + begin_of(i); }
    [[nodiscard]] const float* row(std::int64_t i) const { return numbers_.get() + begin_of(i); }
    /// Elements from the beginning of a row to that of the next row of its band.
    [[nodiscard]] std::int64_t stride(std::int64_t i) const { return std::min(n_, (i / band + 1) * band); }

private:
    [[nodiscard]] std::int64_t begin_of(std::int64_t i) const {
        const std::int64_t before = i / band;  // whole bands
        return band * band * before * (before + 1) / 2 + i % band * stride(i);
    }

    std::int64_t n_;
    std::unique_ptr<float[]> numbers_;
};

/// Puts L, lower triangular with L @ transpose(L) = A, in the place of A, a symmetric matrix. False, with `a` spoilt,
/// where A is not positive definite. Diagonal blocks are factored in float64, the products between them are those of
/// matmul: the result does not depend on the number of threads.
bool cholesky(const Call& call, LowerHalf& a);

}  // namespace breccia::inline v0_4
