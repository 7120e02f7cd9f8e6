// SPDX-License-Identifier: Apache-2.0
//
// What every unit of a backend is written with: the vec.hpp of its CPU, what that is written over, and what follows.

/// Every code's value, filled at compile time by the codec's own decode: what vec.hpp decodes with where it has no
/// cheaper way.
template <class C>
struct DecodeTable {
    alignas(64) float values[1 << C::bits];
    constexpr DecodeTable() : values() {
        for (int code = 0; code < 1 << C::bits; ++code) values[code] = C::decode(static_cast<std::uint8_t>(code));
    }
};
template <class C>
inline constexpr DecodeTable<C> decode_table{};

#include "vec.hpp"

/// Sets the kernel of each codec for which the concept of `make` holds. Where a codec lacks a member that a concept
/// names, the concept is false and the kernel null. So a concept names members that every Codec has, or is the value of
/// a constexpr variable, which does not compile where a member is missing.
template <class Kernel, class Make>
static consteval void set_each(std::array<Kernel, Codecs::size>& kernels, Make make) {
    kernels = Codecs::map([&]<Codec C>() -> Kernel {
        if constexpr (requires { make.template operator()<C>(); })
            return make.template operator()<C>();
        else
            return {};
    });
}

// How many numbers kernels take at a time: a vector F, or four.
inline constexpr std::int64_t lanes = 16, wide = 4 * lanes;

// See to_bfloat16; above the low half-words of the lanes stands nothing.
BRECCIA_INLINE I bfloat16_bits(F x) {
    const I bits = as_bits(x);
    const I odd = i_and(i_shr<16>(bits), i_set(1));
    const I rounded = i_shr<16>(i_add(bits, i_add(odd, i_set(0x7FFF))));
    const I quiet = i_or(i_shr<16>(bits), i_set(0x40));
    const Mask nan = i_less(i_set(0x7F80'0000), i_and(bits, i_set(0x7FFF'FFFF)));
    return i_select(nan, quiet, rounded);
}

BRECCIA_INLINE void f_store_as(BFloat16* p, F x) {
    i_store_words(reinterpret_cast<std::uint16_t*>(p), bfloat16_bits(x));
}
