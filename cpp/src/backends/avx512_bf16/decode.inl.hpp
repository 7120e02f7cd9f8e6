// SPDX-License-Identifier: Apache-2.0
//
// Codes to bfloat16, exactly, through tables the codec's own decode fills at compile time. Formats of one code per byte
// look up the two bytes of the result apart (vpermi2b: 128 entries, the index's sign bit is ignored); 4-bit formats
// look up words (vpermw: 32 entries, of which 16 repeat, so that one stray bit above the code does no harm).

// Every code of these is exact in bfloat16, zero points -8 ... 15 subtracted.
template <class C>
concept BF16Codec = C::family != CodecFamily::exponent;

/// How codes are looked up. Formats of a kind differ in what their tables hold, which kernels are handed: one kernel
/// does for all of them.
enum class CodeKind : std::uint8_t {
    nibbles,     ///< two codes to a byte
    magnitudes,  ///< bytes whose highest bit is the sign, or whose table knows it
    one_zero,    ///< the same, but 0x80 is NaN
    integers     ///< bytes in two's complement
};

template <class C>
inline constexpr CodeKind code_kind = [] {
    if constexpr (C::bits == 4)
        return CodeKind::nibbles;
    else if constexpr (C::family == CodecFamily::integer)
        return CodeKind::integers;
    else
        return C::bits == 8 && is_nan(C::decode(0x80)) ? CodeKind::one_zero : CodeKind::magnitudes;
}();

struct ByteTables {
    alignas(64) std::uint8_t low[128];
    alignas(64) std::uint8_t high[128];
    std::uint8_t sign;  ///< the bit of a code that is none of an index
};
template <class C>
inline constexpr ByteTables byte_tables = [] {
    ByteTables tables{};
    for (int i = 0; i < 128; ++i) {
        const std::uint16_t bits = to_bfloat16(C::decode(static_cast<std::uint8_t>(i & ((1 << C::bits) - 1)))).bits;
        tables.low[i] = static_cast<std::uint8_t>(bits);
        tables.high[i] = static_cast<std::uint8_t>(bits >> 8);
    }
    tables.sign = C::bits == 8 ? 0x80 : 0;
    return tables;
}();

inline constexpr int lowest_zero_point = -8, highest_zero_point = 15;
struct NibbleTables {
    alignas(64) std::uint16_t words[highest_zero_point - lowest_zero_point + 1][32];

    BRECCIA_INLINE_MEMBER I of(std::uint8_t zero_point) const {
        return _mm512_load_si512(words[static_cast<std::int8_t>(zero_point) - lowest_zero_point]);
    }
};
template <class C>
inline constexpr NibbleTables nibble_tables = [] {
    NibbleTables tables{};
    for (int zero = lowest_zero_point; zero <= highest_zero_point; ++zero)
        for (int i = 0; i < 32; ++i)
            tables.words[zero - lowest_zero_point][i] =
                to_bfloat16(C::decode(static_cast<std::uint8_t>(i & 15)) - static_cast<float>(zero)).bits;
    return tables;
}();

/// The tables of a format: those that its kind reads.
struct CodeTables {
    const NibbleTables* nibbles = nullptr;
    const ByteTables* bytes = nullptr;
};
template <class C>
inline constexpr CodeTables code_tables = [] {
    if constexpr (code_kind<C> == CodeKind::nibbles)
        return CodeTables{.nibbles = &nibble_tables<C>};
    else
        return CodeTables{.bytes = &byte_tables<C>};
}();

/// Unsigned 4-bit codes may have zero points, a byte to each row's block.
template <class C>
inline constexpr bool may_have_zero_points =
    C::bits == 4 && C::family == CodecFamily::integer && C::decode(15) == 15.0F;

BRECCIA_INLINE __mmask64 first_bytes(std::int64_t n) { return n >= 64 ? ~__mmask64{0} : (__mmask64{1} << n) - 1; }

/// The two bytes of 64 bfloat16 numbers apart.
struct ByteHalves {
    I low, high;
};

/// Byte codes through tables.
template <CodeKind Kind>
struct ByteLookup {
    I low[2], high[2], sign;

    BRECCIA_INLINE_MEMBER explicit ByteLookup(const ByteTables* tables) {
        if constexpr (Kind != CodeKind::nibbles) {
            low[0] = _mm512_load_si512(tables->low), low[1] = _mm512_load_si512(tables->low + 64);
            high[0] = _mm512_load_si512(tables->high), high[1] = _mm512_load_si512(tables->high + 64);
            sign = b_set(tables->sign);
        }
    }

    BRECCIA_INLINE_MEMBER ByteHalves halves(I codes) const {
        I index = codes;
        if constexpr (Kind == CodeKind::integers) index = _mm512_abs_epi8(codes);
        constexpr int a_or_b_and_c = 0xF8;
        ByteHalves value{.low = _mm512_permutex2var_epi8(low[0], index, low[1]),
                         .high = _mm512_permutex2var_epi8(high[0], index, high[1])};
        value.high = _mm512_ternarylogic_epi32(value.high, codes, sign, a_or_b_and_c);
        // The code 0x80 is not always minus code 0.
        if constexpr (Kind == CodeKind::integers || Kind == CodeKind::one_zero) {
            constexpr std::uint16_t bits = Kind == CodeKind::integers ? to_bfloat16(-128.0F).bits : 0x7FC0;
            const __mmask64 where =
                Kind == CodeKind::integers ? _mm512_movepi8_mask(index) : _mm512_cmpeq_epi8_mask(codes, b_set(0x80));
            value.low = _mm512_mask_blend_epi8(where, value.low, b_set(bits & 255));
            value.high = _mm512_mask_blend_epi8(where, value.high, b_set(bits >> 8));
        }
        return value;
    }
};

struct BF16x64 {
    I first, second;
};

/// 64 byte codes. `first` takes the lower 8 of every 16, `second` the upper 8.
template <CodeKind Kind>
BRECCIA_INLINE BF16x64 decode_bytes(I codes, const ByteLookup<Kind>& look_up) {
    const ByteHalves value = look_up.halves(codes);
    return {_mm512_unpacklo_epi8(value.low, value.high), _mm512_unpackhi_epi8(value.low, value.high)};
}

// --- panels -------------------------------------------------------------------------------------------------------

/// bfloat16 numbers, none of them subnormal, times a power of two whose exponent comes in their place; the caller has
/// checked the range.
BRECCIA_INLINE I add_exponent(I x, I exponent) {
    // Without signs: neither 0 nor 0xFF00 and more, which are no numbers.
    const I magnitude = _mm512_add_epi16(x, x), one = _mm512_set1_epi16(1);
    const __mmask32 finite_nonzero =
        _mm512_cmplt_epu16_mask(_mm512_sub_epi16(magnitude, one), _mm512_set1_epi16(static_cast<short>(0xFF00 - 1)));
    return _mm512_mask_add_epi16(x, finite_nonzero, x, exponent);
}

/// Blocks: none, of a multiple of 32, or of 16 elements.
enum class ByteScales : std::uint8_t { none, whole, halves };

template <CodeKind Kind, ByteScales Scales>
static void decode_byte_rows(DecodeBF16 d, const ByteTables& tables) {
    // Quarters of the codes are dealt out so that unpacking leaves them in order.
    const I deal = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const ByteLookup<Kind> look_up(&tables);
    for (std::int64_t row = 0; row < d.rows; ++row) {
        const std::uint8_t* codes = d.codes + row * d.row_stride;
        std::uint16_t* out = d.out + row * panel_stride_bf16;
        const std::uint8_t* scales = d.scales + row * d.scale_stride;
        const auto exponent_at = [&](std::int64_t k) BRECCIA_INLINE_LAMBDA {
            const std::uint8_t e8m0 = scales[(d.skip + (k < d.k ? k : d.k - 1)) >> d.block_shift];
            return static_cast<short>((e8m0 - 127) * 128);
        };
        const auto scaled = [&](I words, [[maybe_unused]] std::int64_t k) BRECCIA_INLINE_LAMBDA {
            if constexpr (Scales == ByteScales::none) return words;
            I exponent = _mm512_set1_epi16(exponent_at(k));
            if constexpr (Scales == ByteScales::halves)
                exponent = _mm512_mask_set1_epi16(exponent, 0xFFFF'0000, exponent_at(k + 16));
            return add_exponent(words, exponent);
        };
        const auto put = [&](std::int64_t k, I bytes) BRECCIA_INLINE_LAMBDA {
            const BF16x64 w = decode_bytes(_mm512_permutexvar_epi64(deal, bytes), look_up);
            _mm512_storeu_si512(out + k, scaled(w.first, k));
            _mm512_storeu_si512(out + k + 32, scaled(w.second, k + 32));
        };
        std::int64_t k = 0;
        for (; k + 64 <= d.k; k += 64) put(k, _mm512_loadu_si512(codes + k));
        if (k < d.k) put(k, _mm512_maskz_loadu_epi8(first_bytes(d.k - k), codes + k));
    }
}

/// Calls table(k, both) for what element k and the 31 after it are looked up in, by their codes; and, where `Halves`,
/// by 16 more from the seventeenth on, if `both` tells that there are so many.
template <bool Halves, class TableOf>
BRECCIA_INLINE void decode_nibble_row(const DecodeBF16& d, std::int64_t row, TableOf table) {
    const std::uint8_t* codes = d.codes + row * d.row_stride;
    std::uint16_t* out = d.out + row * panel_stride_bf16;
    // Words take bytes twice, of which odd ones want the high nibble; what is left above the low one does no harm to
    // tables that hold everything twice.
    const I word = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11,
                                    10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const I byte_of_word = _mm512_srli_epi16(word, 1), odd_by_four = _mm512_set1_epi32(4 << 16);
    const I upper_half = _mm512_and_si512(word, _mm512_set1_epi16(16)), nibble = _mm512_set1_epi16(15);
    const auto decode = [&](I bytes, int part, I of) BRECCIA_INLINE_LAMBDA {
        const I at = _mm512_add_epi16(byte_of_word, _mm512_set1_epi16(static_cast<short>(16 * part)));
        I index = _mm512_srlv_epi16(_mm512_permutexvar_epi8(at, bytes), odd_by_four);
        constexpr int a_and_b_or_c = 0xEA;
        if constexpr (Halves) index = _mm512_ternarylogic_epi32(index, nibble, upper_half, a_and_b_or_c);
        return _mm512_permutexvar_epi16(index, of);
    };
    std::int64_t k = 0;
    for (; k + 128 <= d.k; k += 128) {
        const I bytes = _mm512_loadu_si512(codes + k / 2);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part)
            _mm512_storeu_si512(out + k + part * 32, decode(bytes, part, table(k + part * 32, true)));
    }
    if (k == d.k) return;
    // Zeros follow the last code. The last byte of an odd row has a high nibble that may be anything.
    const I bytes = _mm512_maskz_loadu_epi8(first_bytes((d.k - k + 1) / 2), codes + k / 2);
    for (int part = 0; k < (d.k + 63) / 64 * 64; ++part, k += 32) {
        I words = i_set(0);
        if (k < d.k) {
            const __mmask32 inside = k + 32 <= d.k ? ~__mmask32{0} : (__mmask32{1} << (d.k - k)) - 1;
            words = _mm512_maskz_mov_epi16(inside, decode(bytes, part, table(k, k + 16 < d.k)));
        }
        _mm512_storeu_si512(out + k, words);
    }
}

[[maybe_unused]] static void decode_nibble_rows(DecodeBF16 d, const NibbleTables& tables) {
    const I no_zero_point = tables.of(0);
    for (std::int64_t row = 0; row < d.rows; ++row) {
        const std::uint8_t* zero_points = d.zero_points + row * d.zero_stride;
        decode_nibble_row<false>(d, row, [&](std::int64_t k, bool) BRECCIA_INLINE_LAMBDA {
            if (d.zero_points == nullptr) return no_zero_point;
            return tables.of(zero_points[(d.skip + k) >> d.block_shift]);
        });
    }
}

/// The codes times every scale that goes into them.
struct ScaledTables {
    alignas(64) std::uint16_t words[256][16];
};
template <class C, class Scale>
inline constexpr ScaledTables scaled_tables = [] {
    ScaledTables tables{};
    for (int scale = 0; scale < 256; ++scale) {
        if (std::is_same_v<Scale, Float8E8M0FNU> && (scale < 127 - 60 || scale > 127 + 60)) continue;
        const float by = Scale::decode(static_cast<std::uint8_t>(scale));
        for (int i = 0; i < 16; ++i)
            tables.words[scale][i] = to_bfloat16(is_nan(by) ? by : C::decode(static_cast<std::uint8_t>(i)) * by).bits;
    }
    return tables;
}();

/// Halves: blocks of 16, of which a vector holds two.
template <bool Halves>
static void decode_scaled_nibble_rows(DecodeBF16 d, const ScaledTables& tables) {
    for (std::int64_t row = 0; row < d.rows; ++row) {
        const std::uint8_t* scales = d.scales + row * d.scale_stride;
        _mm_prefetch(scales + (d.k >> d.block_shift) + 64, _MM_HINT_T1);  // rows of them are far apart, too
        decode_nibble_row<Halves>(d, row, [&](std::int64_t k, [[maybe_unused]] bool both) BRECCIA_INLINE_LAMBDA {
            const auto table_at = [&](std::int64_t at) BRECCIA_INLINE_LAMBDA {
                const std::uint8_t scale = scales[(d.skip + at) >> d.block_shift];
                return _mm256_load_si256(reinterpret_cast<const __m256i*>(tables.words[scale]));
            };
            const __m256i first = table_at(k);
            if constexpr (!Halves) return _mm512_broadcast_i64x4(first);
            const __m256i second = table_at(both ? k + 16 : k);
            return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
        });
    }
}

[[maybe_unused]] static void decode_scaled_nibble_rows(const DecodeBF16& d, const ScaledTables& tables) {
    d.block_shift == 4 ? decode_scaled_nibble_rows<true>(d, tables) : decode_scaled_nibble_rows<false>(d, tables);
}

template <CodeKind Kind>
static void decode_byte_rows(const DecodeBF16& d, const ByteTables& tables) {
    d.scales == nullptr  ? decode_byte_rows<Kind, ByteScales::none>(d, tables)
    : d.block_shift == 4 ? decode_byte_rows<Kind, ByteScales::halves>(d, tables)
                         : decode_byte_rows<Kind, ByteScales::whole>(d, tables);
}

template <class C>
static void decode_bf16(const DecodeBF16& d) {
    if constexpr (C::bits != 4) {
        decode_byte_rows<code_kind<C>>(d, byte_tables<C>);
    } else if (d.scales == nullptr) {
        decode_nibble_rows(d, nibble_tables<C>);
    } else {
        if constexpr (std::is_same_v<C, Float4E2M1FN>)
            if (d.scale_type == ScaleType::e4m3) return decode_scaled_nibble_rows(d, scaled_tables<C, Float8E4M3FN>);
        decode_scaled_nibble_rows(d, scaled_tables<C, Float8E8M0FNU>);
    }
}
