// SPDX-License-Identifier: Apache-2.0
//
// OCP 8-bit Floating Point Specification (OFP8) rev. 1.0, section 5; fnuz: Noune et al., arXiv:2206.02915.
#pragma once

#include "breccia/codecs/minifloat.hpp"

namespace breccia::inline v0_3 {

struct Float8E4M3FN : Minifloat<4, 3, 7, Specials::nan_ones> {
    static constexpr std::string_view name = "float8_e4m3fn";
};
static_assert(Float8E4M3FN::decode(0b0'1111'110) == 448.0F);
static_assert(Float8E4M3FN::decode(0b0'0000'001) == 0.001953125F);  // 2^-9

struct Float8E5M2 : Minifloat<5, 2, 15, Specials::ieee> {
    static constexpr std::string_view name = "float8_e5m2";
};
static_assert(Float8E5M2::decode(0b0'11110'11) == 57344.0F);
static_assert(Float8E5M2::nan_code == 0b0'11111'10);

struct Float8E4M3FNUZ : Minifloat<4, 3, 8, Specials::nan_zero> {
    static constexpr std::string_view name = "float8_e4m3fnuz";
    static constexpr bool is_target = false;
};
static_assert(Float8E4M3FNUZ::decode(0b0'1111'111) == 240.0F);

struct Float8E5M2FNUZ : Minifloat<5, 2, 16, Specials::nan_zero> {
    static constexpr std::string_view name = "float8_e5m2fnuz";
    static constexpr bool is_target = false;
};
static_assert(Float8E5M2FNUZ::decode(0b0'11111'11) == 57344.0F);

}  // namespace breccia::inline v0_3
