// SPDX-License-Identifier: Apache-2.0
//
// One activation by a weight read in place, in integers: codes are bytes from zero up, the activation is a sum of
// signed bytes (Digits), and vpdpbusd adds up four products a lane. What the codes are too large by is in the sums'
// first value. A step's sum is exact; it becomes a float once and takes its scale.

/// One to a step or to several, or several to a step: as floats, or as codes that become floats by a shift.
enum class RowScales : std::uint8_t { one, floats, e4m3, e8m0 };

/// Bytes of a step's scales that are codes: of blocks of 16 packed elements, or of 32.
template <bool Packed, RowScales Scales>
inline constexpr int scale_bytes = Scales == RowScales::e4m3 ? 8
                                   : Packed                  ? 4
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

/// Which of a step's `per_step` scales each lane takes; of codes, the byte that comes to its highest, above zeros.
template <RowScales Scales>
BRECCIA_INLINE I scales_of_lanes(int per_step) {
    const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I scale = _mm512_srli_epi32(_mm512_mullo_epi32(lane, i_set(per_step)), 4);
    if constexpr (Scales != RowScales::e4m3 && Scales != RowScales::e8m0) return scale;
    return i_or(_mm512_slli_epi32(scale, 24), i_set(0x0080'8080));
}

/// The scales of a row's step, lane by lane.
template <bool Packed, RowScales Scales>
BRECCIA_INLINE F step_scale(const std::byte* at, I scale_of_lane) {
    if constexpr (Scales == RowScales::one) {
        float scale;
        __builtin_memcpy(&scale, at, sizeof scale);
        return f_set(scale);
    } else if constexpr (Scales == RowScales::floats) {
        return _mm512_permutexvar_ps(scale_of_lane,
                                     _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(at))));
    } else {
        constexpr int width = scale_bytes<Packed, Scales>;
        long long word = 0;
        __builtin_memcpy(&word, at, width);
        const I all = width == 8 ? _mm512_set1_epi64(word) : i_set(static_cast<int>(word));
        constexpr int to_exponent = Scales == RowScales::e4m3 ? 4 : 1;
        return as_float(_mm512_srli_epi32(_mm512_shuffle_epi8(all, scale_of_lane), to_exponent));
    }
}

/// Four rows, the last one again where there are fewer. Their addresses are distances from the first's, so that the
/// loop does with the registers there are.
template <ByteReading Reading, RowScales Scales, bool HasZero>
static void integer_rows(const IntegerGemv& g, const CodeBytes& of_codes, bool near, std::int64_t first, float* out) {
    const ByteReader<Reading> reader(of_codes);
    constexpr bool packed = is_packed(Reading);
    constexpr int rows = 4, vectors = packed ? 2 : 1;
    constexpr bool coded = Scales == RowScales::e4m3 || Scales == RowScales::e8m0;
    constexpr std::int64_t step_codes = row_step(packed);
    const CodeRows& w = g.w;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block, bytes = packed ? (w.k + 1) / 2 : w.k;
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
    I scale_of_lane = scales_of_lanes<Scales>(static_cast<int>(per_step));
    const auto scale_at = [&](const std::byte* at)
                              BRECCIA_INLINE_LAMBDA { return step_scale<packed, Scales>(at, scale_of_lane); };

    const DigitStep* step = g.x->steps;
    const auto by_digits = [&]<int Count>(const std::uint8_t* next) BRECCIA_INLINE_LAMBDA {
        constexpr int first_digits = Count < DigitStep::first ? Count : DigitStep::first;
        I offsets = i_load(step->offsets[0]);
        F unit_f32x16 = f_load(step->units);
        if constexpr (Count == 2) {
            offsets = _mm512_srai_epi32(offsets, 8);
            unit_f32x16 = f_mul(unit_f32x16, f_set(256.0F));
        }
        prefetch_rows(next, codes_to, near);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const auto by_zero_point = [&](I of) BRECCIA_INLINE_LAMBDA {
                if constexpr (!HasZero) return of;
                return _mm512_mullo_epi32(of, i_set(static_cast<std::int8_t>(zeros[zeros_to[r]])));
            };
            I bytes_of[vectors];
            reader.read(_mm512_loadu_si512(codes + codes_to[r]), bytes_of);
            F sum_f32x16 =
                _mm512_cvtepi32_ps(integer_sum<first_digits>(bytes_of, step->digits, by_zero_point(offsets)));
            if constexpr (Count > first_digits) {
                const I small = integer_sum<Count - first_digits>(bytes_of, step->digits + first_digits,
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
                case 1: by_digits.template operator()<1>(next); break;
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
        prefetch_rows(codes + ahead, codes_to, near);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const __mmask64 codes_there = first_bytes(rest), scales_there = first_bytes(scales_left * scale_size);
            _mm512_store_si512(last_codes[r], _mm512_maskz_loadu_epi8(codes_there, codes + codes_to[r]));
            _mm512_store_si512(last_scales[r], _mm512_maskz_loadu_epi8(scales_there, scales + scales_to[r]));
            codes_to[r] = scales_to[r] = r * 64;
        }
        codes = last_codes[0];
        scales = last_scales[0];
        rest = ahead = 0;
    }
    const float end = (Scales == RowScales::e4m3 ? e4m3_bias : 1.0F) / g.x->bias;
    for (int r = 0; r < rows; ++r) out[r] = f_sum(total_f32x16[r]) * end;
}

template <ByteReading Reading, bool HasZero>
static void integer_gemv_of(const IntegerGemv& g, const CodeBytes& of_codes, bool near) {
    constexpr bool packed = is_packed(Reading);
    constexpr bool looked_up = Reading == ByteReading::looked_up_nibbles || Reading == ByteReading::looked_up_bytes;
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
            integer_rows<Reading, RowScales::one, HasZero>(g, of_codes, near, row, sums);
        } else if constexpr (!HasZero) {  // zero points come one to so many steps
            if (looked_up && coded && e8m0)
                integer_rows<Reading, looked_up ? RowScales::e8m0 : RowScales::floats, false>(g, of_codes, near, row,
                                                                                              sums);
            else if (looked_up && packed && coded && e4m3)
                integer_rows<Reading, looked_up && packed ? RowScales::e4m3 : RowScales::floats, false>(
                    g, of_codes, near, row, sums);
            else
                integer_rows<Reading, RowScales::floats, false>(g, of_codes, near, row, sums);
        }
        for (std::int64_t r = 0; r < n; ++r) g.out[row + r] = sums[r];
    }
}

template <class C>
static void integer_gemv(const IntegerGemv& g) {
    constexpr std::int64_t step_bytes = 9 * 64;  // of a DigitStep, what is read where digits are few
    constexpr ByteReading reading = byte_reading<C>;
    constexpr std::int64_t step = row_step(is_packed(reading));
    const bool near = next_rows_fit(g.w, (g.w.k + step - 1) / step * step_bytes);
    if constexpr (may_have_zero_points<C>)
        if (g.w.zero_points != nullptr) return integer_gemv_of<reading, true>(g, code_bytes<C>, near);
    integer_gemv_of<reading, false>(g, code_bytes<C>, near);
}
