// SPDX-License-Identifier: Apache-2.0
//
// What multiplies, in float32 for every backend. Included as quantize_kernels.inl.hpp is.
#include "kernels/gemm.inl.hpp"

static consteval MatmulKernels make_matmul_kernels(const BF16Kernels* bf16 = nullptr,
                                                   const CodeKernelsF32* codes_f32 = nullptr) {
    return {.pack = pack_f32,
            .gemm = gemm_f32,
            .transpose = transpose_16x16,
            .dot = dot,
            .bf16 = bf16,
            .codes_f32 = codes_f32};
}
