// SPDX-License-Identifier: Apache-2.0
//
// The backend's table, and its kernels but for those that products of codes in place need.
#include "backends/portable/target.hpp"
#include "contract/compare_kernels.hpp"

namespace breccia::inline v0_4::portable {
extern constinit const ImportanceKernels importance_kernels;
namespace {
// clang-format off: sorting would break the order
#include "backends/portable/vocabulary.inl.hpp"
#include "kernels/quantize_kernels.inl.hpp"
#include "kernels/dequantize_kernels.inl.hpp"
#include "kernels/matmul_kernels.inl.hpp"
namespace compares {
using Doubles = double __attribute__((vector_size(16)));
BRECCIA_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }
BRECCIA_INLINE Doubles larger(Doubles a, Doubles b) { return a > b ? a : b; }
#include "kernels/compare_kernels.inl.hpp"
}
// clang-format on

constinit const QuantizeKernels quantize_kernels = make_quantize_kernels();
constinit const DequantizeKernels dequantize_kernels = make_dequantize_kernels();
constinit const MatmulKernels matmul_kernels = make_matmul_kernels();
constinit const CompareKernels compare_kernels = compares::make_compare_kernels();
}  // namespace

extern constinit const KernelTable kernels;
constinit const KernelTable kernels{.name = "portable",
                                    .quantize = quantize_kernels,
                                    .dequantize = dequantize_kernels,
                                    .matmul = matmul_kernels,
                                    .compare = compare_kernels,
                                    .importance = importance_kernels};

}  // namespace breccia::inline v0_4::portable
