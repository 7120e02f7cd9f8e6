// SPDX-License-Identifier: Apache-2.0
//
// E4M3 decodes by arithmetic where tables are slow: vpermi2b is three operations here, gf2p8affineqb one.

/// A matrix over bits for gf2p8affineqb: bit i of the result is the parity of the bits in rows[i].
consteval long long bit_matrix(const std::uint8_t (&rows)[8]) {
    std::uint64_t matrix = 0;
    for (int i = 0; i < 8; ++i) matrix |= std::uint64_t{rows[i]} << (8 * (7 - i));
    return static_cast<long long>(matrix);
}

/// Both bytes of a bfloat16 number with the code's sign and mantissa and 128 more than its exponent's bits: 256 times
/// its value, unless those bits are zeros or it is NaN. Such codes are rare. Unless Told which blocks have some, it
/// notices them, for the block to be summed up again: three operations of nine.
template <bool Told>
struct AffineE4M3 {
    static constexpr float times = 256;
    static constexpr bool knows_all = false;
    static constexpr bool is_told = Told;
    static constexpr char filler = 0x38;
    I least = _mm512_set1_epi8(-1);

    BRECCIA_INLINE_MEMBER BF16x64 decode(I codes) {
        // s e3 e2 e1 e0 m2 m1 m0 becomes s 1 0 0 0 e3 e2 e1 above e0 m2 m1 m0 0 0 0 0.
        constexpr long long high_bits = bit_matrix({1 << 4, 1 << 5, 1 << 6, 0, 0, 0, 0, 1 << 7});
        constexpr long long low_bits = bit_matrix({0, 0, 0, 0, 1 << 0, 1 << 1, 1 << 2, 1 << 3});
        const I high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(high_bits), 0x40);
        const I low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(low_bits), 0);
        // Twice the code and two: 2 ... 16 where the exponent's bits are zeros, 0 for NaN, else 18 and more.
        if constexpr (!Told) least = _mm512_min_epu8(least, _mm512_add_epi8(_mm512_add_epi8(codes, codes), b_set(2)));
        return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    }
    BRECCIA_INLINE_MEMBER bool failed() { return !Told && _mm512_cmple_epu8_mask(least, b_set(16)) != 0; }
};

static void gemv_e4m3(const Gemv& g) {
    if (g.vectors == 1 && g.w.special != nullptr)
        gemv_one<Float8E4M3FN, false, AffineE4M3<true>>(g);
    else
        gemv_any<Float8E4M3FN, false, AffineE4M3<false>>(g);
}
