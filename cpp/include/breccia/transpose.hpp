// SPDX-License-Identifier: Apache-2.0
//
// The transpose of codes whose scales are powers of two, blocks along the other axis, without floats (FP8-Flow-MoE,
// arXiv:2511.02302, which calls it scaling-aware).
#pragma once

#include "breccia/ops.hpp"

namespace breccia::inline v0_4 {

/// What a transpose changed.
struct TransposeReport {
    std::int64_t rounded = 0;  ///< values that are not what they were
    std::int64_t lost = 0;     ///< of those, zeros
};

/// (K, M) of a matrix that has such a transpose. Throws Error for any other.
BRECCIA_API Shape transpose_shape(const ScaledTensor& scaled);

/// A matrix (M, K) with E8M0 scales of blocks of 1 x g as its transpose (K, M), of the same recipe, whose blocks run
/// along M. Each tile of g x g numbers gets the largest of its g scales, and the codes of rows with smaller ones move
/// down by the difference of exponents: a code to a code, rounded to nearest, ties to even, where its bits fall below
/// the least of the format. A scale that is NaN becomes codes of NaN; a tile of nothing else keeps it. M and K are
/// multiples of g. Throws Error, and has written nothing, unless `scaled` is such a matrix of one code to a byte and
/// `out` has the parts of plan_cast({K, M}, recipe); where a scale is NaN and the format has no code for it, too.
BRECCIA_API TransposeReport transpose_into(const ScaledTensor& scaled, const CastOutput& out);
/// The same into memory of its own. `report`: where to, or null.
BRECCIA_API ScaledTensor transpose(const ScaledTensor& scaled, TransposeReport* report = nullptr);

}  // namespace breccia::inline v0_4
