// SPDX-License-Identifier: Apache-2.0
//
// 32 by 16 floats to 16 by 32 bfloat16 numbers: rounded by pairs of rows eight apart, so that three rounds of unpacking
// within quarters and one of quarters put 32 of them side by side.

static void transpose_32x16(const float* in, std::int64_t in_stride, std::uint16_t* out, std::int64_t out_stride) {
    const auto row_of = [](int i) { return i % 8 + i / 8 * 16; };  // the lower half of a[i]; rows to the upper: 8
    I a[16], b[16], smallest = _mm512_set1_epi32(-1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        const float* row = in + row_of(i) * in_stride;
        a[i] = f_round_pair(f_load(row), f_load(row + 8 * in_stride));
        smallest = _mm512_min_epu16(smallest, _mm512_add_epi16(a[i], a[i]));
    }
    if (_mm512_testn_epi16_mask(smallest, smallest) != 0) [[unlikely]]  // a zero: or subnormal, flushed by rounding
        for (int i = 0; i < 16; ++i) {
            const float* row = in + row_of(i) * in_stride;
            std::uint16_t halves[32];
            i_store_words(halves, bfloat16_bits(f_load(row)));
            i_store_words(halves + 16, bfloat16_bits(f_load(row + 8 * in_stride)));
            a[i] = _mm512_loadu_si512(halves);
        }
    // Now of columns c ... c + 3 and, in the second and fourth quarter, c + 8 ... c + 11.
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
            a[i + 2 * c] = _mm512_unpacklo_epi32(b[i + c], b[i + 2 + c]);
            a[i + 2 * c + 1] = _mm512_unpackhi_epi32(b[i + c], b[i + 2 + c]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 8)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            b[i + 2 * c] = _mm512_unpacklo_epi64(a[i + c], a[i + 4 + c]);
            b[i + 2 * c + 1] = _mm512_unpackhi_epi64(a[i + c], a[i + 4 + c]);
        }
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
        _mm512_storeu_si512(out + c * out_stride, _mm512_shuffle_i32x4(b[c], b[8 + c], 0b10'00'10'00));
        _mm512_storeu_si512(out + (c + 8) * out_stride, _mm512_shuffle_i32x4(b[c], b[8 + c], 0b11'01'11'01));
    }
}
