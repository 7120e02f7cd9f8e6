// SPDX-License-Identifier: Apache-2.0
//
// Up to 16 activations by groups of 16 weight rows, a row to each lane: codes are decoded into the registers that the
// products read, and a pair of an activation's elements is broadcast from memory. Decoding takes other ports than the
// products do, so it costs next to nothing as soon as a few activations share it.
//
// A doubleword of codes is 4 of a row (8 where they are packed) and makes `parts` pairs of bfloat16: part p holds the
// codes p and p + parts.

template <CodeKind Kind>
inline constexpr int lane_parts = Kind == CodeKind::nibbles ? 4 : 2;

/// Differences of code and zero point, modulo 64.
struct DifferenceTable {
    alignas(64) std::uint16_t words[64];
    constexpr DifferenceTable() : words() {
        for (int i = 0; i < 64; ++i)
            words[i] = to_bfloat16(static_cast<float>(i <= 15 - lowest_zero_point ? i : i - 64)).bits;
    }
};
inline constexpr DifferenceTable difference_table{};

/// Decodes a doubleword of codes of 16 rows. `Zero`: less their blocks' zero points.
template <CodeKind Kind, bool Zero>
struct LaneDecoder {
    I table = i_set(0), upper_table = i_set(0);
    I zero_points = i_set(0);  ///< of the block, one in every byte of a row's doubleword
    const ByteTables* bytes;   ///< read where they are: registers are for sums

    BRECCIA_INLINE_MEMBER explicit LaneDecoder(const CodeTables& tables) : bytes(tables.bytes) {
        if constexpr (Zero) {
            table = _mm512_load_si512(difference_table.words);
            upper_table = _mm512_load_si512(difference_table.words + 32);
        } else if constexpr (Kind == CodeKind::nibbles) {
            table = tables.nibbles->of(0);
        }
    }
    BRECCIA_INLINE_MEMBER void start_block([[maybe_unused]] const std::byte* of_rows,
                                           [[maybe_unused]] std::int64_t block) {
        if constexpr (!Zero) return;
        const I rows = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
        const I byte = _mm512_add_epi8(rows, _mm512_set1_epi8(static_cast<char>(block % 4)));
        zero_points = _mm512_shuffle_epi8(_mm512_loadu_si512(of_rows + block / 4 * 64), byte);
    }
    BRECCIA_INLINE_MEMBER void decode(I codes, I (&pairs)[lane_parts<Kind>]) const {
        if constexpr (Zero) {
            const I nibble = _mm512_set1_epi8(15);
            const I even = _mm512_sub_epi8(_mm512_and_si512(codes, nibble), zero_points);
            const I odd = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble), zero_points);
            const auto look_up = [&](I index) BRECCIA_INLINE_LAMBDA {
                return _mm512_permutex2var_epi16(table, index, upper_table);
            };
            pairs[0] = look_up(even);
            pairs[1] = look_up(odd);
            pairs[2] = look_up(_mm512_srli_epi16(even, 8));
            pairs[3] = look_up(_mm512_srli_epi16(odd, 8));
        } else if constexpr (Kind == CodeKind::nibbles) {
            pairs[0] = _mm512_permutexvar_epi16(codes, table);
            pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table);
            pairs[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table);
            pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table);
        } else {
            const ByteHalves value = ByteLookup<Kind>(bytes).halves(codes);
            const I low_bytes = _mm512_set1_epi16(0x00FF);
            constexpr int a_selects_b_else_c = 0xCA;
            pairs[0] =
                _mm512_ternarylogic_epi32(low_bytes, value.low, _mm512_slli_epi16(value.high, 8), a_selects_b_else_c);
            pairs[1] =
                _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(value.low, 8), value.high, a_selects_b_else_c);
        }
    }
};

/// Quads as they lie.
struct InterleavedCodes {
    const std::uint8_t* codes;
};

BRECCIA_INLINE void load_quad(const InterleavedCodes& from, std::int64_t quad, I (&codes)[4]) {
    constexpr std::int64_t ahead = 4096;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        codes[i] = _mm512_loadu_si512(from.codes + quad * 256 + i * 64);
        _mm_prefetch(from.codes + quad * 256 + i * 64 + ahead, _MM_HINT_T0);
    }
}

/// Quads of 16 rows apart, 64 bytes of each at a time. Turning them is cut in halves, one of which is done a line
/// ahead, and both are spread over the quads of a line: they are to run beside the products.
struct CodesInRows {
    const std::uint8_t* codes;
    std::int64_t row_stride, row_bytes, last_row;
    I (&lines)[2][4][4];  ///< [line][quad][i]: 16 bytes of each of the rows i, 4 + i, 8 + i, 12 + i
};

/// A line of rows i, 4 + i, 8 + i, 12 + i; of the next group it is asked for. Rows past the last repeat it.
BRECCIA_INLINE void fetch_lines(const CodesInRows& from, std::int64_t line, std::int64_t i) {
    const __mmask64 in_row = first_bytes(from.row_bytes - line * 64);
    I row[4], t[4];
#pragma GCC unroll 4
    for (std::int64_t q = 0; q < 4; ++q) {
        const std::int64_t r = 4 * q + i;
        const std::uint8_t* p = from.codes + line * 64 + (r < from.last_row ? r : from.last_row) * from.row_stride;
        row[q] = _mm512_maskz_loadu_epi8(in_row, p);
        _mm_prefetch(p + 16 * from.row_stride, _MM_HINT_T1);
    }
    t[0] = _mm512_shuffle_i32x4(row[0], row[1], 0b01'00'01'00);
    t[1] = _mm512_shuffle_i32x4(row[0], row[1], 0b11'10'11'10);
    t[2] = _mm512_shuffle_i32x4(row[2], row[3], 0b01'00'01'00);
    t[3] = _mm512_shuffle_i32x4(row[2], row[3], 0b11'10'11'10);
    I(&to)[4][4] = from.lines[line % 2];
    to[0][i] = _mm512_shuffle_i32x4(t[0], t[2], 0b10'00'10'00);
    to[1][i] = _mm512_shuffle_i32x4(t[0], t[2], 0b11'01'11'01);
    to[2][i] = _mm512_shuffle_i32x4(t[1], t[3], 0b10'00'10'00);
    to[3][i] = _mm512_shuffle_i32x4(t[1], t[3], 0b11'01'11'01);
}

BRECCIA_INLINE void load_quad(const CodesInRows& from, std::int64_t quad, I (&codes)[4]) {
    const std::int64_t line = quad / 4;
    if (quad == 0)
        for (std::int64_t i = 0; i < 4; ++i) fetch_lines(from, 0, i);
    if ((line + 1) * 64 < from.row_bytes) fetch_lines(from, line + 1, quad % 4);
    const I(&rows)[4] = from.lines[line % 2][quad % 4];
    const I t[4] = {_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[0], rows[1]),
                    _mm512_unpacklo_epi32(rows[2], rows[3]), _mm512_unpackhi_epi32(rows[2], rows[3])};
    codes[0] = _mm512_unpacklo_epi64(t[0], t[2]);
    codes[1] = _mm512_unpackhi_epi64(t[0], t[2]);
    codes[2] = _mm512_unpacklo_epi64(t[1], t[3]);
    codes[3] = _mm512_unpackhi_epi64(t[1], t[3]);
}

/// A group's codes, however they lie. (Kernels of their own for either would be twice the code.)
struct LaneCodes {
    InterleavedCodes interleaved;
    CodesInRows in_rows;
    bool are_interleaved;
};

BRECCIA_INLINE void load_quad(const LaneCodes& from, std::int64_t quad, I (&codes)[4]) {
    from.are_interleaved ? load_quad(from.interleaved, quad, codes) : load_quad(from.in_rows, quad, codes);
}

/// Scales of a block for 16 rows that lie four codes to a doubleword, turned to where a float32 has its fields: E4M3
/// without its bias.
template <ScaleType Type>
BRECCIA_INLINE F lane_scale_bits(const std::byte* scales, std::int64_t block) {
    constexpr bool e8m0 = Type == ScaleType::e8m0;
    const I codes = _mm512_loadu_si512(scales + block / 4 * 64);
    const I turned = _mm512_rolv_epi32(codes, i_set(static_cast<int>((e8m0 ? 23 : 20) - block % 4 * 8)));
    return as_float(i_and(turned, i_set(e8m0 ? 0x7F80'0000 : 0x07F0'0000)));
}

BRECCIA_INLINE F lane_scales(const std::byte* scales, ScaleType type, std::int64_t block) {
    if (type == ScaleType::float32) return f_load(reinterpret_cast<const float*>(scales) + block * 16);
    if (type == ScaleType::e8m0) return lane_scale_bits<ScaleType::e8m0>(scales, block);
    return f_mul(lane_scale_bits<ScaleType::e4m3>(scales, block), f_set(e4m3_bias));
}

/// c += w x for a pair of one activation's elements and those of 16 rows.
BRECCIA_INLINE F lane_dot(F sum, I pairs, const std::uint16_t* x) {
    std::int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return f_dot_pairs(sum, pairs, _mm512_set1_epi32(pair));
}

/// What a group of rows takes from its blocks.
struct LaneBlockValues {
    const std::byte *scales, *zero_points;
};

/// The sums of a group of rows, in registers as long as these suffice for them and for the sums of a block.
template <int Vectors, bool InRegisters>
struct LaneTotals {
    F values[InRegisters ? Vectors : 1];
    float* out;

    BRECCIA_INLINE_MEMBER void clear() {
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v)
            if constexpr (InRegisters)
                values[v] = f_set(0.0F);
            else
                f_store(out + v * 16, f_set(0.0F));
    }
    BRECCIA_INLINE_MEMBER void add_scaled(int v, F sum, F scale) {
        if constexpr (InRegisters)
            values[v] = f_multiply_add(sum, scale, values[v]);
        else
            f_store(out + v * 16, f_multiply_add(sum, scale, f_load(out + v * 16)));
    }
    BRECCIA_INLINE_MEMBER void store() const {
        if constexpr (InRegisters)
#pragma GCC unroll 16
            for (int v = 0; v < Vectors; ++v) f_store(out + v * 16, values[v]);
    }
    /// The same after store() has written before: so many sums on top of one another lose less than one long one.
    BRECCIA_INLINE_MEMBER void add_to_stored() const {
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) f_store(out + v * 16, f_add(f_load(out + v * 16), values[v]));
    }
};

/// Blocks of many elements: the sums of all activations go on at once, as several chains where these are few.
template <CodeKind Kind, int Vectors, bool Zero>
BRECCIA_INLINE void lane_group_long(const LaneProduct& g, const CodeTables& tables, const LaneCodes& source,
                                    const LaneBlockValues& of, float* out) {
    constexpr int parts = lane_parts<Kind>, chains = Vectors <= 3 ? 4 : Vectors <= 6 ? 2 : 1;
    LaneDecoder<Kind, Zero> decoder(tables);
    LaneTotals<Vectors, (Vectors <= 8)> totals{.values = {}, .out = out};
    totals.clear();
    const std::uint16_t* x = g.x;
    const float* x_scales = g.x_scales;
    for (std::int64_t quad = 0, block = 0; quad < g.quads; block += g.scale_step) {
        decoder.start_block(of.zero_points, block);
        F sum_f32x16[Vectors][chains];
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 4
            for (int s = 0; s < chains; ++s) sum_f32x16[v][s] = f_set(0.0F);
        const std::int64_t end = quad + g.block_quads < g.quads ? quad + g.block_quads : g.quads;
        for (; quad < end; ++quad) {
            I codes[4];
            load_quad(source, quad, codes);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                I pairs[parts];
                decoder.decode(codes[i], pairs);
#pragma GCC unroll 4
                for (int p = 0; p < parts; ++p, x += 2 * Vectors)
#pragma GCC unroll 16
                    for (int v = 0; v < Vectors; ++v) {
                        F& sum = sum_f32x16[v][(i * parts + p) % chains];
                        sum = lane_dot(sum, pairs[p], x + 2 * v);
                    }
            }
        }
        const F scale_f32x16 = lane_scales(of.scales, g.scale_type, block);
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) {
            F sum = sum_f32x16[v][0];
            if constexpr (chains == 2) sum = f_add(sum, sum_f32x16[v][1]);
            if constexpr (chains == 4)
                sum = f_add(f_add(sum, sum_f32x16[v][1]), f_add(sum_f32x16[v][2], sum_f32x16[v][3]));
            if (x_scales != nullptr) sum = f_mul(sum, f_set(x_scales[v]));
            totals.add_scaled(v, sum, scale_f32x16);
        }
        if (x_scales != nullptr) x_scales += Vectors;
    }
    totals.store();
}

/// Blocks of 16, 32 or 64: the codes of 16 elements are decoded at a time, then one activation follows another. Sums
/// of 1024 elements are added up on their own.
template <CodeKind Kind, int Vectors, bool Zero>
BRECCIA_INLINE void lane_group_short(const LaneProduct& g, const CodeTables& tables, const LaneCodes& source,
                                     const LaneBlockValues& of, float* out) {
    constexpr int parts = lane_parts<Kind>, in_unit = 8 / parts, units = 4 / in_unit, chains = Vectors <= 3 ? 2 : 1;
    LaneDecoder<Kind, Zero> decoder(tables);
    LaneTotals<Vectors, true> totals{.values = {}, .out = out};
    constexpr std::int64_t quads_at_once = 64 / units;  // 1024 elements
    const std::uint16_t* x = g.x;
    std::int64_t end = 0;
    for (std::int64_t quad = 0; quad < g.quads; ++quad) {
        if (quad == end) {
            if (end == quads_at_once) totals.store();
            if (end > quads_at_once) totals.add_to_stored();
            totals.clear();
            end += quads_at_once;
        }
        I codes[4];
        load_quad(source, quad, codes);
#pragma GCC unroll 2
        for (int u = 0; u < units; ++u, x += 16 * Vectors) {
            const std::int64_t block = (quad * units + u) >> g.block_shift;
            decoder.start_block(of.zero_points, block);
            I pairs[in_unit][parts];
#pragma GCC unroll 4
            for (int i = 0; i < in_unit; ++i) decoder.decode(codes[u * in_unit + i], pairs[i]);
            const F scale_f32x16 = lane_scales(of.scales, g.scale_type, block);
            const auto products = [&](const float* x_scales) BRECCIA_INLINE_LAMBDA {
#pragma GCC unroll 16
                for (int v = 0; v < Vectors; ++v) {
                    F sum_f32x16[chains];
#pragma GCC unroll 2
                    for (int s = 0; s < chains; ++s) sum_f32x16[s] = f_set(0.0F);
#pragma GCC unroll 8
                    for (int p = 0; p < 8; ++p)
                        sum_f32x16[p % chains] =
                            lane_dot(sum_f32x16[p % chains], pairs[p / parts][p % parts], x + 2 * (p * Vectors + v));
                    if constexpr (chains == 2) sum_f32x16[0] = f_add(sum_f32x16[0], sum_f32x16[1]);
                    if (x_scales != nullptr) sum_f32x16[0] = f_mul(sum_f32x16[0], f_set(x_scales[v]));
                    totals.add_scaled(v, sum_f32x16[0], scale_f32x16);
                }
            };
            if (g.x_scales != nullptr)
                products(g.x_scales + block * Vectors);
            else
                products(nullptr);
        }
    }
    end > quads_at_once ? totals.add_to_stored() : totals.store();
}

template <CodeKind Kind, int Vectors, bool Short, bool Zero>
static void lane_groups(const LaneProduct& g, const CodeTables& tables) {
    LaneBlockValues of{.scales = g.scales, .zero_points = g.zero_points};
    float* out = g.out;
    I lines[2][4][4];
    for (std::int64_t row = 0; row < g.rows; row += 16, out += Vectors * 16) {
        const LaneCodes source{.interleaved = {.codes = g.codes + row / 16 * g.quads * 256},
                               .in_rows = {.codes = g.codes + row * g.row_stride,
                                           .row_stride = g.row_stride,
                                           .row_bytes = g.row_bytes,
                                           .last_row = (g.rows - row < 16 ? g.rows - row : 16) - 1,
                                           .lines = lines},
                               .are_interleaved = g.interleaved};
        if constexpr (Short)
            lane_group_short<Kind, Vectors, Zero>(g, tables, source, of, out);
        else
            lane_group_long<Kind, Vectors, Zero>(g, tables, source, of, out);
        of.scales += g.group_scale_stride;
        if constexpr (Zero) of.zero_points += g.group_zero_stride;
    }
}

template <CodeKind Kind, int Vectors, bool Zero>
static void lane_groups_of(const LaneProduct& g, const CodeTables& tables) {
    g.block_quads == 0 ? lane_groups<Kind, Vectors, true, Zero>(g, tables)
                       : lane_groups<Kind, Vectors, false, Zero>(g, tables);
}

template <CodeKind Kind, bool Zero>
static void lane_product_of(const LaneProduct& g, const CodeTables& tables) {
    switch (g.vectors) {
        case 1: return lane_groups_of<Kind, 1, Zero>(g, tables);
        case 2: return lane_groups_of<Kind, 2, Zero>(g, tables);
        case 3: return lane_groups_of<Kind, 3, Zero>(g, tables);
        case 4: return lane_groups_of<Kind, 4, Zero>(g, tables);
        case 8: return lane_groups_of<Kind, 8, Zero>(g, tables);
        default: return lane_groups_of<Kind, 16, Zero>(g, tables);
    }
}

template <class C>
static void lane_product(const LaneProduct& g) {
    if constexpr (may_have_zero_points<C>)
        if (g.zero_points != nullptr) return lane_product_of<CodeKind::nibbles, true>(g, {});
    lane_product_of<code_kind<C>, false>(g, code_tables<C>);
}

/// Activations for a lane_product, rounded to nearest. Returns what pack_bf16 does.
static bool pack_lanes(const PackLanes& p) {
    alignas(64) static constexpr std::uint16_t orders[4][32] = {
        {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
         16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31},
        {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,  13, 10, 14, 11, 15,
         16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31},
        {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
         16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31},
        {0,  1,  8,  9,  2,  3,  10, 11, 4,  5,  12, 13, 6,  7,  14, 15,
         16, 17, 24, 25, 18, 19, 26, 27, 20, 21, 28, 29, 22, 23, 30, 31}};
    static_assert(static_cast<int>(PairOrder::bytes) == 0 && static_cast<int>(PairOrder::runs) == 3);
    const I order = _mm512_load_si512(orders[static_cast<int>(p.order)]);
    const __mmask16 lane = first_lanes(p.rows);
    PanelRange range;
    for (std::int64_t k = 0; k < p.k; k += 32) {
        I row[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            row[i] = i_set(0);
            if (i >= p.rows) continue;
            const float* from = p.x + i * p.x_stride + k;
            const F first = load_checked(range, from, p.k - k), second = load_checked(range, from + 16, p.k - k - 16);
            row[i] = _mm512_permutexvar_epi16(order, f_round_pair(first, second));
        }
        std::uint16_t* out = p.out + k * p.vectors;
        if (p.vectors == 1) {
            _mm512_storeu_si512(out, row[0]);
            continue;
        }
        transpose_16x16(row);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_mask_storeu_epi32(out + i * 2 * p.vectors, lane, row[i]);
    }
    return range.outside == 0;
}
