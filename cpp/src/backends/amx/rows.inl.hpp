// SPDX-License-Identifier: Apache-2.0
//
// Up to 16 activations by rows of codes in place. A step is a cache line of codes of each of 16 rows. While the tiles
// multiply one step, the next is decoded: a line becomes as many lines of tiles as it holds codes to a doubleword and
// two, in whatever order of k costs least; activations are packed in that order. Sums leave their tiles before the
// first product of the next block and are scaled, row by row, between the rows that are decoded.

/// Products of 32 float16 numbers.
BRECCIA_INLINE I h_mul(I a, I b) {
    return _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b)));
}

// Tile numbers must be literals. Sums: 0, 1. Weights: 2, 4, 6. Activations: 3, 5, 7: a tile that a product still reads
// is not loaded, so that three pairs take turns.
BRECCIA_INLINE void configure_row_tiles(std::int64_t vectors) {
    TileConfig config = tile_config;
    for (const int tile : {0, 1, 3, 5, 7}) config.bytes_per_row[tile] = static_cast<std::uint16_t>(4 * vectors);
    tile_memory_barrier();
    _tile_loadconfig(&config);
}

/// A block's scale multiplies the sums of several steps, or of one tile; or the codes, or is added to their exponents.
enum class RowScaling : std::uint8_t { steps, tile, codes, exponents };

constexpr bool into_codes(RowScaling s) { return s == RowScaling::codes || s == RowScaling::exponents; }

// Codes as words, twice, so that a stray bit above an index does no harm.
struct WordTable {
    alignas(64) std::uint16_t words[32];
};
// 2^8 times the codes, for E4M3 scales whose bits are read as float16: those are 2^-8 as large.
template <class C>
inline constexpr WordTable float16_table = [] {
    WordTable table{};
    for (int i = 0; i < 32; ++i) table.words[i] = to_float16(C::decode(static_cast<std::uint8_t>(i & 15)) * 256).bits;
    return table;
}();

// 2^120 times the codes in bfloat16, all zeros positive. What is subtracted from the exponent leaves zeros alone, as
// it saturates.
constexpr int high_exponent = 120;
template <class C>
inline constexpr WordTable high_table = [] {
    WordTable table{};
    for (int i = 0; i < 32; ++i) {
        const float value = C::decode(static_cast<std::uint8_t>(i & 15));
        if (value != 0) table.words[i] = to_bfloat16(value * exp2i(high_exponent)).bits;
    }
    return table;
}();

template <CodeKind Kind>
inline constexpr int tiles_of_line = Kind == CodeKind::nibbles ? 4 : 2;

/// The tables of a format, and what its codes are looked up in where scales go into them.
struct RowTables {
    CodeTables codes;
    const WordTable* scaled = nullptr;
};

/// What a kernel is made for besides the codes: how their scales apply, whether they have zero points, and whether the
/// activations are codes with scales of their own.
template <RowScaling S, bool Z, bool X>
struct RowOptions {
    static constexpr RowScaling scaling = S;
    static constexpr bool zero_points = Z, x_scales = X;
};

/// A line of codes; where tiles are blocks, in the order that leaves the first 32 elements to one tile, see
/// decode_bytes.
template <RowScaling Scaling>
BRECCIA_INLINE I load_line(const std::uint8_t* codes) {
    const I line = _mm512_loadu_si512(codes);
    if constexpr (Scaling != RowScaling::tile) return line;
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), line);
}

/// One line of each tile.
template <CodeKind Kind, RowScaling Scaling>
struct RowDecoder {
    ByteLookup<Kind> look_up;
    I table, scale_of_byte;
    __mmask16 scales_of_line;

    BRECCIA_INLINE_MEMBER RowDecoder(const TileRows& g, const RowTables& tables) : look_up(tables.codes.bytes) {
        table = i_set(0);
        scale_of_byte = i_set(0);
        scales_of_line = 0;
        if constexpr (into_codes(Scaling)) {
            table = _mm512_load_si512(tables.scaled->words);
            scales_of_line = first_lanes(row_step(true) >> g.code_block_shift);
            // A doubleword holds 8 codes.
            const I lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const I scale = _mm512_srl_epi32(lane, _mm_cvtsi32_si128(g.code_block_shift - 3));
            scale_of_byte = _mm512_mullo_epi32(scale, i_set(0x0101'0101));
        } else if constexpr (Kind == CodeKind::nibbles) {
            table = tables.codes.nibbles->of(0);
        }
    }

    /// The codes of scales that words of codes take, in the upper halves of words.
    BRECCIA_INLINE_MEMBER I scale_words(const std::uint8_t* scales) const {
        const I line = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(scales_of_line, scales));
        return _mm512_maskz_permutexvar_epi8(0xAAAA'AAAA'AAAA'AAAA, scale_of_byte, line);
    }

    /// `scales`: of packed codes that are scaled. `words`: of those that are not.
    BRECCIA_INLINE_MEMBER void decode(I codes, [[maybe_unused]] const std::uint8_t* scales, [[maybe_unused]] I words,
                                      std::uint8_t* out) const {
        if constexpr (Scaling == RowScaling::codes) {
            // Exact in float16: at most six bits, 2^-10 ... 2^12. Shifted right by three, the exponent is bfloat16's
            // less 112.
            const I scale_f16x32 = _mm512_srli_epi16(scale_words(scales), 1);
            const I sign_and_rest = _mm512_set1_epi16(static_cast<short>(0x8FFF));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const I code = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), table);
                const I product = _mm512_srai_epi16(h_mul(code, scale_f16x32), 3);
                _mm512_store_si512(out + i * 1024, _mm512_and_si512(product, sign_and_rest));
            }
        } else if constexpr (Scaling == RowScaling::exponents) {
            constexpr short highest = (127 + high_exponent) << 7;
            const I less = _mm512_sub_epi16(_mm512_set1_epi16(highest), _mm512_srli_epi16(scale_words(scales), 1));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const I code = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), table);
                _mm512_store_si512(out + i * 1024, _mm512_subs_epu16(code, less));
            }
        } else if constexpr (Kind == CodeKind::nibbles) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                _mm512_store_si512(out + i * 1024, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * i), words));
        } else {
            const BF16x64 value = decode_bytes(codes, look_up);
            _mm512_store_si512(out, value.first);
            _mm512_store_si512(out + 1024, value.second);
        }
    }
};

/// The products of one step; sums of the block before leave first.
template <CodeKind Kind, RowScaling Scaling, bool First>
BRECCIA_INLINE void multiply_line(const TileRows& g, const std::uint8_t* w, const std::uint16_t* x,
                                  float (&sums)[2][256]) {
    // Pairs of the parts take turns, or follow one another.
    constexpr std::int64_t parts = Scaling == RowScaling::tile ? 1 : tiles_of_line<Kind>;
    const std::int64_t x_bytes = 4 * parts * g.vectors, x_tile = (parts == 1 ? 32 : 2) * g.vectors;
    tile_memory_barrier();
    _tile_loadd(2, w, 64);
    _tile_loadd(3, x, x_bytes);
    begin_sums<First, 0>(sums[0]);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(4, w + 1024, 64);
    _tile_loadd(5, x + x_tile, x_bytes);
    begin_sums<First, 1>(sums[1]);
    _tile_dpbf16ps(1, 4, 5);
    if constexpr (Kind == CodeKind::nibbles) {
        _tile_loadd(6, w + 2048, 64);
        _tile_loadd(7, x + 2 * x_tile, x_bytes);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(2, w + 3072, 64);
        _tile_loadd(3, x + 3 * x_tile, x_bytes);
        _tile_dpbf16ps(1, 2, 3);
    }
    tile_memory_barrier();
}

/// Row r of a block's sums, times its scales, added to the total.
template <class Options>
BRECCIA_INLINE F add_block(F total, const float (&sums)[2][256], int r, [[maybe_unused]] const float* scales,
                           [[maybe_unused]] F x_scale) {
    const F first_f32x16 = f_load(sums[0] + r * 16), second_f32x16 = f_load(sums[1] + r * 16);
    if constexpr (Options::scaling == RowScaling::tile) {
        const F scale_f32x16 = f_set(scales[0]), next_scale_f32x16 = f_set(scales[1]);
        if constexpr (!Options::x_scales)
            return f_multiply_add(second_f32x16, next_scale_f32x16, f_multiply_add(first_f32x16, scale_f32x16, total));
        const F both_f32x16 = f_multiply_add(second_f32x16, next_scale_f32x16, f_mul(first_f32x16, scale_f32x16));
        return f_multiply_add(both_f32x16, x_scale, total);
    } else {
        const F both_f32x16 = f_add(first_f32x16, second_f32x16);
        if constexpr (into_codes(Options::scaling))
            return Options::x_scales ? f_multiply_add(both_f32x16, x_scale, total) : f_add(total, both_f32x16);
        const F scale_f32x16 = Options::x_scales ? f_mul(f_set(scales[0]), x_scale) : f_set(scales[0]);
        return f_multiply_add(both_f32x16, scale_f32x16, total);
    }
}

template <CodeKind Kind, class Options>
static void multiply_16_rows(const TileRows& g, const RowTables& tables, std::int64_t row) {
    constexpr RowScaling scaling = Options::scaling;
    constexpr std::int64_t line = 64, step_k = Kind == CodeKind::nibbles ? 128 : 64;
    // Steps from decoding to multiplying: with two, tiles do not wait for the stores of their lines, which pays where
    // decoding is short.
    constexpr std::int64_t ahead = scaling == RowScaling::exponents ? 2 : 1;
    alignas(64) std::uint8_t lines[ahead + 1][tiles_of_line<Kind> * 1024], edge[16 * line] = {};
    constexpr std::int64_t most_scales = step_k / 16;  // of a line
    std::uint8_t scale_edge[16 * most_scales] = {};
    alignas(64) float sums[2][256] = {}, tile_scales[16][16] = {};
    const RowDecoder<Kind, scaling> decoder(g, tables);
    const std::int64_t steps = (g.row_bytes + line - 1) / line;
    const std::int64_t rows = g.rows - row < 16 ? g.rows - row : 16;
    const std::uint8_t* codes = g.codes + row * g.row_stride;
    const float* scales = g.scales + row * g.scale_stride;
    [[maybe_unused]] const std::uint8_t* scale_codes = g.scale_codes + row * g.scale_code_stride;
    F total_f32x16[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) total_f32x16[r] = f_set(0.0F);

    // Where the 16 rows' scales of a block lie: those of tiles are read 16 at a time.
    constexpr bool of_tiles = scaling == RowScaling::tile;
    const std::int64_t scale_stride = of_tiles ? 16 : g.scale_stride;
    const auto scales_of_block = [&](std::int64_t first) BRECCIA_INLINE_LAMBDA -> const float* {
        if constexpr (!of_tiles) return scales + first;
        if (first % 16 == 0) {
            const std::int64_t left = g.scales_of_row - first;
            const Mask inside = first_lanes(left < 16 ? left : 16);
            for (std::int64_t r = 0; r < rows; ++r) {
                if (g.scale_codes == nullptr) {
                    f_store(tile_scales[r], _mm512_maskz_loadu_ps(inside, scales + r * g.scale_stride + first));
                    continue;
                }
                const __m128i e8m0 = _mm_maskz_loadu_epi8(inside, scale_codes + r * g.scale_code_stride + first);
                f_store(tile_scales[r], f_decode<Float8E8M0FNU>(_mm512_cvtepu8_epi32(e8m0)));
            }
        }
        return tile_scales[0] + first % 16;
    };

    // Decodes a step, and meanwhile adds up the sums of a block.
    const auto decode = [&]<bool Add>(std::int64_t step, const float* block_scales, F x_scale) BRECCIA_INLINE_LAMBDA {
        const std::uint8_t* from = codes + step * line;
        std::int64_t stride = g.row_stride;
        const std::uint8_t* from_scales = nullptr;
        std::int64_t code_stride = 0;
        if constexpr (into_codes(scaling)) {
            from_scales = scale_codes + (step * step_k >> g.code_block_shift);
            code_stride = g.scale_code_stride;
        }
        // Hardware prefetches along rows, but not the beginnings of the next ones, if there are any.
        _mm_prefetch(codes + (16 + step % 16) * stride + step / 16 * line, _MM_HINT_T1);
        if (rows < 16 || (step + 1) * line > g.row_bytes) {
            const std::int64_t bytes = g.row_bytes - step * line;
            const __mmask64 inside = first_bytes(bytes);
            for (std::int64_t r = 0; r < rows; ++r)
                _mm512_store_si512(edge + r * line, _mm512_maskz_loadu_epi8(inside, from + r * stride));
            from = edge;
            stride = line;
            if constexpr (into_codes(scaling)) {
                const std::int64_t codes_left = bytes < line ? 2 * bytes : step_k;
                const std::int64_t count =
                    (codes_left + (std::int64_t{1} << g.code_block_shift) - 1) >> g.code_block_shift;
                for (std::int64_t r = 0; r < rows; ++r)
                    for (std::int64_t i = 0; i < count; ++i)
                        scale_edge[r * most_scales + i] = from_scales[r * code_stride + i];
                from_scales = scale_edge;
                code_stride = most_scales;
            }
        }
        [[maybe_unused]] const std::uint8_t* zero_points = nullptr;
        if constexpr (Options::zero_points)
            zero_points = g.zero_points + row * g.scale_stride + step / (g.block_steps * g.blocks_per_scale) * 16;
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r, from += stride, from_scales += code_stride) {
            I words = decoder.table;
            if constexpr (Options::zero_points) words = tables.codes.nibbles->of(zero_points[r]);
            decoder.decode(load_line<scaling>(from), from_scales, words, lines[step % (ahead + 1)] + r * line);
            if constexpr (Add)
                total_f32x16[r] =
                    add_block<Options>(total_f32x16[r], sums, r, block_scales + r * scale_stride, x_scale);
        }
    };
    const F none = f_set(0.0F);
    const std::uint16_t* x = g.x;
    const float* x_scales = g.x_scales;
    const auto next_x_scale = [&]() BRECCIA_INLINE_LAMBDA {
        if constexpr (!Options::x_scales) return none;
        const F x_scale = f_load(x_scales);
        x_scales += 16;
        return x_scale;
    };
    // Decoding stands at two places, not more: each is code for 16 rows.
    std::int64_t scale = 0, blocks = 0, left = 0;
    for (std::int64_t step = -ahead; step < steps; ++step) {
        bool add = false;
        if (step >= 0) {
            const std::uint8_t* w = lines[step % (ahead + 1)];
            if (left > 0) {
                multiply_line<Kind, scaling, false>(g, w, x, sums);
            } else {
                multiply_line<Kind, scaling, true>(g, w, x, sums);
                left = g.block_steps;
                add = step > 0;
            }
            --left;
            x += step_k * g.vectors;
        }
        const bool more = step + ahead < steps;
        if (!add) {
            if (more) decode.template operator()<false>(step + ahead, nullptr, none);
            continue;
        }
        const F x_scale = next_x_scale();
        const float* block_scales = scales_of_block(scale);
        if (more) {
            decode.template operator()<true>(step + ahead, block_scales, x_scale);
        } else {
#pragma GCC unroll 16
            for (int r = 0; r < 16; ++r)
                total_f32x16[r] =
                    add_block<Options>(total_f32x16[r], sums, r, block_scales + r * scale_stride, x_scale);
        }
        if (++blocks == g.blocks_per_scale) {
            blocks = 0;
            scale += scaling == RowScaling::tile ? 2 : 1;
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    tile_memory_barrier();
    const F x_scale = next_x_scale();
    const float* block_scales = scales_of_block(scale);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r)
        f_store(g.out + (row + r) * 16,
                add_block<Options>(total_f32x16[r], sums, r, block_scales + r * scale_stride, x_scale));
}

template <CodeKind Kind, class Options>
static void multiply_rows(const TileRows& g, const RowTables& tables) {
    for (std::int64_t row = 0; row < g.rows; row += 16) multiply_16_rows<Kind, Options>(g, tables, row);
}

template <CodeKind Kind, RowScaling Scaling>
static void multiply_rows(const TileRows& g, const RowTables& tables) {
    if constexpr (Kind == CodeKind::nibbles && Scaling == RowScaling::steps)
        if (g.zero_points != nullptr)
            return g.x_scales != nullptr ? multiply_rows<Kind, RowOptions<Scaling, true, true>>(g, tables)
                                         : multiply_rows<Kind, RowOptions<Scaling, true, false>>(g, tables);
    g.x_scales != nullptr ? multiply_rows<Kind, RowOptions<Scaling, false, true>>(g, tables)
                          : multiply_rows<Kind, RowOptions<Scaling, false, false>>(g, tables);
}

template <class C>
static void multiply_rows_in_place(const TileRows& g) {
    configure_row_tiles(g.vectors);
    constexpr CodeKind kind = code_kind<C>;
    constexpr CodeTables codes = code_tables<C>;
    if constexpr (kind == CodeKind::nibbles) {
        if (g.code_block_shift == 0)
            multiply_rows<kind, RowScaling::steps>(g, {.codes = codes});
        else if (g.scale_type == ScaleType::e8m0)
            multiply_rows<kind, RowScaling::exponents>(g, {.codes = codes, .scaled = &high_table<C>});
        else
            multiply_rows<kind, RowScaling::codes>(g, {.codes = codes, .scaled = &float16_table<C>});
    } else {
        g.tile_scales ? multiply_rows<kind, RowScaling::tile>(g, {.codes = codes})
                      : multiply_rows<kind, RowScaling::steps>(g, {.codes = codes});
    }
    release_tiles();
}
