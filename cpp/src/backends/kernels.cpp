// SPDX-License-Identifier: Apache-2.0
//
// A backend's table, and its kernels but for those that have a unit of their own.
#include "target.hpp"

BRECCIA_CPU_BEGIN
namespace breccia::inline v0_4::BRECCIA_CPU {
extern constinit const ImportanceKernels importance_kernels;
#ifdef BRECCIA_UNIT_CODES_F32
extern constinit const CodeKernelsF32 codes_f32_kernels;
#endif
#ifdef BRECCIA_UNIT_MATMUL
extern constinit const MatmulKernels matmul_kernels;
#endif
namespace {
// clang-format off: sorting would break the order
#include "kernels/vocabulary.inl.hpp"
#include "kernels/quantize_kernels.inl.hpp"
#include "kernels/dequantize.inl.hpp"
#include "kernels/adamw_kernels.inl.hpp"
#ifndef BRECCIA_UNIT_MATMUL
#include "kernels/gemm.inl.hpp"
#endif
namespace compares {
#include "kernels/compare_kernels.inl.hpp"
}
// clang-format on

constinit const QuantizeKernels quantize_kernels = make_quantize_kernels();
constinit const DequantizeKernels dequantize_kernels = make_dequantize_kernels();
#if defined(BRECCIA_UNIT_CODES_F32)
constinit const MatmulKernels matmul_kernels = make_matmul_kernels({.codes_f32 = &codes_f32_kernels});
#elif !defined(BRECCIA_UNIT_MATMUL)
constinit const MatmulKernels matmul_kernels = make_matmul_kernels();
#endif
constinit const AdamWKernels adamw_kernels = make_adamw_kernels();
constinit const CompareKernels compare_kernels = compares::make_compare_kernels();
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels{.name = BRECCIA_CPU_NAME,
                                    .quantize = quantize_kernels,
                                    .dequantize = dequantize_kernels,
                                    .matmul = matmul_kernels,
                                    .compare = compare_kernels,
                                    .importance = importance_kernels,
                                    .adamw = adamw_kernels};

}  // namespace breccia::inline v0_4::BRECCIA_CPU
BRECCIA_CPU_END
