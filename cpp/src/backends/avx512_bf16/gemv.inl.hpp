// SPDX-License-Identifier: Apache-2.0
//
// A few activations by a weight read in place: rows are dot products along K, codes are decoded in registers, a
// block's sum is multiplied by its scale once. Several rows at a time share the loads of the activations.

/// Decodes through tables: byte codes here, packed ones where they are read.
template <CodeKind Kind>
struct TableDecoder {
    static constexpr bool packed = Kind == CodeKind::nibbles;
    static constexpr bool knows_all = true;  ///< or else some spans are left to tables:
    static constexpr bool is_told = false;   ///< it is told which, instead of noticing them
    static constexpr char filler = 0;        ///< a code that it knows
    ByteLookup<Kind> look_up;
    BRECCIA_INLINE_MEMBER explicit TableDecoder(const CodeTables& of) : look_up(of.bytes) {}
    BRECCIA_INLINE_MEMBER BF16x64 decode(I codes) { return decode_bytes(codes, look_up); }
    BRECCIA_INLINE_MEMBER bool failed() { return false; }
};

/// What is known of a product when compiling.
struct Known {
    int rows = 1;              ///< so many rows at a time
    int vectors = 1;           ///< activations
    bool zero_points = false;  ///< the weight has them
    std::int64_t span = 0;     ///< so many codes between two looks at scales, and whole spans only; or 0
    bool two_blocks = false;   ///< a span is two blocks

    [[nodiscard]] constexpr Known with_rows(int count) const {
        Known changed = *this;
        changed.rows = count;
        return changed;
    }
};

/// Sums of a span of Rows rows by Vectors activations.
template <int Rows, int Vectors>
struct SpanSums {
    F of[Rows][Vectors];
};

/// `count` codes, which are whole steps or the last of their rows, by x, whose activations are padded_k apart. Rows of
/// codes, and those after them at `next`, are addressed by their distances from the first, so that the loop does with
/// the registers there are. `tables`: of packed codes.
template <Known What, class Decoder, int Rows, int Vectors>
BRECCIA_INLINE void add_up_span(Decoder& decoder, const std::uint8_t* codes, const std::uint8_t* next,
                                const std::int64_t (&codes_to)[Rows], const I (&tables)[Rows], std::int64_t count,
                                const std::uint16_t* x, std::int64_t padded_k, bool next_near,
                                SpanSums<Rows, Vectors>& sums) {
    constexpr bool packed = Decoder::packed;
    constexpr std::int64_t step = row_step(packed);
    constexpr int parts = packed ? 4 : 2;
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) sums.of[r][v] = f_set(0.0F);
    const auto one_step = [&](std::int64_t at, auto load) BRECCIA_INLINE_LAMBDA {
        const std::int64_t k = packed ? 2 * at : at;
        prefetch_rows(next + at, codes_to, Vectors == 1 && next_near);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            const I bytes = load(codes + codes_to[r] + at);
            I w[parts];
            if constexpr (packed) {
                w[0] = _mm512_permutexvar_epi16(bytes, tables[r]);
                w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), tables[r]);
                w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), tables[r]);
                w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 12), tables[r]);
            } else {
                const BF16x64 decoded = decoder.decode(bytes);
                w[0] = decoded.first;
                w[1] = decoded.second;
            }
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v)
#pragma GCC unroll 4
                for (int p = 0; p < parts; ++p)
                    sums.of[r][v] = f_dot_pairs(sums.of[r][v], w[p], _mm512_loadu_si512(x + v * padded_k + k + 32 * p));
        }
    };
    const auto load_all = [](const std::uint8_t* p) BRECCIA_INLINE_LAMBDA { return _mm512_loadu_si512(p); };
    if constexpr (What.span > 0) {
#pragma GCC unroll 2
        for (std::int64_t i = 0; i < What.span / step; ++i) one_step(64 * i, load_all);
        return;
    }
    for (; count >= step; count -= step) {
        one_step(0, load_all);
        codes += 64;
        next += 64;
        x += step;
    }
    if (count > 0) {
        const __mmask64 there = first_bytes(packed ? (count + 1) / 2 : count);
        const I filler = b_set(Decoder::filler);  // x is zero there
        one_step(0,
                 [=](const std::uint8_t* p) BRECCIA_INLINE_LAMBDA { return _mm512_mask_loadu_epi8(filler, there, p); });
    }
}

/// Whether a decoder leaves some of a row's codes to tables.
template <class Decoder>
BRECCIA_OUT_OF_LINE bool leaves_some(const std::uint8_t* codes, std::int64_t count) {
    Decoder decoder{{}};
    for (; count > 0; count -= 64, codes += 64)
        decoder.decode(_mm512_mask_loadu_epi8(b_set(Decoder::filler), first_bytes(count), codes));
    return decoder.failed();
}

/// The sums of a row through tables, for spans that another decoder leaves: they are few, and out of the way.
/// (Of sums that it returned gcc 12 would clear the upper half.)
template <int Vectors>
BRECCIA_OUT_OF_LINE void add_up_by_tables(const CodeTables& tables, const std::uint8_t* codes, std::int64_t count,
                                          const std::uint16_t* x, std::int64_t padded_k, SpanSums<1, Vectors>& sums) {
    TableDecoder<CodeKind::magnitudes> decoder{tables};
    const I no_tables[1] = {};
    add_up_span<Known{}>(decoder, codes, codes, {0}, no_tables, count, x, padded_k, true, sums);
}

template <class Decoder, Known What>
static void gemv_rows(const Gemv& g, const CodeTables& of_codes, bool next_near, std::int64_t row) {
    constexpr int rows = What.rows, vectors = What.vectors;
    constexpr bool packed = Decoder::packed;
    constexpr std::int64_t step = row_step(packed);
    const CodeRows& w = g.w;
    const std::int64_t padded_k = (w.k + step - 1) / step * step;
    const std::int64_t blocks = (w.k + w.block - 1) / w.block;
    // A decoder that knows all codes has no use for shorter spans than blocks.
    const std::int64_t of_rows =
        Decoder::knows_all ? (w.block > step ? w.block : step) : row_span(w.block, w.k, packed);
    const std::int64_t span = What.span > 0 ? What.span : of_rows, spans = (w.k + span - 1) / span;
    const std::int64_t per_span = What.two_blocks ? 2 : What.span == 0 && w.block < step ? step / w.block : 1;
    const std::int64_t next_scales = blocks == 1 ? 0 : per_span;

    // In a step, lane i holds codes of one run of 8 (packed) or 16: which scale of the step's that takes.
    const I lane_number = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I in_step =
        packed ? _mm512_slli_epi32(lane_number, 3) : _mm512_slli_epi32(_mm512_srli_epi32(lane_number, 2), 4);
    I scale_index = i_set(0);
    for (std::int64_t i = 1; i < per_span; ++i)
        scale_index = _mm512_mask_add_epi32(
            scale_index, _mm512_cmpge_epi32_mask(in_step, i_set(static_cast<int>(i * w.block))), scale_index, i_set(1));

    const std::uint8_t* codes = w.codes + row * w.row_stride;
    const std::uint8_t* next = codes + rows * w.row_stride;
    const std::int64_t first_scale_row = w.scale_row_of(row);
    const std::uint8_t* zeros = What.zero_points ? w.zero_points + first_scale_row * w.zero_row_stride : nullptr;
    const std::uint8_t* special = Decoder::is_told ? w.special + row / special_rows * spans : nullptr;
    std::uintptr_t scales = 0, scales_to[rows] = {};
    std::int64_t codes_to[rows] = {}, zeros_to[rows] = {};
    I tables[rows];
    F total_f32x16[rows][vectors];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        const std::int64_t scale_row = r == 0 ? first_scale_row : w.scale_row_of(row + r);
        const auto at = reinterpret_cast<std::uintptr_t>(
            row_scales(w.scales + scale_row * w.scale_row_stride, w.scale_type, blocks, w.scale_scratch + r * blocks));
        if (r == 0) scales = at;
        scales_to[r] = at - scales;
        codes_to[r] = r * w.row_stride;
        zeros_to[r] = (scale_row - first_scale_row) * w.zero_row_stride;
        if constexpr (packed && !What.zero_points) tables[r] = of_codes.nibbles->of(0);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) total_f32x16[r][v] = f_set(0.0F);
    }

    const std::uint16_t* x = g.x;
    for (std::int64_t left = w.k; left > 0; left -= span) {
        const std::int64_t count = What.span > 0 || left >= span ? span : left;
        if constexpr (packed && What.zero_points) {
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) tables[r] = of_codes.nibbles->of(zeros[zeros_to[r]]);
            zeros += next_scales;
        }
        SpanSums<rows, vectors> sums;
        Decoder decoder{of_codes};
        add_up_span<What>(decoder, codes, next, codes_to, tables, count, x, padded_k, next_near, sums);
        if constexpr (!Decoder::knows_all) {
            const unsigned told = Decoder::is_told ? *special++ >> row % special_rows : 0;
            if (Decoder::is_told ? told != 0 : decoder.failed()) [[unlikely]] {
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) {
                    const std::uint8_t* from = codes + codes_to[r];
                    if (Decoder::is_told ? (told >> r & 1) == 0 : !leaves_some<Decoder>(from, count)) continue;
                    SpanSums<1, vectors> by_tables;
                    add_up_by_tables(of_codes, from, count, x, padded_k, by_tables);
#pragma GCC unroll 8
                    for (int v = 0; v < vectors; ++v) sums.of[r][v] = by_tables.of[0][v];
                }
            }
        }
        codes += packed ? span / 2 : span;
        next += packed ? span / 2 : span;
        x += span;
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const auto* at = reinterpret_cast<const float*>(scales + scales_to[r]);
            F scale_f32x16 = f_set(*at);
            if constexpr (What.two_blocks) {  // a whole register would lie across cache lines
                double pair;
                __builtin_memcpy(&pair, at, sizeof pair);
                scale_f32x16 = _mm512_permutexvar_ps(scale_index, _mm512_castpd_ps(_mm512_set1_pd(pair)));
            } else if (per_span > 1) {
                const std::int64_t n = count == span ? per_span : (count + w.block - 1) / w.block;
                scale_f32x16 = _mm512_permutexvar_ps(scale_index, f_load_n(at, n));
            }
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v)
                total_f32x16[r][v] = f_multiply_add(sums.of[r][v], scale_f32x16, total_f32x16[r][v]);
        }
        scales += next_scales * sizeof(float);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) g.out[(row + r) * vectors + v] = f_sum(total_f32x16[r][v]);
}

template <class Decoder, Known What>
static void gemv_vectors(const Gemv& g, const CodeTables& tables, bool next_near = false) {
    constexpr int rows = What.vectors == 1 ? 4 : What.vectors <= 3 ? 2 : 1;
    std::int64_t row = 0;
    for (; row + rows <= g.w.rows; row += rows) gemv_rows<Decoder, What.with_rows(rows)>(g, tables, next_near, row);
    constexpr Known last{.vectors = What.vectors,
                         .zero_points = What.zero_points};  // few rows: one kernel does for all
    for (; row < g.w.rows; ++row) gemv_rows<Decoder, last>(g, tables, next_near, row);
}

template <class Decoder, bool HasZero = false>
static void gemv_one(const Gemv& g, const CodeTables& tables) {
    constexpr std::int64_t step = row_step(Decoder::packed);
    const CodeRows& w = g.w;
    if (2 * w.block == step && w.k % step == 0)
        return gemv_vectors<Decoder, Known{.zero_points = HasZero, .span = step, .two_blocks = true}>(g, tables);
    const bool cut = !Decoder::knows_all && w.block >= w.k;
    const bool known = (w.block == usual_span || cut) && w.k % usual_span == 0;
    const bool near = w.block >= step && next_rows_fit(w, 2 * w.k);
    known ? gemv_vectors<Decoder, Known{.zero_points = HasZero, .span = usual_span}>(g, tables, near)
          : gemv_vectors<Decoder, Known{.zero_points = HasZero}>(g, tables, near);
}

template <class Decoder, bool HasZero = false>
static void gemv_any(const Gemv& g, const CodeTables& tables) {
    switch (g.vectors) {
        case 1: return gemv_one<Decoder, HasZero>(g, tables);
        case 2: return gemv_vectors<Decoder, Known{.vectors = 2, .zero_points = HasZero}>(g, tables);
        case 3: return gemv_vectors<Decoder, Known{.vectors = 3, .zero_points = HasZero}>(g, tables);
        case 4: return gemv_vectors<Decoder, Known{.vectors = 4, .zero_points = HasZero}>(g, tables);
        case 6: return gemv_vectors<Decoder, Known{.vectors = 6, .zero_points = HasZero}>(g, tables);
        default: return gemv_vectors<Decoder, Known{.vectors = 8, .zero_points = HasZero}>(g, tables);
    }
}

template <class C>
static void gemv_bf16(const Gemv& g) {
    if constexpr (C::bits == 4 && C::family == CodecFamily::integer)
        if (g.w.zero_points != nullptr) return gemv_any<TableDecoder<CodeKind::nibbles>, true>(g, code_tables<C>);
    gemv_any<TableDecoder<code_kind<C>>>(g, code_tables<C>);
}
