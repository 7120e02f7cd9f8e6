// SPDX-License-Identifier: Apache-2.0
//
// Codes as unsigned bytes, and the sums of their products with signed ones: what products in integers are made of.

/// How codes become unsigned bytes: two's complement by turning the sign over, other codes by a table.
enum class ByteReading : std::uint8_t { turned_nibbles, looked_up_nibbles, turned_bytes, looked_up_bytes };

constexpr bool is_packed(ByteReading reading) {
    return reading == ByteReading::turned_nibbles || reading == ByteReading::looked_up_nibbles;
}

/// Codes as unsigned bytes: a code's value is (byte - offset) * unit.
struct CodeBytes {
    alignas(64) std::uint8_t operand[64];  ///< the table, which repeats, or what is turned over
    float unit;
    int offset;
};

template <class C>
inline constexpr ByteReading byte_reading =
    C::family == CodecFamily::integer ? (C::bits == 4 ? ByteReading::turned_nibbles : ByteReading::turned_bytes)
                                      : (C::bits == 4 ? ByteReading::looked_up_nibbles : ByteReading::looked_up_bytes);
template <class C>
inline constexpr CodeBytes code_bytes = [] {
    constexpr int codes = 1 << C::bits;
    float lowest = 0;
    for (int i = 0; i < codes; ++i) {
        const float value = C::decode(static_cast<std::uint8_t>(i));
        lowest = value < lowest ? value : lowest;
    }
    CodeBytes of{.operand = {}, .unit = C::decode(1), .offset = static_cast<int>(-lowest / C::decode(1))};
    for (int i = 0; i < 64; ++i) {
        const float value = C::decode(static_cast<std::uint8_t>(i % codes)) - lowest;
        if constexpr (C::family == CodecFamily::integer)
            of.operand[i] = static_cast<std::uint8_t>(of.offset != 0 ? codes / 2 : 0);
        else
            of.operand[i] = static_cast<std::uint8_t>(value / of.unit);
    }
    return of;
}();

template <ByteReading Reading>
struct ByteReader {
    static constexpr bool packed = is_packed(Reading);
    static constexpr int vectors = packed ? 2 : 1;
    I operand;

    BRECCIA_INLINE_MEMBER explicit ByteReader(const CodeBytes& of) : operand(_mm512_load_si512(of.operand)) {}
    BRECCIA_INLINE_MEMBER void read(I bytes, I (&out)[vectors]) const {
        const I above = packed ? _mm512_srli_epi64(bytes, 4) : bytes;
        if constexpr (Reading == ByteReading::turned_nibbles) {
            constexpr int a_and_b_xor_c = 0x6A;
            out[0] = _mm512_ternarylogic_epi32(bytes, b_set(15), operand, a_and_b_xor_c);
            out[1] = _mm512_ternarylogic_epi32(above, b_set(15), operand, a_and_b_xor_c);
        } else if constexpr (Reading == ByteReading::turned_bytes) {
            out[0] = _mm512_xor_si512(bytes, operand);
        } else {  // what is above a packed code does no harm
            out[0] = _mm512_permutexvar_epi8(bytes, operand);
            if constexpr (packed) out[1] = _mm512_permutexvar_epi8(above, operand);
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
template <class C>
concept ByteCodec = has_code_bytes<C>;

/// A step's sums of products with `Count` digits, as the integers that they stand for.
template <int Count, int Vectors>
BRECCIA_INLINE I integer_sum(const I (&codes)[Vectors], const std::int8_t (*digits)[128], I offsets) {
    I total = i_set(0);
    // Every digit has a sum of its own: one chain of products would be three times as long.
#pragma GCC unroll 3
    for (int d = 0; d < Count; ++d) {
        I sum = d + 1 < Count ? i_set(0) : offsets;
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v)
            sum = _mm512_dpbusd_epi32(sum, codes[v], _mm512_load_si512(digits[d] + v * 64));
        total = d == 0 ? sum : i_add(_mm512_slli_epi32(total, 8), sum);
    }
    return total;
}
