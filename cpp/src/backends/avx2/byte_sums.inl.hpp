// SPDX-License-Identifier: Apache-2.0
//
// Rows of INT8 codes by an activation that is such codes; a part of integer_rows.inl.hpp. With VNNI a weight's codes
// are bytes from zero up, `byte_sums_offset` too large, and the activation's are as DigitStep has them. Without it the
// sign of a weight's code goes over to the activation's, which must not be -128; where one is, both are words.

BRECCIA_INLINE __m256i digits_of_half(const std::int8_t* digits, int half) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(digits) + half);
}
BRECCIA_INLINE __m256i codes_of_half(const std::uint8_t* codes, int half) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + half);
}
#ifdef BRECCIA_DPBUSD
inline constexpr int byte_sums_offset = 128;
inline constexpr bool byte_sums_know_symmetric = false;
BRECCIA_INLINE void prepare_byte_step(DigitStep& /*step*/) {}
BRECCIA_INLINE __m256i sums_of_half(const std::uint8_t* codes, const DigitStep& step, int half) {
    return BRECCIA_DPBUSD(_mm256_load_si256(reinterpret_cast<const __m256i*>(step.offsets[0]) + half),
                          _mm256_xor_si256(codes_of_half(codes, half), _mm256_set1_epi8(-128)),
                          digits_of_half(step.digits[0], half));
}
#else
inline constexpr int byte_sums_offset = 0;
inline constexpr bool byte_sums_know_symmetric = true;
/// The codes as words, and behind them as they are.
BRECCIA_INLINE void prepare_byte_step(DigitStep& step) {
    for (int i = 0; i < 64; ++i) step.digits[1][i] = step.digits[0][i];
    for (int i = 0; i < 64; i += 16)
        _mm256_store_si256(reinterpret_cast<__m256i*>(step.digits[0] + 2 * i),
                           _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(step.digits[1] + i))));
}
BRECCIA_INLINE __m256i sums_of_half(const std::uint8_t* codes, const DigitStep& step, int half) {
    const __m256i bytes = codes_of_half(codes, half);
    const __m256i words =  // of at most 2 * 128 * 127
        _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(digits_of_half(step.digits[1], half), bytes));
    return _mm256_madd_epi16(words, _mm256_set1_epi16(1));
}
BRECCIA_INLINE __m256i sums_of_quarter(const std::uint8_t* codes, const DigitStep& step, int quarter) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + quarter);
    return _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes),
                             _mm256_load_si256(reinterpret_cast<const __m256i*>(step.digits[0]) + quarter));
}
#endif
template <int PerStep>
BRECCIA_INLINE __m256 scales_of_byte_half(const float* scales, int half) {
    if constexpr (PerStep != 4) return _mm256_broadcast_ss(scales + PerStep * half / 2);
    return _mm256_blend_ps(_mm256_broadcast_ss(scales + 2 * half), _mm256_broadcast_ss(scales + 2 * half + 1), 0xF0);
}
/// `Symmetric`: Digits::symmetric.
template <bool Symmetric>
struct ByteSums {
    __m256 total_f32x8[2] = {};  ///< of parts in turn, so that none waits for the one before

    BRECCIA_INLINE_MEMBER float total() const { return sum_of(_mm256_add_ps(total_f32x8[0], total_f32x8[1])); }
    BRECCIA_INLINE_MEMBER void add_part(int part, __m256i sum, __m256 scale_f32x8) {
        total_f32x8[part % 2] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale_f32x8, total_f32x8[part % 2]);
    }
    /// A step; see byte_rows.
    template <bool OneUnit, int PerStep>
    BRECCIA_INLINE_MEMBER void add(const std::uint8_t* codes, const DigitStep& step, const float* scales) {
#ifndef BRECCIA_DPBUSD
        if constexpr (!Symmetric) {
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                __m256 scale_f32x8 = _mm256_broadcast_ss(scales + PerStep * part / 4);
                if constexpr (!OneUnit)
                    scale_f32x8 = _mm256_mul_ps(_mm256_broadcast_ss(step.units + 4 * part), scale_f32x8);
                add_part(part, sums_of_quarter(codes, step, part), scale_f32x8);
            }
            return;
        }
#endif
        if constexpr (OneUnit && PerStep == 0)
            return add_part(0, _mm256_add_epi32(sums_of_half(codes, step, 0), sums_of_half(codes, step, 1)),
                            _mm256_broadcast_ss(scales));
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            __m256 scale_f32x8 = scales_of_byte_half<PerStep>(scales, half);
            if constexpr (!OneUnit) scale_f32x8 = _mm256_mul_ps(_mm256_loadu_ps(step.units + 8 * half), scale_f32x8);
            add_part(half, sums_of_half(codes, step, half), scale_f32x8);
        }
    }
};
