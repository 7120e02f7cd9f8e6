// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in AVX2, FMA and F16C: 16 lanes are two registers.

struct F {
    __m256 lo, hi;
};
struct I {
    __m256i lo, hi;
};
using Mask = I;  // all ones or all zeros per lane

BRECCIA_INLINE __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

BRECCIA_INLINE F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BRECCIA_INLINE I i_set(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
BRECCIA_INLINE F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
BRECCIA_INLINE F f_load_n(const float* p, std::int64_t n) {
    const __m256i count = _mm256_set1_epi32(static_cast<std::int32_t>(n));
    const __m256i in_lo = _mm256_cmpgt_epi32(count, lane_numbers());
    const __m256i in_hi = _mm256_cmpgt_epi32(count, _mm256_add_epi32(lane_numbers(), _mm256_set1_epi32(8)));
    return {_mm256_maskload_ps(p, in_lo), _mm256_maskload_ps(p + 8, in_hi)};
}
BRECCIA_INLINE void f_store(float* p, F x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
BRECCIA_INLINE I i_load(const std::int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
BRECCIA_INLINE void i_store(std::int32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
BRECCIA_INLINE I widen_bytes(__m128i bytes) {
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
BRECCIA_INLINE I i_load_bytes(const std::uint8_t* p) {
    return widen_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    return widen_bytes(_mm_unpacklo_epi8(low, high));
}
BRECCIA_INLINE __m128i narrow_to_bytes(I x, std::int32_t mask) {
    // Packing saturates, so the lanes are cleaned first.
    const __m256i low = _mm256_set1_epi32(mask);
    x = {_mm256_and_si256(x.lo, low), _mm256_and_si256(x.hi, low)};
    // Packing works within 128-bit halves: a permutation puts the quarters back in order.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.lo, x.hi), 0b11'01'10'00);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_to_bytes(x, 255));
}
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    alignas(16) std::uint8_t bytes[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), narrow_to_bytes(x, 255));
    for (std::int64_t i = 0; i < n; ++i) p[i] = bytes[i];
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    const __m128i pairs = _mm_maddubs_epi16(narrow_to_bytes(x, 15), _mm_set1_epi16(0x1001));  // even + 16 * odd
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
}

BRECCIA_INLINE F f_add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
BRECCIA_INLINE F f_sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
BRECCIA_INLINE F f_mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
BRECCIA_INLINE F f_div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
BRECCIA_INLINE F f_sqrt(F a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
BRECCIA_INLINE F f_reciprocal_rest(F divisor, F reciprocal) {
    const __m256 one = _mm256_set1_ps(1.0F);
    return {_mm256_div_ps(_mm256_fnmadd_ps(divisor.lo, reciprocal.lo, one), divisor.lo),
            _mm256_div_ps(_mm256_fnmadd_ps(divisor.hi, reciprocal.hi, one), divisor.hi)};
}
BRECCIA_INLINE F f_divide_fast(F x, F /*divisor*/, F high, F low) {
    return {_mm256_fmadd_ps(x.lo, high.lo, _mm256_mul_ps(x.lo, low.lo)),
            _mm256_fmadd_ps(x.hi, high.hi, _mm256_mul_ps(x.hi, low.hi))};
}
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
BRECCIA_INLINE F f_min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
BRECCIA_INLINE F f_max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
BRECCIA_INLINE __m256 clamp_magnitude(__m256 x, __m256 largest) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    const __m256 magnitude = _mm256_min_ps(_mm256_andnot_ps(sign, x), largest);
    return _mm256_or_ps(magnitude, _mm256_and_ps(x, sign));
}
BRECCIA_INLINE F f_clamp_magnitude(F x, F largest) {
    return {clamp_magnitude(x.lo, largest.lo), clamp_magnitude(x.hi, largest.hi)};
}
BRECCIA_INLINE __m256 binade(__m256 x, __m256 least) {
    const __m256 power = _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F80'0000)));
    return _mm256_or_ps(_mm256_max_ps(power, least), _mm256_and_ps(x, _mm256_set1_ps(-0.0F)));
}
BRECCIA_INLINE F f_binade(F x, F least) { return {binade(x.lo, least.lo), binade(x.hi, least.hi)}; }

BRECCIA_INLINE I as_bits(F x) { return {_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)}; }
BRECCIA_INLINE F as_float(I x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }
BRECCIA_INLINE I i_add(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
BRECCIA_INLINE I i_sub(I a, I b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
BRECCIA_INLINE I i_and(I a, I b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
BRECCIA_INLINE I i_or(I a, I b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
BRECCIA_INLINE I i_xor(I a, I b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
BRECCIA_INLINE I i_min(I a, I b) { return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)}; }
BRECCIA_INLINE I i_max(I a, I b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
template <int Count>
BRECCIA_INLINE I i_shr(I x) {
    return {_mm256_srli_epi32(x.lo, Count), _mm256_srli_epi32(x.hi, Count)};
}
BRECCIA_INLINE Mask i_less(I a, I b) { return {_mm256_cmpgt_epi32(b.lo, a.lo), _mm256_cmpgt_epi32(b.hi, a.hi)}; }
BRECCIA_INLINE Mask f_less(F a, F b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
BRECCIA_INLINE F f_select(Mask m, F yes, F no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(m.lo)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(m.hi))};
}
BRECCIA_INLINE I i_select(Mask m, I yes, I no) {
    return {_mm256_blendv_epi8(no.lo, yes.lo, m.lo), _mm256_blendv_epi8(no.hi, yes.hi, m.hi)};
}

template <int Count>
BRECCIA_INLINE I i_shl(I x) {
    return {_mm256_slli_epi32(x.lo, Count), _mm256_slli_epi32(x.hi, Count)};
}
BRECCIA_INLINE Mask m_or(Mask a, Mask b) { return i_or(a, b); }
BRECCIA_INLINE bool i_none(Mask m) {
    const __m256i any = _mm256_or_si256(m.lo, m.hi);
    return _mm256_testz_si256(any, any) != 0;
}

struct B {
    __m256i lo, hi;
};
// The bytes of lanes that hold no more than a byte.
BRECCIA_INLINE __m256i bytes_of(I a, I b) {
    const __m256i words = _mm256_packus_epi32(a.lo, a.hi), more = _mm256_packus_epi32(b.lo, b.hi);
    // Packing works within 128-bit halves: a permutation puts the fours back in order.
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, more), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
BRECCIA_INLINE B b_low_bytes(I a, I b, I c, I d) {
    const I low = i_set(255);
    return {bytes_of(i_and(a, low), i_and(b, low)), bytes_of(i_and(c, low), i_and(d, low))};
}
BRECCIA_INLINE B b_high_bytes(I a, I b, I c, I d) {
    return {bytes_of(i_shr<24>(a), i_shr<24>(b)), bytes_of(i_shr<24>(c), i_shr<24>(d))};
}
BRECCIA_INLINE B b_set(int x) {
    return {_mm256_set1_epi8(static_cast<char>(x)), _mm256_set1_epi8(static_cast<char>(x))};
}
BRECCIA_INLINE B b_and(B a, B b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
BRECCIA_INLINE B b_or(B a, B b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int Count>
BRECCIA_INLINE B b_shr(B x) {
    return b_and({_mm256_srli_epi16(x.lo, Count), _mm256_srli_epi16(x.hi, Count)}, b_set(255 >> Count));
}
BRECCIA_INLINE B b_zero_where_zero(B x, B test) {
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_andnot_si256(_mm256_cmpeq_epi8(test.lo, zero), x.lo),
            _mm256_andnot_si256(_mm256_cmpeq_epi8(test.hi, zero), x.hi)};
}
BRECCIA_INLINE void b_store(std::uint8_t* p, B x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.hi);
}
BRECCIA_INLINE void b_store_nibbles(std::uint8_t* p, B x) {
    const B codes = b_and(x, b_set(15));
    const __m256i weights = _mm256_set1_epi16(0x1001);  // even + 16 * odd
    const __m256i pairs =
        _mm256_packus_epi16(_mm256_maddubs_epi16(codes.lo, weights), _mm256_maddubs_epi16(codes.hi, weights));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(pairs, 0b11'01'10'00));
}

// As in AVX-512, for the eight lanes that are left of each vector after its halves.
BRECCIA_INLINE __m256i max_of_eight(const __m256i (&x)[8]) {
    __m256i t[4];
    for (int i = 0; i < 4; ++i)
        t[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                                _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    const __m256i low = _mm256_max_epi32(_mm256_unpacklo_epi64(t[0], t[1]), _mm256_unpackhi_epi64(t[0], t[1]));
    const __m256i high = _mm256_max_epi32(_mm256_unpacklo_epi64(t[2], t[3]), _mm256_unpackhi_epi64(t[2], t[3]));
    return _mm256_max_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
BRECCIA_INLINE I i_max_of_each(const I (&x)[16]) {
    __m256i halves[2][8];
    for (int i = 0; i < 16; ++i) halves[i / 8][i % 8] = _mm256_max_epi32(x[i].lo, x[i].hi);
    return {max_of_eight(halves[0]), max_of_eight(halves[1])};
}

BRECCIA_INLINE std::int32_t i_max_lane(I x) {
    const __m256i x8 = _mm256_max_epi32(x.lo, x.hi);
    __m128i x4 = _mm_max_epi32(_mm256_castsi256_si128(x8), _mm256_extracti128_si256(x8, 1));
    x4 = _mm_max_epi32(x4, _mm_shuffle_epi32(x4, 0b01'00'11'10));
    x4 = _mm_max_epi32(x4, _mm_shuffle_epi32(x4, 0b10'11'00'01));
    return _mm_cvtsi128_si32(x4);
}
BRECCIA_INLINE float f_max_lane(F x) {
    const __m256 x8 = _mm256_max_ps(x.lo, x.hi);
    __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    x4 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_max_ss(x4, _mm_movehdup_ps(x4)));
}
BRECCIA_INLINE float f_sum(F x) {
    const __m256 x8 = _mm256_add_ps(x.lo, x.hi);
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}

template <class C>
BRECCIA_INLINE __m256 decode_eight(__m256i codes) {
    const float* table = decode_table<C>.values;
    if constexpr (C::bits == 4) {
        // The low three bits choose the magnitude; two halves of the table by the fourth.
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), codes);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), codes);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    } else if constexpr (C::bits == 8 && C::family == CodecFamily::integer) {
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(codes, 24), 24));
    } else if constexpr (C::bits == 8 && C::family == CodecFamily::minifloat) {
        // As in AVX-512: fields moved, then rebiased by a multiplication; the codes that are not finite by gather.
        constexpr int shift = 23 - C::mantissa_bits;
        const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(127)), shift);
        const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(codes, 7), 31);
        const __m256 value =
            _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(magnitude, sign)), _mm256_set1_ps(exp2i(127 - C::bias)));
        const __m256i special = C::specials == Specials::nan_zero
                                    ? _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(C::nan_code))
                                    : _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(C::max_code << shift));
        if (_mm256_testz_si256(special, special) != 0) [[likely]]
            return value;
        return _mm256_mask_i32gather_ps(value, table, codes, _mm256_castsi256_ps(special), 4);
    } else if constexpr (C::family == CodecFamily::exponent) {
        // The exponent field is the code, but 2^-127 is a subnormal and 255 a NaN.
        const auto where = [&](int code, __m256i yes, __m256i no) BRECCIA_INLINE_LAMBDA {
            return _mm256_blendv_epi8(no, yes, _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(code)));
        };
        const __m256i powers = where(0, _mm256_set1_epi32(0x0040'0000), _mm256_slli_epi32(codes, 23));
        return _mm256_castsi256_ps(where(255, _mm256_set1_epi32(0x7FC0'0000), powers));
    } else {
        // What is above a code's bits must not count: it would gather from beyond the table.
        return _mm256_i32gather_ps(table, _mm256_and_si256(codes, _mm256_set1_epi32((1 << C::bits) - 1)), 4);
    }
}
template <class C>
BRECCIA_INLINE F f_decode(I codes) {
    return {decode_eight<C>(codes.lo), decode_eight<C>(codes.hi)};
}

template <class C>
inline constexpr bool f_decodes_wide = false;
inline constexpr bool f_stores_bf16 = false, b_compares_quarters = false;

BRECCIA_INLINE F f_load_as(const float* p) { return f_load(p); }
BRECCIA_INLINE F f_load_as(const Float16* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
BRECCIA_INLINE F f_load_as(const BFloat16* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    const auto widen = [](__m128i x) BRECCIA_INLINE_LAMBDA {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    };
    return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
}
BRECCIA_INLINE void f_store_as(float* p, F x) { f_store(p, x); }
BRECCIA_INLINE void f_store_as(Float16* p, F x) {
    auto* halves = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}
BRECCIA_INLINE void i_store_words(std::uint16_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.lo, x.hi), 0b11'01'10'00);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

/// 16 float16 numbers.
BRECCIA_INLINE F f_of_halves(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
BRECCIA_INLINE F f_of_signed_bytes(const std::uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
/// One, two or four numbers, which as many runs of lanes take. Four are read.
struct Spread {
    I index;
    BRECCIA_INLINE_MEMBER explicit Spread(int runs) {
        const I lane = {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
        const __m256i times = _mm256_set1_epi32(runs);
        index = i_shr<4>({_mm256_mullo_epi32(lane.lo, times), _mm256_mullo_epi32(lane.hi, times)});
    }
    BRECCIA_INLINE_MEMBER F operator()(const float* p) const {
        const __m256 four = _mm256_castps128_ps256(_mm_loadu_ps(p));
        return {_mm256_permutevar8x32_ps(four, index.lo), _mm256_permutevar8x32_ps(four, index.hi)};
    }
};

/// Asks for the line of a row that will be read soon.
BRECCIA_INLINE void prefetch(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

/// Weight rows that meet one activation at a time.
inline constexpr int single_vector_rows = 2;

/// Weight rows of a matmul tile one vector wide.
inline constexpr int gemm_rows = 6;
inline constexpr std::int64_t wide_gemm_k = 128;
inline constexpr std::int64_t codes_f32_tile_rows = 12;  // see CodeKernelsF32::tile_rows

using Doubles = __m256d;
BRECCIA_INLINE Doubles d_multiply_add(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
BRECCIA_INLINE Doubles d_larger(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }

#include "kernels/transpose.inl.hpp"
