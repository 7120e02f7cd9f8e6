// SPDX-License-Identifier: Apache-2.0
//
// A few activations by a weight read in place: rows are dot products along K, codes are decoded in registers, a
// block's sum is multiplied by its scale once. Several rows at a time share the loads of the activations.

/// Decodes byte codes through tables.
template <class C>
struct TableDecoder {
    static constexpr float times = 1;       ///< what it multiplies them by
    static constexpr bool is_told = false;  ///< of special codes, instead of noticing them
    BRECCIA_INLINE_MEMBER BF16x64 decode(I codes) { return decode_bytes<C>(codes); }
    BRECCIA_INLINE_MEMBER bool failed() { return false; }
};

template <class C, bool HasZero, class Decoder, int Rows, int Vectors>
static void gemv_rows(const Gemv& g, std::int64_t row) {
    constexpr bool packed = C::bits == 4;
    constexpr std::int64_t step = row_step(packed);
    constexpr int parts = packed ? 4 : 2;
    const std::int64_t padded_k = (g.w.k + step - 1) / step * step;
    const std::int64_t blocks = (g.w.k + g.w.block - 1) / g.w.block;
    const std::int64_t per_step = g.w.block < step ? step / g.w.block : 1;
    const std::int64_t span = row_span(g.w.block, packed), spans = (g.w.k + span - 1) / span;

    // In a step, lane i holds codes of one run of 8 (packed) or 16: which scale of the step's that takes.
    const I lane_number = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I in_step =
        packed ? _mm512_slli_epi32(lane_number, 3) : _mm512_slli_epi32(_mm512_srli_epi32(lane_number, 2), 4);
    I scale_index = i_set(0);
    for (std::int64_t i = 1; i < per_step; ++i)
        scale_index =
            _mm512_mask_add_epi32(scale_index, _mm512_cmpge_epi32_mask(in_step, i_set(static_cast<int>(i * g.w.block))),
                                  scale_index, i_set(1));

    const std::uint8_t* codes[Rows];
    const float* scales[Rows];
    const std::uint8_t* zeros[Rows];
    I tables[Rows];
    F total_f32x16[Rows][Vectors];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
        codes[r] = g.w.codes + (row + r) * g.w.row_stride;
        const std::int64_t scale_row = scale_row_of(g.w, row + r);
        scales[r] = row_scales(g.w.scales + scale_row * g.w.scale_row_stride, g.w.scale_type, blocks,
                               g.w.scale_scratch + r * blocks);
        zeros[r] = HasZero ? g.w.zero_points + scale_row * g.w.zero_row_stride : nullptr;
        if constexpr (packed && !HasZero) tables[r] = nibble_table<C>(0);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) total_f32x16[r][v] = f_set(0.0F);
    }

    std::int64_t k = 0;
    for (std::int64_t block = 0; k < g.w.k; block += per_step) {
        if constexpr (packed && HasZero)
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) tables[r] = nibble_table<C>(zeros[r][block]);
        F sum_f32x16[Rows][Vectors];
        const auto one_step = [&](auto& decoder, std::int64_t at_k, auto load) BRECCIA_INLINE_LAMBDA {
            const std::uint16_t* x = g.x + at_k;
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const std::uint8_t* at = codes[r] + (packed ? at_k / 2 : at_k);
                const I bytes = load(at);
                // A row is too short for the hardware to learn: have the next rows come meanwhile.
                _mm_prefetch(at + Rows * g.w.row_stride, _MM_HINT_T1);
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
                        sum_f32x16[r][v] =
                            f_dot_pairs(sum_f32x16[r][v], w[p], _mm512_loadu_si512(x + v * padded_k + 32 * p));
            }
        };
        const std::int64_t end = k + span < g.w.k ? k + span : g.w.k;
        const auto sum_block = [&](auto decoder) BRECCIA_INLINE_LAMBDA {
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = f_set(0.0F);
            std::int64_t at = k;
            for (; at + step <= end; at += step)
                one_step(decoder, at,
                         [](const std::uint8_t* p) BRECCIA_INLINE_LAMBDA { return _mm512_loadu_si512(p); });
            if (at < end) {
                const std::int64_t bytes = packed ? (end - at + 1) / 2 : end - at;
                one_step(decoder, at, [=](const std::uint8_t* p) BRECCIA_INLINE_LAMBDA {
                    return _mm512_maskz_loadu_epi8(first_bytes(bytes), p);
                });
            }
            return decoder.failed();
        };
        bool special = false;
        if constexpr (Decoder::is_told) {
            const std::uint8_t* of_row = g.w.special + row * spans + k / span;
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) special |= of_row[r * spans] != 0;
            if (!special) sum_block(Decoder{});
        } else {
            special = sum_block(Decoder{});
        }
        if (special) [[unlikely]] {
            sum_block(TableDecoder<C>{});
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = f_mul(sum_f32x16[r][v], f_set(Decoder::times));
        }
        k = end;
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            F scale_f32x16 = f_set(scales[r][block]);
            if (per_step > 1) {
                const std::int64_t n = blocks - block < per_step ? blocks - block : per_step;
                scale_f32x16 = _mm512_permutexvar_ps(scale_index, f_load_n(scales[r] + block, n));
            }
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v)
                total_f32x16[r][v] = f_multiply_add(sum_f32x16[r][v], scale_f32x16, total_f32x16[r][v]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vectors; ++v)
            g.out[(row + r) * Vectors + v] = f_sum(total_f32x16[r][v]) * (1 / Decoder::times);
}

template <class C, bool HasZero, class Decoder, int Vectors>
static void gemv_vectors(const Gemv& g) {
    constexpr int rows = Vectors == 1 ? 4 : Vectors <= 3 ? 2 : 1;
    std::int64_t row = 0;
    for (; row + rows <= g.w.rows; row += rows) gemv_rows<C, HasZero, Decoder, rows, Vectors>(g, row);
    for (; row < g.w.rows; ++row) gemv_rows<C, HasZero, Decoder, 1, Vectors>(g, row);
}

template <class C, bool HasZero, class Decoder>
static void gemv_any(const Gemv& g) {
    switch (g.vectors) {
        case 1: return gemv_vectors<C, HasZero, Decoder, 1>(g);
        case 2: return gemv_vectors<C, HasZero, Decoder, 2>(g);
        case 3: return gemv_vectors<C, HasZero, Decoder, 3>(g);
        case 4: return gemv_vectors<C, HasZero, Decoder, 4>(g);
        case 6: return gemv_vectors<C, HasZero, Decoder, 6>(g);
        default: return gemv_vectors<C, HasZero, Decoder, 8>(g);
    }
}

template <class C>
static void gemv_bf16(const Gemv& g) {
    if constexpr (C::bits == 4 && C::family == CodecFamily::integer)
        if (g.w.zero_points != nullptr) return gemv_any<C, true, TableDecoder<C>>(g);
    gemv_any<C, false, TableDecoder<C>>(g);
}
