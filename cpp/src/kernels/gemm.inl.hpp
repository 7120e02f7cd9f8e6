// SPDX-License-Identifier: Apache-2.0
//
// Products of rows: both operands have K contiguous, as activations (M, K) and weights (N, K) do, so nothing is
// transposed. gemm_rows_a x gemm_rows_b accumulators of 16 partial sums each keep the vector units busy.

template <int Rows, int Cols>
static void dot_tile(const DotBlock& t, std::int64_t i, std::int64_t j) {
    F sum_f32x16[Rows][Cols];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < Cols; ++c) sum_f32x16[r][c] = f_set(0.0F);
    const float* a = t.a + i * t.a_stride;
    const float* b = t.b + j * t.b_stride;
    const auto step = [&](auto load) BRECCIA_INLINE_LAMBDA {
        F b_f32x16[Cols];
#pragma GCC unroll 8
        for (int c = 0; c < Cols; ++c) b_f32x16[c] = load(b + c * t.b_stride);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const F a_f32x16 = load(a + r * t.a_stride);
#pragma GCC unroll 8
            for (int c = 0; c < Cols; ++c) sum_f32x16[r][c] = f_multiply_add(a_f32x16, b_f32x16[c], sum_f32x16[r][c]);
        }
    };
    std::int64_t k = 0;
    for (; k + lanes <= t.k; k += lanes) step([&](const float* p) BRECCIA_INLINE_LAMBDA { return f_load(p + k); });
    if (k < t.k) step([&](const float* p) BRECCIA_INLINE_LAMBDA { return f_load_n(p + k, t.k - k); });
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Cols; ++c) t.c[(i + r) * t.c_stride + j + c] += f_sum(sum_f32x16[r][c]);
}

template <int Rows>
static void dot_rows(const DotBlock& t, std::int64_t i) {
    std::int64_t j = 0;
    for (; j + gemm_rows_b <= t.rows_b; j += gemm_rows_b) dot_tile<Rows, gemm_rows_b>(t, i, j);
    for (; j < t.rows_b; ++j) dot_tile<Rows, 1>(t, i, j);
}

static void dot_block(const DotBlock& t) {
    std::int64_t i = 0;
    for (; i + gemm_rows_a <= t.rows_a; i += gemm_rows_a) dot_rows<gemm_rows_a>(t, i);
    for (; i < t.rows_a; ++i) dot_rows<1>(t, i);
}
