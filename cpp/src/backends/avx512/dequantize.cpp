// SPDX-License-Identifier: Apache-2.0
#include "backends/avx512/target.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_3::avx512 {
namespace {
#include "backends/avx512/vocabulary.inl.hpp"
#include "kernels/dequantize_kernels.inl.hpp"
}  // namespace

extern constinit const DequantizeKernels dequantize_kernels;
constinit const DequantizeKernels dequantize_kernels = make_dequantize_kernels();

}  // namespace breccia::inline v0_3::avx512
BRECCIA_TARGET_END
