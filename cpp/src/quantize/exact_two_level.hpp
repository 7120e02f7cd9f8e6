// SPDX-License-Identifier: Apache-2.0
//
// NVFP4's two levels under which a tensor that is quantized already keeps every value. A block's scale must be one of a
// few numbers: the source's own, or the block's amax over one of E2M1's magnitudes. All of them must be products of one
// global scale and E4M3 numbers.
#pragma once

#include "quantize/block_writer.hpp"

namespace breccia::inline v0_4 {

/// Writes the tensor that is walked, whose source is stored already; blocks that keep the source's scales and codes are
/// copied. False, with nothing written, where no such scales are found: a block with an infinity has none.
bool write_exact_two_levels(const BlockWalk& walk, const Recipe& recipe, const BlockWriter& to);

}  // namespace breccia::inline v0_4
