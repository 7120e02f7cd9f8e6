// SPDX-License-Identifier: Apache-2.0
//
// One activation by a weight read in place, in integers: codes are bytes from zero up, the activation is a sum of
// signed bytes (Digits), and vpdpbusd adds up four products a lane. What the codes are too large by is in the sums'
// first value. A step's sum is exact; it becomes a float once and takes its scale.

/// Codes as unsigned bytes: a code's value is (byte - offset) * unit.
template <class C>
struct CodeBytes {
    static constexpr bool packed = C::bits == 4;
    static constexpr int vectors = packed ? 2 : 1;
    static constexpr int codes = 1 << C::bits;
    static constexpr float unit = C::decode(1);
    static constexpr float lowest = [] {
        float least = 0;
        for (int i = 0; i < codes; ++i)
            least = C::decode(static_cast<std::uint8_t>(i)) < least ? C::decode(static_cast<std::uint8_t>(i)) : least;
        return least;
    }();
    static constexpr int offset = static_cast<int>(-lowest / unit);
    static constexpr auto table = [] {
        struct {
            alignas(64) std::uint8_t byte[64];
        } of{};
        for (int i = 0; i < 64; ++i) {
            const float value = C::decode(static_cast<std::uint8_t>(i % codes)) - lowest;
            of.byte[i] = static_cast<std::uint8_t>(value / unit);
        }
        return of;
    }();

    BRECCIA_INLINE void read(I bytes, I (&out)[vectors]) {
        const I above = packed ? _mm512_srli_epi64(bytes, 4) : bytes;
        if constexpr (packed && C::family == CodecFamily::integer) {
            constexpr int a_and_b = 0xC0, a_and_b_xor_c = 0x6A;
            // A two's complement integer is offset by turning its sign over.
            constexpr int op = offset != 0 ? a_and_b_xor_c : a_and_b;
            out[0] = _mm512_ternarylogic_epi32(bytes, b_set(15), b_set(8), op);
            out[1] = _mm512_ternarylogic_epi32(above, b_set(15), b_set(8), op);
        } else if constexpr (C::family == CodecFamily::integer) {
            out[0] = offset == 0 ? bytes : _mm512_xor_si512(bytes, b_set(0x80));
        } else {  // the table repeats: what is above a packed code does no harm
            const I table_u8x64 = _mm512_load_si512(table.byte);
            out[0] = _mm512_permutexvar_epi8(bytes, table_u8x64);
            if constexpr (packed) out[1] = _mm512_permutexvar_epi8(above, table_u8x64);
        }
    }
};

/// Formats whose values are few enough multiples of one number.
template <class C>
inline constexpr bool has_code_bytes = [] {
    if constexpr (C::family == CodecFamily::exponent)
        return false;
    else
        return C::max / C::decode(1) <= 128;
}();

/// A step's sums of products with `Count` digits, as the integers that they stand for.
template <class C, int Count>
BRECCIA_INLINE I integer_sum(const I (&codes)[CodeBytes<C>::vectors], const std::int8_t (*digits)[128], I offsets) {
    I total = i_set(0);
    // Every digit has a sum of its own: one chain of products would be three times as long.
#pragma GCC unroll 3
    for (int d = 0; d < Count; ++d) {
        I sum = d + 1 < Count ? i_set(0) : offsets;
#pragma GCC unroll 2
        for (int v = 0; v < CodeBytes<C>::vectors; ++v)
            sum = _mm512_dpbusd_epi32(sum, codes[v], _mm512_load_si512(digits[d] + v * 64));
        total = d == 0 ? sum : i_add(_mm512_slli_epi32(total, 8), sum);
    }
    return total;
}

/// One to a step or to several, or several to a step: as floats, or as codes that become floats by a shift.
enum class RowScales : std::uint8_t { one, floats, e4m3, e8m0 };

/// Bytes of a step's scales that are codes: of blocks of 16 packed elements, or of 32.
template <class C, RowScales Scales>
inline constexpr int scale_bytes = Scales == RowScales::e4m3 ? 8
                                   : C::bits == 4            ? 4
                                                             : 2;

/// Whether a shift makes floats of all of a row's `n` codes: E4M3 that are neither negative nor subnormal nor NaN
/// (floats that are subnormal would take a hundred cycles each), E8M0 but 2^-127 and NaN.
static bool shift_makes_floats(const std::byte* codes, ScaleType type, std::int64_t n) {
    const int least = type == ScaleType::e8m0 ? 1 : 8, most = type == ScaleType::e8m0 ? 254 : 0x7E;
    I highest = i_set(0);
    for (std::int64_t i = 0; i < n; i += 64) {
        const I code = n - i >= 64 ? _mm512_loadu_si512(codes + i)
                                   : _mm512_mask_loadu_epi8(b_set(least), first_bytes(n - i), codes + i);
        highest = _mm512_max_epu8(highest, _mm512_sub_epi8(code, b_set(least)));
    }
    if (_mm512_cmp_epu8_mask(highest, b_set(most - least), _MM_CMPINT_NLE) == 0) return true;
    if (type == ScaleType::e8m0) return false;
    __mmask64 others = 0;  // zeros are none
    for (std::int64_t i = 0; i < n; i += 64) {
        const I code = _mm512_maskz_loadu_epi8(first_bytes(n - i), codes + i);
        others |= _mm512_mask_cmp_epu8_mask(_mm512_test_epi8_mask(code, code), _mm512_sub_epi8(code, b_set(least)),
                                            b_set(most - least), _MM_CMPINT_NLE);
    }
    return others == 0;
}

/// Four rows, the last one again where there are fewer. Their addresses are distances from the first's, so that the
/// loop does with the registers there are.
template <class C, RowScales Scales, bool HasZero, bool Near>
static void integer_rows(const IntegerGemv& g, std::int64_t first, float* out) {
    constexpr int rows = 4, vectors = CodeBytes<C>::vectors;
    constexpr bool coded = Scales == RowScales::e4m3 || Scales == RowScales::e8m0;
    constexpr std::int64_t step_codes = row_step(CodeBytes<C>::packed);
    const CodeRows& w = g.w;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block, bytes = CodeBytes<C>::packed ? (w.k + 1) / 2 : w.k;
    const std::int64_t per_step = blocks > 1 && w.block < step_codes ? step_codes / w.block : 1;
    const std::int64_t steps_per_scale = blocks == 1 ? w.k : w.block < step_codes ? 1 : w.block / step_codes;
    constexpr std::int64_t scale_size = coded ? 1 : sizeof(float);

    const std::int64_t first_scale_row = w.scale_row_of(first);
    const std::uint8_t* codes = w.codes + first * w.row_stride;
    const std::byte* scales =
        coded ? w.scales + first_scale_row * w.scale_row_stride : reinterpret_cast<const std::byte*>(w.scale_scratch);
    const std::uint8_t* zeros = HasZero ? w.zero_points + first_scale_row * w.zero_row_stride : nullptr;
    std::int64_t codes_to[rows] = {}, scales_to[rows] = {}, zeros_to[rows] = {};
    F total_f32x16[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        const std::int64_t row = first + r < w.rows ? r : w.rows - 1 - first;
        const std::int64_t scale_row = r == 0 ? first_scale_row : w.scale_row_of(first + row);
        codes_to[r] = r == 0 ? 0 : row * w.row_stride;
        scales_to[r] = coded ? (scale_row - first_scale_row) * w.scale_row_stride : r * blocks * scale_size;
        zeros_to[r] = (scale_row - first_scale_row) * w.zero_row_stride;
        // Side by side even where they are floats already: one address for four.
        if constexpr (!coded)
            convert_scales(w.scales + scale_row * w.scale_row_stride, w.scale_type, blocks,
                           w.scale_scratch + r * blocks);
        total_f32x16[r] = f_set(0.0F);
    }
    // Which of a step's scales a lane takes; of codes, the byte that comes to its highest, above zeros.
    const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    I scale_of_lane = _mm512_srli_epi32(_mm512_mullo_epi32(lane, i_set(static_cast<int>(per_step))), 4);
    if constexpr (coded) scale_of_lane = i_or(_mm512_slli_epi32(scale_of_lane, 24), i_set(0x0080'8080));
    const auto scale_at = [&](const std::byte* at) BRECCIA_INLINE_LAMBDA {
        if constexpr (Scales == RowScales::one) {
            float scale;
            __builtin_memcpy(&scale, at, sizeof scale);
            return f_set(scale);
        } else if constexpr (Scales == RowScales::floats) {
            return _mm512_permutexvar_ps(scale_of_lane,
                                         _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(at))));
        } else {
            constexpr int width = scale_bytes<C, Scales>;
            long long word = 0;
            __builtin_memcpy(&word, at, width);
            const I all = width == 8 ? _mm512_set1_epi64(word) : i_set(static_cast<int>(word));
            constexpr int to_exponent = Scales == RowScales::e4m3 ? 4 : 1;
            return as_float(_mm512_srli_epi32(_mm512_shuffle_epi8(all, scale_of_lane), to_exponent));
        }
    };

    const DigitStep* step = g.x->steps;
    const auto by_digits = [&]<int Count>(const std::uint8_t* next) BRECCIA_INLINE_LAMBDA {
        constexpr int first_digits = Count < DigitStep::first ? Count : DigitStep::first;
        I offsets = i_load(step->offsets[0]);
        F unit_f32x16 = f_load(step->units);
        if constexpr (Count == 2) {
            offsets = _mm512_srai_epi32(offsets, 8);
            unit_f32x16 = f_mul(unit_f32x16, f_set(256.0F));
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const auto by_zero_point = [&](I of) BRECCIA_INLINE_LAMBDA {
                if constexpr (!HasZero) return of;
                return _mm512_mullo_epi32(of, i_set(static_cast<std::int8_t>(zeros[zeros_to[r]])));
            };
            I code_bytes[vectors];
            CodeBytes<C>::read(_mm512_loadu_si512(codes + codes_to[r]), code_bytes);
            prefetch_codes<Near>(next + codes_to[r]);
            F sum_f32x16 =
                _mm512_cvtepi32_ps(integer_sum<C, first_digits>(code_bytes, step->digits, by_zero_point(offsets)));
            if constexpr (Count > first_digits) {
                const I small = integer_sum<C, Count - first_digits>(code_bytes, step->digits + first_digits,
                                                                     by_zero_point(i_load(step->offsets[1])));
                sum_f32x16 = f_multiply_add(_mm512_cvtepi32_ps(small), f_set(step->smaller), sum_f32x16);
            }
            sum_f32x16 = f_mul(sum_f32x16, unit_f32x16);
            total_f32x16[r] = f_multiply_add(sum_f32x16, scale_at(scales + scales_to[r]), total_f32x16[r]);
        }
    };
    // Whole lines of codes, then what is left, filled up with zeros.
    alignas(64) std::uint8_t last_codes[rows][64];
    alignas(64) std::byte last_scales[rows][64];
    std::int64_t left = steps_per_scale, rest = bytes % 64, ahead = rows * w.row_stride;
    for (std::int64_t steps = bytes / 64;; steps = 1) {
        const std::uint8_t* next = codes + ahead;
        for (; steps > 0; --steps) {
            switch (step->count) {
                case 2: by_digits.template operator()<2>(next); break;
                case 3: by_digits.template operator()<3>(next); break;
                case 4: by_digits.template operator()<4>(next); break;
                case 5: by_digits.template operator()<5>(next); break;
                default: by_digits.template operator()<6>(next);
            }
            ++step;
            codes += 64;
            next += 64;
            if (Scales != RowScales::one || --left == 0) {
                left = steps_per_scale;
                scales += per_step * scale_size;
                if constexpr (HasZero) ++zeros;
            }
        }
        if (rest == 0) break;
        const std::int64_t scales_left = blocks - (blocks - 1) / per_step * per_step;
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const __mmask64 codes_there = first_bytes(rest), scales_there = first_bytes(scales_left * scale_size);
            _mm512_store_si512(last_codes[r], _mm512_maskz_loadu_epi8(codes_there, codes + codes_to[r]));
            _mm512_store_si512(last_scales[r], _mm512_maskz_loadu_epi8(scales_there, scales + scales_to[r]));
            prefetch_codes<Near>(codes + ahead + codes_to[r]);
            codes_to[r] = scales_to[r] = r * 64;
        }
        codes = last_codes[0];
        scales = last_scales[0];
        rest = ahead = 0;
    }
    const float end = (Scales == RowScales::e4m3 ? e4m3_bias : 1.0F) / g.x->bias;
    for (int r = 0; r < rows; ++r) out[r] = f_sum(total_f32x16[r]) * end;
}

template <class C, bool HasZero, bool Near>
static void integer_gemv_of(const IntegerGemv& g) {
    constexpr bool packed = CodeBytes<C>::packed;
    const CodeRows& w = g.w;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block;
    const bool e4m3 = packed && w.scale_type == ScaleType::e4m3 && w.block == 16 && g.x->bias != 1;
    const bool e8m0 = w.scale_type == ScaleType::e8m0 && w.block == 32;
    for (std::int64_t row = 0; row < w.rows; row += 4) {
        const std::int64_t n = w.rows - row < 4 ? w.rows - row : 4;
        bool coded = e4m3 || e8m0;
        for (std::int64_t r = 0; coded && r < n; ++r)
            coded = shift_makes_floats(w.scales + w.scale_row_of(row + r) * w.scale_row_stride, w.scale_type, blocks);
        float sums[4];
        if (w.block >= row_step(packed) || blocks == 1) {
            integer_rows<C, RowScales::one, HasZero, Near>(g, row, sums);
        } else if constexpr (!HasZero) {  // zero points come one to so many steps
            if (coded && e8m0 && C::family == CodecFamily::minifloat)
                integer_rows<C, RowScales::e8m0, false, Near>(g, row, sums);
            else if (packed && coded && e4m3 && C::family == CodecFamily::minifloat)
                integer_rows<C, RowScales::e4m3, false, Near>(g, row, sums);
            else
                integer_rows<C, RowScales::floats, false, Near>(g, row, sums);
        }
        for (std::int64_t r = 0; r < n; ++r) g.out[row + r] = sums[r];
    }
}

template <class C, bool Near>
static void integer_gemv_of(const IntegerGemv& g) {
    if constexpr (may_have_zero_points<C>)
        if (g.w.zero_points != nullptr) return integer_gemv_of<C, true, Near>(g);
    integer_gemv_of<C, false, Near>(g);
}

template <class C>
static void integer_gemv(const IntegerGemv& g) {
    constexpr std::int64_t step_bytes = 9 * 64;  // of a DigitStep, what is read where digits are few
    const std::int64_t steps = (g.w.k + row_step(CodeBytes<C>::packed) - 1) / row_step(CodeBytes<C>::packed);
    next_rows_fit(g.w, steps * step_bytes) ? integer_gemv_of<C, true>(g) : integer_gemv_of<C, false>(g);
}

/// The bits of the largest magnitude of a step.
template <std::int64_t Step>
static int largest_bits(const float* x) {
    I most = i_set(0);
    for (std::int64_t k = 0; k < Step; k += 16) most = i_max(most, i_and(as_bits(f_load(x + k)), i_set(0x7FFF'FFFF)));
    return i_max_lane(most);
}

/// The exponent of a number that is neither zero nor infinite nor NaN.
constexpr int exponent_of(int bits) { return (bits >> 23) - 127; }

/// Digits of a step's elements: [digit][element].
template <class C>
using ElementDigits = std::int8_t[3][row_step(CodeBytes<C>::packed)];

/// `count` digits of v, which are so many bytes: |v| < 2^(8 count - 1) - 2^(8 count - 8). Returns what they leave;
/// those of 16 elements go to digits[...][at].
template <class C>
BRECCIA_INLINE F f_take_digits(F v, int count, ElementDigits<C>& digits, std::int64_t at) {
    I rest = _mm512_cvtps_epi32(v);
    const F left = f_sub(v, _mm512_cvtepi32_ps(rest));
    for (int d = count - 1; d >= 0; --d) {
        const I digit = d == 0 ? rest : _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(digits[d] + at), _mm512_cvtepi32_epi8(digit));
        rest = _mm512_srai_epi32(i_sub(rest, digit), 8);
    }
    return left;
}

/// A step's digits in the order of the codes' bytes, and minus the sum of the integers that a lane meets. Returns which
/// doublewords of the last digit are not all zeros.
template <class C>
static Mask put_digits(const ElementDigits<C>& digits, int count, int times, std::int8_t (*out)[128],
                       std::int32_t* offsets, std::int64_t run, std::int32_t (*runs)[16]) {
    constexpr int vectors = CodeBytes<C>::vectors;
    I total = i_set(0);
    Mask last = 0;
    for (int d = 0; d < count; ++d) {
        I bytes[vectors];
        bytes[0] = _mm512_loadu_si512(digits[d]);
        if constexpr (vectors == 2) {
            const I low = bytes[0], high = _mm512_loadu_si512(digits[d] + 64);
            const auto join = [](__m256i a, __m256i b)
                                  BRECCIA_INLINE_LAMBDA { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); };
            bytes[0] = join(_mm512_cvtepi16_epi8(low), _mm512_cvtepi16_epi8(high));
            bytes[1] =
                join(_mm512_cvtepi16_epi8(_mm512_srli_epi16(low, 8)), _mm512_cvtepi16_epi8(_mm512_srli_epi16(high, 8)));
        }
        I sum = i_set(0);
        last = 0;
        for (int v = 0; v < vectors; ++v) {
            last = m_or(last, _mm512_test_epi32_mask(bytes[v], bytes[v]));
            _mm512_store_si512(out[d] + v * 64, bytes[v]);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), bytes[v]);
        }
        if (run > 0) {
            alignas(64) std::int32_t doublewords[16];
            i_store(doublewords, _mm512_mullo_epi32(sum, i_set(-times)));
            std::int32_t* of_run = runs[d];
            for (std::int64_t first = 0; first < 16; first += run, ++of_run) {
                *of_run = 0;
                for (std::int64_t j = first; j < first + run; ++j) *of_run += doublewords[j];
            }
        }
        total = i_add(_mm512_slli_epi32(total, 8), sum);
    }
    i_store(offsets, _mm512_mullo_epi32(total, i_set(-times)));
    return last;
}

/// The elements of a step whose products a lane adds up.
template <class C>
inline constexpr int lane_elements = CodeBytes<C>::packed ? 8 : 4;

/// The bits of the largest magnitude among those that a lane adds up, in the place of each.
template <class C>
BRECCIA_INLINE I lane_magnitudes(F x) {
    I most = i_and(as_bits(x), i_set(0x7FFF'FFFF));
    most = i_max(most, _mm512_shuffle_epi32(most, _MM_PERM_CDAB));
    most = i_max(most, _mm512_shuffle_epi32(most, _MM_PERM_BADC));
    if constexpr (lane_elements<C> == 8) most = i_max(most, _mm512_shuffle_i32x4(most, most, 0b10'11'00'01));
    return most;
}

/// Powers of two that make integers of numbers whose largest magnitude has the bits `most`, and of these numbers
/// again: as large as three bytes hold, so that the third is seldom needed, below 2^23 - 2^16. Bytes of codes are
/// larger than packed ones, and for the sums of a lane to fit in 32 bits theirs are below 2^21.
template <class C>
BRECCIA_INLINE void digit_units(I most, F& up, F& unit) {
    I top = i_set(CodeBytes<C>::packed ? 22 : 20);
    if constexpr (CodeBytes<C>::packed)
        top = i_sub(top, i_select(i_less(i_and(most, i_set(0x7F'FFFF)), i_set(0x7E'0000)), i_set(0), i_set(1)));
    const I unit_exponent = i_sub(_mm512_srli_epi32(most, 23), top);
    unit = as_float(_mm512_slli_epi32(unit_exponent, 23));
    up = as_float(_mm512_slli_epi32(i_sub(i_set(254), unit_exponent), 23));
}

template <class C>
static bool pack_step(const PackDigits& p, std::int64_t s) {
    constexpr std::int64_t step = row_step(CodeBytes<C>::packed);
    DigitStep& to = p.out->steps[s];
    const float* x = p.x + s * step;
    const int largest = largest_bits<step>(x), exponent = exponent_of(largest);
    // Of a weight in rows, lanes whose elements are smaller have a smaller unit, and so fewer third digits.
    constexpr int fineness = 7;
    const bool one_unit = p.run > 0 || exponent < -100;
    const int least = exponent - fineness > -100 ? exponent - fineness : -100;
    const I at_least = i_set(one_unit ? largest : static_cast<int>(bits_of(exp2i(least))));
    const F zero = f_set(0.0F);
    alignas(64) float left[step], units[step];
    ElementDigits<C> digits;
    Mask lost = 0, any = 0;
    for (std::int64_t k = 0; k < step; k += 16) {
        const F value = f_load(x + k);
        const I most = i_max(lane_magnitudes<C>(value), at_least);
        F up_f32x16 = f_set(1.0F), unit_f32x16 = up_f32x16;
        // Where all are zero or subnormal there is none to go by; the latter leave something behind.
        if (exponent >= -100) digit_units<C>(most, up_f32x16, unit_f32x16);
        const F v = f_mul(value, up_f32x16);
        const F rest = f_take_digits<C>(v, DigitStep::first, digits, k);
        f_store(left + k, rest);
        f_store(units + k, unit_f32x16);
        any = m_or(any, _mm512_cmp_ps_mask(rest, zero, _CMP_NEQ_UQ));
        lost = m_or(lost, _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(v, zero, _CMP_EQ_OQ), value, zero, _CMP_NEQ_UQ));
    }
    if (lost != 0) return false;
    const int times = p.zero_points ? 1 : CodeBytes<C>::offset;
    to.thirds = static_cast<std::uint16_t>(
        put_digits<C>(digits, DigitStep::first, times, to.digits, to.offsets[0], p.run, to.runs));
    for (int lane = 0; lane < 16; ++lane)
        to.units[lane] = units[lane * lane_elements<C>] * (CodeBytes<C>::unit * p.out->bias);
    int further = 0;
    while (any != 0) {
        if (++further > DigitStep::most - DigitStep::first) return false;
        const F more_f32x16 = f_set(exp2i(8 * further - 1));
        any = 0;
        for (std::int64_t k = 0; k < step; k += 16) {
            const F rest = f_take_digits<C>(f_mul(f_load(left + k), more_f32x16), further, digits, k);
            any = m_or(any, _mm512_cmp_ps_mask(rest, zero, _CMP_NEQ_UQ));
        }
    }
    to.further = static_cast<std::uint8_t>(further);
    to.count = static_cast<std::uint8_t>(to.thirds == 0 && further == 0 ? 2 : DigitStep::first + further);
    if (further > 0) {
        put_digits<C>(digits, further, times, to.digits + DigitStep::first, to.offsets[1], p.run,
                      to.runs + DigitStep::first);
        to.smaller = exp2i(1 - 8 * further);
    }
    return true;
}

template <class C>
static bool pack_digits(const PackDigits& p) {
    constexpr std::int64_t step = row_step(CodeBytes<C>::packed);
    int least = 0, most = 0;
    for (std::int64_t s = 0; s < p.steps; ++s) {
        const int exponent = exponent_of(largest_bits<step>(p.x + s * step));
        if (exponent > 100) return false;  // infinities and NaN, too
        if (exponent < -126) continue;
        least = exponent < least ? exponent : least;
        most = exponent > most ? exponent : most;
    }
    // Sums times E4M3 scales, without the scales' bias or with it, stay within float32's range: the least digit there
    // is, 2^-51 of its step's largest, by the least scale that is not subnormal; and the largest by 2^20 codes of 127.
    p.out->bias = p.scale_type == ScaleType::e4m3 && least >= -20 && most <= 17 ? exp2i(73) : 1.0F;
    for (std::int64_t s = 0; s < p.steps; ++s)
        if (!pack_step<C>(p, s)) return false;
    return true;
}
