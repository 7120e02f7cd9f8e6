// SPDX-License-Identifier: Apache-2.0
//
// One activation by rows of 4-bit codes in place, in integers: codes are bytes from zero up, the activation is a sum of
// signed bytes (Digits). vpmaddubsw adds up two products to a word, which has room for two such sums, and vpmaddwd
// makes a doubleword of two words: a lane is eight elements. With VNNI vpdpbusd (BRECCIA_DPBUSD) does it all. What the
// codes are too large by is in the sums' first value. A sum is exact; it becomes a float once and takes its scale. See
// also avx512_bf16/integer_gemv.inl.hpp.

BRECCIA_INLINE float sum_of(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/// Codes as unsigned bytes: a code's value is (byte - offset) * unit.
struct NibbleBytes {
    alignas(16) std::uint8_t byte[16];
    float unit;
    int offset;
    bool are_codes;  ///< codes are those bytes
};
template <class C>
inline constexpr NibbleBytes nibble_bytes = [] {
    NibbleBytes of{.byte = {},
                   .unit = C::decode(1),
                   .offset = static_cast<int>(-C::lowest / C::decode(1)),
                   .are_codes = C::family == CodecFamily::integer && C::lowest == 0};
    for (int i = 0; i < 16; ++i)
        of.byte[i] = static_cast<std::uint8_t>((C::decode(static_cast<std::uint8_t>(i)) - C::lowest) / C::decode(1));
    return of;
}();

template <bool AreCodes>
BRECCIA_INLINE __m256i read_nibbles(const NibbleBytes& of, __m256i nibbles) {
    if constexpr (AreCodes) return nibbles;
    const auto* bytes = reinterpret_cast<const __m128i*>(of.byte);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(bytes)), nibbles);
}

/// 64 codes of a row: those of even and of odd k.
struct NibblePair {
    __m256i even, odd;
};

/// Sums of products with `Count` digits, as the integers that they stand for. `digits`: those of a half of a step.
template <int Count>
BRECCIA_INLINE __m256i nibble_sums(NibblePair codes, const std::int8_t (*digits)[128], std::int64_t half) {
#ifdef BRECCIA_DPBUSD
    const auto sums = [&](int d) BRECCIA_INLINE_LAMBDA {
        const auto* of = reinterpret_cast<const __m256i*>(digits[d] + 32 * half);
        const __m256i even = BRECCIA_DPBUSD(_mm256_setzero_si256(), codes.even, _mm256_load_si256(of));
        return BRECCIA_DPBUSD(even, codes.odd, _mm256_load_si256(of + 2));
    };
    __m256i total = sums(0);
#pragma GCC unroll 2
    for (int d = 1; d < Count; ++d) total = _mm256_add_epi32(_mm256_slli_epi32(total, 8), sums(d));
    return total;
#else
    const auto words = [&](int d) BRECCIA_INLINE_LAMBDA {
        const auto* of = reinterpret_cast<const __m256i*>(digits[d] + 32 * half);
        return _mm256_add_epi16(_mm256_maddubs_epi16(codes.even, _mm256_load_si256(of)),
                                _mm256_maddubs_epi16(codes.odd, _mm256_load_si256(of + 2)));
    };
    const __m256i one = _mm256_set1_epi16(1);
    if constexpr (Count == 1) return _mm256_madd_epi16(words(0), one);
    const __m256i two =
        _mm256_add_epi32(_mm256_madd_epi16(words(0), _mm256_set1_epi16(256)), _mm256_madd_epi16(words(1), one));
    if constexpr (Count <= 2) return two;
    return _mm256_add_epi32(_mm256_slli_epi32(two, 8), _mm256_madd_epi16(words(2), one));
#endif
}

/// The scales of half a step, `PerHalf` of them; with 0 there is one to a step or to several.
template <int PerHalf>
BRECCIA_INLINE __m256 scales_of_half(const float* scales, int half) {
    if constexpr (PerHalf == 0) return _mm256_set1_ps(*scales);
    const float* p = scales + PerHalf * half;
    if constexpr (PerHalf == 1) return _mm256_set1_ps(*p);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)),
                                    _mm256_srli_epi32(lane, PerHalf == 2 ? 2 : 1));
}

/// Sums of `Rows` rows at a time.
template <bool AreCodes, int PerHalf, bool HasZero, int Rows>
struct NibbleSums {
    const NibbleBytes& of_codes;
    const DigitStep* step;
    const std::uint8_t* codes[Rows] = {};
    const float* scales[Rows] = {};
    const std::uint8_t* zeros[Rows] = {};
    __m256 total_f32x8[Rows] = {};

    BRECCIA_INLINE_MEMBER void clear(int r) { total_f32x8[r] = _mm256_setzero_ps(); }
    BRECCIA_INLINE_MEMBER float total(int r) const { return sum_of(total_f32x8[r]); }

    /// One step; `ahead`: bytes from a row's codes to what is prefetched.
    template <int Count>
    BRECCIA_INLINE_MEMBER void by_digits(std::int64_t ahead) {
        constexpr int first = Count < DigitStep::first ? Count : DigitStep::first;
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const auto offsets = [&](int of) BRECCIA_INLINE_LAMBDA {
                return _mm256_load_si256(reinterpret_cast<const __m256i*>(step->offsets[of]) + half);
            };
            __m256i start = offsets(0);
            __m256 unit_f32x8 = _mm256_loadu_ps(step->units + 8 * half);
            if constexpr (Count == 2) {
                start = _mm256_srai_epi32(start, 8);
                unit_f32x8 = _mm256_mul_ps(unit_f32x8, _mm256_set1_ps(256.0F));
            }
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const auto by_zero_point = [&](__m256i of) BRECCIA_INLINE_LAMBDA {
                    if constexpr (!HasZero) return of;
                    return _mm256_mullo_epi32(of, _mm256_set1_epi32(static_cast<std::int8_t>(*zeros[r])));
                };
                const __m256i nibble = _mm256_set1_epi8(15);
                const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes[r]) + half);
                if (half == 0) prefetch(codes[r] + ahead);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
                const NibblePair pair = {read_nibbles<AreCodes>(of_codes, _mm256_and_si256(bytes, nibble)),
                                         read_nibbles<AreCodes>(of_codes, high)};
                const __m256i sum =
                    _mm256_add_epi32(nibble_sums<first>(pair, step->digits, half), by_zero_point(start));
                __m256 sum_f32x8 = _mm256_cvtepi32_ps(sum);
                if constexpr (Count > first) {
                    const __m256i small = _mm256_add_epi32(nibble_sums<Count - first>(pair, step->digits + first, half),
                                                           by_zero_point(offsets(1)));
                    sum_f32x8 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(small), _mm256_set1_ps(step->smaller), sum_f32x8);
                }
                const __m256 scale_f32x8 = _mm256_mul_ps(unit_f32x8, scales_of_half<PerHalf>(scales[r], half));
                total_f32x8[r] = _mm256_fmadd_ps(sum_f32x8, scale_f32x8, total_f32x8[r]);
            }
        }
    }
};

/// Eight elements, which a lane of a step has.
using Eight = __m256;
using EightIntegers = __m256i;
BRECCIA_INLINE Eight load_eight(const float* p) { return _mm256_loadu_ps(p); }
BRECCIA_INLINE void store_eight(float* p, Eight x) { _mm256_storeu_ps(p, x); }
BRECCIA_INLINE EightIntegers nearest(Eight x) { return _mm256_cvtps_epi32(x); }
/// What rounding leaves.
BRECCIA_INLINE Eight rest_of(Eight x, EightIntegers integers) { return _mm256_sub_ps(x, _mm256_cvtepi32_ps(integers)); }
BRECCIA_INLINE Eight times(Eight x, float by) { return _mm256_mul_ps(x, _mm256_set1_ps(by)); }
BRECCIA_INLINE __m256 is_zero(Eight x) { return _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_EQ_OQ); }
BRECCIA_INLINE bool any_not_zero(Eight x) { return _mm256_movemask_ps(is_zero(x)) != 255; }
/// Whether a number that is not zero became zero.
BRECCIA_INLINE bool any_lost(Eight before, Eight after) {
    return _mm256_movemask_ps(_mm256_andnot_ps(is_zero(before), is_zero(after))) != 0;
}
/// The bits of the largest magnitude.
BRECCIA_INLINE std::int32_t largest_of(Eight x) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFF'FFFF));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(magnitude), _mm256_extracti128_si256(magnitude, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01'00'11'10));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10'11'00'01)));
}
BRECCIA_INLINE std::int32_t sum_of(EightIntegers x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0b01'00'11'10));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0b10'11'00'01)));
}

/// `count` digits of the integers of a lane's elements, to where its codes meet them. Returns whether the last is not
/// zero everywhere.
BRECCIA_INLINE bool put_lane(EightIntegers integers, int count, std::int8_t (*digits)[128], int lane) {
    // The lowest bytes of a half's doublewords, those of even k first.
    const __m256i lowest = _mm256_setr_epi8(0, 8, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                            0, 8, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    bool any = false;
    for (int d = count - 1; d >= 0; --d) {
        const __m256i digit = _mm256_srai_epi32(_mm256_slli_epi32(integers, 24), 24);
        const __m256i bytes = _mm256_shuffle_epi8(integers, lowest);
        const auto a = static_cast<std::uint32_t>(_mm256_extract_epi32(bytes, 0));
        const auto b = static_cast<std::uint32_t>(_mm256_extract_epi32(bytes, 4));
        const std::uint32_t even = (a & 0xFFFFU) | b << 16, odd = a >> 16 | (b & 0xFFFF'0000U);
        __builtin_memcpy(digits[d] + 4 * lane, &even, sizeof even);
        __builtin_memcpy(digits[d] + 64 + 4 * lane, &odd, sizeof odd);
        if (d == count - 1) any = (even | odd) != 0;
        integers = _mm256_srai_epi32(_mm256_sub_epi32(integers, digit), 8);
    }
    return any;
}
