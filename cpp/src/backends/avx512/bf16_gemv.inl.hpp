// SPDX-License-Identifier: Apache-2.0
//
// A few activations by a weight read in place: rows are dot products along K, codes are decoded in registers, a
// block's sum is multiplied by its scale once. Several rows at a time share the loads of the activations.

/// `n` scales as float32; where they are that already, they are used in place.
static const float* gemv_scales(const std::byte* from, ScaleType type, std::int64_t n, float* out) {
    if (type == ScaleType::float32 && reinterpret_cast<std::uintptr_t>(from) % alignof(float) == 0)
        return reinterpret_cast<const float*>(from);
    const std::int64_t size = is_coded(type) ? 1 : static_cast<std::int64_t>(size_of(static_cast<DType>(type)));
    for (std::int64_t i = 0; i < n; i += 16) {
        const std::int64_t rest = n - i < 16 ? n - i : 16;
        const Mask lane = first_lanes(rest);
        const std::byte* p = from + i * size;
        I bits = i_set(0);
        if (is_coded(type)) {
            const I code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lane, p));
            if (type == ScaleType::e8m0) {
                bits = _mm512_slli_epi32(code, 23);
                bits = i_select(_mm512_cmpeq_epi32_mask(code, i_set(0)), i_set(0x0040'0000), bits);  // 2^-127
                bits = i_select(_mm512_cmpeq_epi32_mask(code, i_set(255)), i_set(0x7FC0'0000), bits);
            } else {
                const I magnitude = i_and(code, i_set(127));
                const F value = f_mul(as_float(_mm512_slli_epi32(magnitude, 20)), f_set(exp2i(120)));
                bits = i_select(_mm512_cmpeq_epi32_mask(magnitude, i_set(127)), i_set(0x7FC0'0000), as_bits(value));
                bits = i_or(bits, _mm512_slli_epi32(i_and(code, i_set(128)), 24));
            }
        } else if (type == ScaleType::float16) {
            bits = as_bits(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane, p)));
        } else if (type == ScaleType::bfloat16) {
            bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lane, p)), 16);
        } else if (type == ScaleType::float64) {
            const __m256 low = _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(static_cast<__mmask8>(lane), p));
            const __m256 high = _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(static_cast<__mmask8>(lane >> 8), p + 64));
            bits = as_bits(_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1));
        } else {
            bits = _mm512_maskz_loadu_epi32(lane, p);
        }
        _mm512_mask_storeu_ps(out + i, lane, as_float(bits));
    }
    return out;
}

template <class C, bool HasZero, int Rows, int Vectors>
static void gemv_rows(const Gemv& g, std::int64_t row) {
    constexpr bool packed = C::bits == 4;
    constexpr std::int64_t step = gemv_step(packed);
    constexpr int parts = packed ? 4 : 2;
    const std::int64_t padded_k = (g.k + step - 1) / step * step;
    const std::int64_t blocks = (g.k + g.block - 1) / g.block;
    const std::int64_t per_step = g.block < step ? step / g.block : 1;
    const std::int64_t span = g.block < step ? step : g.block;

    // In a step, lane i holds codes of one run of 8 (packed) or 16: which scale of the step's that takes.
    const I lane_number = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const I in_step =
        packed ? _mm512_slli_epi32(lane_number, 3) : _mm512_slli_epi32(_mm512_srli_epi32(lane_number, 2), 4);
    I scale_index = i_set(0);
    for (std::int64_t i = 1; i < per_step; ++i)
        scale_index = _mm512_mask_add_epi32(
            scale_index, _mm512_cmpge_epi32_mask(in_step, i_set(static_cast<int>(i * g.block))), scale_index, i_set(1));

    const std::uint8_t* codes[Rows];
    const float* scales[Rows];
    const std::uint8_t* zeros[Rows];
    I tables[Rows];
    F total_f32x16[Rows][Vectors];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
        codes[r] = g.codes + (row + r) * g.row_stride;
        const std::int64_t scale_row = (g.first_row + row + r) / g.block_rows;
        scales[r] =
            gemv_scales(g.scales + scale_row * g.scale_row_stride, g.scale_type, blocks, g.scale_scratch + r * blocks);
        zeros[r] = HasZero ? g.zero_points + scale_row * g.zero_row_stride : nullptr;
        if constexpr (packed && !HasZero) tables[r] = nibble_table<C>(0);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) total_f32x16[r][v] = f_set(0.0F);
    }

    std::int64_t k = 0;
    for (std::int64_t block = 0; k < g.k; block += per_step) {
        if constexpr (packed && HasZero)
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) tables[r] = nibble_table<C>(zeros[r][block]);
        F sum_f32x16[Rows][Vectors];
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = f_set(0.0F);
        const auto one_step = [&](auto load) BRECCIA_INLINE_LAMBDA {
            const std::uint16_t* x = g.x + k;
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const std::uint8_t* at = codes[r] + (packed ? k / 2 : k);
                const I bytes = load(at);
                // A row is too short for the hardware to learn: have the next rows come meanwhile.
                _mm_prefetch(at + Rows * g.row_stride, _MM_HINT_T1);
                I w[parts];
                if constexpr (packed) {
                    w[0] = _mm512_permutexvar_epi16(bytes, tables[r]);
                    w[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), tables[r]);
                    w[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 8), tables[r]);
                    w[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 12), tables[r]);
                } else {
                    const BF16x64 decoded = decode_bytes<C>(bytes);
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
        const std::int64_t end = k + span < g.k ? k + span : g.k;
        for (; k + step <= end; k += step)
            one_step([](const std::uint8_t* p) BRECCIA_INLINE_LAMBDA { return _mm512_loadu_si512(p); });
        if (k < end) {
            const std::int64_t bytes = packed ? (end - k + 1) / 2 : end - k;
            one_step([=](const std::uint8_t* p)
                         BRECCIA_INLINE_LAMBDA { return _mm512_maskz_loadu_epi8(first_bytes(bytes), p); });
            k = end;
        }
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
        for (int v = 0; v < Vectors; ++v) g.out[(row + r) * Vectors + v] = f_sum(total_f32x16[r][v]);
}

template <class C, bool HasZero, int Vectors>
static void gemv_vectors(const Gemv& g) {
    constexpr int rows = Vectors == 1 ? 4 : Vectors <= 3 ? 2 : 1;
    std::int64_t row = 0;
    for (; row + rows <= g.rows; row += rows) gemv_rows<C, HasZero, rows, Vectors>(g, row);
    for (; row < g.rows; ++row) gemv_rows<C, HasZero, 1, Vectors>(g, row);
}

template <class C, bool HasZero>
static void gemv_any(const Gemv& g) {
    switch (g.vectors) {
        case 1: return gemv_vectors<C, HasZero, 1>(g);
        case 2: return gemv_vectors<C, HasZero, 2>(g);
        case 3: return gemv_vectors<C, HasZero, 3>(g);
        case 4: return gemv_vectors<C, HasZero, 4>(g);
        case 6: return gemv_vectors<C, HasZero, 6>(g);
        default: return gemv_vectors<C, HasZero, 8>(g);
    }
}

template <class C>
static void gemv_bf16(const Gemv& g) {
    if constexpr (C::bits == 4 && C::family == CodecFamily::integer)
        if (g.zero_points != nullptr) return gemv_any<C, true>(g);
    gemv_any<C, false>(g);
}
