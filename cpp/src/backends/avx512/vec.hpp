// SPDX-License-Identifier: Apache-2.0
//
// The vector vocabulary in AVX-512 (F, BW, DQ, VL).

using F = __m512;
using I = __m512i;
using Mask = __mmask16;

BRECCIA_INLINE Mask first_lanes(std::int64_t n) { return static_cast<Mask>((1U << n) - 1U); }

BRECCIA_INLINE F f_set(float x) { return _mm512_set1_ps(x); }
BRECCIA_INLINE I i_set(std::int32_t x) { return _mm512_set1_epi32(x); }
BRECCIA_INLINE F f_load(const float* p) { return _mm512_loadu_ps(p); }
BRECCIA_INLINE F f_load_n(const float* p, std::int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
BRECCIA_INLINE void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
BRECCIA_INLINE I i_load(const std::int32_t* p) { return _mm512_loadu_si512(p); }
BRECCIA_INLINE void i_store(std::int32_t* p, I x) { _mm512_storeu_si512(p, x); }
BRECCIA_INLINE I i_load_bytes(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
    return _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
}
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), x);
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    // Each 64-bit lane holds an even code and, 32 bits up, its odd neighbour.
    const I pairs = _mm512_or_si512(x, _mm512_srli_epi64(x, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
}

BRECCIA_INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
BRECCIA_INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
BRECCIA_INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
BRECCIA_INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
BRECCIA_INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }

BRECCIA_INLINE I as_bits(F x) { return _mm512_castps_si512(x); }
BRECCIA_INLINE F as_float(I x) { return _mm512_castsi512_ps(x); }
BRECCIA_INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
BRECCIA_INLINE I i_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
BRECCIA_INLINE I i_and(I a, I b) { return _mm512_and_si512(a, b); }
BRECCIA_INLINE I i_or(I a, I b) { return _mm512_or_si512(a, b); }
BRECCIA_INLINE I i_xor(I a, I b) { return _mm512_xor_si512(a, b); }
BRECCIA_INLINE I i_min(I a, I b) { return _mm512_min_epi32(a, b); }
BRECCIA_INLINE I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
template <int Count>
BRECCIA_INLINE I i_shr(I x) {
    return _mm512_srli_epi32(x, Count);
}
BRECCIA_INLINE Mask i_less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
BRECCIA_INLINE I i_select(Mask m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

BRECCIA_INLINE std::int32_t i_max_lane(I x) { return _mm512_reduce_max_epi32(x); }
BRECCIA_INLINE float f_max_lane(F x) { return _mm512_reduce_max_ps(x); }
BRECCIA_INLINE float f_sum(F x) {
    const __m256 x8 = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}

template <int Bits>
BRECCIA_INLINE F f_lookup(const float* table, I index) {
    if constexpr (Bits == 4) return _mm512_permutexvar_ps(index, _mm512_load_ps(table));
    return _mm512_i32gather_ps(index, table, 4);
}

BRECCIA_INLINE F f_load_as(const float* p) { return f_load(p); }
BRECCIA_INLINE F f_load_as(const Float16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
BRECCIA_INLINE F f_load_as(const BFloat16* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
BRECCIA_INLINE void f_store_as(float* p, F x) { f_store(p, x); }
BRECCIA_INLINE void f_store_as(Float16* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
BRECCIA_INLINE void f_store_as(BFloat16* p, F x) {
    const I bits = as_bits(x);
    const I odd = i_and(i_shr<16>(bits), i_set(1));
    const I rounded = i_shr<16>(i_add(bits, i_add(odd, i_set(0x7FFF))));
    const I quiet = i_or(i_shr<16>(bits), i_set(0x40));
    const Mask nan = i_less(i_set(0x7F80'0000), i_and(bits, i_set(0x7FFF'FFFF)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(i_select(nan, quiet, rounded)));
}

/// Correctly rounded x / value. `ordinary` promises that no x is an infinity or a NaN; then, for divisors well inside
/// the exponent range, one Newton step on x * (1 / value) rounds as the division does (Markstein 1990, theorem 8: the
/// reciprocal is correctly rounded, the remainder exact) at a third of its cost. Quotients too small for an exact
/// remainder are below 2^-20 and encode to zero either way.
class Divisor {
public:
    BRECCIA_INLINE_MEMBER Divisor(float value, bool ordinary)
        : value_(f_set(value)), reciprocal_(f_set(1.0F / value)) {
        const std::uint32_t exponent = bits_of(value) >> 23 & 255U;
        newton_ = ordinary && exponent > 127 - 80 && exponent < 127 + 80;
    }
    BRECCIA_INLINE_MEMBER F value() const { return value_; }
    BRECCIA_INLINE_MEMBER F divide(F x) const {
        if (!newton_) return _mm512_div_ps(x, value_);
        const F quotient = _mm512_mul_ps(x, reciprocal_);
        const F remainder = _mm512_fnmadd_ps(quotient, value_, x);
        // The step makes +0 of a zero whose sign the first product has right.
        const F refined = _mm512_fmadd_ps(remainder, reciprocal_, quotient);
        return _mm512_or_ps(refined, _mm512_and_ps(quotient, _mm512_set1_ps(-0.0F)));
    }

private:
    F value_, reciprocal_;
    bool newton_;
};

inline constexpr int gemm_rows_a = 4, gemm_rows_b = 4;
