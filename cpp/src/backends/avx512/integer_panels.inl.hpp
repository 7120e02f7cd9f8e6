// SPDX-License-Identifier: Apache-2.0
//
// What kernels/integer_panels.inl.hpp is written over, with VNNI: vpdpbusd adds up four products of bytes. Sums and
// totals of twelve activations stay in registers.

inline constexpr PanelHeights panel_heights = {12, 8, 4};
inline constexpr bool panel_codes_are_signed = false;
inline constexpr std::int64_t long_run = 4096;  // steps, whose sums of bytes 32 bits hold
inline constexpr int panel_byte_offset = 128, panel_byte_elements = 4, panel_byte_stride = 64;
inline constexpr bool packed_starts_are_words = false;
inline constexpr std::int64_t packed_run = long_run;

struct NibblePanelWords {
    static constexpr int vectors = 1, steps_at_once = 4;
    using Floats = __m512;
    using Sums = __m512i;
    using Codes = __m512i;
    BRECCIA_INLINE_MEMBER static Floats none() { return _mm512_setzero_ps(); }
    BRECCIA_INLINE_MEMBER static Floats load(const float* p, int /*v*/) { return _mm512_loadu_ps(p); }
    BRECCIA_INLINE_MEMBER static Floats times(Floats x, const float* by) {
        return _mm512_mul_ps(x, _mm512_set1_ps(*by));
    }
    BRECCIA_INLINE_MEMBER static void multiply_add(Floats& to, Floats a, Floats b) { to = _mm512_fmadd_ps(a, b, to); }
    BRECCIA_INLINE_MEMBER static void store(float* p, int /*v*/, Floats x) { _mm512_storeu_ps(p, x); }
    BRECCIA_INLINE_MEMBER static Codes read(const std::uint8_t* p, int /*v*/) { return _mm512_loadu_si512(p); }
    BRECCIA_INLINE_MEMBER static __m512i broadcast(const void* four_bytes) {
        std::int32_t word;
        __builtin_memcpy(&word, four_bytes, sizeof word);
        return _mm512_set1_epi32(word);
    }
    BRECCIA_INLINE_MEMBER static Sums begin(const std::int32_t* start) { return broadcast(start); }
    BRECCIA_INLINE_MEMBER static void add(Sums& sum, Codes codes, __m512i by) {
        sum = _mm512_dpbusd_epi32(sum, codes, by);
    }
    BRECCIA_INLINE_MEMBER static Floats end(Sums sum, const std::int32_t* /*start*/) { return _mm512_cvtepi32_ps(sum); }
};
using BytePanelWords = NibblePanelWords;

BRECCIA_INLINE void put_bytes(const std::uint32_t* words, std::uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_xor_si512(_mm512_load_si512(words), _mm512_set1_epi8(-128)));
}

#include "backends/avx512/integer_packing.inl.hpp"
