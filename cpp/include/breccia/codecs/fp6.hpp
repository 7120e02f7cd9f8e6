// SPDX-License-Identifier: Apache-2.0
//
// OCP Microscaling Formats (MX) Specification v1.0, section 5.3.2.
#pragma once

#include "breccia/codecs/minifloat.hpp"

namespace breccia::inline v0_4 {

/// Up to 7.5 in steps of 0.125 or more; MXFP6.
struct Float6E2M3FN : Minifloat<2, 3, 1, Specials::none> {
    static constexpr std::string_view name = "float6_e2m3fn";  ///< as in ml_dtypes
};
static_assert(Float6E2M3FN::decode(0b0'11'111) == 7.5F);

/// Up to 28 in steps of 0.0625 or more; MXFP6.
struct Float6E3M2FN : Minifloat<3, 2, 3, Specials::none> {
    static constexpr std::string_view name = "float6_e3m2fn";  ///< as in ml_dtypes
};
static_assert(Float6E3M2FN::decode(0b0'111'11) == 28.0F);

}  // namespace breccia::inline v0_4
