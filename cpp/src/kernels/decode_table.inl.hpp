// SPDX-License-Identifier: Apache-2.0
//
// Every code's value, filled at compile time by the codec's own decode: what vec.hpp decodes with where it has no
// cheaper way.

template <class C>
struct DecodeTable {
    alignas(64) float values[1 << C::bits];
    constexpr DecodeTable() : values() {
        for (int code = 0; code < 1 << C::bits; ++code) values[code] = C::decode(static_cast<std::uint8_t>(code));
    }
};
template <class C>
inline constexpr DecodeTable<C> decode_table{};
