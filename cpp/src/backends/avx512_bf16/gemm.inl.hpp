// SPDX-License-Identifier: Apache-2.0
//
// The bfloat16 panel product with vdpbf16ps: weights are read as pairs and broadcast, 16 activations abreast.
// A tile's 24 sums stay in registers for one block, then go into c times the block's scale. That happens between the
// first products of the next block, whose instructions hide it: multiplying, loading and storing after a block's last
// product takes three times as long.

/// Where the sums of a block go.
struct BlockSums {
    float* c;
    const float *w_scales, *x_scales;
};

/// Has x computed here, and c in memory: compilers would keep c in room of their own from block to block.
BRECCIA_INLINE void settle([[maybe_unused]] F& x) {
#if defined(__GNUC__) && !defined(BRECCIA_EMULATED_BACKEND)
    asm volatile("" : "+v"(x) : : "memory");
#endif
}

template <bool ScaledX>
BRECCIA_INLINE void add_block_sum(const BlockSums& to, F scale, F sum, int at, int v) {
    settle(sum);
    if constexpr (ScaledX) scale = f_mul(scale, f_load(to.x_scales + 16 * v));
    f_store(to.c + at, f_multiply_add(sum, scale, f_load(to.c + at)));
}

BRECCIA_INLINE I broadcast_pair(const std::uint16_t* p) {
    std::int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}

/// One block of a tile; the sums hold those of the block before.
template <bool ScaledX, int Rows, int Vectors>
BRECCIA_INLINE void multiply_block(F (&sum_f32x16)[Rows][Vectors], const BlockSums& before, const std::uint16_t* w,
                                   const std::uint16_t* x, std::int64_t pairs) {
    I x_bf16x32[Vectors];
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) x_bf16x32[v] = _mm512_loadu_si512(x + 32 * v);
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r) {
        float pair;  // as an integer it would take the way through a general register
        __builtin_memcpy(&pair, w + r * panel_stride_bf16, sizeof pair);
        const I w_bf16x32 = as_bits(f_set(pair));
        const F scale_f32x16 = f_set(before.w_scales[r]);
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
            const F before_f32x16 = sum_f32x16[r][v];
            sum_f32x16[r][v] = f_dot_pairs(f_set(0.0F), w_bf16x32, x_bf16x32[v]);
            add_block_sum<ScaledX>(before, scale_f32x16, before_f32x16, (r * Vectors + v) * 16, v);
        }
    }
    for (--pairs, w += 2, x += 32 * Vectors; pairs > 0; --pairs, w += 2, x += 32 * Vectors) {
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) x_bf16x32[v] = _mm512_loadu_si512(x + 32 * v);
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r) {
            const I w_bf16x32 = broadcast_pair(w + r * panel_stride_bf16);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = f_dot_pairs(sum_f32x16[r][v], w_bf16x32, x_bf16x32[v]);
        }
    }
}

BRECCIA_INLINE const std::uint16_t* x_of(const GemmBF16& g, std::int64_t part) {
    return g.x + part / g.terms * g.x_panel_stride + part % g.terms * g.term_stride;
}

/// Asks for what comes next while a tile is multiplied: its share of the next panel of activations, and, where that is
/// the last one, the codes of as many rows, which would not stay if they were asked for earlier.
template <int Rows, int Vectors>
BRECCIA_INLINE void prefetch_share(const GemmBF16& g, std::int64_t row, const std::uint16_t* next_x, bool last) {
    const std::int64_t share = (g.pairs * Rows / g.rows + 1) * 64 * Vectors;
    for (std::int64_t at = 0; at < (g.next_x_bytes > 0 ? share : 0); at += 64)
        _mm_prefetch(reinterpret_cast<const char*>(next_x) + row / Rows * share + at, _MM_HINT_T1);
    if (g.next == nullptr || !last) return;
    const std::int64_t end = row + Rows < g.next_rows ? row + Rows : g.next_rows;
    for (std::int64_t r = row; r < end; ++r)
        for (std::int64_t at = 0; at < g.next_bytes; at += 64)
            _mm_prefetch(g.next + r * g.next_stride + at, _MM_HINT_T1);
}

template <bool ScaledX, int Rows, int Vectors>
static void gemm_bf16_tiles(const GemmBF16& g) {
    alignas(64) float nowhere[Rows * Vectors * 16] = {};
    F sum_f32x16[Rows][Vectors];
    BlockSums before{.c = nowhere, .w_scales = g.w_scales, .x_scales = g.x_scales};
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = f_set(0.0F);
    const std::int64_t parts = g.panels * g.terms;
    for (std::int64_t part = 0; part < parts; ++part) {
        const std::int64_t panel = part / g.terms;
        const std::uint16_t *x = x_of(g, part), *next_x = part + 1 < parts ? x_of(g, part + 1) : g.next_x;
        for (std::int64_t row = 0; row < g.rows; row += Rows) {
            prefetch_share<Rows, Vectors>(g, row, next_x, part + 1 == parts);
            const std::uint16_t* w = g.w + row * panel_stride_bf16;
            BlockSums to{.c = g.c + panel * g.c_panel_stride + row * 16 * Vectors,
                         .w_scales = g.w_scales + row,
                         .x_scales = ScaledX ? g.x_scales + panel * g.x_scale_panel_stride : nullptr};
            for (std::int64_t done = 0; done < g.pairs; done += g.block_pairs) {
                const std::int64_t pairs = g.pairs - done < g.block_pairs ? g.pairs - done : g.block_pairs;
                multiply_block<ScaledX>(sum_f32x16, before, w + 2 * done, x + 32 * Vectors * done, pairs);
                before = to;
                to.w_scales += g.w_scale_stride;
                if constexpr (ScaledX) to.x_scales += 16 * Vectors;
            }
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v)
            add_block_sum<ScaledX>(before, f_set(before.w_scales[r]), sum_f32x16[r][v], (r * Vectors + v) * 16, v);
}

[[maybe_unused]] static void gemm_bf16(const GemmBF16& g) {
    const bool scaled = g.x_scales != nullptr;
    if (g.width == 16)
        scaled ? gemm_bf16_tiles<true, 24, 1>(g) : gemm_bf16_tiles<false, 24, 1>(g);
    else
        scaled ? gemm_bf16_tiles<true, 12, 2>(g) : gemm_bf16_tiles<false, 12, 2>(g);
}

/// Whether any number was neither zero nor in [2^-100, 2^100], for which no product or sum of a panel meets the ends of
/// the exponent range.
struct PanelRange {
    __mmask16 outside = 0;
};

/// 16 floats, those from n on zero.
BRECCIA_INLINE F load_checked(PanelRange& range, const float* from, std::int64_t n) {
    const F x = n >= 16 ? f_load(from) : n > 0 ? f_load_n(from, n) : f_set(0.0F);
    const I magnitude = i_and(as_bits(x), i_set(0x7FFF'FFFF));
    constexpr int smallest = (127 - 100) << 23, largest = (127 + 100) << 23;
    const I above = _mm512_sub_epi32(magnitude, i_set(smallest));
    const __mmask16 beyond = _mm512_cmpgt_epu32_mask(above, i_set(largest - smallest));
    range.outside = static_cast<__mmask16>(range.outside | _mm512_mask_test_epi32_mask(beyond, magnitude, magnitude));
    return x;
}

/// Rounds pairs of float32 to nearest even and lays them side by side. Returns whether all were in the range; terms
/// but the first may be smaller: they are exact.
static bool pack_bf16(const PackRows& p) {
    PanelRange range;
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
    return range.outside == 0;
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
