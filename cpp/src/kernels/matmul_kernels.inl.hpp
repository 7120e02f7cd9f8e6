// SPDX-License-Identifier: Apache-2.0
//
// What multiplies, in float32 for every backend. Included as quantize_kernels.inl.hpp is.
#include "kernels/gemm.inl.hpp"

// `kernels`: those that the backend has of its own.
static consteval MatmulKernels make_matmul_kernels(MatmulKernels kernels = {}) {
    kernels.pack = pack_f32;
    kernels.gemm = gemm_f32;
    kernels.transpose = transpose_16x16;
    kernels.dot = dot;
    return kernels;
}
