// SPDX-License-Identifier: Apache-2.0
//
// out[j][i] = in[i][j] for 16 by 16 floats, in plain C++.

[[maybe_unused]] static void transpose_16x16(const float* in, std::int64_t in_stride, float* out,
                                             std::int64_t out_stride) {
    for (int j = 0; j < 16; ++j)
        for (int i = 0; i < 16; ++i) out[j * out_stride + i] = in[i * in_stride + j];
}
