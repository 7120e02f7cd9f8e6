// SPDX-License-Identifier: Apache-2.0
//
// Codes as unsigned bytes, and the sums of their products with signed ones: what products in integers are made of.

/// Codes as unsigned bytes: a code's value is (byte - offset) * unit.
template <class C>
struct CodeBytes {
    static constexpr bool packed = C::bits == 4;
    static constexpr int vectors = packed ? 2 : 1;
    static constexpr int codes = 1 << C::bits;
    static constexpr float unit = C::decode(1);
    static constexpr float lowest = [] {
        float least = 0;
        for (int i = 0; i < codes; ++i)
            least = C::decode(static_cast<std::uint8_t>(i)) < least ? C::decode(static_cast<std::uint8_t>(i)) : least;
        return least;
    }();
    static constexpr int offset = static_cast<int>(-lowest / unit);
    static constexpr auto table = [] {
        struct {
            alignas(64) std::uint8_t byte[64];
        } of{};
        for (int i = 0; i < 64; ++i) {
            const float value = C::decode(static_cast<std::uint8_t>(i % codes)) - lowest;
            of.byte[i] = static_cast<std::uint8_t>(value / unit);
        }
        return of;
    }();

    BRECCIA_INLINE void read(I bytes, I (&out)[vectors]) {
        const I above = packed ? _mm512_srli_epi64(bytes, 4) : bytes;
        if constexpr (packed && C::family == CodecFamily::integer) {
            constexpr int a_and_b = 0xC0, a_and_b_xor_c = 0x6A;
            // A two's complement integer is offset by turning its sign over.
            constexpr int op = offset != 0 ? a_and_b_xor_c : a_and_b;
            out[0] = _mm512_ternarylogic_epi32(bytes, b_set(15), b_set(8), op);
            out[1] = _mm512_ternarylogic_epi32(above, b_set(15), b_set(8), op);
        } else if constexpr (C::family == CodecFamily::integer) {
            out[0] = offset == 0 ? bytes : _mm512_xor_si512(bytes, b_set(0x80));
        } else {  // the table repeats: what is above a packed code does no harm
            const I table_u8x64 = _mm512_load_si512(table.byte);
            out[0] = _mm512_permutexvar_epi8(bytes, table_u8x64);
            if constexpr (packed) out[1] = _mm512_permutexvar_epi8(above, table_u8x64);
        }
    }
};

/// Formats whose values are few enough multiples of one number.
template <class C>
inline constexpr bool has_code_bytes = [] {
    if constexpr (C::family == CodecFamily::exponent)
        return false;
    else
        return C::max / C::decode(1) <= 128;
}();

/// A step's sums of products with `Count` digits, as the integers that they stand for.
template <class C, int Count>
BRECCIA_INLINE I integer_sum(const I (&codes)[CodeBytes<C>::vectors], const std::int8_t (*digits)[128], I offsets) {
    I total = i_set(0);
    // Every digit has a sum of its own: one chain of products would be three times as long.
#pragma GCC unroll 3
    for (int d = 0; d < Count; ++d) {
        I sum = d + 1 < Count ? i_set(0) : offsets;
#pragma GCC unroll 2
        for (int v = 0; v < CodeBytes<C>::vectors; ++v)
            sum = _mm512_dpbusd_epi32(sum, codes[v], _mm512_load_si512(digits[d] + v * 64));
        total = d == 0 ? sum : i_add(_mm512_slli_epi32(total, 8), sum);
    }
    return total;
}
