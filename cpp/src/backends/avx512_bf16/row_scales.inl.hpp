// SPDX-License-Identifier: Apache-2.0
//
// Rows of codes that are read in place, and their scales.

/// What E4M3's exponent and fraction lack in the place of a float's.
constexpr float e4m3_bias = exp2i(120);

/// Whether the next four rows of codes may come to the first-level cache while four are read, beside these and an
/// activation of so many bytes; else they come to the second-level one. (Of 48 KiB, K = 4096, FP8: 26 to 28 GB/s; K =
/// 8192 lost 7 % so.)
BRECCIA_INLINE bool next_rows_fit(const CodeRows& w, std::int64_t activation_bytes) {
    constexpr std::int64_t rest = 4 * 1024;
    return 8 * w.row_stride + activation_bytes <= w.first_level_cache - rest;
}

/// Rows are too short for the hardware to learn: the next ones are asked for. `to`: from `next` to each of them.
template <int Rows>
BRECCIA_INLINE void prefetch_rows(const std::uint8_t* next, const std::int64_t (&to)[Rows], bool near) {
    if (near) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) _mm_prefetch(next + to[r], _MM_HINT_T0);
    } else {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) _mm_prefetch(next + to[r], _MM_HINT_T1);
    }
}

/// `n` scales as float32.
static void convert_scales(const std::byte* from, ScaleType type, std::int64_t n, float* out) {
    const std::int64_t size = is_coded(type) ? 1 : static_cast<std::int64_t>(size_of(static_cast<DType>(type)));
    for (std::int64_t i = 0; i < n; i += 16) {
        const std::int64_t rest = n - i < 16 ? n - i : 16;
        const Mask lane = first_lanes(rest);
        const std::byte* p = from + i * size;
        I bits = i_set(0);
        if (is_coded(type)) {
            const I code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lane, p));
            if (type == ScaleType::e8m0) {
                bits = _mm512_slli_epi32(code, 23);
                bits = i_select(_mm512_cmpeq_epi32_mask(code, i_set(0)), i_set(0x0040'0000), bits);  // 2^-127
                bits = i_select(_mm512_cmpeq_epi32_mask(code, i_set(255)), i_set(0x7FC0'0000), bits);
            } else {
                const I magnitude = i_and(code, i_set(127));
                const F value = f_mul(as_float(_mm512_slli_epi32(magnitude, 20)), f_set(e4m3_bias));
                bits = i_select(_mm512_cmpeq_epi32_mask(magnitude, i_set(127)), i_set(0x7FC0'0000), as_bits(value));
                bits = i_or(bits, _mm512_slli_epi32(i_and(code, i_set(128)), 24));
            }
        } else if (type == ScaleType::float16) {
            bits = as_bits(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane, p)));
        } else if (type == ScaleType::bfloat16) {
            bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lane, p)), 16);
        } else if (type == ScaleType::float64) {
            const __m256 low = _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(static_cast<__mmask8>(lane), p));
            const __m256 high = _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(static_cast<__mmask8>(lane >> 8), p + 64));
            bits = as_bits(_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
        } else {
            bits = _mm512_maskz_loadu_epi32(lane, p);
        }
        _mm512_mask_storeu_ps(out + i, lane, as_float(bits));
    }
}

/// The same; where they are that already, they are used in place.
static const float* row_scales(const std::byte* from, ScaleType type, std::int64_t n, float* out) {
    if (type == ScaleType::float32 && reinterpret_cast<std::uintptr_t>(from) % alignof(float) == 0)
        return reinterpret_cast<const float*>(from);
    convert_scales(from, type, n, out);
    return out;
}
