// SPDX-License-Identifier: Apache-2.0
#include "runtime/kernel_table.hpp"

namespace breccia::inline v0_3::avx512 {

extern constinit const QuantizeKernels quantize_kernels;
extern constinit const DequantizeKernels dequantize_kernels;
extern constinit const MatmulKernels matmul_kernels;
extern constinit const CompareKernels compare_kernels;

extern constinit const KernelTable kernels;
constinit const KernelTable kernels{.name = "avx512",
                                    .quantize = quantize_kernels,
                                    .dequantize = dequantize_kernels,
                                    .matmul = matmul_kernels,
                                    .compare = compare_kernels};

}  // namespace breccia::inline v0_3::avx512
