// SPDX-License-Identifier: Apache-2.0
//
// THE list of element formats. Ids, names, kernel tables, the Python listing and the tests are folds over it:
// a new codec is its header plus one line here.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "breccia/codecs/e8m0.hpp"
#include "breccia/codecs/fp4.hpp"
#include "breccia/codecs/fp6.hpp"
#include "breccia/codecs/fp8.hpp"
#include "breccia/codecs/integer.hpp"
#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// A list of codecs, as a type.
template <Codec... Cs>
struct CodecList {
    /// How many there are.
    static constexpr std::size_t size = sizeof...(Cs);

    /// Calls `f.template operator()<C>()` for every codec and collects the results.
    template <class F>
    static constexpr auto map(F f) {
        return std::array{f.template operator()<Cs>()...};
    }

    /// The place of a codec, or `size`.
    template <Codec C>
    static constexpr std::uint8_t index_of() {
        std::uint8_t index = 0;
        (void)((std::same_as<C, Cs> || (++index, false)) || ...);
        return index;
    }
};

/// Every element format.
using Codecs = CodecList<  //
    Float8E4M3FN,          //
    Float8E5M2,            //
    Float8E4M3FNUZ,        //
    Float8E5M2FNUZ,        //
    Float8E4M3,            //
    Float8E3M4,            //
    Float8E4M3B11FNUZ,     //
    Float6E2M3FN,          //
    Float6E3M2FN,          //
    Float4E2M1FN,          //
    Float8E8M0FNU,         //
    Int8,                  //
    Int4,                  //
    UInt4                  //
    >;

/// A codec as a run-time value: its place in the list.
enum class Format : std::uint8_t {};

/// The run-time value of a codec.
template <Codec C>
inline constexpr Format format_of{Codecs::index_of<C>()};

/// What a codec says of itself, for code that knows the format at run time alone.
struct FormatInfo {
    std::string_view name;          ///< as in ml_dtypes: "float8_e4m3fn"
    int bits;                       ///< of a code
    CodecFamily family;             ///< how it is encoded
    float max;                      ///< largest finite value
    float lowest;                   ///< most negative finite value
    float smallest;                 ///< smallest positive value
    bool has_nan;                   ///< whether a code is NaN
    bool is_target;                 ///< whether recipes quantize to it
    int mantissa_bits;              ///< explicit ones; 0 for integers and E8M0
    int max_exponent;               ///< exponent of `max`
    float (*decode)(std::uint8_t);  ///< the value of a code; bits above the format's are not looked at
    std::uint8_t (*encode)(float);  ///< round to nearest even, saturating
};

/// All formats, in the order of Codecs.
inline constexpr auto format_table = Codecs::map([]<Codec C>() {
    int mantissa_bits = 0;
    if constexpr (C::family == CodecFamily::minifloat) mantissa_bits = C::mantissa_bits;
    return FormatInfo{
        C::name,     C::bits,    C::family,    C::max,        C::lowest,
        C::smallest, C::has_nan, C::is_target, mantissa_bits, static_cast<int>(bits_of(C::max) >> 23) - 127,
        &C::decode,  &C::encode};
});

/// Of a format that is in the list.
constexpr const FormatInfo& info(Format format) { return format_table[static_cast<std::size_t>(format)]; }

/// The format of that name, or none.
constexpr std::optional<Format> find_format(std::string_view name) {
    for (std::size_t i = 0; i < format_table.size(); ++i)
        if (format_table[i].name == name) return Format{static_cast<std::uint8_t>(i)};
    return std::nullopt;
}

/// The format of that name, or an Error that lists the names there are.
BRECCIA_API Format parse_format(std::string_view name);

/// Two codes share a byte, element 2i in the low nibble (OCP, torch float4_e2m1fn_x2, compressed-tensors).
constexpr bool is_packed(Format format) { return info(format).bits == 4; }

}  // namespace breccia::inline v0_4
