// SPDX-License-Identifier: Apache-2.0
//
// 6-bit codes four in three bytes, the first from the lowest bit on: the order of files of compressed-tensors and
// Quark, and of the packed FP6 operands of GPUs.
#pragma once

#include <cstdint>
#include <span>

#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// Codes are one per byte, in multiples of four; what a byte holds above its six bits is left out. Throw Error unless
/// `packed` has three quarters as many bytes.
/// @{
BRECCIA_API void pack_sixes(std::span<const std::uint8_t> codes, std::span<std::uint8_t> packed);
BRECCIA_API void unpack_sixes(std::span<const std::uint8_t> packed, std::span<std::uint8_t> codes);
/// @}

}  // namespace breccia::inline v0_4
