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
// What is above the low nibbles does not matter: they index tables of 16.
BRECCIA_INLINE I i_load_nibbles(const std::uint8_t* p) {
    std::int32_t low = 0, high = 0;
    __builtin_memcpy(&low, p, sizeof low);
    __builtin_memcpy(&high, p + 4, sizeof high);
    const I nibbles = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xFF00, high);
    return _mm512_srlv_epi32(nibbles, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
}
BRECCIA_INLINE void i_store_bytes(std::uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
BRECCIA_INLINE void i_store_bytes_n(std::uint8_t* p, I x, std::int64_t n) {
    _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), x);
}
BRECCIA_INLINE void i_store_nibbles(std::uint8_t* p, I x) {
    // Each 64-bit lane holds an even code and, 32 bits up, its odd neighbour.
    const I codes = _mm512_and_si512(x, _mm512_set1_epi32(15));
    const I pairs = _mm512_or_si512(codes, _mm512_srli_epi64(codes, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
}

BRECCIA_INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
BRECCIA_INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
BRECCIA_INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
BRECCIA_INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
BRECCIA_INLINE F f_sqrt(F a) { return _mm512_sqrt_ps(a); }
BRECCIA_INLINE F f_reciprocal_rest(F divisor, F reciprocal) {
    return _mm512_div_ps(_mm512_fnmadd_ps(divisor, reciprocal, _mm512_set1_ps(1.0F)), divisor);
}
BRECCIA_INLINE F f_divide_fast(F x, F /*divisor*/, F high, F low) {
    return _mm512_fmadd_ps(x, high, _mm512_mul_ps(x, low));
}
BRECCIA_INLINE F f_multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
BRECCIA_INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
BRECCIA_INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }
// vrangeps: bits 1:0 choose the smaller (2) or larger (3) magnitude, bits 3:2 = 0 the first operand's sign.
BRECCIA_INLINE F f_clamp_magnitude(F x, F largest) { return _mm512_range_ps(x, largest, 0b00'10); }
BRECCIA_INLINE F f_binade(F x, F least) {
    const I power = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xFF80'0000U)));
    return _mm512_range_ps(_mm512_castsi512_ps(power), least, 0b00'11);
}

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
BRECCIA_INLINE Mask f_less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
BRECCIA_INLINE F f_select(Mask m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
BRECCIA_INLINE I i_select(Mask m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

template <int Count>
BRECCIA_INLINE I i_shl(I x) {
    return _mm512_slli_epi32(x, Count);
}
BRECCIA_INLINE Mask m_or(Mask a, Mask b) { return static_cast<Mask>(a | b); }
BRECCIA_INLINE bool i_none(Mask m) { return m == 0; }

using B = __m512i;
using Mask64 = __mmask64;

#ifdef BRECCIA_VBMI
// Bytes of two vectors at a time, wherever they are.
template <int Byte>
BRECCIA_INLINE __m256i bytes_of(I a, I b) {
    alignas(64) static constexpr auto index = [] {
        struct {
            std::uint8_t byte[64];
        } of{};
        for (int i = 0; i < 64; ++i) of.byte[i] = static_cast<std::uint8_t>(4 * (i % 32) + Byte);
        return of;
    }();
    return _mm512_castsi512_si256(_mm512_permutex2var_epi8(a, _mm512_load_si512(index.byte), b));
}
BRECCIA_INLINE B b_low_bytes(I a, I b, I c, I d) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(bytes_of<0>(a, b)), bytes_of<0>(c, d), 1);
}
BRECCIA_INLINE B b_high_bytes(I a, I b, I c, I d) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(bytes_of<3>(a, b)), bytes_of<3>(c, d), 1);
}
#else
BRECCIA_INLINE B b_low_bytes(I a, I b, I c, I d) {
    const __m256i ab = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
    const __m256i cd = _mm256_set_m128i(_mm512_cvtepi32_epi8(d), _mm512_cvtepi32_epi8(c));
    return _mm512_inserti64x4(_mm512_castsi256_si512(ab), cd, 1);
}
BRECCIA_INLINE B b_high_bytes(I a, I b, I c, I d) {
    return b_low_bytes(_mm512_srli_epi32(a, 24), _mm512_srli_epi32(b, 24), _mm512_srli_epi32(c, 24),
                       _mm512_srli_epi32(d, 24));
}
#endif
BRECCIA_INLINE B b_set(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
BRECCIA_INLINE B b_and(B a, B b) { return _mm512_and_si512(a, b); }
BRECCIA_INLINE B b_or(B a, B b) { return _mm512_or_si512(a, b); }
template <int Count>
BRECCIA_INLINE B b_shr(B x) {
    return _mm512_and_si512(_mm512_srli_epi16(x, Count), b_set(255 >> Count));
}
BRECCIA_INLINE B b_zero_where_zero(B x, B test) { return _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(test, test), x); }
BRECCIA_INLINE void b_store(std::uint8_t* p, B x) { _mm512_storeu_si512(p, x); }
BRECCIA_INLINE void b_store_nibbles(std::uint8_t* p, B x) {
    const B codes = _mm512_and_si512(x, b_set(15));
    const I pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));  // even + 16 * odd
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(pairs));
}

// Pairs are interleaved and the larger kept, until each vector's sixteen lanes are one.
BRECCIA_INLINE I i_max_of_each(const I (&x)[16]) {
    I t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        t[i] = i_max(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        t[i] = i_max(_mm512_unpacklo_epi64(t[2 * i], t[2 * i + 1]), _mm512_unpackhi_epi64(t[2 * i], t[2 * i + 1]));
    const auto halves = [](I a, I b) BRECCIA_INLINE_LAMBDA {
        return i_max(_mm512_shuffle_i32x4(a, b, 0b10'00'10'00), _mm512_shuffle_i32x4(a, b, 0b11'01'11'01));
    };
    return halves(halves(t[0], t[1]), halves(t[2], t[3]));
}

BRECCIA_INLINE std::int32_t i_max_lane(I x) { return _mm512_reduce_max_epi32(x); }
BRECCIA_INLINE float f_max_lane(F x) { return _mm512_reduce_max_ps(x); }
BRECCIA_INLINE float f_sum(F x) {
    const __m256 x8 = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_movehdup_ps(x2)));
}

template <class C>
BRECCIA_INLINE F f_decode(I codes) {
    const float* table = decode_table<C>.values;
    if constexpr (C::bits == 4) {
        return _mm512_permutexvar_ps(codes, _mm512_load_ps(table));
    } else if constexpr (C::bits == 6) {
        const F magnitude = _mm512_permutex2var_ps(_mm512_load_ps(table), codes, _mm512_load_ps(table + 16));
        const I sign = i_and(_mm512_slli_epi32(codes, 26), i_set(static_cast<std::int32_t>(f32_sign_bit)));
        return as_float(i_or(as_bits(magnitude), sign));
    } else if constexpr (C::family == CodecFamily::integer) {
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24), 24));
    } else if constexpr (C::family == CodecFamily::exponent) {
        // The exponent field is the code, but 2^-127 is a subnormal and 255 a NaN.
        const I bits = _mm512_slli_epi32(codes, 23);
        const I low = i_select(_mm512_testn_epi32_mask(codes, codes), i_set(0x0040'0000), bits);
        return as_float(i_select(_mm512_cmpeq_epi32_mask(codes, i_set(255)), i_set(0x7FC0'0000), low));
    } else {
        // The fields moved to those of a float, which a multiplication by a power of two rebiases, subnormals included.
        constexpr int shift = 23 - C::mantissa_bits;
        const I magnitude = _mm512_slli_epi32(i_and(codes, i_set(C::magnitude_mask)), shift);
        const I sign = i_and(_mm512_slli_epi32(codes, 24), i_set(static_cast<std::int32_t>(f32_sign_bit)));
        const F value = f_mul(as_float(i_or(magnitude, sign)), f_set(exp2i(127 - C::bias)));
        // Codes that are not finite are rare; their table entries are read one by one.
        const Mask special = C::specials == Specials::nan_zero
                                 ? _mm512_cmpeq_epi32_mask(codes, i_set(C::nan_code))
                                 : _mm512_cmpgt_epi32_mask(magnitude, i_set(C::max_code << shift));
        if (special == 0) [[likely]]
            return value;
        return _mm512_mask_i32gather_ps(value, special, codes, table, 4);
    }
}

template <class C>
inline constexpr bool is_int8 = C::family == CodecFamily::integer && C::bits == 8;
#ifdef BRECCIA_VBMI
inline constexpr bool f_stores_bf16 = true, b_compares_quarters = true;
template <class C>
inline constexpr bool looks_up_bytes = [] {
    if constexpr (C::family == CodecFamily::minifloat && C::bits == 8)
        return C::has_negative_zero;
    else
        return false;
}();

// The bytes of the bfloat16 that each magnitude's code stands for, exactly.
template <class C>
struct MagnitudeBytes {
    alignas(64) std::uint8_t low[128], high[128];
    constexpr MagnitudeBytes() : low(), high() {
        for (int code = 0; code < 128; ++code) {
            const std::uint32_t bits = bits_of(C::decode(static_cast<std::uint8_t>(code)));
            low[code] = static_cast<std::uint8_t>(bits >> 16);
            high[code] = static_cast<std::uint8_t>(bits >> 24);
        }
    }
};
template <class C>
inline constexpr MagnitudeBytes<C> magnitude_bytes{};

BRECCIA_INLINE I lookup_128(I codes, const std::uint8_t* table) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
}

// Bytes of float32 numbers, looked up and then interleaved. Interleaving works within 128-bit quarters, so the codes
// are dealt out to them first.
template <class C>
BRECCIA_INLINE void look_up_bytes(const std::uint8_t* p, F (&x)[4]) {
    const I dealt = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I codes = _mm512_permutexvar_epi32(dealt, _mm512_loadu_si512(p));
    // A NaN has no sign here, whatever its code's.
    constexpr int last_number = C::has_infinity ? C::infinity_code : C::max_code;
    const Mask64 negative_nan = _mm512_cmpgt_epu8_mask(codes, b_set(C::sign_mask | last_number));
    if (negative_nan != 0) [[unlikely]] {
        for (int j = 0; j < 4; ++j) x[j] = f_decode<C>(i_load_bytes(p + j * 16));
        return;
    }
    const I low = lookup_128(codes, magnitude_bytes<C>.low);
    const I sign = _mm512_and_si512(codes, b_set(C::sign_mask));
    const I high = _mm512_or_si512(lookup_128(codes, magnitude_bytes<C>.high), sign);
    const I zero = _mm512_setzero_si512();
    const I first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
    x[0] = as_float(_mm512_unpacklo_epi16(zero, first));
    x[1] = as_float(_mm512_unpackhi_epi16(zero, first));
    x[2] = as_float(_mm512_unpacklo_epi16(zero, second));
    x[3] = as_float(_mm512_unpackhi_epi16(zero, second));
}

// Codes by the multiple of 1/4 that a value is, or by the two that it lies between, where no code changes: number u
// stands for u / 8, odd ones for all between their neighbours.
template <class C>
struct CodesOfQuarters {
    alignas(64) std::uint8_t code[128];
    constexpr CodesOfQuarters() : code() {
        for (int u = -64; u < 64; ++u) code[u & 127] = C::encode(static_cast<float>(u) * 0.125F);
    }
};
template <class C>
inline constexpr CodesOfQuarters<C> codes_of_quarters{};

// Packed E2M1 codes of 64 values of magnitudes below 8, four vectors that are each 4 x over the scale. The sum of what
// a vector is rounded down and up to tells exact quarters from what lies between, a zero's sign apart.
template <class C>
BRECCIA_INLINE void b_store_quarters(std::uint8_t* p, F a, F b, F c, F d) {
    const auto twice = [](F x) BRECCIA_INLINE_LAMBDA {
        return _mm512_add_epi32(_mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC),
                                _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
    };
    const auto bytes = [](I w, I x, I y, I z) BRECCIA_INLINE_LAMBDA {
        return _mm512_packs_epi16(_mm512_packs_epi32(w, x), _mm512_packs_epi32(y, z));
    };
    alignas(64) static constexpr auto in_order = [] {  // packing works within 128-bit quarters
        struct {
            std::uint8_t byte[64];
        } of{};
        for (int i = 0; i < 32; ++i) of.byte[i] = static_cast<std::uint8_t>(i % 8 / 2 * 16 + i / 8 * 4 + i % 2 * 2);
        return of;
    }();
    const B u = bytes(twice(a), twice(b), twice(c), twice(d));
    const std::uint8_t* table = codes_of_quarters<C>.code;
    B codes = _mm512_permutex2var_epi8(_mm512_load_si512(table), u, _mm512_load_si512(table + 64));
    if (_mm512_testn_epi8_mask(u, u) != 0) [[unlikely]] {
        const auto top = [](F x) BRECCIA_INLINE_LAMBDA { return _mm512_srli_epi32(_mm512_castps_si512(x), 28); };
        codes = b_or(codes, b_and(bytes(top(a), top(b), top(c), top(d)), b_set(C::sign_mask)));
    }
    const I pairs = _mm512_maddubs_epi16(codes, _mm512_set1_epi16(0x1001));  // even + 16 * odd
    const B packed = _mm512_permutexvar_epi8(_mm512_load_si512(in_order.byte), pairs);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(packed));
}

BRECCIA_INLINE void f_store_normal(BFloat16* p, const F (&x)[4]) {
    const __m512bh first = _mm512_cvtne2ps_pbh(x[1], x[0]), second = _mm512_cvtne2ps_pbh(x[3], x[2]);
    __builtin_memcpy(p, &first, sizeof first);
    __builtin_memcpy(p + 32, &second, sizeof second);
}
#else
inline constexpr bool f_stores_bf16 = false, b_compares_quarters = false;
template <class C>
inline constexpr bool looks_up_bytes = false;
template <class C>
void look_up_bytes(const std::uint8_t* p, F (&x)[4]) = delete;
#endif

template <class C>
inline constexpr bool f_decodes_wide = looks_up_bytes<C> || is_int8<C>;

// 64 codes.
template <class C>
BRECCIA_INLINE void f_decode_wide(const std::uint8_t* p, F (&x)[4]) {
    if constexpr (is_int8<C>) {
        for (int j = 0; j < 4; ++j)
            x[j] =
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * j))));
    } else {
        look_up_bytes<C>(p, x);
    }
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
BRECCIA_INLINE void i_store_words(std::uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}

/// 16 float16 numbers.
BRECCIA_INLINE F f_of_halves(__m256i x) { return _mm512_cvtph_ps(x); }
BRECCIA_INLINE F f_of_signed_bytes(const std::uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
/// One, two or four numbers, which as many runs of lanes take. Four are read.
struct Spread {
    I index;
    BRECCIA_INLINE_MEMBER explicit Spread(int runs) {
        const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        index = _mm512_srli_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(runs)), 4);
    }
    BRECCIA_INLINE_MEMBER F operator()(const float* p) const {
        return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(p)));
    }
};

/// Asks for the line of a row that will be read soon.
BRECCIA_INLINE void prefetch(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

/// Weight rows that meet one activation at a time.
inline constexpr int single_vector_rows = 4;

/// Weight rows of a matmul tile one vector wide.
inline constexpr int gemm_rows = 24;
inline constexpr std::int64_t wide_gemm_k = 256;
inline constexpr std::int64_t codes_f32_tile_rows = 24;  // see CodeKernelsF32::tile_rows

using Doubles = __m512d;
BRECCIA_INLINE Doubles d_multiply_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
BRECCIA_INLINE Doubles d_larger(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }

#include "backends/avx512/transpose.inl.hpp"
