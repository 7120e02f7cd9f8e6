// SPDX-License-Identifier: Apache-2.0
//
// Values as text, for logs and failing tests. The text is for people and may change; nothing reads it back.
#pragma once

#include <iosfwd>

#include "breccia/scaled_tensor.hpp"

namespace breccia::inline v0_4 {

/// "PerBlockK(128)", "PerBlockMN(1, 16, axis=-2)".
BRECCIA_API std::string to_string(const Layout& layout);
/// "NVFP4BlockScaling(float4_e2m1fn, float8_e4m3fn scales, PerBlockMN(1, 16), two_level)".
BRECCIA_API std::string to_string(const Recipe& recipe);
/// Type, shape and recipe, without values: "ScaledTensor (64, 256) NVFP4BlockScaling(…), 9220 bytes".
BRECCIA_API std::string to_string(const ScaledTensor& scaled);

/// The same text; of an element type its name.
/// @{
BRECCIA_API std::ostream& operator<<(std::ostream& stream, ElementType type);
BRECCIA_API std::ostream& operator<<(std::ostream& stream, const Layout& layout);
BRECCIA_API std::ostream& operator<<(std::ostream& stream, const Recipe& recipe);
BRECCIA_API std::ostream& operator<<(std::ostream& stream, const ScaledTensor& scaled);
/// @}

}  // namespace breccia::inline v0_4
