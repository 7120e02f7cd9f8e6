// SPDX-License-Identifier: Apache-2.0
//
// What kernels/integer_packing.inl.hpp is written over, with AVX-512.

/// out[j][r] = word j of row r, of 64 bytes of sixteen rows.
static void transpose_words(const std::uint8_t* const* rows, std::uint32_t* out) {
    __m512i row[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) row[r] = _mm512_loadu_si512(rows[r]);
    transpose_16x16(row);
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) _mm512_store_si512(out + 16 * j, row[j]);
}

/// The integers of sixteen words of packed codes: of even k, then of odd k.
template <bool HasZero>
BRECCIA_INLINE void unpack_words(const std::uint32_t* words, const std::uint8_t* integers, const std::uint8_t* zeros,
                                 std::uint8_t* out) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(integers)));
    const __m512i bytes = _mm512_load_si512(words);
    const auto look_up = [&](__m512i nibbles) BRECCIA_INLINE_LAMBDA {
        const __m512i of = _mm512_shuffle_epi8(table, _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
        if constexpr (!HasZero) return of;
        return _mm512_sub_epi8(of, _mm512_load_si512(zeros));
    };
    _mm512_storeu_si512(out, look_up(bytes));
    _mm512_storeu_si512(out + 64, look_up(_mm512_srli_epi16(bytes, 4)));
}
