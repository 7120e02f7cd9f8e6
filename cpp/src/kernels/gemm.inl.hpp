// SPDX-License-Identifier: Apache-2.0
//
// The float32 panel product. One tile is gemm_rows weight rows by one vector of 16 activations, or half as many rows by
// two, which loads less; its sums stay in registers for the whole panel. Included as quantize_kernels.inl.hpp is.

template <int Rows, int Vectors>
static void gemm_tile(const GemmF32& g, std::int64_t row) {
    F sum_f32x16[Rows][Vectors];
    float* c = g.c + row * g.width;
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) sum_f32x16[r][v] = f_set(0.0F);
    const float* w = g.w + row * panel_stride_f32;
    const float* x = g.x;
    for (std::int64_t k = 0; k < g.k; ++k, x += 16 * Vectors, ++w) {
        F x_f32x16[Vectors];
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) x_f32x16[v] = f_load(x + 16 * v);
#pragma GCC unroll 24
        for (int r = 0; r < Rows; ++r) {
            const F w_f32x16 = f_set(w[r * panel_stride_f32]);
#pragma GCC unroll 2
            for (int v = 0; v < Vectors; ++v)
                sum_f32x16[r][v] = f_multiply_add(w_f32x16, x_f32x16[v], sum_f32x16[r][v]);
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
            float* to = c + r * 16 * Vectors + 16 * v;
            f_store(to, f_add(f_load(to), sum_f32x16[r][v]));
        }
}

static void gemm_f32(const GemmF32& all) {
    if (all.width == 16) {
        for (std::int64_t row = 0; row < all.rows; row += gemm_rows) gemm_tile<gemm_rows, 1>(all, row);
        return;
    }
    // So many k at a time that their activations stay in the first-level cache while all rows meet them.
    for (std::int64_t k = 0; k < all.k; k += wide_gemm_k) {
        GemmF32 g = all;
        g.w += k;
        g.x += k * g.width;
        g.k = all.k - k < wide_gemm_k ? all.k - k : wide_gemm_k;
        for (std::int64_t row = 0; row < g.rows; row += gemm_rows / 2) gemm_tile<gemm_rows / 2, 2>(g, row);
    }
}

static void pack_f32(const PackRows& p) {
    float* out = static_cast<float*>(p.out);
    for (std::int64_t k = 0; k < p.k; k += 16) {
        if (k + 16 <= p.k) {
            transpose_16x16(p.x + k, p.x_stride, out + k * p.width, p.width);
            continue;
        }
        for (std::int64_t j = k; j < p.k; ++j)
            for (int i = 0; i < 16; ++i) out[j * p.width + i] = p.x[i * p.x_stride + j];
    }
}

/// Four chains of sums, for single rows.
static float dot(const float* a, const float* b, std::int64_t n) {
    F sum_f32x16[4] = {f_set(0.0F), f_set(0.0F), f_set(0.0F), f_set(0.0F)};
    std::int64_t k = 0;
    for (; k + 4 * lanes <= n; k += 4 * lanes)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            sum_f32x16[i] = f_multiply_add(f_load(a + k + i * lanes), f_load(b + k + i * lanes), sum_f32x16[i]);
    for (; k + lanes <= n; k += lanes) sum_f32x16[0] = f_multiply_add(f_load(a + k), f_load(b + k), sum_f32x16[0]);
    if (k < n) sum_f32x16[1] = f_multiply_add(f_load_n(a + k, n - k), f_load_n(b + k, n - k), sum_f32x16[1]);
    return f_sum(f_add(f_add(sum_f32x16[0], sum_f32x16[1]), f_add(sum_f32x16[2], sum_f32x16[3])));
}

// What multiplies, in float32 for every backend. `kernels`: those that the backend has of its own.
static consteval MatmulKernels make_matmul_kernels(MatmulKernels kernels = {}) {
    kernels.pack = pack_f32;
    kernels.gemm = gemm_f32;
    kernels.transpose = transpose_16x16;
    kernels.dot = dot;
    return kernels;
}
