// SPDX-License-Identifier: Apache-2.0
//
// 16 by 16 words of 32 bits: four rounds of pairwise exchanges, of 1, 2, 4 and 8 columns.

BRECCIA_INLINE void transpose_16x16(I (&row)[16]) {
    I t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        row[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        row[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        row[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        row[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // row[4 g + c] now holds, in quarter q, column 4 q + c of rows 4 g ... 4 g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        t[c] = _mm512_shuffle_i32x4(row[c], row[4 + c], 0b10'00'10'00);
        t[4 + c] = _mm512_shuffle_i32x4(row[c], row[4 + c], 0b11'01'11'01);
        t[8 + c] = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0b10'00'10'00);
        t[12 + c] = _mm512_shuffle_i32x4(row[8 + c], row[12 + c], 0b11'01'11'01);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        row[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0b10'00'10'00);
        row[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0b11'01'11'01);
        row[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0b10'00'10'00);
        row[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0b11'01'11'01);
    }
}

[[maybe_unused]] static void transpose_16x16(const float* in, std::int64_t in_stride, float* out,
                                             std::int64_t out_stride) {
    I row[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) row[i] = _mm512_loadu_si512(in + i * in_stride);
    transpose_16x16(row);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_stride, row[i]);
}
