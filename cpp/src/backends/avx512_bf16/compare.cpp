// SPDX-License-Identifier: Apache-2.0
#include "backends/avx512_bf16/target.hpp"
#include "quantize/compare_kernels.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_3::avx512_bf16 {
namespace {
#include "backends/avx512/doubles.inl.hpp"
#include "kernels/compare_kernels.inl.hpp"
}  // namespace

extern constinit const CompareKernels compare_kernels;
constinit const CompareKernels compare_kernels = make_compare_kernels();

}  // namespace breccia::inline v0_3::avx512_bf16
BRECCIA_TARGET_END
