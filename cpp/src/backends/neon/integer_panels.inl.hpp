// SPDX-License-Identifier: Apache-2.0
//
// What kernels/integer_panels.inl.hpp is written over: sdot adds up four products of signed bytes, which the integers
// of 4-bit codes are, too.

inline constexpr PanelHeights panel_heights = {4, 0, 0};
inline constexpr bool panel_codes_are_signed = false;
inline constexpr std::int64_t long_run = 4096;  // steps, whose sums of bytes 32 bits hold
inline constexpr int panel_byte_offset = 0, panel_byte_elements = 4, panel_byte_stride = 64;
inline constexpr bool packed_starts_are_words = false;
inline constexpr std::int64_t packed_run = long_run;

struct NibblePanelWords {
    BRECCIA_INLINE_MEMBER static I begin(std::int32_t start) { return i_set(start); }
    BRECCIA_INLINE_MEMBER static void add(I& sum, I codes, I by) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            sum.q[v] = vdotq_s32(sum.q[v], vreinterpretq_s8_s32(codes.q[v]), vreinterpretq_s8_s32(by.q[v]));
    }
    BRECCIA_INLINE_MEMBER static F end(I sum, std::int32_t /*start*/) { return each<F, vcvtq_f32_s32>(sum); }
};
using BytePanelWords = NibblePanelWords;

BRECCIA_INLINE void put_bytes(const std::uint32_t* words, std::uint8_t* out) { __builtin_memcpy(out, words, 64); }

/// out[j][r] = word j of row r, of 64 bytes of sixteen rows.
static void transpose_words(const std::uint8_t* const* rows, std::uint32_t* out) {
    for (int r = 0; r < 16; ++r)
        for (int j = 0; j < 16; ++j) __builtin_memcpy(out + 16 * j + r, rows[r] + 4 * j, 4);
}

/// The integers of sixteen words of packed codes: of even k, then of odd k.
template <bool HasZero>
BRECCIA_INLINE void unpack_words(const std::uint32_t* words, const std::uint8_t* integers, const std::uint8_t* zeros,
                                 std::uint8_t* out) {
    const uint8x16_t table = vld1q_u8(integers);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
        const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const std::uint8_t*>(words) + 16 * v);
        const auto look_up = [&](uint8x16_t nibbles) BRECCIA_INLINE_LAMBDA {
            const uint8x16_t of = vqtbl1q_u8(table, nibbles);
            if constexpr (!HasZero) return of;
            return vsubq_u8(of, vld1q_u8(zeros + 16 * v));
        };
        vst1q_u8(out + 16 * v, look_up(vandq_u8(bytes, vdupq_n_u8(15))));
        vst1q_u8(out + 64 + 16 * v, look_up(vshrq_n_u8(bytes, 4)));
    }
}
