// SPDX-License-Identifier: Apache-2.0
//
// The bfloat16 panel product with vdpbf16ps: weights are read as pairs and broadcast, 16 activations abreast.
// A tile's 24 sums stay in registers for one block, then go into c times the block's scale.

template <int Rows, int Vectors>
static void gemm_bf16_tile(const GemmBF16& g, std::int64_t row) {
    const std::uint16_t* w = g.w + row * panel_stride_bf16;
    const std::uint16_t* x = g.x;
    float* c = g.c + row * 16 * Vectors;
    const float* w_scales = g.w_scales + row;
    const float* x_scales = g.x_scales;
    if (g.next != nullptr) {
        const std::int64_t end = row + Rows < g.next_rows ? row + Rows : g.next_rows;
        for (std::int64_t r = row; r < end; ++r)
            for (std::int64_t at = 0; at < g.next_bytes; at += 64)
                _mm_prefetch(g.next + r * g.next_stride + at, _MM_HINT_T1);
    }
    for (std::int64_t done = 0; done < g.pairs; w_scales += g.w_scale_stride) {
        std::int64_t pairs = g.pairs - done < g.block_pairs ? g.pairs - done : g.block_pairs;
        done += pairs;
        F sum_f32x16[Rows][Vectors];
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = _mm512_setzero_ps();
        for (; pairs > 0; --pairs, w += 2, x += 32 * Vectors) {
            I x_bf16x32[Vectors];
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) x_bf16x32[v] = _mm512_loadu_si512(x + 32 * v);
#pragma GCC unroll 24
            for (int r = 0; r < Rows; ++r) {
                std::int32_t pair;
                __builtin_memcpy(&pair, w + r * panel_stride_bf16, sizeof pair);
                const I w_bf16x32 = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
                for (int v = 0; v < Vectors; ++v)
                    sum_f32x16[r][v] = f_dot_pairs(sum_f32x16[r][v], w_bf16x32, x_bf16x32[v]);
            }
        }
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r) {
            F scale_f32x16 = f_set(w_scales[r]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) {
                F both = scale_f32x16;
                if (x_scales != nullptr) both = f_mul(both, f_load(x_scales + 16 * v));
                float* to = c + (r * Vectors + v) * 16;
                f_store(to, f_multiply_add(sum_f32x16[r][v], both, f_load(to)));
            }
        }
        if (x_scales != nullptr) x_scales += 16 * Vectors;
    }
}

[[maybe_unused]] static void gemm_bf16(const GemmBF16& g) {
    GemmBF16 one = g;
    for (std::int64_t part = 0; part < g.panels * g.terms; ++part) {
        const std::int64_t panel = part / g.terms;
        one.x = g.x + panel * g.x_panel_stride + part % g.terms * g.term_stride;
        one.c = g.c + panel * g.c_panel_stride;
        if (g.x_scales != nullptr) one.x_scales = g.x_scales + panel * g.x_scale_panel_stride;
        if (g.width == 16)
            for (std::int64_t row = 0; row < g.rows; row += 24) gemm_bf16_tile<24, 1>(one, row);
        else
            for (std::int64_t row = 0; row < g.rows; row += 12) gemm_bf16_tile<12, 2>(one, row);
        one.next = nullptr;
    }
}

/// Whether any number was neither zero nor in [2^-100, 2^100], for which no product or sum of a panel meets the ends of
/// the exponent range.
struct OrdinaryRange {
    __mmask16 strange = 0;
};

/// 16 floats, those from n on zero.
BRECCIA_INLINE F load_checked(OrdinaryRange& range, const float* from, std::int64_t n) {
    const F x = n >= 16 ? f_load(from) : n > 0 ? f_load_n(from, n) : f_set(0.0F);
    const I magnitude = i_and(as_bits(x), i_set(0x7FFF'FFFF));
    constexpr int smallest = (127 - 100) << 23, largest = (127 + 100) << 23;
    const I above = _mm512_sub_epi32(magnitude, i_set(smallest));
    const __mmask16 outside = _mm512_cmpgt_epu32_mask(above, i_set(largest - smallest));
    range.strange = static_cast<__mmask16>(range.strange | _mm512_mask_test_epi32_mask(outside, magnitude, magnitude));
    return x;
}

/// Rounds pairs of float32 to nearest even and lays them side by side. Returns whether the range was ordinary; terms
/// but the first may be smaller: they are exact.
static bool pack_bf16(const PackRows& p) {
    OrdinaryRange range;
    alignas(64) float rest[16][32];
    for (std::int64_t k = 0; k < p.k; k += 32)
        for (std::int64_t term = 0; term < p.terms; ++term) {
            I row[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) {
                const float* from = p.x + i * p.x_stride + k;
                const F first = term == 0 ? load_checked(range, from, p.k - k) : f_load(rest[i]);
                const F second = term == 0 ? load_checked(range, from + 16, p.k - k - 16) : f_load(rest[i] + 16);
                row[i] = f_round_pair(first, second);
                if (term + 1 < p.terms) {
                    f_store(rest[i], f_sub(first, f_widen(_mm512_castsi512_si256(row[i]))));
                    f_store(rest[i] + 16, f_sub(second, f_widen(_mm512_extracti64x4_epi64(row[i], 1))));
                }
            }
            transpose_16x16(row);
            auto* out = static_cast<std::uint16_t*>(p.out) + term * p.term_stride + k * p.width;
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 2 * p.width, row[i]);
        }
    return range.strange == 0;
}

static bool pack_words(const PackWords& p) {
    __mmask32 strange = 0;
    for (std::int64_t k = 0; k < p.k; k += 32) {
        const __mmask32 inside = p.k - k >= 32 ? ~__mmask32{0} : (__mmask32{1} << (p.k - k)) - 1;
        I row[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            row[i] = p.rows[static_cast<std::size_t>(i)] == nullptr
                         ? _mm512_setzero_si512()
                         : _mm512_maskz_loadu_epi16(inside, p.rows[static_cast<std::size_t>(i)] + 2 * k);
            const I magnitude = _mm512_and_si512(row[i], _mm512_set1_epi16(0x7FFF));
            constexpr short smallest = (127 - 100) << 7, largest = (127 + 100) << 7;
            const I above = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(smallest));
            const __mmask32 outside = _mm512_cmpgt_epu16_mask(above, _mm512_set1_epi16(largest - smallest));
            strange |= _mm512_mask_test_epi16_mask(outside, magnitude, magnitude);
        }
        transpose_16x16(row);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(p.out + (k / 2 + i) * 2 * p.width, row[i]);
    }
    return strange == 0;
}
