// SPDX-License-Identifier: Apache-2.0
//
// Activations that are codes: multiplied without their scales, which multiply the sums of their blocks.
#pragma once

#include "matmul/product.hpp"

namespace breccia::inline v0_4 {

/// The activations where they are codes along K that bfloat16 holds, one matrix of them; else null.
const ScaledMatrix* coded_activations(const Product& product);

/// Elements [k, k + count) of `rows` activations from `first` on, to rows of `out` `stride` apart: codes of `coded`,
/// unless that is null.
void read_activations(const Product& product, const ScaledMatrix* coded, std::int64_t first, std::int64_t rows,
                      std::int64_t k, std::int64_t count, Scratch& scratch, float* out, std::int64_t stride);

}  // namespace breccia::inline v0_4
