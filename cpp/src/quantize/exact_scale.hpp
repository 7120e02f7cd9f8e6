// SPDX-License-Identifier: Apache-2.0
//
// Scales under which the values of a tensor that is quantized already can be kept as they are.
#pragma once

#include <optional>

#include "runtime/kernel_table.hpp"

namespace breccia {

/// The scale that a type stores as exactly `scale`, if it can; `amax_bits` is of the block it is for.
std::optional<BlockScale> stored_exactly(float scale, ScaleType type, std::uint32_t amax_bits);

/// The smallest power of two by which a format reaches `amax`, if there is one.
std::optional<float> power_of_two_for(float amax, Format format);

/// Whether a number has no more significant bits than a format's codes: else no power of two makes it one.
bool has_few_bits(float x, Format format);

}  // namespace breccia
