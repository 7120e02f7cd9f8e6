// SPDX-License-Identifier: Apache-2.0
//
// E4M3 decodes by arithmetic where tables are slow: vpermi2b is three operations here, gf2p8affineqb one.

/// A matrix over bits for gf2p8affineqb: bit i of the result is the parity of the bits in rows[i].
consteval long long bit_matrix(const std::uint8_t (&rows)[8]) {
    std::uint64_t matrix = 0;
    for (int i = 0; i < 8; ++i) matrix |= std::uint64_t{rows[i]} << (8 * (7 - i));
    return static_cast<long long>(matrix);
}

/// Both bytes of the bfloat16 number that a code stands for, unless its exponent's bits are zeros or it is NaN. Such
/// codes are rare. Unless Told which spans have some, it notices them, for rows of the span to be summed up again: two
/// operations of eight.
template <bool Told>
struct AffineE4M3 {
    static constexpr bool packed = false;
    static constexpr bool knows_all = false;
    static constexpr bool is_told = Told;
    static constexpr char filler = 0x38;
    I least = _mm512_set1_epi8(-1);

    BRECCIA_INLINE_MEMBER explicit AffineE4M3(const CodeTables& /*unused*/) {}
    BRECCIA_INLINE_MEMBER BF16x64 decode(I codes) {
        constexpr std::uint8_t s = 1 << 7, e3 = 1 << 6, e2 = 1 << 5, e1 = 1 << 4, e0 = 1 << 3, m2 = 4, m1 = 2, m0 = 1;
        // Above e0 m2 m1 m0 0 0 0 0 the sign and the exponent, 120 more than e3 e2 e1 e0: e3, four times not e3, e2,
        // e1.
        constexpr long long high_bits = bit_matrix({e1, e2, e3, e3, e3, e3, e3, s});
        constexpr long long low_bits = bit_matrix({0, 0, 0, 0, m0, m1, m2, e0});
        const I high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(high_bits), 0b0011'1100);
        const I low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(low_bits), 0);
        if constexpr (!Told) {
            // All other bits turned over where e0 is one, the sign last: 0 ... 15 where the exponent's bits are zeros,
            // 16 and 17 for NaN, else more.
            constexpr long long order_bits = bit_matrix({s, m0 | e0, m1 | e0, m2 | e0, e0, e1 | e0, e2 | e0, e3 | e0});
            const I order = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(order_bits), 0);
            least = _mm512_min_epu8(least, order);
        }
        return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    }
    [[nodiscard]] BRECCIA_INLINE_MEMBER bool failed() const {
        return !Told && _mm512_cmple_epu8_mask(least, b_set(17)) != 0;
    }
};

static void gemv_e4m3(const Gemv& g) {
    if (row_span(g.w.block, g.w.k, false) > longest_span_of_finite) return gemv_bf16<Float8E4M3FN>(g);
    if (g.vectors == 1 && g.w.special != nullptr) return gemv_one<AffineE4M3<true>>(g, code_tables<Float8E4M3FN>);
    gemv_any<AffineE4M3<false>>(g, code_tables<Float8E4M3FN>);
}
