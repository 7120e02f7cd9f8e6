// SPDX-License-Identifier: Apache-2.0
//
// OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3.
#pragma once

#include "breccia/codecs/minifloat.hpp"

namespace breccia::inline v0_4 {

/// Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6; MXFP4 and NVFP4.
struct Float4E2M1FN : Minifloat<2, 1, 1, Specials::none> {
    static constexpr std::string_view name = "float4_e2m1fn";  ///< as in ml_dtypes
};
static_assert(Float4E2M1FN::decode(0b0'11'1) == 6.0F);
static_assert(Float4E2M1FN::decode(0b0'00'1) == 0.5F);

}  // namespace breccia::inline v0_4
