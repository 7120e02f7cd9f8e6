// SPDX-License-Identifier: Apache-2.0
//
// Codes to bfloat16, exactly, through tables the codec's own decode fills at compile time. Formats of one code per byte
// look up the two bytes of the result apart (vpermi2b: 128 entries, the index's sign bit is ignored); 4-bit formats
// look up words (vpermw: 32 entries, of which 16 repeat, so that one stray bit above the code does no harm).

// Every code of these is exact in bfloat16, zero points -8 ... 15 subtracted.
template <class C>
inline constexpr bool has_bf16 = C::family != CodecFamily::exponent;

template <class C>
struct ByteTables {
    alignas(64) std::uint8_t low[128];
    alignas(64) std::uint8_t high[128];
    constexpr ByteTables() : low(), high() {
        for (int i = 0; i < 128; ++i) {
            const std::uint16_t bits = to_bfloat16(C::decode(static_cast<std::uint8_t>(i & ((1 << C::bits) - 1)))).bits;
            low[i] = static_cast<std::uint8_t>(bits);
            high[i] = static_cast<std::uint8_t>(bits >> 8);
        }
    }
};
template <class C>
inline constexpr ByteTables<C> byte_tables{};

inline constexpr int lowest_zero_point = -8, highest_zero_point = 15;
template <class C>
struct NibbleTables {
    alignas(64) std::uint16_t words[highest_zero_point - lowest_zero_point + 1][32];
    constexpr NibbleTables() : words() {
        for (int zero = lowest_zero_point; zero <= highest_zero_point; ++zero)
            for (int i = 0; i < 32; ++i)
                words[zero - lowest_zero_point][i] =
                    to_bfloat16(C::decode(static_cast<std::uint8_t>(i & 15)) - static_cast<float>(zero)).bits;
    }
};
template <class C>
inline constexpr NibbleTables<C> nibble_tables{};

/// Unsigned 4-bit codes may have zero points, a byte to each row's block.
template <class C>
inline constexpr bool may_have_zero_points =
    C::bits == 4 && C::family == CodecFamily::integer && C::decode(15) == 15.0F;

template <class C>
BRECCIA_INLINE I nibble_table(std::uint8_t zero_point) {
    return _mm512_load_si512(nibble_tables<C>.words[static_cast<std::int8_t>(zero_point) - lowest_zero_point]);
}

BRECCIA_INLINE __mmask64 first_bytes(std::int64_t n) { return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1; }

/// The two bytes of 64 bfloat16 numbers apart.
struct ByteHalves {
    I low, high;
};

template <class C>
BRECCIA_INLINE ByteHalves look_up_bytes(I codes) {
    I index = codes;
    if constexpr (C::family == CodecFamily::integer) index = _mm512_abs_epi8(codes);
    const std::uint8_t *low_table = byte_tables<C>.low, *high_table = byte_tables<C>.high;
    I low = _mm512_permutex2var_epi8(_mm512_load_si512(low_table), index, _mm512_load_si512(low_table + 64));
    I high = _mm512_permutex2var_epi8(_mm512_load_si512(high_table), index, _mm512_load_si512(high_table + 64));
    if constexpr (C::bits == 8) {
        constexpr int a_or_b_and_c = 0xF8;
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), a_or_b_and_c);
        const auto replace_most_negative = [&](__mmask64 where, std::uint16_t bits) BRECCIA_INLINE_LAMBDA {
            low = _mm512_mask_blend_epi8(where, low, _mm512_set1_epi8(static_cast<char>(bits & 255)));
            high = _mm512_mask_blend_epi8(where, high, _mm512_set1_epi8(static_cast<char>(bits >> 8)));
        };
        // The code 0x80 is not always minus code 0.
        if constexpr (C::family == CodecFamily::integer)
            replace_most_negative(_mm512_movepi8_mask(index), to_bfloat16(-128.0F).bits);
        else if constexpr (is_nan(C::decode(0x80)))
            replace_most_negative(_mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128)), 0x7FC0);
    }
    return {low, high};
}

struct BF16x64 {
    I first, second;
};

/// 64 byte codes. `first` takes the lower 8 of every 16, `second` the upper 8.
template <class C>
BRECCIA_INLINE BF16x64 decode_bytes(I codes) {
    const ByteHalves value = look_up_bytes<C>(codes);
    return {_mm512_unpacklo_epi8(value.low, value.high), _mm512_unpackhi_epi8(value.low, value.high)};
}

// --- panels -------------------------------------------------------------------------------------------------------

/// 2^e times nonzero finite bfloat16 numbers; the caller has checked the range.
BRECCIA_INLINE I add_exponent(I x, I exponent) {
    const I magnitude_exponent = _mm512_and_si512(x, _mm512_set1_epi16(0x7F80));
    const __mmask32 nonzero = _mm512_test_epi16_mask(magnitude_exponent, magnitude_exponent);
    const __mmask32 finite = _mm512_mask_cmpneq_epi16_mask(nonzero, magnitude_exponent, _mm512_set1_epi16(0x7F80));
    return _mm512_mask_add_epi16(x, finite, x, exponent);
}

/// The exponents of two powers of two, one for each half of a vector.
BRECCIA_INLINE I exponent_words(float low, float high) {
    const auto word = [](float scale) BRECCIA_INLINE_LAMBDA {
        return static_cast<short>((static_cast<int>(bits_of(scale) >> 23) - 127) << 7);
    };
    return _mm512_mask_set1_epi16(_mm512_set1_epi16(word(low)), 0xFFFF'0000, word(high));
}

template <class C, bool Scaled>
static void decode_byte_rows(const DecodeBF16& d) {
    // Quarters of the codes are dealt out so that unpacking leaves them in order.
    const I deal = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (std::int64_t row = 0; row < d.rows; ++row) {
        const std::uint8_t* codes = d.codes + row * d.row_stride;
        std::uint16_t* out = d.out + row * panel_stride_bf16;
        const float* scales = d.scales + row * d.stride;
        const auto put = [&](std::int64_t k, I bytes) BRECCIA_INLINE_LAMBDA {
            BF16x64 w = decode_bytes<C>(_mm512_permutexvar_epi64(deal, bytes));
            if constexpr (Scaled) {
                const auto scale_of = [&](std::int64_t at) { return at < d.k ? scales[at >> d.block_shift] : 1.0F; };
                w.first = add_exponent(w.first, exponent_words(scale_of(k), scale_of(k + 16)));
                w.second = add_exponent(w.second, exponent_words(scale_of(k + 32), scale_of(k + 48)));
            }
            _mm512_storeu_si512(out + k, w.first);
            _mm512_storeu_si512(out + k + 32, w.second);
        };
        std::int64_t k = 0;
        for (; k + 64 <= d.k; k += 64) put(k, _mm512_loadu_si512(codes + k));
        if (k < d.k) put(k, _mm512_maskz_loadu_epi8(first_bytes(d.k - k), codes + k));
    }
}

/// 32 packed codes as 16 doublewords of two: the even one in the low nibble of each, the odd one above it.
BRECCIA_INLINE I load_pairs(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

/// Calls decode(k, pairs, store) for every 32 codes of a row; of the last ones, what lies past the end is stored as
/// zeros (of an odd row the last byte's high nibble is someone's rubbish), up to a multiple of 64.
template <class Decode>
BRECCIA_INLINE void for_pairs(const DecodeBF16& d, std::int64_t row, Decode decode) {
    const std::uint8_t* codes = d.codes + row * d.row_stride;
    std::uint16_t* out = d.out + row * panel_stride_bf16;
    std::int64_t k = 0;
    for (; k + 32 <= d.k; k += 32) _mm512_storeu_si512(out + k, decode(k, load_pairs(codes + k / 2)));
    if (k < d.k) {
        const __m128i rest = _mm_maskz_loadu_epi8(first_lanes((d.k - k + 1) / 2), codes + k / 2);
        const __mmask32 inside = (__mmask32{1} << (d.k - k)) - 1;
        _mm512_storeu_si512(out + k, _mm512_maskz_mov_epi16(inside, decode(k, _mm512_cvtepu8_epi32(rest))));
        k += 32;
    }
    if (k % 64 != 0) _mm512_storeu_si512(out + k, _mm512_setzero_si512());
}

template <class C>
static void decode_nibble_rows(const DecodeBF16& d) {
    const I no_zero_point = nibble_table<C>(0);
    for (std::int64_t row = 0; row < d.rows; ++row)
        for_pairs(d, row, [&](std::int64_t k, I pairs) BRECCIA_INLINE_LAMBDA {
            const I index = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
            const I table = d.zero_points != nullptr
                                ? nibble_table<C>(d.zero_points[row * d.stride + (k >> d.block_shift)])
                                : no_zero_point;
            return _mm512_permutexvar_epi16(index, table);
        });
}

/// E2M1 times a scale of few enough bits: in float32, then cut to bfloat16, which drops only zeros. Halves: blocks of
/// 16, of which a vector holds two.
template <class C, bool Halves>
static void decode_scaled_nibble_rows(const DecodeBF16& d) {
    const F table = _mm512_load_ps(decode_table<C>.values);
    const I upper_half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    for (std::int64_t row = 0; row < d.rows; ++row) {
        const float* scales = d.scales + row * d.stride;
        for_pairs(d, row, [&](std::int64_t k, I pairs) BRECCIA_INLINE_LAMBDA {
            F scale_f32x16;
            if constexpr (Halves)
                scale_f32x16 =
                    _mm512_permutexvar_ps(upper_half, _mm512_castpd_ps(_mm512_maskz_loadu_pd(1, scales + k / 16)));
            else
                scale_f32x16 = f_set(scales[k >> d.block_shift]);
            const F even = _mm512_mul_ps(_mm512_permutexvar_ps(pairs, table), scale_f32x16);
            const F odd = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table), scale_f32x16);
            constexpr int a_or_b_and_c = 0xF8;
            return _mm512_ternarylogic_epi32(_mm512_srli_epi32(as_bits(even), 16), as_bits(odd),
                                             i_set(static_cast<int>(0xFFFF'0000U)), a_or_b_and_c);
        });
    }
}

template <class C>
static void decode_bf16(const DecodeBF16& d) {
    if constexpr (C::bits != 4) {
        d.scales != nullptr ? decode_byte_rows<C, true>(d) : decode_byte_rows<C, false>(d);
    } else if (d.scales == nullptr) {
        decode_nibble_rows<C>(d);
    } else {
        d.block_shift == 4 ? decode_scaled_nibble_rows<C, true>(d) : decode_scaled_nibble_rows<C, false>(d);
    }
}
