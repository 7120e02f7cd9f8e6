// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace breccia::inline v0_4 {

/// Puts L, lower triangular with L @ transpose(L) = A, in the lower half of `a`, a symmetric (n, n) matrix of which
/// only that half is read; what is above the diagonal is left as it is. False, with `a` spoilt, where A is not positive
/// definite. Diagonal blocks are factored in float64, the products between them are those of matmul: the result does
/// not depend on the number of threads.
bool cholesky(std::span<float> a, std::int64_t n);

}  // namespace breccia::inline v0_4
