// SPDX-License-Identifier: Apache-2.0
//
// OCP 8-bit Floating Point Specification (OFP8) rev. 1.0, section 5; fnuz: Noune et al., arXiv:2206.02915.
#pragma once

#include "breccia/codecs/minifloat.hpp"

namespace breccia::inline v0_4 {

/// Up to 448, without infinities.
struct Float8E4M3FN : Minifloat<4, 3, 7, Specials::nan_ones> {
    static constexpr std::string_view name = "float8_e4m3fn";  ///< as in ml_dtypes
};
static_assert(Float8E4M3FN::decode(0b0'1111'110) == 448.0F);
static_assert(Float8E4M3FN::decode(0b0'0000'001) == 0.001953125F);  // 2^-9

/// Up to 57344, with infinities.
struct Float8E5M2 : Minifloat<5, 2, 15, Specials::ieee> {
    static constexpr std::string_view name = "float8_e5m2";  ///< as in ml_dtypes
};
static_assert(Float8E5M2::decode(0b0'11110'11) == 57344.0F);
static_assert(Float8E5M2::nan_code == 0b0'11111'10);

/// Up to 240, of AMD's MI300.
struct Float8E4M3FNUZ : Minifloat<4, 3, 8, Specials::nan_zero> {
    static constexpr std::string_view name = "float8_e4m3fnuz";  ///< as in ml_dtypes
};
static_assert(Float8E4M3FNUZ::decode(0b0'1111'111) == 240.0F);

/// Up to 57344 without infinities, of AMD's MI300.
struct Float8E5M2FNUZ : Minifloat<5, 2, 16, Specials::nan_zero> {
    static constexpr std::string_view name = "float8_e5m2fnuz";  ///< as in ml_dtypes
};
static_assert(Float8E5M2FNUZ::decode(0b0'11111'11) == 57344.0F);

/// Up to 240, with infinities: IEEE 754's rules for 8 bits, of AWS Trainium.
struct Float8E4M3 : Minifloat<4, 3, 7, Specials::ieee> {
    static constexpr std::string_view name = "float8_e4m3";  ///< as in ml_dtypes
};
static_assert(Float8E4M3::decode(0b0'1110'111) == 240.0F);
static_assert(Float8E4M3::nan_code == 0b0'1111'100);

/// Up to 15.5, with infinities, of AWS Trainium.
struct Float8E3M4 : Minifloat<3, 4, 3, Specials::ieee> {
    static constexpr std::string_view name = "float8_e3m4";  ///< as in ml_dtypes
};
static_assert(Float8E3M4::decode(0b0'110'1111) == 15.5F);

/// Up to 30 without infinities, with one zero, of Google's TPUs.
struct Float8E4M3B11FNUZ : Minifloat<4, 3, 11, Specials::nan_zero> {
    static constexpr std::string_view name = "float8_e4m3b11fnuz";  ///< as in ml_dtypes
};
static_assert(Float8E4M3B11FNUZ::decode(0b0'1111'111) == 30.0F);

}  // namespace breccia::inline v0_4
