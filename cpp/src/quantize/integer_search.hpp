// SPDX-License-Identifier: Apache-2.0
//
// The scale, and the zero point, of least weighted squared error among all that a type has, for integers of 4 bits.
#pragma once

#include <span>

#include "contract/kernel_table.hpp"

namespace breccia::inline v0_4 {

/// A block that lies in one piece: finite values, not all zero, and weights above zero.
struct WeightedBlock {
    std::span<const float> x;
    const float* weights;
    BlockStats stats;
};

/// Of integer codes lowest … largest under a scale of that type; `own` is the scale of the amax rule, to which ties go.
BlockScale best_integer_scale(const ImportanceKernels& kernels, const WeightedBlock& block, const CodeGrid& grid,
                              const ScaleParams& params, const BlockScale& own);

}  // namespace breccia::inline v0_4
