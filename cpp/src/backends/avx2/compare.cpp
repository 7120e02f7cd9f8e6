// SPDX-License-Identifier: Apache-2.0
#include "backends/avx2/target.hpp"
#include "quantize/compare_kernels.hpp"

BRECCIA_TARGET_BEGIN(BRECCIA_TARGET)
namespace breccia::inline v0_3::avx2 {
namespace {
using Doubles = __m256d;
BRECCIA_INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
BRECCIA_INLINE Doubles larger(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
#include "kernels/compare_kernels.inl.hpp"
}  // namespace

extern constinit const CompareKernels compare_kernels;
constinit const CompareKernels compare_kernels = make_compare_kernels();

}  // namespace breccia::inline v0_3::avx2
BRECCIA_TARGET_END
