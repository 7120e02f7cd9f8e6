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
    static constexpr bool is_told = Told;
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
    BRECCIA_INLINE_MEMBER bool failed() { return _mm512_cmple_epu8_mask(least, b_set(16)) != 0; }
};

/// Sums over `count` codes, a multiple of 64, of four rows.
struct RowSums {
    F of[4];
};
[[gnu::noinline]] static RowSums sums_by_tables(const std::uint8_t* codes, const std::int64_t (&codes_to)[4],
                                                std::int64_t count, const std::uint16_t* x) {
    RowSums sums;
    for (int r = 0; r < 4; ++r) {
        sums.of[r] = f_set(0.0F);
        for (std::int64_t k = 0; k < count; k += 64) {
            const BF16x64 w = decode_bytes<Float8E4M3FN>(_mm512_loadu_si512(codes + codes_to[r] + k));
            sums.of[r] = f_dot_pairs(sums.of[r], w.first, _mm512_loadu_si512(x + k));
            sums.of[r] = f_dot_pairs(sums.of[r], w.second, _mm512_loadu_si512(x + k + 32));
        }
    }
    return sums;
}

/// One activation by four rows of whole blocks: of a multiple of 64 elements, or of 32 (Short). What gemv_rows does,
/// with addresses that are distances from the first row's, for the loop to do with the registers there are.
template <bool Told, bool Short, bool Near>
static void e4m3_rows(const Gemv& g, std::int64_t first) {
    constexpr int rows = 4;
    const CodeRows& w = g.w;
    const std::int64_t blocks = w.k / w.block, span = Short ? 64 : w.block, spans = w.k / span;
    const std::uint8_t* codes = w.codes + first * w.row_stride;
    const std::uint8_t* next = codes + rows * w.row_stride;
    const std::uint8_t* special = Told ? w.special + first * spans : nullptr;
    const std::uint16_t* x = g.x;
    std::uintptr_t scales = 0;
    std::int64_t codes_to[rows] = {};
    std::uintptr_t scales_to[rows] = {};
    F total_f32x16[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        const std::byte* of_row = w.scales + scale_row_of(w, first + r) * w.scale_row_stride;
        const auto at =
            reinterpret_cast<std::uintptr_t>(row_scales(of_row, w.scale_type, blocks, w.scale_scratch + r * blocks));
        if (r == 0) scales = at;
        codes_to[r] = r * w.row_stride;
        scales_to[r] = at - scales;
        total_f32x16[r] = f_set(0.0F);
    }
    // Decoding leaves the 16 codes of a 128-bit lane in that lane.
    const I scale_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    for (std::int64_t block = 0; block < spans; ++block) {
        AffineE4M3<Told> decoder{};
        F sum_f32x16[rows];
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) sum_f32x16[r] = f_set(0.0F);
        for (std::int64_t k = 0; k < span; k += 64) {
            const I x_first = _mm512_loadu_si512(x), x_second = _mm512_loadu_si512(x + 32);
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
                const BF16x64 pairs = decoder.decode(_mm512_loadu_si512(codes + codes_to[r]));
                prefetch_codes<Near>(next + codes_to[r]);
                sum_f32x16[r] = f_dot_pairs(sum_f32x16[r], pairs.first, x_first);
                sum_f32x16[r] = f_dot_pairs(sum_f32x16[r], pairs.second, x_second);
            }
            codes += 64;
            next += 64;
            x += 64;
        }
        bool again = false;
        if constexpr (Told) {
            again = (special[0] | special[spans] | special[2 * spans] | special[3 * spans]) != 0;
            ++special;
        } else {
            again = decoder.failed();
        }
        if (again) [[unlikely]] {
            const RowSums sums = sums_by_tables(codes - span, codes_to, span, x - span);
            for (int r = 0; r < rows; ++r) sum_f32x16[r] = f_mul(sums.of[r], f_set(AffineE4M3<Told>::times));
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            F scale_f32x16;
            if constexpr (Short) {
                double pair;
                __builtin_memcpy(&pair, reinterpret_cast<const void*>(scales + scales_to[r]), sizeof pair);
                scale_f32x16 = _mm512_permutexvar_ps(scale_of_lane, _mm512_castpd_ps(_mm512_set1_pd(pair)));
            } else {
                scale_f32x16 = f_set(*reinterpret_cast<const float*>(scales + scales_to[r]));
            }
            total_f32x16[r] = f_multiply_add(sum_f32x16[r], scale_f32x16, total_f32x16[r]);
        }
        scales += sizeof(float) * (Short ? 2 : 1);
    }
    for (int r = 0; r < rows; ++r) g.out[first + r] = f_sum(total_f32x16[r]) * (1 / AffineE4M3<Told>::times);
}

template <bool Told>
static void gemv_one_e4m3(const Gemv& g) {
    const std::int64_t block = g.w.block;
    if ((block != 32 && block % 64 != 0) || g.w.k % (block < 64 ? 64 : block) != 0)
        return gemv_vectors<Float8E4M3FN, false, AffineE4M3<Told>, 1>(g);
    // The scales of short blocks are in the first-level cache, too.
    const auto rows = block == 32                     ? e4m3_rows<Told, true, false>
                      : next_rows_fit(g.w, 2 * g.w.k) ? e4m3_rows<Told, false, true>
                                                      : e4m3_rows<Told, false, false>;
    std::int64_t row = 0;
    for (; row + 4 <= g.w.rows; row += 4) rows(g, row);
    for (; row < g.w.rows; ++row) gemv_rows<Float8E4M3FN, false, AffineE4M3<Told>, 1, 1>(g, row);
}

static void gemv_e4m3(const Gemv& g) {
    if (g.vectors != 1) return gemv_any<Float8E4M3FN, false, AffineE4M3<false>>(g);
    g.w.special != nullptr ? gemv_one_e4m3<true>(g) : gemv_one_e4m3<false>(g);
}
