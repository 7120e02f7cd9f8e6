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
    BRECCIA_INLINE_MEMBER static I begin(std::int32_t start) { return i_set(start); }
    BRECCIA_INLINE_MEMBER static void add(I& sum, I codes, I by) { sum = _mm512_dpbusd_epi32(sum, codes, by); }
    BRECCIA_INLINE_MEMBER static F end(I sum, std::int32_t /*start*/) { return _mm512_cvtepi32_ps(sum); }
};
using BytePanelWords = NibblePanelWords;

BRECCIA_INLINE void put_bytes(const std::uint32_t* words, std::uint8_t* out) {
    _mm512_storeu_si512(out, _mm512_xor_si512(_mm512_load_si512(words), _mm512_set1_epi8(-128)));
}

#include "backends/avx512/integer_packing.inl.hpp"
