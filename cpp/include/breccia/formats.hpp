// SPDX-License-Identifier: Apache-2.0
//
// Codes without scales: encode, decode, pack and unpack contiguous runs with the kernels of the current backend.
#pragma once

#include <span>

#include "breccia/codecs/registry.hpp"
#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// One code per byte. Spans must be of equal length; throws Error otherwise.
/// @{
BRECCIA_API void encode(std::span<const float> x, Format format, std::span<std::uint8_t> codes);
BRECCIA_API void decode(std::span<const std::uint8_t> codes, Format format, std::span<float> x);
/// @}

/// Two 4-bit codes per byte, element 2i in the low nibble; an odd last element leaves the high nibble zero.
/// Throws Error unless `packed` has half as many bytes, rounded up.
/// @{
BRECCIA_API void pack(std::span<const std::uint8_t> codes, std::span<std::uint8_t> packed);
BRECCIA_API void unpack(std::span<const std::uint8_t> packed, std::span<std::uint8_t> codes);
/// @}

}  // namespace breccia::inline v0_4
