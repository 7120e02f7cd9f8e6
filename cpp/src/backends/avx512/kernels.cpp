// SPDX-License-Identifier: Apache-2.0
//
// The backend's table, and its kernels but for those that products of codes in place need.
#include "backends/avx512/target.hpp"
#include "contract/compare_kernels.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_4::avx512 {
extern constinit const ImportanceKernels importance_kernels;
extern constinit const CodeKernelsF32 codes_f32_kernels;
namespace {
// clang-format off: sorting would break the order
#include "backends/avx512/vocabulary.inl.hpp"
#include "kernels/quantize_kernels.inl.hpp"
#include "kernels/dequantize_kernels.inl.hpp"
#include "kernels/matmul_kernels.inl.hpp"
namespace compares {
#include "backends/avx512/doubles.inl.hpp"
#include "kernels/compare_kernels.inl.hpp"
}
// clang-format on

constinit const QuantizeKernels quantize_kernels = make_quantize_kernels();
constinit const DequantizeKernels dequantize_kernels = make_dequantize_kernels();
constinit const MatmulKernels matmul_kernels = make_matmul_kernels({.codes_f32 = &codes_f32_kernels});
constinit const CompareKernels compare_kernels = compares::make_compare_kernels();
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels{.name = "avx512",
                                    .quantize = quantize_kernels,
                                    .dequantize = dequantize_kernels,
                                    .matmul = matmul_kernels,
                                    .compare = compare_kernels,
                                    .importance = importance_kernels};

}  // namespace breccia::inline v0_4::avx512
BRECCIA_TARGET_END
