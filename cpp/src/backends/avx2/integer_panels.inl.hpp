// SPDX-License-Identifier: Apache-2.0
//
// What kernels/integer_panels.inl.hpp is written over. With VNNI vpdpbusd adds up four products of bytes. Without it
// vpmaddubsw adds up two to a word, which has room for a short unit's sums of 4-bit codes; bytes are words, of which
// vpmaddwd takes two.

inline constexpr PanelHeights panel_heights = {4, 0, 0};
inline constexpr bool panel_codes_are_signed = false;
inline constexpr std::int64_t long_run = 4096;  // steps, whose sums of bytes 32 bits hold

BRECCIA_INLINE F f_of_integers(I x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }

#ifdef BRECCIA_DPBUSD

inline constexpr int panel_byte_offset = 128, panel_byte_elements = 4, panel_byte_stride = 64;
inline constexpr bool packed_starts_are_words = false;
inline constexpr std::int64_t packed_run = long_run;

struct NibblePanelWords {
    BRECCIA_INLINE_MEMBER static I begin(std::int32_t start) { return i_set(start); }
    BRECCIA_INLINE_MEMBER static void add(I& sum, I codes, I by) {
        sum = {BRECCIA_DPBUSD(sum.lo, codes.lo, by.lo), BRECCIA_DPBUSD(sum.hi, codes.hi, by.hi)};
    }
    BRECCIA_INLINE_MEMBER static F end(I sum, std::int32_t /*start*/) { return f_of_integers(sum); }
};
using BytePanelWords = NibblePanelWords;

BRECCIA_INLINE void put_bytes(const std::uint32_t* words, std::uint8_t* out) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
        const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(words) + v);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + v, _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)));
    }
}

#else

inline constexpr int panel_byte_offset = 0, panel_byte_elements = 2, panel_byte_stride = 128;
/// Less what offsets add too much, words hold values of up to 15 by INT8 codes of so many steps, two of each; what they
/// hold before may wrap. (To begin with it is slower: gcc keeps fewer sums in registers.)
inline constexpr bool packed_starts_are_words = true;
inline constexpr std::int64_t packed_run = 8;
static_assert(15 * 128 * 2 * packed_run < 32768);

struct NibblePanelWords {
    BRECCIA_INLINE_MEMBER static I begin(std::int32_t /*start*/) { return i_set(0); }
    BRECCIA_INLINE_MEMBER static void add(I& sum, I codes, I by) {
        sum = {_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(codes.lo, by.lo)),
               _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(codes.hi, by.hi))};
    }
    BRECCIA_INLINE_MEMBER static F end(I sum, std::int32_t start) {
        const __m256i words = _mm256_set1_epi32(start), one = _mm256_set1_epi16(1);
        return f_of_integers({_mm256_madd_epi16(_mm256_add_epi16(sum.lo, words), one),
                              _mm256_madd_epi16(_mm256_add_epi16(sum.hi, words), one)});
    }
};
struct BytePanelWords {
    BRECCIA_INLINE_MEMBER static I begin(std::int32_t start) { return i_set(start); }
    BRECCIA_INLINE_MEMBER static void add(I& sum, I codes, I by) {
        sum = i_add(sum, {_mm256_madd_epi16(codes.lo, by.lo), _mm256_madd_epi16(codes.hi, by.hi)});
    }
    BRECCIA_INLINE_MEMBER static F end(I sum, std::int32_t /*start*/) { return f_of_integers(sum); }
};

/// Words of the elements 0 and 1 of sixteen rows, then of 2 and 3.
BRECCIA_INLINE void put_bytes(const std::uint32_t* words, std::uint8_t* out) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
        const auto* from = reinterpret_cast<const __m128i*>(words) + 2 * v;
        const __m256 a = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_load_si128(from)));
        const __m256 b = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_load_si128(from + 1)));
        const auto in_order = [](__m256 x) BRECCIA_INLINE_LAMBDA {
            return _mm256_permute4x64_epi64(_mm256_castps_si256(x), 0b11'01'10'00);
        };
        auto* to = reinterpret_cast<__m256i*>(out) + v;
        _mm256_storeu_si256(to, in_order(_mm256_shuffle_ps(a, b, 0b10'00'10'00)));
        _mm256_storeu_si256(to + 2, in_order(_mm256_shuffle_ps(a, b, 0b11'01'11'01)));
    }
}

#endif

/// Eight words of eight rows, turned.
BRECCIA_INLINE void transpose_8x8(const std::uint8_t* const* rows, std::int64_t at, std::uint32_t* out) {
    __m256 x[8], t[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + at));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0b01'00'01'00);
        x[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0b11'10'11'10);
        x[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0b01'00'01'00);
        x[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0b11'10'11'10);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm256_store_ps(reinterpret_cast<float*>(out + 16 * i), _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_store_ps(reinterpret_cast<float*>(out + 16 * (i + 4)), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
}
/// out[j][r] = word j of row r, of 64 bytes of sixteen rows.
static void transpose_words(const std::uint8_t* const* rows, std::uint32_t* out) {
    for (int r = 0; r < 16; r += 8)
        for (int j = 0; j < 16; j += 8) transpose_8x8(rows + r, 4 * j, out + 16 * j + r);
}

/// The integers of sixteen words of packed codes: of even k, then of odd k.
template <bool HasZero>
BRECCIA_INLINE void unpack_words(const std::uint32_t* words, const std::uint8_t* integers, const std::uint8_t* zeros,
                                 std::uint8_t* out) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(integers)));
    const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
        const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(words) + v);
        const auto look_up = [&](__m256i nibbles) BRECCIA_INLINE_LAMBDA {
            const __m256i of = _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, nibble));
            if constexpr (!HasZero) return of;
            return _mm256_sub_epi8(of, _mm256_load_si256(reinterpret_cast<const __m256i*>(zeros) + v));
        };
        auto* to = reinterpret_cast<__m256i*>(out) + v;
        _mm256_storeu_si256(to, look_up(bytes));
        _mm256_storeu_si256(to + 2, look_up(_mm256_srli_epi16(bytes, 4)));
    }
}
