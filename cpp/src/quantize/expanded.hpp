// SPDX-License-Identifier: Apache-2.0
//
// Groups along rows, each with an exponent: see kernels/expansion.inl.hpp.
#pragma once

#include "quantize/block_writer.hpp"
#include "quantize/scale_choice.hpp"

namespace breccia::inline v0_4 {

/// The exponent is 1 where a scale loses nothing so, and of groups that have no other, which are divided by the scale.
void quantize_expanded(const BlockWalk& walk, Format element, const ScaleParams& params, const ScaleChoice& choice,
                       const BlockWriter& to);

}  // namespace breccia::inline v0_4
