// SPDX-License-Identifier: Apache-2.0
//
// Sixteen weight rows as integers side by side, a word of 32 bits of each, ready for many activations that are INT8
// codes. Included after what a backend names for it.

/// How codes become integers.
struct PanelCodes {
    alignas(16) std::uint8_t integer[16];  ///< of packed codes
    float unit;
    PanelIntegers integers;
};

template <class C, bool HasZero>
inline constexpr PanelCodes panel_codes = [] {
    constexpr float unit = C::decode(1);
    PanelCodes of{.integer = {}, .unit = unit, .integers = {}};
    if constexpr (C::bits == 4) {
        // Values, less their zero points too, are -15 … 15.
        static_assert(-C::lowest <= 15 * unit && C::max <= 15 * unit);
        const int offset = panel_codes_are_signed ? 0 : HasZero ? 15 : static_cast<int>(-C::lowest / unit);
        for (int i = 0; i < 16; ++i) {
            const auto value = static_cast<int>(C::decode(static_cast<std::uint8_t>(i)) / unit);
            of.integer[i] = static_cast<std::uint8_t>(value + offset);
        }
        of.integers = {.offset = offset, .starts_are_words = packed_starts_are_words, .most_run = packed_run};
    } else {
        of.integers = {.offset = panel_byte_offset, .most_run = long_run};
    }
    return of;
}();

/// Bytes ahead of a row's codes that are asked for: sixteen streams are too many for the processor to follow.
inline constexpr std::int64_t panel_ahead = 512;

/// Calls put(word, words) for each word of 32 bits of `bytes` of sixteen rows, side by side; the last row again for
/// those that are missing.
template <class Put>
BRECCIA_INLINE void for_each_word(const CodeRows& w, std::int64_t bytes, Put put) {
    alignas(64) std::uint8_t last[16][64];
    alignas(64) std::uint32_t turned[16 * 16];
    const std::uint8_t* rows[16];
    for (int r = 0; r < 16; ++r) rows[r] = w.codes + (r < w.rows ? r : w.rows - 1) * w.row_stride;
    for (std::int64_t at = 0; at < bytes; at += 64) {
        if (at + 64 > bytes) {
            for (int r = 0; r < 16; ++r) {
                for (std::int64_t i = 0; i < 64; ++i) last[r][i] = at + i < bytes ? rows[r][i] : 0;
                rows[r] = last[r];
            }
        }
        transpose_words(rows, turned);
        for (const std::uint8_t*& row : rows) {
            row += 64;
            prefetch(row + panel_ahead);
        }
        for (int j = 0; j < 16; ++j) put(at / 4 + j, turned + j * 16);
    }
}

/// Sixteen rows of packed codes.
template <bool HasZero>
static void pack_packed_integers(const PackIntegers& p, const PanelCodes& of) {
    const CodeRows& w = p.w;
    const std::int64_t bytes = (w.k + 1) / 2, block_words = w.block >= w.k ? bytes : w.block / 8;
    alignas(64) std::uint8_t zeros[64];
    const std::uint8_t* zero_points[16];
    if constexpr (HasZero)
        for (int r = 0; r < 16; ++r)
            zero_points[r] = w.zero_points + w.scale_row_of(r < w.rows ? r : w.rows - 1) * w.zero_row_stride;
    std::uint8_t* out = p.out;
    std::int64_t zeros_of = -1;
    for_each_word(w, bytes, [&](std::int64_t word, const std::uint32_t* words) BRECCIA_INLINE_LAMBDA {
        if constexpr (HasZero) {
            const std::int64_t block = word / block_words;
            if (block != zeros_of && word * 8 < w.k) {
                zeros_of = block;
                for (int i = 0; i < 64; ++i) zeros[i] = zero_points[i / 4][block];
            }
        }
        unpack_words<HasZero>(words, of.integer, zeros, out);
        out += 128;
    });
}

/// Sixteen rows of INT8 codes.
static void pack_byte_integers(const PackIntegers& p) {
    std::uint8_t* out = p.out;
    for_each_word(p.w, p.w.k, [&](std::int64_t, const std::uint32_t* words) BRECCIA_INLINE_LAMBDA {
        put_bytes(words, out);
        out += panel_byte_stride;
    });
}

template <class C>
static void pack_integers(const PackIntegers& p) {
    if constexpr (C::bits == 8)
        pack_byte_integers(p);
    else if (p.w.zero_points != nullptr)
        pack_packed_integers<true>(p, panel_codes<C, true>);
    else
        pack_packed_integers<false>(p, panel_codes<C, false>);
}

template <class C>
concept PanelCodec = C::bits == 4 || std::is_same_v<C, Int8>;

template <class C>
static consteval IntegerPanelKernel panel_kernel(void (*multiply)(const IntegerPanel&), int elements) {
    return {.pack = pack_integers<C>,
            .multiply = multiply,
            .elements = elements,
            .unit = panel_codes<C, false>.unit,
            .plain = panel_codes<C, false>.integers,
            .with_zero_points = panel_codes<C, true>.integers};
}
