// SPDX-License-Identifier: Apache-2.0
//
// NVFP4's two levels under which a tensor that is quantized already keeps every value. A block's scale must be one of a
// few numbers: the source's own, or the block's amax over one of E2M1's magnitudes. All of them must be products of one
// global scale and E4M3 numbers.
#pragma once

#include <vector>

#include "quantize/quantizer.hpp"

namespace breccia::inline v0_3 {

/// `scales` has one for each block of the grid, in order.
struct TwoLevels {
    float global_scale = 1;  ///< as the recipe stores it
    std::vector<BlockScale> scales;
};

/// None where no such scales are found: a block with an infinity has none.
std::optional<TwoLevels> exact_two_levels(const RowSource& source, const BlockGrid& grid, std::int64_t matrices,
                                          const Recipe& recipe);

}  // namespace breccia::inline v0_3
