// SPDX-License-Identifier: Apache-2.0
//
// One activation by rows of codes in place, in integers: 4-bit codes are bytes from zero up, the activation is a sum of
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
    /// Codes are those bytes, or would be, were their sign turned over.
    bool are_codes;
    std::uint8_t flip;
};
template <class C>
inline constexpr NibbleBytes nibble_bytes = [] {
    static_assert(C::max - C::lowest <= 31 * C::decode(1));  // words hold eight products of bytes up to 31 by digits
    NibbleBytes of{.byte = {},
                   .unit = C::decode(1),
                   .offset = static_cast<int>(-C::lowest / C::decode(1)),
                   .are_codes = C::family == CodecFamily::integer,
                   .flip = C::lowest == 0 ? std::uint8_t{0} : std::uint8_t{0x88}};
    for (int i = 0; i < 16; ++i)
        of.byte[i] = static_cast<std::uint8_t>((C::decode(static_cast<std::uint8_t>(i)) - C::lowest) / C::decode(1));
    return of;
}();

/// 64 codes of a row: those of even and of odd k.
struct NibblePair {
    __m256i even, odd;
};
template <bool AreCodes>
BRECCIA_INLINE NibblePair read_nibbles(const NibbleBytes& of, const std::uint8_t* codes) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
#if defined(__GNUC__) && !defined(BRECCIA_EMULATED_BACKEND)
    asm("" : "+x"(bytes));  // loaded once: compilers would load them again for each use
#endif
    if constexpr (AreCodes) bytes = _mm256_xor_si256(bytes, _mm256_set1_epi8(static_cast<char>(of.flip)));
    const __m256i low = _mm256_and_si256(bytes, nibble);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    if constexpr (AreCodes) return {low, high};
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(of.byte)));
    return {_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high)};
}

/// `start` and the sums of products with `Count` digits, as the integers that they stand for. `digits`: those of a half
/// of a step.
template <int Count>
BRECCIA_INLINE __m256i nibble_sums(NibblePair codes, const std::int8_t (*digits)[128], std::int64_t half,
                                   __m256i start) {
#ifdef BRECCIA_DPBUSD
    const auto sums = [&](int d) BRECCIA_INLINE_LAMBDA {
        const auto* of = reinterpret_cast<const __m256i*>(digits[d] + 32 * half);
        const __m256i first = d == Count - 1 ? start : _mm256_setzero_si256();
        return BRECCIA_DPBUSD(BRECCIA_DPBUSD(first, codes.even, _mm256_load_si256(of)), codes.odd,
                              _mm256_load_si256(of + 2));
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
    if constexpr (Count == 1) return _mm256_add_epi32(_mm256_madd_epi16(words(0), one), start);
    const __m256i two =
        _mm256_add_epi32(_mm256_madd_epi16(words(0), _mm256_set1_epi16(256)), _mm256_madd_epi16(words(1), one));
    if constexpr (Count <= 2) return _mm256_add_epi32(two, start);
    return _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(two, 8), _mm256_madd_epi16(words(2), one)), start);
#endif
}

/// The scales of half a step, `PerHalf` of them; with 0 there is one to a step or to several.
template <int PerHalf>
BRECCIA_INLINE __m256 scales_of_half(const float* scales, int half) {
    if constexpr (PerHalf == 0) return _mm256_set1_ps(*scales);
    if constexpr (PerHalf == 1) return _mm256_broadcast_ss(scales + half);
    // One load of all that a step has, or a half: loads are what these loops have the most of.
    const __m256 four = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(scales + (PerHalf == 4 ? 4 * half : 0)));
    if constexpr (PerHalf == 4) return _mm256_permutevar_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    const int first = 2 * half;
    return _mm256_permutevar_ps(
        four, _mm256_setr_epi32(first, first, first, first, first + 1, first + 1, first + 1, first + 1));
}

/// Codes of scales, as many to half a step as the format with such scales has. Where all of a row are plain, their bits
/// are a float's after a shift, `unit` times too small.
template <int PerHalf>
struct ScaleCodes {
    static constexpr bool there = false;
};
/// Whether no code is below `Least` or above `Most`, but for zeros with `OrZero`.
template <std::uint8_t Least, std::uint8_t Most, bool OrZero>
BRECCIA_INLINE bool all_within(const std::uint8_t* codes, std::int64_t n) {
    if (n < 32) {
        bool within = true;
        for (std::int64_t i = 0; i < n; ++i)
            within &= (OrZero && codes[i] == 0) || (codes[i] >= Least && codes[i] <= Most);
        return within;
    }
    __m256i least = _mm256_set1_epi8(-1), most = _mm256_setzero_si256();
    const auto look_at = [&](const std::uint8_t* from) BRECCIA_INLINE_LAMBDA {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        // With one less, zero is the largest.
        least = _mm256_min_epu8(least, OrZero ? _mm256_sub_epi8(x, _mm256_set1_epi8(1)) : x);
        most = _mm256_max_epu8(most, x);
    };
    for (std::int64_t i = 0; i + 32 <= n; i += 32) look_at(codes + i);
    look_at(codes + n - 32);
    const __m256i below = _mm256_subs_epu8(_mm256_set1_epi8(static_cast<char>(Least - OrZero)), least);
    const __m256i above = _mm256_subs_epu8(most, _mm256_set1_epi8(static_cast<char>(Most)));
    const __m256i outside = _mm256_or_si256(below, above);
    return _mm256_testz_si256(outside, outside) != 0;
}
/// E4M3 in blocks of 16: no sign, no NaN and no subnormal numbers, which some processors are slow with.
template <>
struct ScaleCodes<4> {
    static constexpr bool there = true;
    static constexpr ScaleType type = ScaleType::e4m3;
    static constexpr float unit = exp2i(120);
    static constexpr int shift = 4;
    BRECCIA_INLINE_MEMBER static bool all_plain(const std::uint8_t* codes, std::int64_t n) {
        return all_within<0x08, 0x7E, true>(codes, n);
    }
};
/// E8M0 in blocks of 32: powers of two whose products do not leave the range of floats.
template <>
struct ScaleCodes<2> {
    static constexpr bool there = true;
    static constexpr ScaleType type = ScaleType::e8m0;
    static constexpr float unit = 1;
    static constexpr int shift = 1;
    BRECCIA_INLINE_MEMBER static bool all_plain(const std::uint8_t* codes, std::int64_t n) {
        return all_within<127 - 60, 127 + 60, false>(codes, n);
    }
};
/// The scales of a step whose sums are in_pairs(), those of 16 elements in the order 0, 1, 4, 5, 2, 3, 6, 7.
template <int PerHalf>
BRECCIA_INLINE __m256 scales_of_step(const float* scales) {
    if constexpr (PerHalf == 0) return _mm256_broadcast_ss(scales);
    if constexpr (PerHalf == 1) {
        std::int64_t two;
        __builtin_memcpy(&two, scales, sizeof two);
        const __m256i pairs = _mm256_set1_epi64x(two);
        return _mm256_permutevar_ps(_mm256_castsi256_ps(pairs), _mm256_setr_epi32(0, 0, 1, 1, 0, 0, 1, 1));
    }
    if constexpr (PerHalf == 2) {
        const __m256 four = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(scales));
        return _mm256_permutevar_ps(four, _mm256_setr_epi32(0, 0, 2, 2, 1, 1, 3, 3));
    }
    const __m256d eight = _mm256_castps_pd(_mm256_loadu_ps(scales));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(eight, 0b11'01'10'00));
}
template <int PerHalf>
BRECCIA_INLINE __m256 scales_of_step(const std::uint8_t* scales) {
    // Each code to the highest byte of its lanes.
    const auto place = [](int scale) { return scale << 24 | 0x80'8080; };
    __m256i codes, places;
    if constexpr (PerHalf == 4) {
        std::int64_t eight;
        __builtin_memcpy(&eight, scales, sizeof eight);
        codes = _mm256_set1_epi64x(eight);
        places = _mm256_setr_epi32(place(0), place(1), place(4), place(5), place(2), place(3), place(6), place(7));
    } else {
        std::int32_t four;
        __builtin_memcpy(&four, scales, sizeof four);
        codes = _mm256_set1_epi32(four);
        places = _mm256_setr_epi32(place(0), place(0), place(2), place(2), place(1), place(1), place(3), place(3));
    }
    return _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_shuffle_epi8(codes, places), ScaleCodes<PerHalf>::shift));
}

/// The words of 32 bits 0 and 1 of both, 2 and 3 of both … in the order of scales_of_step().
struct Pairs {
    __m256i even, odd;
};
BRECCIA_INLINE Pairs in_pairs(__m256i a, __m256i b) {
    const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return {_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0b10'00'10'00)),
            _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0b11'01'11'01))};
}
/// Makes the offsets of steps of one digit, whose halves are added up before they take scales: in pairs, and, where one
/// scale is a step's, lane by lane.
BRECCIA_INLINE void prepare_nibble_step(DigitStep& step) {
    const auto* lanes = reinterpret_cast<const __m256i*>(step.offsets[0]);
    auto* sums = reinterpret_cast<__m256i*>(step.offsets[1]);
    const __m256i lo = _mm256_load_si256(lanes), hi = _mm256_load_si256(lanes + 1);
    const Pairs pairs = in_pairs(lo, hi);
    _mm256_store_si256(sums, _mm256_add_epi32(pairs.even, pairs.odd));
    _mm256_store_si256(sums + 1, _mm256_add_epi32(lo, hi));
}
/// `start` and the sums of products with the only digit of a step, of both halves.
template <bool OneScale>
BRECCIA_INLINE __m256i step_sums(NibblePair lo, NibblePair hi, const std::int8_t* digits, __m256i start) {
    const auto* of = reinterpret_cast<const __m256i*>(digits);
    const auto digit = [&](int i) BRECCIA_INLINE_LAMBDA { return _mm256_load_si256(of + i); };
#ifdef BRECCIA_DPBUSD
    if constexpr (OneScale) {
        const __m256i sum = BRECCIA_DPBUSD(BRECCIA_DPBUSD(start, lo.even, digit(0)), lo.odd, digit(2));
        return BRECCIA_DPBUSD(BRECCIA_DPBUSD(sum, hi.even, digit(1)), hi.odd, digit(3));
    }
    const __m256i zero = _mm256_setzero_si256();
    const Pairs pairs = in_pairs(BRECCIA_DPBUSD(BRECCIA_DPBUSD(zero, lo.even, digit(0)), lo.odd, digit(2)),
                                 BRECCIA_DPBUSD(BRECCIA_DPBUSD(zero, hi.even, digit(1)), hi.odd, digit(3)));
    return _mm256_add_epi32(_mm256_add_epi32(pairs.even, pairs.odd), start);
#else
    // Words hold eight products, see nibble_bytes.
    __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(lo.even, digit(0)), _mm256_maddubs_epi16(lo.odd, digit(2)));
    __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(hi.even, digit(1)), _mm256_maddubs_epi16(hi.odd, digit(3)));
    if constexpr (!OneScale) {
        const Pairs pairs = in_pairs(a, b);
        a = pairs.even, b = pairs.odd;
    }
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1)), start);
#endif
}

/// A single stream is what memory brings the quickest. (Zen 4, 4096 x 4096 MXFP4 from memory, INT8 activations: 0.41 ms
/// against 0.89 of two rows at a time and 0.61 of four.)
inline constexpr int nibble_rows_at_once = 1;

/// Sums of some rows at a time. `OneDigit`: steps have one, and their units are left to the caller. `Scale`: float, or
/// std::uint8_t for ScaleCodes.
template <bool AreCodes, int PerHalf, bool HasZero, bool OneDigit, class ScaleOfRow>
struct NibbleSums {
    static constexpr int rows = nibble_rows_at_once, per_half = PerHalf;
    static constexpr bool one_digit = OneDigit, has_zero = HasZero;
    using Scale = ScaleOfRow;
    const NibbleBytes& of_codes;
    const DigitStep* step;
    const std::uint8_t* codes[rows] = {};
    const Scale* scales[rows] = {};
    const std::uint8_t* zeros[rows] = {};
    /// Of one row the halves of a step have totals of their own, so that neither waits for the other.
    static constexpr int totals = rows == 1 && !OneDigit ? 2 : 1;
    __m256 total_f32x8[rows][totals] = {};

    BRECCIA_INLINE_MEMBER void clear(int r) {
        for (__m256& total : total_f32x8[r]) total = _mm256_setzero_ps();
    }
    BRECCIA_INLINE_MEMBER float total(int r) const {
        if constexpr (totals == 2) return sum_of(_mm256_add_ps(total_f32x8[r][0], total_f32x8[r][1]));
        const float sum = sum_of(total_f32x8[r][0]);
        if constexpr (std::is_same_v<Scale, std::uint8_t>) return sum * ScaleCodes<PerHalf>::unit;
        return sum;
    }

    /// One step of one digit. `ahead`: bytes from a row's codes to what is prefetched.
    BRECCIA_INLINE_MEMBER void by_one_digit(std::int64_t ahead) {
        constexpr bool one_scale = PerHalf == 0;
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            prefetch(codes[r] + ahead);
            __m256i start = _mm256_load_si256(reinterpret_cast<const __m256i*>(step->offsets[1]) + one_scale);
            if constexpr (HasZero)
                start = _mm256_mullo_epi32(start, _mm256_set1_epi32(static_cast<std::int8_t>(*zeros[r])));
            const NibblePair lo = read_nibbles<AreCodes>(of_codes, codes[r]);
            const NibblePair hi = read_nibbles<AreCodes>(of_codes, codes[r] + 32);
            const __m256 sum_f32x8 = _mm256_cvtepi32_ps(step_sums<one_scale>(lo, hi, step->digits[0], start));
            __m256& total = total_f32x8[r][0];
            total = _mm256_fmadd_ps(sum_f32x8, scales_of_step<PerHalf>(scales[r]), total);
        }
    }

    /// One step of several.
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
            for (int r = 0; r < rows; ++r) {
                const auto by_zero_point = [&](__m256i of) BRECCIA_INLINE_LAMBDA {
                    if constexpr (!HasZero) return of;
                    return _mm256_mullo_epi32(of, _mm256_set1_epi32(static_cast<std::int8_t>(*zeros[r])));
                };
                if (half == 0) prefetch(codes[r] + ahead);
                const NibblePair pair = read_nibbles<AreCodes>(of_codes, codes[r] + 32 * half);
                const __m256i sum = nibble_sums<first>(pair, step->digits, half, by_zero_point(start));
                __m256 sum_f32x8 = _mm256_cvtepi32_ps(sum);
                if constexpr (Count > first) {
                    const __m256i small =
                        nibble_sums<Count - first>(pair, step->digits + first, half, by_zero_point(offsets(1)));
                    sum_f32x8 = _mm256_fmadd_ps(_mm256_cvtepi32_ps(small), _mm256_set1_ps(step->smaller), sum_f32x8);
                }
                const __m256 scale_f32x8 = _mm256_mul_ps(unit_f32x8, scales_of_half<PerHalf>(scales[r], half));
                __m256& total = total_f32x8[r][half % totals];
                total = _mm256_fmadd_ps(sum_f32x8, scale_f32x8, total);
            }
        }
    }
};

#include "backends/avx2/byte_sums.inl.hpp"

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
