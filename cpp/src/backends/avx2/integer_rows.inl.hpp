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
template <class C>
struct NibbleBytes {
    static constexpr float unit = C::decode(1);
    static constexpr int offset = static_cast<int>(-C::lowest / unit);
    static constexpr auto table = [] {
        struct {
            alignas(16) std::uint8_t byte[16];
        } of{};
        for (int i = 0; i < 16; ++i)
            of.byte[i] =
                static_cast<std::uint8_t>((C::decode(static_cast<std::uint8_t>(i)) - C::lowest) / C::decode(1));
        return of;
    }();

    BRECCIA_INLINE __m256i read(__m256i nibbles) {
        if constexpr (C::family == CodecFamily::minifloat || offset != 0) {
            const auto* bytes = reinterpret_cast<const __m128i*>(table.byte);
            return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(bytes)), nibbles);
        } else {
            return nibbles;
        }
    }
};

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

/// Rows of codes by an activation of digits, `Rows` at a time.
template <class C, int PerHalf, bool HasZero, int Rows>
struct NibbleRows {
    const IntegerGemv& g;
    const DigitStep* step;
    const std::uint8_t* codes[Rows] = {};
    const float* scales[Rows] = {};
    const std::uint8_t* zeros[Rows] = {};
    __m256 total_f32x8[Rows] = {};

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
                const NibblePair pair = {NibbleBytes<C>::read(_mm256_and_si256(bytes, nibble)),
                                         NibbleBytes<C>::read(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble))};
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

    BRECCIA_INLINE_MEMBER void one_step(std::int64_t ahead) {
        switch (step->count) {
            case 2: by_digits<2>(ahead); break;
            case 3: by_digits<3>(ahead); break;
            case 4: by_digits<4>(ahead); break;
            case 5: by_digits<5>(ahead); break;
            default: by_digits<6>(ahead);
        }
        ++step;
    }

    void run(std::int64_t row, const float* converted, std::int64_t blocks) {
        const CodeRows& w = g.w;
        const std::int64_t bytes = (w.k + 1) / 2, rest = bytes % 64;
        const std::int64_t steps_per_scale = PerHalf > 0 ? 1 : blocks == 1 ? w.k : w.block / row_step(true);
        for (int r = 0; r < Rows; ++r) {
            codes[r] = w.codes + (row + r) * w.row_stride;
            scales[r] = converted + r * blocks;
            if constexpr (HasZero) zeros[r] = w.zero_points + scale_row_of(w, row + r) * w.zero_row_stride;
            total_f32x8[r] = _mm256_setzero_ps();
        }
        std::int64_t left = steps_per_scale;
        for (std::int64_t s = 0; s < bytes / 64; ++s) {
            one_step(Rows * w.row_stride);
            const bool next_scale = PerHalf > 0 || --left == 0;
            for (int r = 0; r < Rows; ++r) {
                codes[r] += 64;
                if (next_scale) scales[r] += PerHalf > 0 ? 2 * PerHalf : 1;
                if (HasZero && next_scale) ++zeros[r];
            }
            if (next_scale) left = steps_per_scale;
        }
        if (rest > 0) {  // filled up with others, which meet zeros
            alignas(64) std::uint8_t last[Rows][64];
            float last_scales[Rows][8];
            for (int r = 0; r < Rows; ++r) {
                for (std::int64_t i = 0; i < 64; ++i) last[r][i] = i < rest ? codes[r][i] : 0;
                codes[r] = last[r];
                if constexpr (PerHalf == 0) continue;
                const std::int64_t there = converted + (r + 1) * blocks - scales[r];
                for (std::int64_t i = 0; i < 8; ++i) last_scales[r][i] = i < there ? scales[r][i] : 0;
                scales[r] = last_scales[r];
            }
            one_step(0);
        }
        for (int r = 0; r < Rows; ++r) g.out[row + r] = sum_of(total_f32x8[r]);
    }

    BRECCIA_INLINE std::int64_t scale_row_of(const CodeRows& w, std::int64_t row) {
        return w.block_rows == 1 ? w.first_row + row : (w.first_row + row) / w.block_rows;
    }
};

/// Of eight numbers: the bits of the largest magnitude, and the sum of integers.
BRECCIA_INLINE std::int32_t largest_of(__m256 x) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFF'FFFF));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(magnitude), _mm256_extracti128_si256(magnitude, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01'00'11'10));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10'11'00'01)));
}
BRECCIA_INLINE std::int32_t sum_of(__m256i x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0b01'00'11'10));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0b10'11'00'01)));
}

/// `count` digits of the integers of a lane's elements, to where its codes meet them. Returns whether the last is not
/// zero everywhere.
BRECCIA_INLINE bool put_lane(__m256i integers, int count, std::int8_t (*digits)[128], int lane) {
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

/// See pack_step of avx512_bf16/integer_gemv.inl.hpp, whose digits these are; here a lane is a vector.
template <class C>
static bool pack_nibble_step(const PackDigits& p, std::int64_t s, std::int32_t largest) {
    constexpr int lanes_of_step = 16;
    DigitStep& to = p.out->steps[s];
    const float* x = p.x + s * row_step(true);
    const int exponent = (largest >> 23) - 127, times = p.zero_points ? 1 : NibbleBytes<C>::offset;
    constexpr int fineness = 7;
    const int least = exponent - fineness > -100 ? exponent - fineness : -100;
    const auto at_least = exponent < -100 ? largest : static_cast<std::int32_t>(bits_of(exp2i(least)));
    alignas(32) float left[lanes_of_step][8];
    bool thirds = false, any = false;
    const auto is_zero = [](__m256 a)
                             BRECCIA_INLINE_LAMBDA { return _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_EQ_OQ); };
    for (int lane = 0; lane < lanes_of_step; ++lane) {
        const __m256 value = _mm256_loadu_ps(x + 8 * lane);
        const std::int32_t own = largest_of(value), most = own > at_least ? own : at_least;
        float unit = 1, up = 1;
        // Where all are zero or subnormal there is none to go by; the latter leave something behind.
        if (exponent >= -100) {
            const int unit_exponent = unit_exponent_of(most);
            unit = float_from_bits(static_cast<std::uint32_t>(unit_exponent) << 23);
            up = float_from_bits(static_cast<std::uint32_t>(254 - unit_exponent) << 23);
        }
        const __m256 v = _mm256_mul_ps(value, _mm256_set1_ps(up));
        const __m256i integers = _mm256_cvtps_epi32(v);
        const __m256 rest = _mm256_sub_ps(v, _mm256_cvtepi32_ps(integers));
        if (_mm256_movemask_ps(_mm256_andnot_ps(is_zero(value), is_zero(v))) != 0) return false;
        any |= _mm256_movemask_ps(is_zero(rest)) != 255;
        _mm256_store_ps(left[lane], rest);
        thirds |= put_lane(integers, DigitStep::first, to.digits, lane);
        to.offsets[0][lane] = -times * sum_of(integers);
        to.units[lane] = unit * NibbleBytes<C>::unit;
    }
    int further = 0;
    while (any) {
        if (++further > DigitStep::most - DigitStep::first) return false;
        const __m256 more = _mm256_set1_ps(exp2i(8 * further - 1));
        any = false;
        for (int lane = 0; lane < lanes_of_step; ++lane) {
            const __m256 v = _mm256_mul_ps(_mm256_load_ps(left[lane]), more);
            const __m256i integers = _mm256_cvtps_epi32(v);
            any |= _mm256_movemask_ps(is_zero(_mm256_sub_ps(v, _mm256_cvtepi32_ps(integers)))) != 255;
            put_lane(integers, further, to.digits + DigitStep::first, lane);
            to.offsets[1][lane] = -times * sum_of(integers);
        }
    }
    to.smaller = exp2i(1 - 8 * further);
    to.further = static_cast<std::uint8_t>(further);
    to.count = static_cast<std::uint8_t>(!thirds && further == 0 ? 2 : DigitStep::first + further);
    return true;
}

template <class C>
static bool pack_nibble_digits(const PackDigits& p) {
    p.out->bias = 1;
    for (std::int64_t s = 0; s < p.steps; ++s) {
        const float* x = p.x + s * row_step(true);
        std::int32_t largest = 0;
        for (int lane = 0; lane < 16; ++lane) {
            const std::int32_t own = largest_of(_mm256_loadu_ps(x + 8 * lane));
            largest = own > largest ? own : largest;
        }
        if ((largest >> 23) - 127 > 100) return false;  // infinities and NaN, too
        if (!pack_nibble_step<C>(p, s, largest)) return false;
    }
    return true;
}
